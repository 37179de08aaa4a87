"""Each rule of MM0xx to MM3xx is broken once, on purpose, and is the one that is found."""

import base64
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.samples import full_sample, make_medium, make_sample

from mmpack.errors import SchemaError, TraceError
from mmpack.schema.codec import CodecIds
from mmpack.schema.codes import OF_TEXT, RULES
from mmpack.schema.ragged import Ragged
from mmpack.schema.rules import check, validate
from mmpack.schema.rules.trajectories import CODES as OVER_SAMPLES
from mmpack.schema.sample import Sample
from mmpack.schema.spans import (
    ActionSpan,
    BboxTarget,
    Cost,
    LossSpan,
    ModalitySpan,
    ObservationSpan,
    PolicyVersion,
    Score,
)
from mmpack.schema.trace import read_trace

IMAGE_ID = 151655


LOSS_IDS = ([8, 9, 10, 11], [14, 15])  # of base()


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


def _routes(**changes: Any) -> dict[str, Any]:
    """One expert of one layer for each of the 19 tokens."""
    text = base64.b64encode(bytes(19)).decode()
    return {"dtype": "uint8", "shape": [19, 1, 1], "base64": text} | changes


LINE = record()
STRUCTURE: dict[str, list[bytes]] = {
    "MM001": [b"hello\n", b"\x89PNG\r\n\x1a\n", b"\xef\xbb\xbf" + LINE, LINE[:-1] + b"\xff}\n"],
    "MM002": [LINE + b"\n" + LINE[:50], b'{"a": "\xc3'],
    "MM003": [
        b"[]\n",
        record(input_ids="abc"),
        record(input_ids=[1, "2"]),
        record(input_ids=[1, 2.0]),
        record(input_ids=[1, True]),
        record(input_ids=[-1]),
        record(input_ids=[2**63]),
        record(attention_mask=[2]),
        record(turn=2**31),
        record(turn=True),
        record(sample_id=3),
        record(finish_reason="tired"),
        record(media={}),
        record(media=[as_record(base())["media"][0] | {"grid_thw": [1, 2**40, 2]}]),
        record(processor_fingerprint="md5:00"),
        record(kept_ids=[[1, 2], [3]]),
        record(kept_ids={"offsets": [0, 1], "ids": [1.5]}),
        record(teachers=[]),
        record(routed_experts=[[[0]]] * 19),
        record(routed_experts=_routes(dtype="int64")),
        record(routed_experts=_routes(base64="not base64")),
        record(routed_experts=_routes(base64=3)),
        record(routed_experts=_routes(shape=[19, 1, -1])),
        record(rewards=[{"name": "x", "value": "1"}]),
        record(rewards=[{"name": "x", "value": 1, "scope": "token"}]),
        record(rollout_logprobs=[-1e300] * 6),
        record(metadata=[]),
        LINE[:-1] + b', "extra": 1' + b"0" * 5000 + b"}",
        LINE[:-1] + b', "x": [{"a": 1, "a": 2}]}',
    ],
    "MM004": [
        b"{}\n",
        record(schema_version=None),
        record(loss_spans=[{"start": 11}]),
        record(kept_ids={"offsets": [0, 1]}),
        record(teachers={"t": {"offsets": [0, 1], "ids": [1]}}),
    ],
    "MM005": [record(schema_version="3")],
    "MM006": [record(family="llama"), record(family="x" * 10**6)],
    "MM007": [LINE + b"\n" + LINE],
    "MM008": [
        record(position_ids=[[0] * 19] * 2),
        record(attention_mask=[1] * 20),
        record(screen_size=[1, 2, 3]),
        record(position_ids=[[0] * 18] * 3),
        record(teachers={"t": {"offsets": [0, 1], "ids": [1], "logprobs": [-1.0, -2.0]}}),
        record(routed_experts=_routes(shape=[18, 1, 1])),
        record(routed_experts=_routes(shape=[19, 0, 1])),
        record(routed_experts=_routes(shape=[19, 1, 2])),
        record(routed_experts=_routes(dtype="uint16")),
    ],
    "MM009": [
        record(rollout_logprobs=[-1.0, float("nan"), -1.0, -1.0, -1.0, -1.0]),
        record(rollout_logprobs=[-1.0, float("-inf"), -1.0, -1.0, -1.0, -1.0]),
        LINE[:-1] + b', "costs": [{"name": "c", "value": 1e999}]}',
        record(metadata={"a": [{"b": float("inf")}]}),
        record(teachers={"t": {"offsets": [0, 1], "ids": [1], "logprobs": [float("nan")]}}),
    ],
    "MM010": [
        b'{"a":' * 10**5 + b"\n",
        LINE[:-1] + b', "x": ' + b"[" * 100 + b"]" * 100 + b"}",
        LINE[:-1] + b', "x": "' + b"a" * 2**20 + b'"}',
        b"\n" * 2**21,
    ],
    "MM013": [
        record(kept_ids={"offsets": [0, 1, 3], "ids": [1, 2]}),
        record(kept_ids={"offsets": [1, 2], "ids": [1, 2]}),
        record(kept_ids={"offsets": [0, 2, 1, 2], "ids": [1, 2]}),
        record(kept_ids={"offsets": [], "ids": []}),
    ],
    "MM011": [record(media=[as_record(base())["media"][0] | {"modality": "audio"}])],
}


