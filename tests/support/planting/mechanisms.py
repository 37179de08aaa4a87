"""Each cause as a mechanism that can be combined with others: it changes what one side, or both, are built from.

One episode: system text, a picture, a video, a question, a response, a tool's answer with a screenshot, a response.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from support.planting.episodes import END, IMAGE, PROCESSOR, START, THINK, THOUGHT, finish, look
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.fingerprint import cache_key as key_of
from mmpack.video.policies.resize import qwen2_size

SECONDS = 1.5
VISION_START, VISION_END = 151652, 151653
OTHER = "0" * 64


class Spec:
    """What a side is built from."""

    def __init__(self) -> None:
        self.system, self.tool = [11, 12, 13], [31, 32, 33]
        self.first, self.second = [700, 703, END], [710, 711, 712, END]
        self.image: dict[str, Any] = {"size": (84, 112), "decoded_size": (84, 112)}
        self.image["metadata"] = {"picture": {"thumbnail": look(), "format": "PNG"}}
        self.video = {"grid_thw": (3, 4, 4), "size": (320, 240)}
        self.video |= {
            "fps": 25.0,
            "frame_indices": np.arange(6) * 5,
            "second_per_grid_ts": SECONDS,
        }
        self.screen = {"grid_thw": (1, 4, 4), "size": (56, 56)}
        self.screen_shown = True
        self.processor = copy.deepcopy(PROCESSOR)
        self.rule, self.seconds_passed, self.offset = "grid", True, 0
        self.family, self.markers, self.stamps = "qwen2_5_vl", "replaced", "middle"
        self.loss_moved, self.finish_reason = 0, "stop"
        self.rewards: list[Any] | None = None
        self.sampling: dict[str, Any] | None = None
        self.after: list[Callable[[mp.Sample], None]] = []  # done to the whole sample, in order

    def build(self) -> mp.Sample:
        part = self.processor["image"]
        patch, limits = part["patch_size"], (part["min_pixels"], part["max_pixels"])
        width, height = qwen2_size(self.image["size"], patch * part["merge_size"], *limits)
        self.image["grid_thw"] = (1, height // patch, width // patch)
        parts = [
            ("text", self.system),
            ("image", self.image["grid_thw"], "diagram"),
            *([("text", [VISION_START])] if self.markers == "kept" else []),
            ("video", self.video["grid_thw"], "clip"),
            *([("text", [VISION_END])] if self.markers == "kept" else []),
            ("text", [21, 22, 23, 24]),
            ("response", self.first, 0),
            ("observation", self.tool, 0),
            *([("image", self.screen["grid_thw"], "screen")] if self.screen_shown else []),
            ("text", [41, 42]),
            ("response", self.second, 1),
        ]
        sample = make_sample(parts, finish_reason=self.finish_reason, family=self.family)
        for medium, fields in zip(
            sample.media, (self.image, self.video, self.screen), strict=False
        ):
            _set(medium, fields)
        if self.family == "qwen3_vl":
            _write_stamps(sample, self.stamps)
            self.processor["video_markers"] = self.markers
        sample.processor = self.processor
        sample.rewards = self.rewards
        sample.attention_mask = np.ones(len(sample), dtype=np.int8)
        finish(sample, self.rule, **({} if self.seconds_passed else {"second_per_grid_ts": None}))
        if sample.position_ids is not None:
            sample.position_ids = sample.position_ids + self.offset
        sample.metadata |= {"padding": [self.offset, 0]} if self.offset else {}
        sample.loss_spans[0].stop += self.loss_moved
        if self.sampling:
            sample.sampling = self.sampling
            sample.rollout_logprobs = np.full(sample.num_loss_tokens, -0.5, np.float32)
        for change in self.after:
            change(sample)
        return sample


def _set(medium: mp.Medium, fields: dict[str, Any]) -> None:
    made = make_medium(medium.media_id, medium.grid_thw, medium.modality)
    medium.decoded_size, medium.mode, medium.file_hash = (640, 480), "RGB", "f" * 64
    fields = copy.deepcopy(fields)
    for name, value in fields.items():
        setattr(medium, name, value)
    if medium.modality == "video":
        medium.total_frames = medium.total_frames or 100
        medium.frame_timestamps = tuple((medium.frame_indices / (medium.fps or 24)).tolist())
    medium.cache_key = key_of(
        medium.content_hash or made.content_hash, medium.grid_thw, PROCESSOR["image"]
    )


def _write_stamps(sample: mp.Sample, which: str) -> None:
    """Times of the video's frames written where `make_sample` left <k.5 seconds>."""
    times = np.array(sample.media[1].frame_timestamps)
    written = times[::2] if which == "first" else (times[::2] + times[1::2]) / 2
    for span in sample.modality_spans:
        if span.frame is not None:
            whole, tenth = f"{written[span.frame]:.1f}".split(".")
            sample.input_ids[span.start - 6] = 15 + int(whole)
            sample.input_ids[span.start - 4] = 15 + int(tenth)


