"""The page: a key, a tree of samples beside them, and for each sample its screens, its tokens and its scores.

One file: nothing is loaded, and its policy allows one style sheet and one script, by hash. Without the script all is
there but the keys and the line about one token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.progress import tracked
from mmpack.schema.replay_figures import replay_figures
from mmpack.schema.rules import problems_of
from mmpack.schema.sample import REPLAY, Sample
from mmpack.view.media import finder
from mmpack.view.parity.frame_viewer import FrameViewer
from mmpack.view.shapes import svg
from mmpack.view.strips import sample_strip
from mmpack.view.tags import Markup, joined, tag
from mmpack.view.trace.episodes import Episode, Node, episodes_of
from mmpack.view.trace.roles import LETTERS, MEANING, ROLES
from mmpack.view.trace.scores import Placed, placed_scores
from mmpack.view.trace.screens import SHOWN, Album, figures, film, new_marks, new_media
from mmpack.view.trace.script import SCRIPT
from mmpack.view.trace.style import STYLE
from mmpack.view.trace.sums import OF_ROLE, sums
from mmpack.view.trace.texts import KEY, texts_of
from mmpack.view.trace.tokens import Written, kept_of, logprobs_of, rows, score_chip

PROBLEMS = 5  # broken rules shown of a sample
FIELDS = (
    "group_id", "trajectory_id", "turn", "family", "finish_reason", "coordinate_system", "screen_size",
    "prefix_cached_tokens", "sampling", "policy_versions", "processor_fingerprint", "metadata",
)  # fmt: skip
FIELD_MOST = 600  # characters of a field's value


def page(
    samples: Sequence[Sample],
    note: str,
    *,
    media_root: str | os.PathLike[str] | None,
    pictures: Mapping[str, np.ndarray] | None,
    tokenizer: Any,
    title: str,
) -> tuple[str, dict[str, str]]:
    """The page, and for each medium that is drawn without its picture why.

    `note`: a line about what is not in it. `pictures`: content_hash to pixels.
    """
    count = len({medium.cache_key for sample in samples for medium in sample.media})
    album = Album(finder(media_root, pictures), FrameViewer(media_root, pictures), count)
    episodes = episodes_of(samples)
    sections = joined(
        [_episode(episode, album, tokenizer) for episode in tracked(episodes, "drawing")]
    )
    digest = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for name, text in (("style", STYLE), ("script", SCRIPT))
    }
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest['style']}'; "
        f"script-src 'sha256-{digest['script']}'; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{tag('title', f'{title} · mmpack view')}<style>{STYLE}</style>"
    )
    body = joined(
        [
            tag("a", "Skip to the samples", href="#samples", class_="skip"),
            _top(samples, episodes, title, note),
            tag(
                "div",
                _tree(episodes),
                tag("main", sections, id="samples", tabindex="-1"),
                class_="cols",
            ),
            album.symbols(),
            tag("output", id="now", role="status", aria_live="polite", hidden=""),
        ]
    )
    html = (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )
    return html, album.missing


def _top(samples: Sequence[Sample], episodes: Sequence[Episode], title: str, note: str) -> Markup:
    trajectories = sum(e.kind == "trajectory" for e in episodes)
    counts = [
        (len(samples), "sample"),
        (trajectories, "trajectory"),
        (sum(map(len, samples)), "token"),
        (sum(s.num_loss_tokens for s in samples), "token in the loss"),
    ]
    facts = " · ".join(_counted(n, name) for n, name in counts if n or name == "sample")
    key = [
        tag(
            "li",
            tag("b", LETTERS[i], class_=f"letter {name}"),
            tag("b", name),
            tag("span", MEANING[i]),
        )
        for i, name in enumerate(ROLES)
    ]
    loss = tag(
        "li",
        tag("b", class_="bar"),
        tag("b", "loss"),
        tag("span", "a solid bar: the loss reads these tokens"),
    )
    places = [
        ("region", "r0", "region", "the response speaks of it (solid)"),
        ("target", "t0", "target", "where the answer is (dashed)"),
        ("action", "1", "action", "a click, or a path with its arrow"),
    ]
    marks = [
        tag("li", tag("b", letter, class_=f"key {role}"), tag("b", name), tag("span", meaning))
        for role, letter, name, meaning in places
    ]
    keys = (
        ("Tab", "rows and screens"),
        ("↑ ↓", "rows"),
        ("← →", "tokens of a row"),
        ("n p", "samples"),
        ("Enter", "a screen larger, and back"),
    )
    help_ = [tag("li", tag("kbd", key), f" {what}") for key, what in keys]
    return tag(
        "header",
        tag("h1", title),
        tag("p", facts, class_="facts"),
        tag("p", note, class_="note") if note else "",
        tag(
            "details",
            tag("summary", "Key"),
            tag("ul", *key, loss, *marks, class_="keys"),
            tag("ul", *help_, class_="help"),
            class_="key-of-all",
            open="",
        ),
        sums(samples),
    )


def _counted(count: int, name: str) -> str:
    first, _, rest = name.partition(" ")
    plural = f"{first[:-1]}ies" if first.endswith("y") else f"{first}s"
    words = first if count == 1 else plural
    return f"{count:,} {words}{' ' + rest if rest else ''}"


def _tree(episodes: Sequence[Episode]) -> Markup:
    parts = []
    for episode in episodes:
        items = [
            tag(
                "li",
                tag(
                    "a",
                    "└ " if node.relation.startswith("branches") else "",
                    _name(node, short=True),
                    href=f"#s{node.number}",
                ),
                tag("small", _branch(node)),
                class_=f"d{min(node.depth, 6)}",
            )
            for node in episode.nodes
        ]
        parts += [tag("h2", f"{episode.kind} ", tag("b", episode.name)), tag("ul", *items)]
    return tag("nav", *parts, aria_label="samples")


def _branch(node: Node) -> str:
    if node.parent is None:
        return f"{len(node.sample):,} tokens"
    new = f"{len(node.sample):,} tokens, {len(node.sample) - node.shared:,} new"
    return new if node.shared == len(node.parent.sample) else f"branches at {node.shared:,}; {new}"


def _name(node: Node, short: bool = False) -> str:
    turn = node.sample.turn
    if turn is None:
        return node.sample.sample_id
    return f"{node.sample.sample_id} · turn {turn}" if short else node.sample.sample_id


def _episode(episode: Episode, album: Album, tokenizer: Any) -> Markup:
    head = tag("h2", f"{episode.kind} ", tag("b", episode.name))
    longest = max(len(node.sample) for node in episode.nodes)
    nodes = [_sample(node, album, tokenizer, longest) for node in episode.nodes]
    return tag("section", head, _film(episode, album), *nodes, class_="episode")


def _film(episode: Episode, album: Album) -> Markup:
    """The screens of a trajectory of several samples, in order."""
    if episode.kind != "trajectory" or len(episode.nodes) < 2:
        return Markup("")
    frames = []
    for node in episode.nodes:
        marks = new_marks(node)
        frames += [
            (node.sample, node.number, index, _seen(node, index), marks)
            for index in new_media(node, marks)[:SHOWN]
        ]
    return film(frames, album)


def _seen(node: Node, index: int) -> str:
    """The sample, and the turn in which the medium came back; of its prompt, the sample's own turn."""
    sample = node.sample
    at = next((s.start for s in sample.modality_spans if s.media_index == index), -1)
    spans = [s for s in sample.observation_spans or () if s.start <= at < s.stop]
    turns = [s.turn for s in spans if s.turn is not None]
    return f"{sample.sample_id} · turn {turns[0]}" if turns else _name(node, short=True)