def _set(name: str, value: Any) -> Callable[[Sample], None]:
    return lambda s: setattr(s, name, value)


def _span(i: int, **changes: Any) -> Callable[[Sample], None]:
    return lambda s: s.modality_spans.__setitem__(
        i, dataclasses.replace(s.modality_spans[i], **changes)
    )


def _medium(**changes: Any) -> Callable[[Sample], None]:
    return lambda s: s.media.__setitem__(0, dataclasses.replace(s.media[0], **changes))


def _kept(*, n: int = 6, **odd: Any) -> Callable[[Sample], None]:
    """Each sampled token and id 20; `odd` lists by number."""

    def change(s: Sample) -> None:
        s.processor = {"tokenizer": {"vocab_size": 200000}}
        lists = [[i, 20] for own in LOSS_IDS for i in own][:n]
        for k, ids in odd.items():
            lists[int(k[1:])] = ids
        offsets = np.cumsum([0, *map(len, lists)])
        s.kept_ids = Ragged(offsets, np.array([i for ids in lists for i in ids], np.int32))

    return change


def _teacher(n: int = 6, ids: list[int] = [3, 4], logprobs: Any = (-1.0, -2.0)) -> Any:  # noqa: B006
    def change(s: Sample) -> None:
        s.processor = {"tokenizer": {"vocab_size": 200000}}
        own = [np.array(ids * n, np.int32), np.array([*logprobs] * n, np.float32)]
        s.teachers = {"t": Ragged(np.arange(n + 1) * len(ids), *own)}

    return change


def _routed(token: int, experts: list[int]) -> Callable[[Sample], None]:
    def change(s: Sample) -> None:
        s.routed_experts = np.tile(np.arange(2, dtype=np.uint8), (19, 3, 1))
        s.routed_experts[token, 1] = experts

    return change


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
    """The picture as a video of two frames in one temporal patch, of which `fields` break a rule."""
    times = {"frame_indices": np.array([0, 5]), "frame_timestamps": (0.0, 0.2), "total_frames": 6}

    def change(s: Sample) -> None:
        s.media[0] = make_medium("clip", (1, 4, 6), "video", **(times | fields))
        s.modality_spans[0].modality = "video"
        s.input_ids[2:8] = 151656

    return change


def _heard(**fields: Any) -> Callable[[Sample], None]:
    """The picture as an audio of 24 feature frames, of which `fields` break a rule."""
    known = {"sampling_rate": 16_000, "num_samples": 24 * 160 - 5, "hop_length": 160}

    def change(s: Sample) -> None:
        s.family = "qwen2_5_omni"
        s.media[0] = make_medium("call", (24, 1, 1), "audio", num_tokens=6, **(known | fields))
        s.modality_spans[0].modality = "audio"
        s.input_ids[2:8] = 151646

    return change


def _sounding(change: Callable[[list[ModalitySpan]], None]) -> Callable[[Sample], None]:
    """The picture as a video of four tokens in two pieces, with its sound of two tokens between and behind them."""

    def make(s: Sample) -> None:
        s.family = "qwen2_5_omni"
        video = make_medium("film", (2, 2, 4), "video", second_per_grid_ts=2.0)
        sound = make_medium("its sound", (8, 1, 1), "audio", num_tokens=2)
        s.media = [video, sound]
        s.input_ids[2:8] = [151656, 151656, 151646, 151656, 151656, 151646]
        places = [
            (2, 4, "video", 0, 0),
            (4, 5, "audio", 1, 0),
            (5, 7, "video", 0, 1),
            (7, 8, "audio", 1, 1),
        ]
        s.modality_spans = [ModalitySpan(a, b, kind, m, chunk=k) for a, b, kind, m, k in places]
        change(s.modality_spans)

    return make