Mechanism = Callable[[Spec, Spec], None]
MECHANISMS: dict[str, Mechanism] = {}
HIDES: dict[tuple[str, str], str] = {}  # (cause that hides, cause that is hidden): why


NO_POSITIONS = (
    "position_rule second_per_grid_ts padding_positions: ids that contradict their grids have none"
)
IN_TEXT = "position_rule second_per_grid_ts: Qwen3-VL has one position rule, of no seconds"


def mechanism(*hides: str) -> Callable[[Mechanism], Mechanism]:
    """Add a cause by its function's name; they are applied in this file's order. `hides`: `causes: why` each."""

    def add(change: Mechanism) -> Mechanism:
        MECHANISMS[change.__name__] = change
        for others, _, why in (text.partition(": ") for text in hides):
            HIDES.update({(change.__name__, other): why for other in others.split()})
        return change

    return add


@mechanism()
def model_family(left: Spec, right: Spec) -> None:
    right.processor["image"]["patch_size"] = 28


@mechanism()
def pixel_transform(left: Spec, right: Spec) -> None:
    def other_key(sample: mp.Sample) -> None:
        medium = sample.media[0]
        if medium.modality == "image":
            medium.cache_key = medium.cache_key[::-1]

    for spec, mean in ((left, 0.48145466), (right, 0.5)):
        spec.processor["image"]["image_mean"] = [mean] * 3
    right.after.append(other_key)


@mechanism("alpha: a turned picture's pixels differ, whatever its background is")
def exif_rotation(left: Spec, right: Spec) -> None:
    right.image |= {"size": right.image["size"][::-1], "content_hash": OTHER}
    right.image["metadata"] = {"picture": {"thumbnail": look(turned=6), "format": "PNG"}}
    for spec in (left, right):
        spec.image["exif_orientation"] = 6


@mechanism()
def alpha(left: Spec, right: Spec) -> None:
    right.image["content_hash"] = OTHER
    other = {"transparent": True, "flattened": {"white": look(), "black": look(2)}}
    for spec, seen in ((left, look()), (right, look(2))):
        spec.image["mode"] = "RGBA"
        spec.image["metadata"] = {"picture": {"format": "PNG", "thumbnail": seen, **other}}


@mechanism()
def jpeg_reencode(left: Spec, right: Spec) -> None:
    right.image |= {"content_hash": OTHER, "file_hash": "e" * 64}
    right.image["metadata"]["picture"]["format"] = "JPEG"


@mechanism()
def cache_key(left: Spec, right: Spec) -> None:
    def short(sample: mp.Sample) -> None:
        for medium in sample.media:
            if medium.media_id == "screen":
                medium.cache_key = "ab"

    right.screen["content_hash"] = OTHER
    left.after.append(short)
    right.after.append(short)


@mechanism("frame_pixels: turned frames have other pixels, whatever the decoder is")
def video_rotation(left: Spec, right: Spec) -> None:
    (t, h, w), (a, b) = right.video["grid_thw"], right.video["size"]
    right.video |= {"grid_thw": (t, w, h), "size": (b, a), "content_hash": OTHER}


@mechanism(
    "position_rule: at 24 fps the video is so short that both rules agree",
    "timestamp_rounding: frames of other seconds have other timestamps",
)
def fps_missing(left: Spec, right: Spec) -> None:
    right.video |= {"fps": None, "second_per_grid_ts": 2 / 24}


@mechanism(
    "video_metadata: two readers count as they count",
    "frame_sampling: two readers' figures take other frames",
    "fps_missing: a rate that was read was not assumed",
    "timestamp_rounding: frames of other seconds have other timestamps",
)
def video_reader(left: Spec, right: Spec) -> None:
    for spec, reader, fps in ((left, "opencv", 25.0), (right, "torchcodec", 25.05)):
        spec.video |= {"fps": fps, "metadata": {"sampling": {"policy": "vllm", "reader": reader}}}


