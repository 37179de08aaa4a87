"""Samples for tests: `make_sample` from parts, `full_sample` with every field, random `samples`.

Ids and spans are those of the family; grids are small; hashes follow from made-up names.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.kits import get_kit
from support.kits.samples import film_ids, film_spans, placeholder_spans

from mmpack.demo.probe_samples import medium_of
from mmpack.families import FAMILIES, Family, get_family
from mmpack.layout.fingerprint import cache_key, fingerprint
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.sample import COORDINATE_SYSTEMS, FINISH_REASONS, VERSIONS, Sample
from mmpack.schema.spans import (
    LOSS_KINDS,
    OBSERVATION_SOURCES,
    ActionSpan,
    BboxTarget,
    Cost,
    LossSpan,
    ObservationSpan,
    PointTarget,
    PolicyVersion,
    RegionSpan,
    Score,
)

TEXT_IDS = 151643  # ids below it are text
PROCESSOR = {
    "tokenizer": {"vocab": "ab" * 32, "special": {"<|image_pad|>": 151655}},
    "image": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "mean": [0.48, 0.46]},
    "position_rule": "grid",
}


def make_medium(
    name: str, grid: tuple[int, int, int], modality: str = "image", **fields: Any
) -> Medium:
    """A medium of Qwen2.5-VL's patch and merge sizes; equal names and grids give equal keys."""
    family = get_family("qwen2_5_vl")
    content = hashlib.sha256(name.encode()).hexdigest()
    key = cache_key(content, grid, PROCESSOR["image"])
    size = (grid[2] * family.patch_size, grid[1] * family.patch_size)
    return Medium(
        media_id=name,
        modality=modality,
        cache_key=key,
        grid_thw=grid,
        content_hash=content,
        **{"size": size, "num_tokens": family.vision_tokens(grid), **fields},
    )


def heard_medium(name: str, kind: str, grid: tuple[int, int, int], family: Family) -> Medium:
    """A video that has a sound, or an audio of 16,000 samples a second."""
    fields: dict[str, Any] = {"num_tokens": family.tokens_of(kind, grid)}
    if kind == "video":
        return make_medium(name, grid, kind, second_per_grid_ts=1.0, **fields)
    fields |= {"sampling_rate": 16_000, "hop_length": 160, "num_samples": 160 * grid[0]}
    return make_medium(name, grid, kind, size=None, **fields)


def make_sample(
    parts: list[tuple[Any, ...]],
    sample_id: str = "s0",
    group_id: str = "g0",
    family: str = "qwen2_5_vl",
    **fields: Any,
) -> Sample:
    """A valid sample out of parts, in order; `fields` are set on it as they are.

    Parts: `("text", ids)`, `("response", ids[, turn[, kind]])` (a loss span),
    `("observation", ids[, turn[, source]])`, `("image", grid[, name])`, `("video", grid[, name])`.
    Of a family that hears, `("audio", grid, name)` and `("film", (grid, audio's grid), name)`, a video with its sound.
    A name that returns is the same medium. A response must not come first.
    """
    about = get_family(family)
    written = get_kit(family).written
    ids: list[int] = []
    media: dict[str, Medium] = {}
    spans: dict[str, list[Any]] = {"modality": [], "loss": [], "observation": []}
    for kind, what, *more in parts:
        start = len(ids)
        if kind == "film":
            own = [
                media.setdefault(name, heard_medium(name, modality, grid, about))
                for name, modality, grid in zip(
                    (more[0], f"{more[0]}'s sound"), ("video", "audio"), what, strict=True
                )
            ]
            ids += film_ids(about, *own)
            indices = [list(media).index(medium.media_id) for medium in own]
            spans["modality"] += film_spans(ids, start, about, indices)
            continue
        if kind in ("image", "video", "audio"):
            name = more[0] if more else f"{kind}-{len(media)}"
            tokens = about.tokens_of(kind, tuple(what))
            made = make_medium(name, tuple(what), kind, num_tokens=tokens)
            made = heard_medium(name, kind, tuple(what), about) if kind == "audio" else made
            made = made if about.tokens_by_size is None else medium_of(about, name, kind, what)
            medium = media.setdefault(name, made)
            index = list(media).index(name)
            ids += written(about, kind, medium.grid_thw)
            spans["modality"] += placeholder_spans(ids, start, about, kind, index)
            continue
        ids += [int(i) for i in what]
        if kind == "response":
            loss_kind = more[1] if len(more) > 1 else "response"
            spans["loss"].append(LossSpan(start, len(ids), loss_kind, more[0] if more else None))
        elif kind == "observation":
            source = more[1] if len(more) > 1 else "tool"
            spans["observation"].append(
                ObservationSpan(start, len(ids), source, more[0] if more else None)
            )
    sample = Sample(
        sample_id=sample_id,
        group_id=group_id,
        family=family,
        input_ids=np.asarray(ids, dtype=np.int64),
        media=list(media.values()),
        modality_spans=spans["modality"],
        loss_spans=spans["loss"],
        observation_spans=spans["observation"] or None,
    )
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def kept_of(sample: Sample, rng: np.random.Generator, most: int = 6) -> Ragged:
    """Per loss token, the token and up to `most` others."""
    targets = sample.input_ids[sample.loss_indices].tolist()
    others = (rng.integers(0, TEXT_IDS, rng.integers(0, most + 1)).tolist() for _ in targets)
    return Ragged.of([sorted({t, *more}) for t, more in zip(targets, others, strict=True)])


