"""What people hand in by mistake is refused where it enters, in one line that names it."""

import base64
import functools
import io

import numpy as np
import pytest
import torch

import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.errors import ArgumentError, LayoutError, MmpackError

IMAGE, START, END = 151655, 151652, 151653
ASKED = [{"role": "user", "content": "1 + 1?"}]


def refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, MmpackError)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rewards": [1.0]}, r"rewards\[0\] is 1.0, expected Score. Fix: rewards=\[mp.Score\("),
        ({"rewards": 1.0}, "rewards is float, expected a list of Score"),
        ({"rewards": [mp.Score("a", float("nan"))]}, r"rewards\[0\].value: nan"),
        ({"rewards": [mp.Score("a", 1.0, "everywhere")]}, r"rewards\[0\].scope"),
        ({"turn": "x"}, "turn: expected an integer"),
        ({"finish_reason": "eos"}, "'eos' is none of stop"),
        ({"metadata": {"a": np.ones(2)}}, "metadata"),
        ({"group_id": 3}, r"group_id is 3, expected a str. Fix: pass str\(group_id\)"),
        ({"rollout_logprobs": [None, -1.0]}, r"rollout_logprobs\[0\] is nan"),
        ({"response_ids": np.array([2**63], np.uint64)}, r"response_ids\[0\]"),
        ({"media": np.zeros((60, 60, 3), np.uint8)}, "media is ndarray, expected a list"),
        ({"kept_ids": mp.schema.Ragged.of([[1]])}, "kept_ids has 1 lists for 2 response ids"),
        (
            {"teachers": {3: mp.schema.Ragged.empty(2, True)}},
            "teachers: has the teacher 3, expected a name",
        ),
        (
            {"routed_experts": [[[1]]]},
            "in memory what mp.schema.compact_routes returns, found an array",
        ),
        ({"routed_experts": np.zeros((2, 1, 1), np.uint8)}, "routes for 2 tokens, expected"),
    ],
)
def test_fields(processor, fields, match):
    call = {"response_ids": [1, 2], "sample_id": "s"} | fields
    refused(lambda: processor(ASKED, **call), ArgumentError, match)


def test_what_is_right_passes(processor):
    sample = processor(
        ASKED,
        response_ids=torch.tensor([1, 152_063]),  # the released embeddings' last row
        rollout_logprobs=[np.float32(-1.0), torch.tensor(-2.0)],
        rewards=[mp.Score("a", np.float32(1.0))],
        costs=(),
        sample_id="s",
        turn=np.int64(1),
    )
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0] and mp.validate(sample) == []


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        (None, "messages is NoneType"),
        ([ASKED], r"messages\[0\] is a conversation.*once per conversation"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has the content None"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has the content 3"),
    ],
)
def test_messages(processor, messages, match):
    refused(lambda: processor(messages, sample_id="s"), ArgumentError, match)
    if messages is not None:
        sample = processor(ASKED, response_ids=[1], sample_id="s")
        refused(lambda: processor.append(sample, messages=messages), ArgumentError, match)


def test_a_template_that_refuses_is_one_line(hf):
    for template, match in (
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].name.first }}", "can't write these messages"),
    ):
        processor = mp.wrap_processor(hf, chat_template=template)
        refused(lambda p=processor: p(ASKED, sample_id="s"), ArgumentError, match)


@pytest.mark.parametrize("bad", [-5, 152_064])
def test_ids_outside_the_vocabulary(processor, bad):
    refused(
        lambda: processor.from_ids([1, bad], loss_spans=(), sample_id="s"),
        ArgumentError,
        rf"\[1\] is {bad}",
    )
    sample = processor(ASKED, response_ids=[1], sample_id="s")
    for name in ("observation_ids", "response_ids"):
        refused(
            functools.partial(processor.append, sample, **{name: [bad]}),
            ArgumentError,
            rf"{name}\[0\] is {bad}",
        )


def test_tokens_that_were_added_are_in_the_vocabulary(hf, processor, monkeypatch):
    assert processor.vocab_size == 152_064
    monkeypatch.setattr(type(hf.tokenizer), "__len__", lambda self: 160_000)
    assert len(processor.from_ids([1, 159_999], loss_spans=(), sample_id="s")) == 2
    refused(lambda: processor.from_ids([160_000], sample_id="s"), ArgumentError, "to 159999")