def _box(
    box: tuple[float, ...],
    system: str = "normalized_1000",
    media_index: int | None = 0,
    **fields: Any,
) -> Callable[[Sample], None]:
    def change(s: Sample) -> None:
        s.bbox_targets, s.coordinate_system = [BboxTarget(box, media_index)], system
        for name, value in fields.items():
            setattr(s, name, value)

    return change


def _codec(codes, rate=12.5):
    return _set("codec_ids", [CodecIds("codec", np.array(codes, np.int32), (8, 8), rate)])


def _act(
    action: dict[str, Any], start: int = 11, stop: int = 15, of: int | None = 0, **fields: Any
) -> Callable[[Sample], None]:
    def change(s: Sample) -> None:
        s.action_spans = [ActionSpan(start, stop, action, of)]
        for name, value in fields.items():
            setattr(s, name, value)

    return change


def _vocabulary(size: int) -> Callable[[Sample], None]:
    return _set("processor", {"tokenizer": {"vocab_size": size}})


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
    "MM111": ("media[0]", [_video, _film(frame_indices=None, frame_timestamps=(0.0, 0.1, 0.2))]),
    "MM112": (
        "media[0]",
        [_medium(fps=-1.0), _medium(second_per_grid_ts=-0.5), _film(frame_timestamps=(-0.1, 0.2))],
    ),
    "MM113": ("media[0]", [_film(frame_timestamps=(0.0,)), _film(frame_timestamps=())]),
    "MM114": (
        "media[0]",
        [_film(frame_indices=np.array([5, 0])), _film(frame_timestamps=(0.2, 0.0))],
    ),
    "MM115": ("media[0]", [_film(total_frames=5), _film(total_frames=0)]),
    "MM116": (
        "media[0]",
        [
            _heard(num_samples=25 * 160),
            _heard(num_samples=23 * 160 - 1),
            _heard(sampling_rate=0),
            _heard(hop_length=0),
        ],
    ),
    "MM117": (
        "media[0]",
        [
            _sounding(lambda spans: setattr(spans[0], "chunk", 1)),
            _sounding(lambda spans: setattr(spans[2], "chunk", 0)),
            _sounding(lambda spans: setattr(spans[2], "chunk", 3)),
        ],
    ),
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
    "MM207": (
        "action_spans[0]",
        [
            _act({"a": 1}, 9, 11),
            _act({"a": 1}, 14, 16),  # an observation's token too
            _act({"a": 1}, 9, 12, 0, turn=2),  # partly of the past
            _act({"a": 1}, 15, 17, 2, turn=2),
            _act({"a": 1}, 15, 16, 1),  # where the loss of turn 0 ends
        ],
    ),
    "MM208": (
        "action_spans[0]",
        [
            _act({"kind": "fly"}),
            _act({"kind": None}),
            _act({"kind": "scroll"}),
            _act({"kind": "drag", "point": [1, 2]}),
            _act({"kind": "click", "point": [1, 2, 3]}),
            _act({"kind": "click", "point": [1, "2"]}),
            _act({"kind": "click", "point": [True, 2]}),
            _act({"kind": "click", "button": "side"}),
            _act({"kind": "click", "modifiers": ["ctrl", "x"]}),
            _act({"kind": "key", "keys": []}),
            _act({"kind": "wait", "seconds": -1}),
            _act({"kind": "type", "text": "\ud800"}),
            _act({"kind": "terminate", "status": "maybe"}),
            _act({"kind": "tool_call", "name": "f", "arguments": "{}"}),
        ],
    ),
    "MM209": (
        "action_spans[0]",
        [
            _act({"kind": "click", "point": [1001, 2]}, coordinate_system="normalized_1000"),
            _act({"kind": "click", "point": [1, 1.1]}, coordinate_system="normalized_1"),
            # of a grid of 4 × 6 patches of 14 pixels
            _act({"kind": "move", "point": [85, 2]}, coordinate_system="absolute_pixels"),
            _act({"kind": "move", "point": [-1, 2]}, coordinate_system="absolute_pixels"),
            _act(
                {"kind": "swipe", "point": [1, 2], "to": [3, 57]},
                coordinate_system="absolute_pixels",
            ),
        ],
    ),
    "MM212": (
        "action_spans[0]",
        [_act({"a": 1}, of=1), _act({"kind": "wait", "seconds": 1}, of=3)],
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
    "MM310": ("bbox_targets[0]", [_box((30.0, 0.0, 20.0, 9.0)), _box((0.0, 9.0, 20.0, 8.5))]),
    "MM311": (
        "bbox_targets[0]",
        [
            _box((0.0, 0.0, 1000.5, 9.0)),
            _box((0.0, 0.0, 1.0, 1.01), "normalized_1"),
            _box((0.0, 0.0, 84.0, 56.5), "absolute_pixels"),
            _box((0.0, -0.5, 84.0, 56.0), "absolute_pixels", None),
            _box((0.0, 0.0, 84.5, 56.0), "absolute_pixels", None),  # in no picture
            _box((0.1, 0.2, 0.5, 1.0), "absolute_pixels"),  # fractions
            _box((0.0, 0.2, 0.5, 1.0), "normalized_1000"),
            _box((12.0, 3.0, 45.0, 56.0), "normalized_1"),  # pixels
        ],
    ),
    "MM314": ("bbox_targets[0]", [_box((9.0, 0.0, 9.0, 5.0)), _box((0.0, 5.0, 9.0, 5.0))]),
    "MM315": ("screen_size", [_set("screen_size", (0, 480)), _set("screen_size", (640, 0))]),
    "MM312": ("input_ids[1]", [_vocabulary(151652), _vocabulary(100)]),
    "MM309": ("prefix_cached_tokens", [_set("prefix_cached_tokens", 20)]),
    "MM331": ("kept_ids", [_kept(n=5)]),
    "MM332": ("kept_ids.ids[1]", [_kept(k0=[8, 200000])]),
    "MM333": ("kept_ids[2]", [_kept(k2=[]), _kept(k2=[9, 11])]),
    "MM334": ("kept_ids.ids[3]", [_kept(k1=[9, 9]), _kept(k1=[9, 4])]),
    "MM335": (
        "teachers['t'].logprobs[1]",
        [_teacher(logprobs=(-1.0, 0.01)), _teacher(logprobs=(-8.0, 7.0))],
    ),
    "MM336": ("routed_experts", [_routed(3, [1, 1]), _routed(17, [0, 0])]),
    "MM321": ("codec_ids[0].codes[1][2]", [_codec([[1, 2, 3], [0, 1, 9]])]),
    "MM322": ("codec_ids[0]", [_codec([[1, 2, 3]]), _codec(np.zeros((2, 0)))]),
    "MM323": ("codec_ids[0].frame_rate", [_codec([[1], [2]], rate=0.0)]),
}


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (_teacher(n=5), "MM331", "teachers['t']"),
        (_teacher(ids=[3, 200000]), "MM332", "teachers['t'].ids[1]"),
        (_teacher(ids=[4, 3]), "MM334", "teachers['t'].ids[1]"),
        (_teacher(logprobs=(-0.1, -0.2)), "MM335", "teachers['t'][0]"),
    ],
)
def test_rules_of_a_teacher(change, code, field):
    sample = base()
    change(sample)
    assert (code, field) in [(p.code, p.field) for p in validate(sample)]