def _sample(node: Node, album: Album, tokenizer: Any, longest: int) -> Markup:
    """`longest`: tokens of the longest sample beside it: their strips have one scale."""
    sample = node.sample
    scores = placed_scores(sample, node.roles)
    marks = new_marks(node)
    shown = new_media(node, marks)
    texts = texts_of(sample, tokenizer)
    written = Written(node, texts, scores, logprobs_of(sample), kept_of(sample))
    turn = "" if sample.turn is None else f"turn {sample.turn}"
    facts = [
        turn,
        f"{len(sample):,} tokens",
        f"{sample.num_loss_tokens:,} in the loss",
        f"ended by {sample.finish_reason}" if sample.finish_reason else "",
    ]
    return tag(
        "article",
        tag(
            "h3",
            tag("span", sample.sample_id),
            tag("small", " · ".join(fact for fact in facts if fact)),
        ),
        _scores(scores, node.shared),
        _problems(sample),
        _strip(node, longest),
        figures(sample, node.number, shown, marks, album),
        _prefix(node),
        rows(written),
        _fields(sample),
        id=f"s{node.number}",
        tabindex="-1",
        aria_label=f"sample {sample.sample_id}",
    )


def _scores(scores: Sequence[Placed], shared: int) -> Markup:
    """Those of the sequence, and those whose tokens are not among the rows."""
    shown = [s for s in scores if s.level == "sequence" or s.stop <= shared]
    return tag("p", *map(score_chip, shown), class_="scores") if shown else Markup("")


def _problems(sample: Sample) -> Markup:
    found = list(problems_of(sample))
    if not found:
        return Markup("")
    lines = [tag("li", tag("b", p.code), f" {p}") for p in found[:PROBLEMS]]
    more = len(found) - PROBLEMS
    lines += [tag("li", f"and {more} more")] if more > 0 else []
    return tag("ul", *lines, class_="problems", aria_label="broken rules")


def _strip(node: Node, longest: int) -> Markup:
    """All tokens of the sample, and how many stretches of them are too many to be drawn."""
    strip, more = sample_strip(
        node.sample.sample_id, node.roles, OF_ROLE.__getitem__, longest, node.shared, high=9
    )
    note = f"{more:,} more stretches are not in the strip" if more else ""
    return tag("div", svg(strip), tag("small", note) if note else "", class_="overview")


def _prefix(node: Node) -> Markup:
    """What stands for the tokens that another sample drew."""
    if node.parent is None:
        return Markup("")
    parts: list[Any] = [
        f"The first {node.shared:,} tokens are those of ",
        tag("a", node.parent.sample.sample_id, href=f"#s{node.parent.number}"),
        f", which this {node.relation}." if node.relation else ".",
    ]
    if node.unread:
        parts.append(f" {node.unread:,} of them are in the loss there and not here.")
    return tag("p", *parts, class_="prefix")


def _fields(sample: Sample) -> Markup:
    """The other fields that are set, as JSON."""
    terms: list[Markup] = []
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
        text = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        )
        if len(text) > FIELD_MOST:
            text = f"{text[:FIELD_MOST]}… ({len(text):,} characters)"
        terms.append(tag("div", tag("dt", name), tag("dd", text)))
    return tag("details", tag("summary", "Fields"), tag("dl", *terms), class_="fields")