@mechanism()
def video_metadata(left: Spec, right: Spec) -> None:
    right.video["total_frames"] = 99


@mechanism(
    "frame_pixels: other frames have other pixels, whatever the decoder is",
    "timestamp_rounding: frames of other seconds have other timestamps",
)
def frame_sampling(left: Spec, right: Spec) -> None:
    right.video["frame_indices"] = right.video["frame_indices"] + 1


@mechanism()
def frame_pixels(left: Spec, right: Spec) -> None:
    right.video["content_hash"] = OTHER


@mechanism()
def resize_twice(left: Spec, right: Spec) -> None:
    for spec, size in ((left, (28, 392)), (right, (13, 400))):
        turned = spec.image["size"] == (112, 84)
        spec.image |= {"size": size[::-1] if turned else size, "decoded_size": (13, 400)}
    right.image["content_hash"] = OTHER


@mechanism()
def max_pixels(left: Spec, right: Spec) -> None:
    right.processor["image"]["max_pixels"] = 8 * 28 * 28


@mechanism()
def video_budget(left: Spec, right: Spec) -> None:
    right.video["grid_thw"] = (3, 8, 6)


@mechanism()
def codec_flip(left: Spec, right: Spec) -> None:
    codes = np.arange(3 * 40, dtype=np.int32).reshape(3, 40) % 16
    flipped = codes.copy()
    flipped[1:, 7] = 5
    for spec, ids in ((left, codes), (right, flipped)):
        audio = mp.schema.CodecIds("codec", ids, (16, 16, 16), 12.5, OTHER)
        spec.after.append(lambda sample, audio=audio: setattr(sample, "codec_ids", [audio]))


@mechanism(
    "exif_rotation alpha jpeg_reencode resize_twice cache_key: what was done is not seen in another one's place"
)
def media_order(left: Spec, right: Spec) -> None:
    def exchange(sample: mp.Sample) -> None:
        if len(sample.media) > 2:
            first, _, last = sample.media
            for name in ("content_hash", "file_hash"):
                one, other = getattr(first, name), getattr(last, name)
                setattr(first, name, other)
                setattr(last, name, one)
            for medium in (first, last):
                key = key_of(str(medium.content_hash), medium.grid_thw, PROCESSOR["image"])
                medium.cache_key = key

    for spec in (left, right):
        spec.screen["file_hash"] = "d" * 64
    right.after.append(exchange)


@mechanism(
    "cache_key: the picture under the wrong key is the one that is dropped",
    "media_order: there is one picture left",
)
def dropped_image(left: Spec, right: Spec) -> None:
    right.screen_shown = False


def _run(sample: mp.Sample) -> tuple[int, int]:
    span = sample.modality_spans[0]
    return span.start, span.stop


def _stretch(sample: mp.Sample, count: int) -> None:
    """The first picture's run cut or grown to `count`, spans counted along; such ids have no positions."""
    start, stop = _run(sample)
    ids, more = sample.input_ids, count - (stop - start)
    sample.input_ids = np.concatenate([ids[:start], np.full(count, IMAGE), ids[stop:]])
    sample.modality_spans[0].stop += more
    others = [*sample.modality_spans[1:], *sample.loss_spans, *(sample.observation_spans or [])]
    for span in others:
        span.start, span.stop = span.start + more, span.stop + more
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    sample.position_ids = None


@mechanism(NO_POSITIONS)
def double_expansion(left: Spec, right: Spec) -> None:
    right.after.append(lambda s: _stretch(s, (_run(s)[1] - _run(s)[0]) ** 2))


@mechanism("double_expansion: a run is too long or too short, not both", NO_POSITIONS)
def not_expanded(left: Spec, right: Spec) -> None:
    right.after.append(lambda s: _stretch(s, 1))


def _in_text(left: Spec, right: Spec) -> None:
    for spec in (left, right):
        spec.family = "qwen3_vl"


@mechanism(IN_TEXT)
def timestamp_rounding(left: Spec, right: Spec) -> None:
    _in_text(left, right)
    right.stamps = "first"


@mechanism(IN_TEXT)
def video_markers(left: Spec, right: Spec) -> None:
    _in_text(left, right)
    left.markers = "kept"