@pytest.mark.parametrize(
    "change",
    [
        _kept(),
        _kept(k0=[8]),
        _teacher(),
        _teacher(ids=[], logprobs=()),
        _routed(4, [1, 0]),
        _routed(18, [0, 0]),  # the engine never ran the last token that it sampled
    ],
)
def test_what_may_be_recorded_to_be_replayed(change):
    sample = base()
    change(sample)
    assert validate(sample) == []


def test_fields_of_version_2_in_a_sample_of_version_1():
    sample = base()
    _kept()(sample)
    sample.schema_version = "1"
    assert [(p.code, p.field) for p in validate(sample)] == [("MM012", "kept_ids")]
    with pytest.raises(TraceError, match="MM012"):
        sample.to_dict()


@pytest.mark.parametrize(
    ("code", "i"), [(c, i) for c, cases in STRUCTURE.items() for i in range(len(cases))]
)
def test_structure(tmp_path, code, i):
    assert set(RULES) - {*OF_TEXT, *OVER_SAMPLES, "MM012"} <= {c for c in RULES if c > "MM4"} | (
        STRUCTURE.keys() ^ RULE_BREAKS.keys()
    )
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
    "change",
    [
        _box((0.0, 0.0, 1000.0, 1000.0)),
        _box((0.0, 0.0, float(np.float32(1.0) * np.float32(1.0000001)), 1.0), "normalized_1"),
        _box((0.0, 0.0, 84.0, 56.0), "absolute_pixels"),
        _box((0.0, 0.0, 640.0, 480.0), "absolute_pixels", screen_size=(640, 480)),
        _set("processor", {"tokenizer": {"vocab_size": "many"}}),
    ],
)
def test_what_may_be_recorded_of_places_and_vocabularies(change):
    sample = base()
    change(sample)
    assert validate(sample) == []