@pytest.mark.parametrize("spans", [[3], [("a", 3)], [(1, 2, 3)], [(0.5, 1.0)]])
def test_loss_spans(processor, spans):
    refused(
        lambda: processor.from_ids([1, 2, 3], loss_spans=spans, sample_id="s"),
        ArgumentError,
        "loss_spans",
    )


def test_a_lone_placeholder_says_expanded(processor, picture):
    one, whole = [START, IMAGE, END], [START, *[IMAGE] * 12, END]
    match = (
        r"one image placeholder, the image has 12 vision tokens. Fix: pass expanded=False.*MM101"
    )
    ids, media = [9, *whole, *one], [picture(0)] * 2
    refused(
        lambda: processor.from_ids(ids, media=media, sample_id="s"),
        LayoutError,
        "token 16 is " + match,
    )
    sample = processor.from_ids([9, *whole], media=media[:1], loss_spans=(), sample_id="s")
    more = {"observation_ids": one, "media": [picture(1)]}
    refused(
        lambda: processor.append(sample, **more),
        LayoutError,
        f"token {len(sample) + 1} is " + match,
    )
    refused(lambda: processor.append(None, observation_ids=[1]), ArgumentError, "NoneType")


# ---------------------------------------------------------------- data: URLs


@pytest.fixture
def png(picture):
    out = io.BytesIO()
    picture(0).save(out, "PNG")
    return out.getvalue()


def as_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_data_urls_are_bytes(processor, png):
    url = as_url(png)
    escaped = "data:image/png," + "".join(f"%{b:02x}" for b in png)
    wanted = processor(
        [{"role": "user", "content": [{"type": "image", "image": png}]}], sample_id="s"
    )
    for part in (
        {"type": "image", "image": url},
        {"type": "image", "image": escaped},
        {"type": "image", "url": url},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image", "base64": base64.b64encode(png).decode()},
    ):
        found = processor([{"role": "user", "content": [part]}], sample_id="s")
        assert found == wanted
        assert np.array_equal(found.media[0].pixel_values, wanted.media[0].pixel_values)
    ids = [START, IMAGE, END]
    by_ids = [processor.from_ids(ids, [x], False, (), sample_id="s") for x in (url, png)]
    assert by_ids[0] == by_ids[1]
    assert processor.medium(url) == processor.medium(png)
    data = clip_exercises(1)[0].video
    url = as_url(data, "video/mp4")
    video = {"type": "video_url", "video_url": {"url": url}}
    found, wanted = (
        processor([{"role": "user", "content": [part]}], sample_id="s")
        for part in (video, {"type": "video", "video": data})
    )
    assert found == wanted and found.media[0].modality == "video"


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,é", "is not base64"),
        ("data:image/png;base64,aGVsbG8=", "can't be decoded"),
    ],
)
def test_broken_data_urls(processor, url, match):
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = [{"role": "user", "content": [part]}]
    refused(lambda: processor(asked, sample_id="s"), ArgumentError, match)


def test_template_kwargs(processor):
    for wrong, shown in (([1], "list"), ({5: 1}, "a dict of other keys")):
        match = f"template_kwargs is {shown}"
        refused(
            lambda w=wrong: processor(ASKED, [1], sample_id="s", template_kwargs=w),
            ArgumentError,
            match,
        )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"tokens_per_second": float("inf")}, "wrap_processor: tokens_per_second is inf"),
        ({"cache_bytes": -1}, "wrap_processor: cache_bytes is -1"),
        ({"tokenizer": "Qwen/Qwen2.5-VL-3B-Instruct"}, "tokenizer is of type str"),
        ({"video_processor": {}}, "video_processor is of type dict"),
        ({"family": ["qwen2_vl"]}, "family .* is unknown"),
        ({"tokens_per_second": "2"}, "tokens_per_second is of type str"),
        ({"media_root": 3}, "media_root is of type int"),
        ({"cache_bytes": "1G"}, "cache_bytes is of type str"),
    ],
)
def test_what_wrap_processor_refuses(hf, wrong, match):
    refused(lambda: mp.wrap_processor(hf, **wrong), MmpackError, match)