@mechanism("stop_token: the response is cut off")
def truncated(left: Spec, right: Spec) -> None:
    def cut(sample: mp.Sample) -> None:
        stop = sample.loss_spans[-1].start + 2
        if stop > len(sample):
            return
        sample.input_ids, sample.attention_mask = sample.input_ids[:stop], np.ones(stop, np.int8)
        if sample.position_ids is not None:
            sample.position_ids = sample.position_ids[:, :stop]
        sample.loss_spans[-1].stop = stop
        if sample.rollout_logprobs is not None:
            sample.rollout_logprobs = sample.rollout_logprobs[: sample.num_loss_tokens]

    for spec in (left, right):
        spec.finish_reason = "length"
    right.after.append(cut)


@mechanism(
    "stop_token: the response is cut off",
    "dropped_image: the dropped picture lies behind the cut",
    "truncated: a cut through a medium is a cut",
    NO_POSITIONS,
)
def truncated_medium(left: Spec, right: Spec) -> None:
    def cut(sample: mp.Sample) -> None:
        span = sample.modality_spans[-1]
        stop = span.start + 1
        sample.input_ids, sample.attention_mask = sample.input_ids[:stop], np.ones(stop, np.int8)
        sample.position_ids = None
        sample.modality_spans[-1].stop = stop
        sample.loss_spans = [s for s in sample.loss_spans if s.stop <= stop]
        if sample.rollout_logprobs is not None:
            sample.rollout_logprobs = sample.rollout_logprobs[: sample.num_loss_tokens]

    right.after.append(cut)


@mechanism()
def chat_template(left: Spec, right: Spec) -> None:
    right.processor["chat_template"] = "sha256:" + "2" * 64
    right.system = [11, 99, 98, 13]


@mechanism()
def turn_order(left: Spec, right: Spec) -> None:
    asked, told = [START, 8, 21, END], [START, 9, 22, END]
    left.system = [*asked, *told, START, 7, *left.system]
    right.system = [*told, *asked, START, 7, *right.system]


@mechanism(NO_POSITIONS)
def sampled_placeholder(left: Spec, right: Spec) -> None:
    for spec in (left, right):
        spec.first = [*spec.first[:-1], IMAGE, spec.first[-1]]


@mechanism()
def retokenized_response(left: Spec, right: Spec) -> None:
    right.first = [{700: 701, 703: 704}.get(i, i) for i in right.first]


@mechanism()
def rewritten_response(left: Spec, right: Spec) -> None:
    left.first = [THINK, 705, THOUGHT, *left.first]


@mechanism()
def stop_token(left: Spec, right: Spec) -> None:
    right.second = right.second[:-1]


@mechanism()
def position_rule(left: Spec, right: Spec) -> None:
    if right.family == "qwen2_5_vl":  # the other has one rule
        right.rule = "max"


@mechanism()
def second_per_grid_ts(left: Spec, right: Spec) -> None:
    right.seconds_passed = False


@mechanism()
def padding_positions(left: Spec, right: Spec) -> None:
    right.offset = 7


@mechanism("loss_mask_shift: the turn whose edge moved has no loss")
def turn_without_loss(left: Spec, right: Spec) -> None:
    def leave_out(sample: mp.Sample) -> None:
        count = sample.loss_spans[0].stop - sample.loss_spans[0].start
        del sample.loss_spans[0]
        if sample.rollout_logprobs is not None:
            sample.rollout_logprobs = sample.rollout_logprobs[count:]
        if sample.kept_ids is not None:
            sample.kept_ids = sample.kept_ids[np.arange(count, len(sample.kept_ids))]

    right.after.append(leave_out)


@mechanism()
def loss_mask_shift(left: Spec, right: Spec) -> None:
    right.loss_moved = 1


@mechanism(
    "truncated: a response without a token can't be cut",
    "stop_token: a response without a token has no stop token",
)
def empty_response(left: Spec, right: Spec) -> None:
    for spec in (left, right):
        spec.second = []
        spec.rewards = [mp.Score("exact", 1.0, {"turn": 1})]


def _target(sample: mp.Sample, box: tuple[float, ...]) -> None:
    sample.bbox_targets = [mp.schema.BboxTarget(box)]
    sample.coordinate_system = "normalized_1000"