@pytest.mark.parametrize(
    "change",
    [
        _act({"kind": "click", "point": [84, 56]}, coordinate_system="absolute_pixels"),
        _act({"kind": "click", "point": [1e6, -5]}),  # in no known system
        _act({"kind": "click"}, of=None),
        _act({"kind": "wait", "seconds": 0, "why": {"deep": [1]}}),
        _act({"click": [float(9999), -1]}, coordinate_system="normalized_1"),  # another vocabulary
        _act({"a": 1}, 9, 10, 0, turn=2),  # of a turn that an earlier sample holds
        _act({"a": 1}, 12, 12),
    ],
)
def test_what_may_be_recorded_of_actions(change):
    sample = base()
    change(sample)
    assert validate(sample) == []


def test_a_box_that_names_no_picture_may_be_in_the_largest():
    parts = [("image", (1, 4, 6), "a"), ("image", (1, 8, 2), "b"), ("text", [2])]
    sample = make_sample(parts)
    for box, outside in (((0.0, 60.0, 84.0, 112.0), []), ((0.0, 0.0, 84.0, 113.0), ["MM311"])):
        _box(box, "absolute_pixels", None)(sample)
        assert [p.code for p in validate(sample)] == outside
    sample.media[1].grid_thw, sample.screen_size = (1, 8, 2), (100, 200)
    assert validate(sample) == []
    sound = ("audio", (37, 1, 1), "call")
    for parts in ([("text", [1, 2])], [("text", [1]), sound, ("text", [2])]):
        blind = make_sample(parts, family="qwen2_5_omni")
        _box((0.0, 0.0, 9999.0, 9.0), "absolute_pixels", None)(blind)
        assert validate(blind) == []


def test_a_tiled_image_has_no_known_width():
    sample = make_sample([("text", [1]), ("image", (4, 32, 32)), ("text", [2])], family="internvl")
    for media_index in (None, 0):
        _box((0.0, 0.0, 900.0, 900.0), "absolute_pixels", media_index)(sample)
        assert validate(sample) == []
    sample.media[0].grid_thw = (1, 32, 32)
    sample.media[0].num_tokens = 256
    assert "MM311" in [p.code for p in validate(sample)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frame_timestamps": None},
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


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (_set("input_ids", np.arange(19, dtype=np.int32)), "MM003", "input_ids"),
        (_set("position_ids", np.zeros((2, 19), np.int64)), "MM008", "position_ids"),
        (_set("attention_mask", np.ones(5, np.int8)), "MM008", "attention_mask"),
        (_set("rollout_logprobs", np.full(6, np.nan, np.float32)), "MM009", "rollout_logprobs[0]"),
        (_medium(fps=np.nan), "MM009", "media[0].fps"),
        (_film(frame_timestamps=(0.0, np.nan)), "MM009", "media[0].frame_timestamps[1]"),
        (_set("costs", [Cost("r", np.inf)]), "MM009", "costs[0].value"),
        (_box((0.0, np.nan, 1.0, 1.0)), "MM009", "bbox_targets[0].bbox[1]"),
    ],
)
def test_samples_built_by_hand_are_checked_too(change, code, field):
    sample = base()
    change(sample)
    assert [(p.code, p.field) for p in validate(sample)] == [(code, field)]