def teacher_of(sample: Sample, rng: np.random.Generator, most: int = 6) -> Ragged:
    """Per loss token, up to `most` ids with the logprobs of a softmax over more; none for some tokens."""
    counts = rng.integers(0, most + 1, sample.num_loss_tokens)
    ids = [np.unique(rng.integers(0, TEXT_IDS, count)) for count in counts]
    return Ragged.of(ids, [np.log(rng.dirichlet(np.ones(len(i) + 1))[:-1]) - 1e-3 for i in ids])


def routes_of(
    sample: Sample, rng: np.random.Generator, layers: int = 2, k: int = 2, experts: int = 8
) -> np.ndarray:
    """[L, layers, k]: the k largest of random router logits."""
    order = np.argsort(rng.random((len(sample), layers, experts)), axis=-1)
    return compact_routes(order[..., :k], experts)


def full_sample(sample_id: str = "s0", seed: int = 0, replay: bool = True) -> Sample:
    """A valid sample of two turns, an image and a video, with every field of the schema set.

    `replay=False`: none of those that all samples of a pack have or none.
    """
    rng = np.random.default_rng(seed)

    def text(n: int) -> list[int]:
        return rng.integers(0, TEXT_IDS, n).tolist()

    sample = make_sample(
        [
            ("text", text(3)),
            ("image", (1, 4, 6), "plan"),
            ("text", text(4)),
            ("response", text(5), 0, "action"),
            ("observation", text(3), 0, "tool"),
            ("video", (2, 4, 4), "clip"),
            ("image", (1, 4, 6), "plan"),
            ("response", text(6), 1),
        ],
        sample_id=sample_id,
    )
    length, loss = len(sample), sample.num_loss_tokens
    first, second = sample.loss_spans
    image, video = sample.media
    image.decoded_size, image.mode, image.exif_orientation = (84, 57), "RGBA", 6
    image.file_hash, image.source = hashlib.sha256(b"file").hexdigest(), "images/plan.png"
    image.metadata = {"camera": "A"}
    video.fps, video.frame_indices = 25.0, np.asarray([0, 12, 25, 37])
    video.frame_timestamps, video.second_per_grid_ts = (0.0, 0.48, 1.0, 1.48), 1.0
    video.total_frames = 50
    for span in sample.modality_spans:
        span.frame = 0
    sample.position_ids = rng.integers(0, length, (3, length))
    sample.attention_mask = np.ones(length, dtype=np.int8)
    sample.processor, sample.processor_fingerprint = dict(PROCESSOR), fingerprint(PROCESSOR)
    sample.action_spans = [ActionSpan(first.start, first.stop, {"click": [3, 4.5]}, 0)]
    box = (1.0, 2.0, 30.5, 40.25)
    sample.region_spans = [RegionSpan(second.start, second.stop, 0, box, (3.0, 4.0), "Ω angle")]
    sample.bbox_targets = [BboxTarget(box, 0, "angle")]
    sample.point_targets = [PointTarget((3.0, 4.0), 0, "vertex")]
    sample.coordinate_system, sample.screen_size = "absolute_pixels", (1280, 720)
    sample.rewards = [Score("exact", 1.0), Score("box", 0.5, {"region": 0})]
    sample.costs = [Cost("length", 0.1, {"turn": 1})]
    sample.verifiers = [Score("format", 1.0, {"span": [second.start, second.stop]})]
    sample.rollout_logprobs = -rng.exponential(size=loss).astype(np.float32)
    sample.sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": None, "logprobs": "processed"}
    sample.finish_reason = "stop"
    sample.policy_versions = [
        PolicyVersion(0, first.stop, "w7"),
        PolicyVersion(first.stop, length, "w8"),
    ]
    if replay:
        sample.kept_ids = kept_of(sample, rng)
        sample.teachers = {"32B": teacher_of(sample, rng), "Ω": teacher_of(sample, rng)}
        sample.routed_experts = routes_of(sample, rng)
    sample.trajectory_id, sample.turn, sample.prefix_cached_tokens = f"of {sample_id}", 1, 4
    sample.metadata = {"dataset": "geo", "nested": {"a": [1, 2.5, None, True, "é\ud800\n"]}}
    return sample


