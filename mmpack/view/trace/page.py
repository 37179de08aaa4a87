"""The page of samples: a key, a tree of samples, and for each sample its screens, its tokens and its scores.

One file: nothing is loaded, and its policy allows one style sheet and one script, by hash. Without the script all is
there but the keys and the line about one token. `templates/trace.html` writes what is found here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmpack.layout.forest import build_forest
from mmpack.progress import tracked
from mmpack.schema.replay_figures import replay_figures
from mmpack.schema.rules import problems_of
from mmpack.schema.sample import REPLAY, Sample
from mmpack.view.bars import histogram, saved_parts, score_histograms
from mmpack.view.forest import forest_drawing
from mmpack.view.pages import asset, document, template, written
from mmpack.view.parts import Figure, Grid, Heading, Line, Part
from mmpack.view.strips import sample_strip
from mmpack.view.trace.choose import Options
from mmpack.view.trace.episodes import Episode, Node, episodes_of
from mmpack.view.trace.roles import KEY, LETTERS, MEANING, ROLES, roles_of, texts_of
from mmpack.view.trace.scores import placed_scores
from mmpack.view.trace.screens import (
    FILM,
    SHOWN,
    Album,
    Pictures,
    Screen,
    new_marks,
    new_media,
    screen_of,
)
from mmpack.view.trace.tokens import Written, kept_of, logprobs_of, rows

STYLE = asset("trace.css", "drawings.css")
PROBLEMS = 5  # broken rules shown of a sample
FIELDS = (
    "group_id", "trajectory_id", "turn", "family", "finish_reason", "coordinate_system", "screen_size",
    "prefix_cached_tokens", "sampling", "policy_versions", "processor_fingerprint", "metadata",
)  # fmt: skip
FIELD_MOST = 600  # characters of a field's value


def page(samples: Sequence[Sample], note: str, options: Options) -> tuple[str, dict[str, str]]:
    """The page, and for each medium that is drawn without its picture why.

    `note`: a line about what is not in it.
    """
    count = len({medium.cache_key for sample in samples for medium in sample.media})
    album = Album(Pictures(options), count)
    episodes = [
        _episode(e, album, options.tokenizer) for e in tracked(episodes_of(samples), "drawing")
    ]
    body = template("trace.html").page(
        options.title,
        _facts(samples, episodes),
        note,
        list(zip(LETTERS, ROLES, MEANING, strict=True)),
        written(sums(samples)),
        episodes,
        album.addresses,
    )
    return document(
        f"{options.title} · mmpack view", STYLE, body, asset("trace.js")
    ), album.pictures.missing


def _facts(samples: Sequence[Sample], episodes: Sequence[dict[str, Any]]) -> str:
    trajectories = sum(e["kind"] == "trajectory" for e in episodes)
    counts = [
        (len(samples), "sample", "samples"),
        (trajectories, "trajectory", "trajectories"),
        (sum(map(len, samples)), "token", "tokens"),
        (sum(s.num_loss_tokens for s in samples), "token in the loss", "tokens in the loss"),
    ]
    found = [f"{n:,} {one if n == 1 else many}" for n, one, many in counts if n or one == "sample"]
    return " · ".join(found)


def _episode(episode: Episode, album: Album, tokenizer: Any) -> dict[str, Any]:
    """What the template shows of an episode; `film`: of several samples of a trajectory."""
    longest = max(len(node.sample) for node in episode.nodes)
    samples = [_sample(node, album, tokenizer, longest) for node in episode.nodes]
    several = episode.kind == "trajectory" and len(episode.nodes) > 1
    film = [frame for node in episode.nodes for frame in _film(node, album)] if several else []
    return {"kind": episode.kind, "name": episode.name, "film": film, "samples": samples}


def _film(node: Node, album: Album) -> Iterator[tuple[str, str, Screen]]:
    """The screens of a sample, small, each with the address of its figure and what stands below it."""
    marks = new_marks(node)
    for index in new_media(node, marks)[:SHOWN]:
        screen = screen_of(node.sample, index, marks, album.look, FILM, 2 * FILM)
        yield f"s{node.number}m{index}", _seen(node, index), screen


def _seen(node: Node, index: int) -> str:
    """The sample, and the turn in which the medium came back; of its prompt, the sample's own turn."""
    sample = node.sample
    at = next((s.start for s in sample.modality_spans if s.media_index == index), -1)
    spans = [s for s in sample.observation_spans or () if s.start <= at < s.stop]
    turns = [s.turn for s in spans if s.turn is not None]
    return f"{sample.sample_id} · turn {turns[0]}" if turns else node.name


def _branch(node: Node) -> str:
    if node.parent is None:
        return f"{len(node.sample):,} tokens"
    new = f"{len(node.sample):,} tokens, {len(node.sample) - node.shared:,} new"
    return new if node.shared == len(node.parent.sample) else f"branches at {node.shared:,}; {new}"