class Hostile:
    """An object that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("line\nbreak" * 1000)

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __len__ = __iter__ = __bool__ = __eq__ = __array__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class HostileList(list):
    def __iter__(self) -> Any:
        raise RuntimeError("no")


HANDED: list[Any] = [
    *(1.0, 1, -5, True, "x", b"x", [], [1.0], [[1.0]], [None], (), {}, {1: 2}, {"a": 1}, object),
    *(np.float32(1), np.array(3), np.zeros((2, 2)), np.array([None]), np.ones(19, bool), np.nan),
    *(np.full(19, -5), np.full(19, 2**60), np.ma.masked_array([1], [True]), [np.array([1])] * 3),
    *(2**70, -(2**70), 10**5000, float("inf"), {"turn": 1}, {"a": {"b": object()}}, [Hostile()]),
    *(Hostile(), HostileList([1]), [Score("r", 1.0)], Score("r", 1.0), ["x"] * 3, [(1, 2)]),
]


@pytest.mark.parametrize("name", [*Sample.columns()])
def test_validate_never_raises_whatever_a_field_holds(name):
    for value in HANDED:
        sample = full_sample()
        setattr(sample, name, value)
        for problem in validate(sample):
            assert problem.code in RULES and "\n" not in str(problem) and len(str(problem)) < 1000
    delattr(sample, name)
    codes = [p.code for p in validate(sample)]
    assert ("MM004" in codes) == Sample.columns()[name].required


@pytest.mark.parametrize(
    ("name", "value", "code", "field"),
    [
        ("rewards", [1.0], "MM003", "rewards[0]"),
        ("rewards", 1.0, "MM003", "rewards"),
        ("rewards", [Score("r", "1")], "MM003", "rewards[0].value"),
        ("rewards", [Cost("r", 1.0)], "MM003", "rewards[0]"),
        ("costs", [Score("r", 1.0)], "MM003", "costs[0]"),
        ("input_ids", np.array([5, -5]), "MM003", "input_ids[1]"),
        ("input_ids", None, "MM004", "input_ids"),
        ("input_ids", np.zeros((2, 2), np.int64), "MM008", "input_ids"),
        ("loss_spans", [(11, 15)], "MM003", "loss_spans[0]"),
        ("loss_spans", [LossSpan(11.0, 15)], "MM003", "loss_spans[0].start"),
        ("family", "llama", "MM006", "family"),
    ],
)
def test_a_field_of_another_type_is_a_problem_and_check_says_so_in_one_line(
    name, value, code, field
):
    sample = base()
    setattr(sample, name, value)
    assert [(p.code, p.field) for p in validate(sample)] == [(code, field)]
    with pytest.raises(SchemaError, match=rf"\({code}\)\. Fix: ") as caught:
        check(sample)
    assert "\n" not in str(caught.value)


def test_numpy_numbers_and_tuples_are_as_good_as_ours():
    """And free objects hold anything in memory; `write_trace` says what JSON has not."""
    sample = full_sample()
    sample.rewards = (Score("exact", np.float32(1.0)), Score("box", 1))
    sample.loss_spans[0].start = np.int32(sample.loss_spans[0].start)
    before = sample.media[0].grid_thw = np.array(sample.media[0].grid_thw)
    sample.metadata = {"a": object(), "b": [np.nan]}
    sample.sampling = {"logit_bias": {5: -1.0}}
    assert validate(sample) == []
    assert sample.media[0].grid_thw is before  # nothing is changed in place


@pytest.mark.parametrize("kind", ["5", "None", "[5]", "[None, 'x']", "h", "[h]", "object"])
def test_what_is_no_sample_is_a_problem(kind):
    handed = eval(kind, {"h": Hostile()})
    problems = validate(handed)
    assert problems and {p.code for p in problems} == {"MM003"}
    with pytest.raises(SchemaError) as caught:
        check(handed)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_problems_name_the_place(tmp_path):
    sample = full_sample("line\nbreak")
    sample.modality_spans[0].stop -= 1
    problems = validate(sample)
    assert [p.code for p in problems] == ["MM101", "MM104"]
    assert problems[0].span == (4, 9) and problems[0].fix == RULES["MM101"].fix
    assert str(problems[0]).startswith(
        "'line\\nbreak'.modality_spans[0] has 5 tokens, media[0] of grid"
    )
    path = tmp_path / "t.jsonl"
    path.write_bytes(LINE + b"\n" + LINE[:50])
    assert [p.code for p in validate(read_trace(path))] == ["MM002"]


def test_many_spans_and_scores_take_no_time():
    """Each pair of them would be 4 · 10^8 looks."""
    sample = make_sample([("text", [1] * 30_000)])
    sample.loss_spans = [LossSpan(i + 1, i + 2) for i in range(20_000)]
    sample.observation_spans = [ObservationSpan(0, 30_000, "tool") for _ in range(20_000)]
    sample.rewards = [Score("r", 1.0, {"span": [25_000, 30_000]}) for _ in range(20_000)]
    begin = time.process_time()
    codes = Counter(p.code for p in validate(sample))
    assert codes == {"MM204": 20_000, "MM206": 19_999, "MM305": 20_000}
    assert time.process_time() - begin < 30  # seconds; pairs take minutes