def _actions_of(loss: LossSpan) -> st.SearchStrategy[ActionSpan]:
    """Actions within a loss span, of its turn: of another vocabulary, or typed."""
    place = st.integers(loss.start, loss.stop)
    span = st.tuples(place, place).map(sorted)
    typed = st.builds(lambda text: {"kind": "type", "text": text}, TEXT)
    turn = st.just(loss.turn) if loss.turn is not None else TURNS
    return st.builds(lambda s, a, t: ActionSpan(*s, a, t), span, FREE_JSON | typed, turn)


def _optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FREE_JSON = st.dictionaries(
    TEXT,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
GRIDS = st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8]))
VIDEO_GRIDS = st.tuples(st.integers(1, 3), st.sampled_from([2, 4]), st.sampled_from([2, 6]))
NAMES = st.sampled_from(["a", "b", "c"])
TURNS = _optional(st.integers(0, 3))
NUMBERS = st.floats(-1e6, 1e6)


@st.composite
def samples(
    draw: st.DrawFn,
    sample_id: str | None = None,
    families: tuple[str, ...] = tuple(FAMILIES),
    replay: bool = False,
) -> Sample:
    """Random samples without a broken rule, with images, videos and at times any optional field.

    `replay`: also what is to be replayed, which all samples of a pack have or none.
    """
    family = get_family(draw(st.sampled_from(families)))
    merge = family.spatial_merge_size
    placeholders = family.placeholder_ids.values()
    token = st.integers(0, TEXT_IDS - 1).filter(lambda i: i not in placeholders)
    tokens = st.lists(token, max_size=8)

    def merged(grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """A grid of pairs of patches, of as many as the family merges."""
        return grid[0], grid[1] * merge // 2, grid[2] * merge // 2

    videos = st.tuples(
        st.just("video"), VIDEO_GRIDS.map(merged), NAMES.map(lambda name: name + " film")
    )
    audio = st.tuples(st.integers(3, 260), st.just(1), st.just(1))
    heard = st.tuples(st.just("audio"), audio, NAMES.map(lambda name: name + " call"))
    heard |= st.tuples(
        st.just("film"), st.tuples(VIDEO_GRIDS, audio), NAMES.map(lambda name: name + " movie")
    )
    parts = draw(
        st.lists(
            st.tuples(st.just("text"), tokens)
            | st.tuples(st.just("response"), tokens, TURNS, st.sampled_from(LOSS_KINDS))
            | st.tuples(st.just("observation"), tokens, TURNS, st.sampled_from(OBSERVATION_SOURCES))
            | st.tuples(st.just("image"), GRIDS.map(merged), NAMES)
            | (videos if "video" in family.placeholder_ids else st.nothing())
            | (heard if family.audio is not None else st.nothing()),
            max_size=6,
        )
    )
    sample = make_sample(
        [("text", [draw(token)]), *parts],
        sample_id=draw(TEXT) if sample_id is None else sample_id,
        group_id=draw(TEXT),
        family=family.name,
    )
    length, loss = len(sample), sample.num_loss_tokens
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    span = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    # what is heard has no places
    seen = [i for i, medium in enumerate(sample.media) if medium.modality != "audio"]
    media_index = st.sampled_from(seen) if seen else st.nothing()
    system = draw(st.sampled_from(COORDINATE_SYSTEMS))
    place = st.floats(
        0, {"normalized_1": 1, "normalized_1000": 1000}.get(system, 14)
    )  # a picture may be one patch
    corner = st.tuples(place, place)
    corners = st.tuples(corner, corner).filter(lambda p: p[0][0] != p[1][0] and p[0][1] != p[1][1])
    boxes = corners.map(
        lambda p: tuple(float(of(a, b)) for of in (min, max) for a, b in zip(*p, strict=True))
    )
    boxes = boxes.filter(lambda b: b[0] < b[2] and b[1] < b[3])  # MM314

    def counted(numbers: tuple[float, ...]) -> bool:  # MM311: fractions are no pixels
        return system == "normalized_1" or max(numbers) > 1 or all(n.is_integer() for n in numbers)

    boxes, points = boxes.filter(counted), corner.filter(counted)

    def records(strategy: st.SearchStrategy[Any]) -> list[Any] | None:
        return draw(_optional(st.lists(strategy, max_size=2)))

    for medium in sample.media:
        medium.decoded_size = draw(_optional(st.tuples(st.integers(1, 4000), st.integers(1, 4000))))
        medium.mode, medium.source = draw(_optional(TEXT)), draw(_optional(TEXT))
        medium.metadata = draw(FREE_JSON)
        if medium.modality == "video" and draw(st.booleans()):
            frames = family.temporal_patch_size * medium.grid_thw[0]
            medium.frame_indices = np.sort(rng.integers(0, 100, frames))
            medium.frame_timestamps = tuple((medium.frame_indices / 25).tolist())
            medium.fps, medium.total_frames = 25.0, 100
            # patches between two positions are refused where they are not cut
            whole = family.audio is not None and not family.audio.cuts_times
            seconds = st.integers(0, 10**6).map(float) if whole else st.floats(0, 1e6)
            medium.second_per_grid_ts = draw(seconds)
    if draw(st.booleans()):
        sample.position_ids = rng.integers(0, length, (family.position_rows, length))
    if draw(st.booleans()):
        sample.attention_mask = np.ones(length, dtype=np.int8)
    if draw(st.booleans()):
        sample.rollout_logprobs = -rng.exponential(size=loss).astype(np.float32)
    if draw(st.booleans()):
        sample.processor = draw(FREE_JSON)
        sample.processor_fingerprint = fingerprint(sample.processor)
    if sample.loss_spans:
        sample.action_spans = records(st.sampled_from(sample.loss_spans).flatmap(_actions_of))
    sample.region_spans = records(
        st.builds(
            lambda s, m, b, p: RegionSpan(*s, m, b, p),
            span,
            media_index,
            _optional(boxes),
            _optional(points),
        )
    )
    sample.bbox_targets = records(st.builds(BboxTarget, boxes, _optional(media_index), TEXT))
    sample.point_targets = records(st.builds(PointTarget, points, _optional(media_index)))
    sample.coordinate_system = system
    sample.screen_size = draw(_optional(st.tuples(st.integers(28, 9999), st.integers(28, 9999))))
    value = NUMBERS if loss else st.just(0.0)
    sample.rewards = records(st.builds(Score, TEXT, value))
    sample.costs = records(st.builds(Cost, TEXT, value))
    sample.verifiers = records(
        st.builds(Score, TEXT, NUMBERS, st.builds(lambda k: {"turn": k}, st.integers(0, 5)))
    )
    sample.sampling, sample.finish_reason = (
        draw(_optional(FREE_JSON)),
        draw(_optional(st.sampled_from(FINISH_REASONS))),
    )
    cut = draw(st.integers(0, length))
    versions = [PolicyVersion(0, cut, "w1"), PolicyVersion(cut, length, "w2")]
    sample.policy_versions = draw(_optional(st.just(versions)))
    # its own, for a trajectory has one group: no other id and text join to the same
    own = f"{len(sample.sample_id)}:{sample.sample_id}"
    sample.trajectory_id = draw(_optional(TEXT.map(lambda text: own + text)))
    sample.turn = draw(TURNS)
    sample.prefix_cached_tokens = draw(_optional(st.integers(0, length)))
    sample.metadata = draw(FREE_JSON)
    if replay and draw(st.booleans()):
        sample.kept_ids = draw(_optional(st.builds(lambda: kept_of(sample, rng))))
        sample.teachers = draw(
            _optional(st.dictionaries(TEXT, st.builds(lambda: teacher_of(sample, rng)), max_size=2))
        )
        experts = draw(st.sampled_from([2, 8, 300]))
        routes = st.builds(lambda: routes_of(sample, rng, 3, 2, experts))
        sample.routed_experts = draw(_optional(routes))
    else:
        sample.schema_version = draw(st.sampled_from(VERSIONS))
    return sample


def traces(max_size: int = 4) -> st.SearchStrategy[list[Sample]]:
    """Lists of samples with unlike ids."""
    return st.lists(samples(replay=True), max_size=max_size, unique_by=lambda s: s.sample_id)