@mechanism()
def coordinate_system(left: Spec, right: Spec) -> None:
    for spec, size in ((left, 1000.0), (right, 1.0)):
        box = (0.1 * size, 0.2 * size, 0.5 * size, 0.75 * size)
        spec.after.append(lambda sample, box=box: _target(sample, box))


@mechanism("sampling: raw logprobs have no settings to compare")
def logprob_kind(left: Spec, right: Spec) -> None:
    for spec, kind in ((left, "processed"), (right, "raw")):
        spec.sampling = {"temperature": 0.5, "top_p": 1.0, "logprobs": kind}


@mechanism()
def sampling(left: Spec, right: Spec) -> None:
    for spec, more in ((left, {"top_k": 20}), (right, {})):
        spec.sampling = (spec.sampling or {"temperature": 0.5, "logprobs": "processed"}) | more


def _kept(sample: mp.Sample) -> None:
    sample.kept_ids = mp.schema.Ragged.of(
        [[i, i + 1] for i in sample.input_ids[sample.loss_indices]]
    )


@mechanism()
def truncated_support(left: Spec, right: Spec) -> None:
    left.after.append(_kept)


def _routed(sample: mp.Sample) -> None:
    """Two experts of eight per token."""
    taken = np.stack([np.arange(len(sample)) % 4 + 4, np.arange(len(sample)) % 4], axis=-1)
    sample.routed_experts = mp.schema.compact_routes(taken[:, None], 8)


@mechanism()
def routing(left: Spec, right: Spec) -> None:
    left.after.append(_routed)


def _padded(sample: mp.Sample) -> None:
    """Three pad ids before all others."""
    sample.input_ids = np.concatenate(
        [[get_family(sample.family).pad_token_id] * 3, sample.input_ids]
    )
    sample.attention_mask = np.ones(len(sample), np.int8)
    if sample.position_ids is not None:
        pads = np.tile(np.arange(3), (len(sample.position_ids), 1))
        sample.position_ids = np.concatenate([pads, sample.position_ids + 3], axis=1)
    for span in (*sample.modality_spans, *sample.loss_spans, *(sample.observation_spans or [])):
        span.start, span.stop = span.start + 3, span.stop + 3


@mechanism("padding_positions: padding before the ids shifts their positions")
def padding_in_ids(left: Spec, right: Spec) -> None:
    right.after.append(_padded)


def broken_by(*causes: str) -> tuple[mp.Sample, mp.Sample]:
    """Rollout and train, to which these causes happened, in the order of MECHANISMS."""
    left, right = Spec(), Spec()
    for cause, mechanism in MECHANISMS.items():
        if cause in causes:
            mechanism(left, right)
    return left.build(), right.build()


# ---- an audio ------------------------------------------------------------------------------------

HEARD_FOR = 0.399  # no whole number of frames


def hear(
    rate: int = 16_000,
    samples: int = 16_000,
    hop: int = 160,
    padding: str = "max_length",
    system: Any = (11, 12),
    end: bool = True,
) -> mp.Sample:
    """A picture, an audio of `samples` samples, a question and a response; what its features are follows from these."""
    frames = int(HEARD_FOR * samples) // hop
    frames += padding == "max_length"  # the last part of a frame counts
    response = [700, 703, 151645] if end else [700, 703]
    sample = make_sample(
        [
            ("text", system),
            ("image", (1, 4, 8), "diagram"),
            ("audio", (frames, 1, 1), "call"),
            ("text", [21, 22]),
            ("response", response),
        ],
        family="qwen2_5_omni",
        finish_reason="stop",
    )
    heard = sample.media[1]
    heard.sampling_rate, heard.hop_length = rate, hop
    heard.num_samples, heard.source = int(HEARD_FOR * samples), "call.wav"
    heard.content_hash = f"sha256:{samples:064x}"
    heard.cache_key = f"sha256:{samples:032x}{frames:032x}"
    sample.processor = {
        "audio": {"sampling_rate": 16_000, "hop_length": hop, "padding": padding},
        "chat_template": f"sha256:{system[0]:064x}",
    }
    return sample


# what the trainer did otherwise
HEARD: dict[str, dict[str, Any]] = {
    "audio_sampling_rate": {"rate": 8_000, "samples": 8_000},
    "audio_hop": {"hop": 320},
    "audio_padding": {"padding": "longest"},
    "chat_template": {"system": (98, 12)},
    "stop_token": {"end": False},
}