def _sample(node: Node, album: Album, tokenizer: Any, longest: int) -> dict[str, Any]:
    """What the template shows of a sample. `longest`: tokens of the episode's longest: their strips have one scale."""
    sample = node.sample
    scores, marks = placed_scores(sample, node.roles), new_marks(node)
    shown, problems = new_media(node, marks), list(problems_of(sample))
    texts = texts_of(sample, tokenizer)
    facts = [
        "" if sample.turn is None else f"turn {sample.turn}",
        f"{len(sample):,} tokens",
        f"{sample.num_loss_tokens:,} in the loss",
        f"ended by {sample.finish_reason}" if sample.finish_reason else "",
    ]
    strip, left_out = sample_strip(
        sample.sample_id, node.roles, OF_ROLE.__getitem__, longest, node.shared, high=9
    )
    return {
        "node": node,
        "branch": _branch(node),
        "facts": " · ".join(filter(None, facts)),
        # of the sequence, and those whose tokens are not among the rows
        "scores": [s for s in scores if s.level == "sequence" or s.stop <= node.shared],
        "problems": problems[:PROBLEMS],
        "more_problems": len(problems) - PROBLEMS,
        "strip": strip,
        "left_out": left_out,
        "screens": [screen_of(sample, i, marks, album.look) for i in shown[:SHOWN]],
        "more_screens": len(shown) - SHOWN,
        "rows": rows(Written(node, texts, scores, logprobs_of(sample), kept_of(sample))),
        "fields": list(_fields(sample)),
    }


def _fields(sample: Sample) -> Iterator[tuple[str, str]]:
    """The other fields that are set, as JSON."""
    to_replay = replay_figures(sample)
    value: Any
    for name in (*FIELDS, *REPLAY):
        value = to_replay.get(name) if name in REPLAY else getattr(sample, name)
        if name == "policy_versions":
            value = [version.to_dict() for version in value or ()]
        if name == "metadata":
            value = {k: v for k, v in value.items() if k != KEY}
        if value is None or value in ([], {}):
            continue
        text = value
        if not isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False, default=str)
        if len(text) > FIELD_MOST:
            text = f"{text[:FIELD_MOST]}… ({len(text):,} characters)"
        yield name, text


OF_ROLE = tuple(f"mm-of {name}" for name in ROLES)  # the class of each role on a page of samples
NAMED = 8  # names of rewards and costs that have a histogram


def sums(samples: Sequence[Sample]) -> list[Part]:
    """Figures of the page; rows, media and the forest are of the samples that break no rule."""
    whole = [sample for sample in samples if not any(problems_of(sample))]
    saved = repeated(whole)
    broken = len(samples) - len(whole)
    left = f" {broken} that break rules are left out." if broken else ""
    return [
        Grid(figures(samples)),
        *saved_parts(saved, "shared"),
        Line(f"All samples of this page in one pack.{left}", soft=True),
        *forest(whole),
    ]


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """Histograms of lengths, media, rewards, costs and logprobs, as far as the samples have them."""
    out = [
        histogram([len(s) for s in samples], "tokens of a sample"),
        histogram([s.num_loss_tokens for s in samples], "loss tokens of a sample"),
    ]
    media = {(m.cache_key, m.modality): m.num_patches for s in samples for m in s.media}
    if media:
        out.append(histogram([len(s.media) for s in samples], "media of a sample"))
        out.append(histogram(list(media.values()), "patches of a medium"))
    scores = (
        (kind, score)
        for s in samples
        for kind, some in (("reward", s.rewards), ("cost", s.costs))
        for score in some or ()
    )
    out += score_histograms(scores)[:NAMED]
    logprobs = [s.rollout_logprobs for s in samples if s.rollout_logprobs is not None]
    if logprobs:
        out.append(histogram(np.concatenate(logprobs), "rollout's logprob of a loss token"))
    return out


def repeated(samples: Sequence[Sample]) -> list[tuple[str, int, int]]:
    """Name, count of each sample alone, and count where prefixes and media are computed once; samples break no rule."""
    rows = sum(build_forest(some).num_tokens for some in _by_family(samples).values())
    media = [medium for sample in samples for medium in sample.media]
    once = {(m.cache_key, m.modality): m for m in media}.values()
    return [
        ("rows", sum(map(len, samples)), rows),
        ("media", len(media), len(once)),
        ("patches", sum(m.num_patches for m in media), sum(m.num_patches for m in once)),
    ]


def forest(samples: Sequence[Sample]) -> list[Part]:
    """The forest of each family's samples, with what the tokens are."""
    parts: list[Part] = []
    for family, some in _by_family(samples).items():
        found = build_forest(some)
        role, loss = np.zeros(found.num_tokens, np.int8), np.zeros(found.num_tokens, bool)
        ends: dict[int, list[str]] = {}
        for b, sample in enumerate(some):
            rows, roles = found.rows(b), roles_of(sample)
            own = roles.loss | ~loss[rows]  # a sample's loss stays, where another has it as context
            role[rows[own]] = roles.role[own]
            loss[rows] |= roles.loss
            ends.setdefault(int(found.sample_segment[b]), []).append(sample.sample_id)
        offsets, parents = found.segment_offsets.tolist(), found.segment_parent.tolist()
        drawing, more = forest_drawing(offsets, parents, ends, role, loss, OF_ROLE)
        note = "Each box is a segment, as wide as its tokens, and continues the one above it. "
        note += "A line below marks the loss."
        note += f" {more:,} more segments are not drawn." if more else ""
        parts += [Heading(f"Forest of {family}"), drawing, Line(note, soft=True)]
    return parts


def _by_family(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    return families
