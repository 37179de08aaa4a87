"""Each rule of MM0xx to MM3xx is broken once, on purpose, and is the one that is found."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.samples import full_sample, make_medium, make_sample

from mmpack.errors import LayoutError, SchemaError, TraceError
from mmpack.schema.codes import RULES
from mmpack.schema.rules import check, validate
from mmpack.schema.sample import Sample
from mmpack.schema.spans import (
    BboxTarget,
    LossSpan,
    ObservationSpan,
    PolicyVersion,
    Score,
)
from mmpack.schema.trace import read_trace

IMAGE_ID = 151655


def as_record(sample: Sample) -> dict[str, Any]:
    return json.loads(json.dumps(sample.to_dict(numpy=True), default=np.ndarray.tolist))


def base() -> Sample:
    """Tokens: 0 text, 1 start, 2-7 image, 8 end, 9-10 text, 11-14 response, 15-16 tool, 17-18 response."""
    return make_sample(
        [
            ("text", [5]),
            ("image", (1, 4, 6), "plan"),
            ("text", [6, 7]),
            ("response", [8, 9, 10, 11], 0),
            ("observation", [12, 13], 0, "tool"),
            ("response", [14, 15], 1),
        ],
        rollout_logprobs=-np.ones(6, np.float32),
    )


def record(**changes: Any) -> bytes:
    return json.dumps(as_record(base()) | changes).encode()


LINE = record()
STRUCTURE: dict[str, list[bytes]] = {
    "MM001": [
        b"hello\n",
        b"\x89PNG\r\n\x1a\n",
        b"[1,\n",
        b"\xef\xbb\xbf" + LINE,
        LINE[:-1] + b"\xff}\n",
        b"{'a': 1}\n",
    ],
    "MM002": [LINE[:-1], LINE + b"\n" + LINE[:50], b'{"a": "\xc3'],
    "MM003": [
        b"[]\n",
        b"3\n",
        record(input_ids="abc"),
        record(input_ids=[1, "2"]),
        record(input_ids=[1, 2.0]),
        record(input_ids=[1, True]),
        record(input_ids=[1, None]),
        record(input_ids=[-1]),
        record(input_ids=[2**63]),
        record(input_ids=[2**70]),
        record(attention_mask=[2]),
        record(turn=2**31),
        record(turn=True),
        record(turn=1.0),
        record(sample_id=3),
        record(finish_reason="tired"),
        record(media={}),
        record(media=[None]),
        record(media=[as_record(base())["media"][0] | {"grid_thw": [1, 2**40, 2]}]),
        record(processor_fingerprint="md5:00"),
        record(rewards=[{"name": "x", "value": "1"}]),
        record(rewards=[{"name": "x", "value": 1, "scope": "token"}]),
        record(rollout_logprobs=[-1e300] * 6),
        record(metadata=[]),
        record(extra=2**64),
        LINE[:-1] + b', "turn": 1' + b"0" * 5000 + b"}",
        LINE[:-1] + b', "extra": 1' + b"0" * 5000 + b"}",
        LINE[:-1] + b', "turn": 1, "turn": 1}',
        LINE[:-1] + b', "x": [{"a": 1, "a": 2}]}',
    ],
    "MM004": [
        b"{}\n",
        record(schema_version=None),
        record(loss_spans=None),
        record(loss_spans=[{"start": 11}]),
    ],
    "MM005": [record(schema_version="2"), record(schema_version=1)],
    "MM006": [record(family="llama"), record(family="x" * 10**6)],
    "MM007": [LINE + b"\n" + LINE],
    "MM008": [
        record(position_ids=[[0] * 19] * 2),
        record(position_ids=[[0] * 19, [0] * 18, [0] * 19]),
        record(attention_mask=[1] * 20),
        record(screen_size=[1, 2, 3]),
        record(position_ids=[[0] * 18] * 3),
    ],
    "MM009": [
        record(rollout_logprobs=[-1.0, float("nan"), -1.0, -1.0, -1.0, -1.0]),
        record(rollout_logprobs=[-1.0, float("-inf"), -1.0, -1.0, -1.0, -1.0]),
        LINE[:-1] + b', "costs": [{"name": "c", "value": 1e999}]}',
        record(metadata={"a": [{"b": float("inf")}]}),
    ],
    "MM010": [
        b"[" * 10**6 + b"\n",
        b'{"a":' * 10**5 + b"\n",
        LINE[:-1] + b', "x": ' + b"[" * 100 + b"]" * 100 + b"}",
        LINE[:-1] + b', "x": "' + b"a" * 2**20 + b'"}',
        b"\n" * 2**21,
    ],
}


def _set(name: str, value: Any) -> Callable[[Sample], None]:
    return lambda s: setattr(s, name, value)


def _span(i: int, **changes: Any) -> Callable[[Sample], None]:
    return lambda s: s.modality_spans.__setitem__(
        i, dataclasses.replace(s.modality_spans[i], **changes)
    )


def _medium(**changes: Any) -> Callable[[Sample], None]:
    return lambda s: s.media.__setitem__(0, dataclasses.replace(s.media[0], **changes))


def _token(at: int, value: int) -> Callable[[Sample], None]:
    return lambda s: s.input_ids.__setitem__(at, value)


def _same_key(s: Sample) -> None:
    other = make_medium("other", (1, 2, 4))
    other.cache_key = s.media[0].cache_key
    s.media.append(other)


def _two_first(s: Sample) -> None:
    s.media.append(make_medium("other", (1, 4, 6)))
    s.modality_spans[0].media_index = 1


def _video(s: Sample) -> None:
    video = make_medium("clip", (1, 4, 6), "video", frame_indices=np.arange(5))
    s.media[0], s.modality_spans[0].modality = video, "video"
    s.input_ids[2:8] = 151656


def _film(**fields: Any) -> Callable[[Sample], None]:
    """The picture as a film of two frames in one temporal patch, of which `fields` break a rule."""
    times = {"frame_indices": np.array([0, 5]), "frame_timestamps": (0.0, 0.2), "total_frames": 6}

    def change(s: Sample) -> None:
        s.media[0] = make_medium("clip", (1, 4, 6), "video", **(times | fields))
        s.modality_spans[0].modality = "video"
        s.input_ids[2:8] = 151656

    return change


RULE_BREAKS: dict[str, tuple[str, list[Callable[[Sample], None]]]] = {
    "MM101": ("modality_spans[0]", [lambda s: (_span(0, stop=7)(s), _token(7, 3)(s))]),
    "MM102": (
        "media[0]",
        [_medium(grid_thw=(1, 3, 6)), _medium(grid_thw=(0, 4, 6)), _medium(grid_thw=(1, 4, 0))],
    ),
    "MM103": (
        "modality_spans[0]",
        [_span(0, stop=2**31 - 1), _span(0, start=8, stop=2), _span(0, start=2, stop=2)],
    ),
    "MM104": ("input_ids", [_token(0, IMAGE_ID), _token(9, 151656)]),
    "MM105": ("modality_spans[0]", [_token(4, 3), _token(4, 151656)]),
    "MM106": ("modality_spans[0]", [_span(0, media_index=7), _span(0, modality="video")]),
    "MM107": ("media[1]", [lambda s: s.media.append(make_medium("other", (1, 4, 6)))]),
    "MM108": ("media[0]", [_medium(num_tokens=24)]),
    "MM109": ("media[1]", [_same_key]),
    "MM110": ("modality_spans[0]", [_two_first]),
    "MM111": (
        "media[0]",
        [_video, _film(frame_indices=None, frame_timestamps=(0.0, 0.1, 0.2))],
    ),
    "MM112": (
        "media[0]",
        [
            _medium(fps=-1.0),
            _medium(second_per_grid_ts=-0.5),
            _film(frame_timestamps=(-0.1, 0.2)),
        ],
    ),
    "MM113": ("media[0]", [_film(frame_timestamps=(0.0,)), _film(frame_timestamps=())]),
    "MM114": (
        "media[0]",
        [_film(frame_indices=np.array([5, 0])), _film(frame_timestamps=(0.2, 0.0))],
    ),
    "MM115": ("media[0]", [_film(total_frames=5), _film(total_frames=0)]),
    "MM201": (
        "loss_spans[1]",
        [
            lambda s: s.loss_spans.__setitem__(1, LossSpan(13, 19)),
            lambda s: s.loss_spans.__setitem__(1, LossSpan(17, 20)),
            lambda s: s.loss_spans.__setitem__(1, LossSpan(18, 17)),
        ],
    ),
    "MM202": ("loss_spans[0]", [lambda s: s.loss_spans.insert(0, LossSpan(0, 1))]),
    "MM203": ("loss_spans[0]", [lambda s: s.loss_spans.insert(0, LossSpan(6, 9))]),
    "MM204": ("loss_spans[0]", [lambda s: s.loss_spans.__setitem__(0, LossSpan(11, 16))]),
    "MM205": (
        "observation_spans[0]",
        [_set("observation_spans", [ObservationSpan(15, 20, "user")])],
    ),
    "MM206": (
        "observation_spans[1]",
        [lambda s: s.observation_spans.append(ObservationSpan(9, 10, "user"))],
    ),
    "MM301": ("rollout_logprobs", [_set("rollout_logprobs", -np.ones(5, np.float32))]),
    "MM302": ("rollout_logprobs[0]", [_set("rollout_logprobs", np.full(6, 0.5, np.float32))]),
    "MM303": (
        "policy_versions[1]",
        [_set("policy_versions", [PolicyVersion(5, 9, "a"), PolicyVersion(0, 5, "b")])],
    ),
    "MM304": (
        "rewards[0]",
        [
            _set("rewards", [Score("r", 1.0, {"turn": 7})]),
            _set("rewards", [Score("r", 1.0, {"region": 0})]),
            _set("rewards", [Score("r", 1.0, {"span": [11, 20]})]),
            _set("rewards", [Score("r", 1.0, {"span": [11, 11]})]),
        ],
    ),
    "MM305": (
        "rewards[0]",
        [
            _set("rewards", [Score("r", 1.0, {"span": [0, 11]})]),
            lambda s: (
                _set("loss_spans", [])(s),
                _set("rollout_logprobs", None)(s),
                _set("rewards", [Score("r", 1.0)])(s),
            ),
        ],
    ),
    "MM306": (
        "attention_mask",
        [_set("attention_mask", np.r_[np.ones(9), 0, np.ones(9)].astype("i1"))],
    ),
    "MM307": ("position_ids", [_set("position_ids", np.full((3, 19), -1))]),
    "MM308": ("coordinate_system", [_set("bbox_targets", [BboxTarget((0.0, 0.0, 1.0, 1.0))])]),
    "MM309": ("prefix_cached_tokens", [_set("prefix_cached_tokens", 20)]),
}


@pytest.mark.parametrize("code", [c for c in RULES if c < "MM4"])
def test_every_rule_has_a_trigger(code):
    assert (code in STRUCTURE) != (code in RULE_BREAKS)


@pytest.mark.parametrize(
    ("code", "i"), [(c, i) for c, cases in STRUCTURE.items() for i in range(len(cases))]
)
def test_structure(tmp_path, code, i):
    path = tmp_path / "t.jsonl"
    path.write_bytes(STRUCTURE[code][i])
    with pytest.raises(TraceError, match=rf"\({code}\)\. Fix: .+$") as caught:
        list(read_trace(path, max_record_bytes=2**20))
    message = str(caught.value)
    assert message.startswith(f"{path}: record ") and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("code", "i"), [(c, i) for c, (_, cases) in RULE_BREAKS.items() for i in range(len(cases))]
)
def test_rule(code, i):
    field, breaks = RULE_BREAKS[code]
    sample = base()
    assert validate(sample) == []
    breaks[i](sample)
    problems = validate([base(), sample])
    assert (code, field) in [(p.code, p.field) for p in problems], problems
    with pytest.raises(SchemaError, match=code) as caught:
        check(sample, "pack")
    assert caught.value.problems == problems and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frame_timestamps": None},
        {"frame_indices": None},
        {"total_frames": None},
        {"frame_indices": np.array([5, 5]), "frame_timestamps": (0.2, 0.2)},  # a policy may repeat
        {"frame_indices": np.array([4]), "frame_timestamps": (0.2,)},  # padded to a temporal patch
        {"frame_indices": None, "frame_timestamps": None, "total_frames": 0},
    ],
)
def test_what_a_producer_may_record_of_a_film(fields):
    sample = base()
    _film(**fields)(sample)
    assert validate(sample) == []


def test_frames_of_a_family_with_a_span_a_temporal_patch():
    parts = [("text", [1]), ("video", (2, 2, 4), "clip"), ("text", [2])]

    def sample(frames: list[int]) -> Sample:
        s = make_sample(parts, family="qwen3_vl")
        for span, frame in zip(s.modality_spans, frames, strict=True):
            span.frame = frame
        return s

    assert validate(sample([0, 1])) == []
    assert [p.code for p in validate(sample([1, 0]))] == ["MM111"]
    short = sample([0, 1])
    short.modality_spans[1].stop -= 1
    short.input_ids[short.modality_spans[1].stop] = 2
    assert [p.code for p in validate(short)] == ["MM101"]
    empty = sample([0, 1])
    empty.media[0].grid_thw = (0, 2, 4)
    assert "MM102" in [p.code for p in validate(empty)]


def test_samples_built_by_hand_are_checked_too():
    for name, value, code in [
        ("input_ids", [1, 2, 3], "MM003"),
        ("input_ids", np.arange(19, dtype=np.int32), "MM003"),
        ("input_ids", np.full(19, -1), "MM003"),
        ("position_ids", np.zeros((2, 19), np.int64), "MM008"),
        ("attention_mask", np.ones(5, np.int8), "MM008"),
        ("rollout_logprobs", np.full(6, np.nan, np.float32), "MM009"),
    ]:
        sample = base()
        setattr(sample, name, value)
        assert [p.code for p in validate(sample)] == [code], name
    for change in (
        _medium(fps=np.nan),
        _medium(second_per_grid_ts=np.inf),
        _film(frame_timestamps=(0.0, np.nan)),
    ):
        sample = base()
        change(sample)
        assert [p.code for p in validate(sample)] == ["MM112"]
    sample = base()
    sample.family = "llama"
    with pytest.raises(LayoutError, match="MM006"):
        validate(sample)


def test_problems_name_the_place():
    sample = full_sample("line\nbreak")
    sample.modality_spans[0].stop -= 1
    problems = validate(sample)
    assert [p.code for p in problems] == ["MM101", "MM104"]
    assert problems[0].span == (4, 9) and problems[0].fix == RULES["MM101"].fix
    assert str(problems[0]) == (
        "'line\\nbreak'.modality_spans[0] has 5 tokens, media[0] of grid [1, 4, 6] needs 6 after "
        f"merging (MM101). Fix: {RULES['MM101'].fix}"
    )


def test_an_error_names_file_record_and_field(tmp_path):
    path = tmp_path / "rollout.jsonl"
    bad = as_record(base()) | {"sample_id": "s1"}
    bad["media"][0]["grid_thw"] = [1, 4]
    path.write_bytes(LINE + b"\n\n" + json.dumps(bad).encode() + b"\n")
    reader = iter(read_trace(path))
    assert next(reader).sample_id == "s0"
    with pytest.raises(TraceError) as caught:
        next(reader)
    assert str(caught.value) == (
        f"{path}: record 3.media[0].grid_thw: expected 3 values, found 2 (MM008). "
        f"Fix: {RULES['MM008'].fix}"
    )
