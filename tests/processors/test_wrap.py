"""Samples against what the Hugging Face processor itself makes, and against `get_rope_index`."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

import mmpack as mp
from mmpack.errors import ArgumentError, LayoutError
from mmpack.schema.media import Medium
from mmpack.schema.spans import LossSpan, ObservationSpan

pytestmark = pytest.mark.adapter

IMAGE, VIDEO, START, END, EOS = 151655, 151656, 151652, 151653, 151645


def user(*parts, role="user"):
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": role, "content": content}


def images_of(messages):
    parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
    return [p["image"] for p in parts if p["type"] == "image"]


def by_hf(hf, messages):
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return hf(text=[text], images=images_of(messages) or None, return_tensors="np")


def positions_of(ids, media):
    """By the public function, which tests/layout holds against transformers."""
    return mp.mrope_positions(ids, "qwen2_5_vl", image_grid_thw=[m.grid_thw for m in media])[0]


CONVERSATIONS = {
    "text": lambda p: [{"role": "user", "content": "Just 1 + 1?"}],
    "several": lambda p: [user(p(0), "and", p(1, 300, 200), p(2, 40, 500)), user("so?")],
    "turns": lambda p: [
        {"role": "system", "content": "Be brief."},
        user(p(0), "What?"),
        {"role": "assistant", "content": "A square."},
        user("And", p(1, 200, 200, "RGBA"), "this?"),
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_the_hf_processor(hf, picture, name):
    messages = CONVERSATIONS[name](picture)
    response = [40, 2776, IMAGE - 5, 198, EOS]
    logprobs = [-0.5, -1.0, 0.0, -2.0, -0.25]
    sample = mp.wrap_processor(hf)(
        messages, response_ids=response, rollout_logprobs=logprobs, sample_id="s", group_id="g"
    )
    expected = by_hf(hf, messages)
    prompt = expected["input_ids"][0]
    assert sample.input_ids.tolist() == prompt.tolist() + response
    grids = [m.grid_thw for m in sample.media]
    assert grids == [tuple(g) for g in expected.get("image_grid_thw", np.zeros((0, 3))).tolist()]
    if grids:
        pixels = np.concatenate([m.pixel_values for m in sample.media])
        assert pixels.dtype == expected["pixel_values"].dtype
        assert np.array_equal(pixels, expected["pixel_values"])
    assert np.array_equal(sample.position_ids, positions_of(sample.input_ids, sample.media))
    assert sample.loss_spans == [LossSpan(len(prompt), len(prompt) + 5, turn=0)]
    assert sample.rollout_logprobs.tolist() == logprobs
    assert (sample.sample_id, sample.group_id, sample.family) == ("s", "g", "qwen2_5_vl")
    covered = np.concatenate([np.arange(s.start, s.stop) for s in sample.modality_spans] or [[]])
    assert covered.tolist() == np.flatnonzero(sample.input_ids == IMAGE).tolist()
    assert mp.validate(sample) == []


def test_bare_parts(processor, picture):
    bare = [user({}, "x", {})]
    for part in bare[0]["content"]:
        part.pop("image", None)
    whole = [user(picture(0), "x", picture(1))]
    one = processor(bare, media=[picture(0), picture(1)], sample_id="s")
    assert one == processor(whole, sample_id="s")
    assert one.loss_spans == [] and one.group_id == "s"


def part(**fields):
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    ("messages", "media", "match"),
    [
        (part(type="image"), None, "holds no image"),
        (part(type="image"), [np.zeros((60, 60, 3), np.uint8)] * 2, "1 of media="),
        (
            part(type="image", url="https://a.example/a.png"),
            None,
            "'url', and mmpack fetches nothing",
        ),
        (part(type="input_audio", input_audio={"data": "AAAA"}), None, "takes no audio"),
        (part(type="file", file={"file_id": "f"}), None, "holds .file., which mmpack can"),
        (part(type="image", path="a.png"), None, "no media_root"),
        (part(type="image", image=np.zeros((4, 60, 60, 3), np.uint8)), None, "of type image"),
        (part(type="video", video=np.zeros((4, 60, 60, 3), np.uint8)), None, "frames alone"),
        (part(type="video", video="a.mp4"), None, "no media_root"),
    ],
)
def test_messages_refused(processor, messages, media, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        processor(messages, media=media, sample_id="s")
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"response_ids": [1, 2], "rollout_logprobs": [-1.0]}, ArgumentError, r"expected \[2\]"),
        ({"rollout_logprobs": [-1.0]}, ArgumentError, r"expected \[0\]"),
        ({"response_ids": [[1, 2]]}, ArgumentError, "response_ids has shape"),
        ({"colour": 1}, ArgumentError, "'colour' is not a field"),
    ],
)
def test_arguments(processor, call, error, match):
    with pytest.raises(error, match=match):
        processor([user("x")], sample_id="s", **call)


# ---------------------------------------------------------------- ids of an engine


def test_turns_equal_the_whole(processor, picture):
    prompt = processor([user(picture(0), "Look.")], sample_id="s", group_id="g")
    first = processor.append(prompt, response_ids=[1, 2, 3], rollout_logprobs=[-1, -2, -3])
    before = pickle.dumps(first)
    seen = [198, START, IMAGE, END, 5, START, IMAGE, END]
    second = processor.append(
        first,
        observation_ids=seen,
        media=[picture(1, 200, 150), picture(0)],
        expanded=False,
        source="screenshot",
        response_ids=[7, 8],
        rollout_logprobs=[-4, -5],
    )
    last = processor.append(second, observation_ids=[11, 12])
    assert pickle.dumps(first) == before
    a, b, c = len(prompt), len(first), len(second)
    observations = [
        ObservationSpan(b, c - 2, "screenshot", 1),
        ObservationSpan(c, c + 2, "tool", 2),
    ]
    assert last.observation_spans == observations
    assert last.loss_spans == [LossSpan(a, b, turn=0), LossSpan(c - 2, c, turn=1)]
    assert last.rollout_logprobs.tolist() == [-1, -2, -3, -4, -5]
    assert [s.media_index for s in last.modality_spans] == [0, 1, 0]
    whole = processor.from_ids(
        last.input_ids,
        media=[picture(0), picture(1, 200, 150), picture(0)],
        loss_spans=last.loss_spans,
        sample_id="s",
        group_id="g",
        observation_spans=observations,
        rollout_logprobs=[-1, -2, -3, -4, -5],
    )
    assert whole == last and mp.validate(last) == []
    shown = [last.media[s.media_index] for s in last.modality_spans]
    assert np.array_equal(last.position_ids, positions_of(last.input_ids, shown))
    one_word = np.concatenate([[9, START, IMAGE, END], [1, 2, 3], seen, [7, 8]])
    short = processor.from_ids(
        one_word,
        media=[picture(0), picture(1, 200, 150), picture(0)],
        expanded=False,
        loss_spans=[(4, 7), LossSpan(15, 17, turn=1)],
        sample_id="s",
    )
    assert short.input_ids[short.loss_indices].tolist() == [1, 2, 3, 7, 8]
    assert mp.validate(short) == []


def test_append_refuses(processor, hf, picture):
    sample = processor([user("x")], response_ids=[1], sample_id="s", finish_reason="tool")
    assert processor.append(sample, response_ids=[2]).finish_reason is None
    more = processor.append(sample, response_ids=[2], rollout_logprobs=[-1])
    assert more.rollout_logprobs is None
    with pytest.raises(ArgumentError, match="other settings"):
        mp.wrap_processor(hf, position_rule="max").append(sample, response_ids=[2])
    with pytest.raises(LayoutError, match="MM107"):
        processor.append(sample, observation_ids=[2], media=[picture(0)])


@pytest.mark.parametrize("expanded", [True, False])
def test_a_sampled_placeholder_is_a_word(processor, picture, expanded):
    given = [9, START, *[IMAGE] * (12 if expanded else 1), END, 5]
    n = len(given)
    sample = processor.from_ids(
        given + [1, IMAGE, IMAGE, 2],
        media=[picture(0)],
        expanded=expanded,
        loss_spans=[(n, n + 4)],
        sample_id="s",
    )
    assert sample.input_ids[-4:].tolist() == [1, IMAGE, IMAGE, 2]
    assert [(s.start, s.stop) for s in sample.modality_spans] == [(2, 14)]
    assert {p.code for p in mp.validate(sample)} == {"MM203", "MM104"}
    context = np.where(np.arange(len(sample)) < 16, sample.input_ids, 5)
    assert np.array_equal(sample.position_ids, positions_of(context, sample.media))


@pytest.mark.parametrize(
    ("ids", "count", "options", "code"),
    [
        ([9, START, *[IMAGE] * 11, END], 1, {}, "MM101"),
        ([9, START, *[IMAGE] * 12, END], 0, {}, "MM104"),
        ([9, START, *[IMAGE] * 12, END], 2, {}, "MM107"),
        ([9, IMAGE, 9], 0, {"expanded": False}, "MM104"),
        ([9, IMAGE, 9], 2, {"expanded": False}, "MM107"),
        ([9, 9], 0, {"loss_spans": [(1, 3)]}, "MM201"),
    ],
)
def test_contradictions(processor, picture, ids, count, options, code):
    with pytest.raises(LayoutError) as caught:
        processor.from_ids(ids, media=[picture(i) for i in range(count)], sample_id="s", **options)
    assert caught.value.code == code and "\n" not in str(caught.value)


def video(grid=(2, 4, 4)):
    return Medium("v", "video", "ab" * 32, grid, grid[0] * 4, second_per_grid_ts=1.5)


def test_videos_are_laid_out(processor, picture):
    ids = [9, START, *[VIDEO] * 8, END, START, *[IMAGE] * 12, END, 5]
    sample = processor.from_ids(ids, media=[video(), picture(0)], sample_id="s")
    assert [(s.start, s.stop, s.modality) for s in sample.modality_spans] == [
        (2, 10, "video"),
        (12, 24, "image"),
    ]
    # 2 per second, steps of 1.5 s
    assert sample.position_ids[0, 2:10].tolist() == [2] * 4 + [5] * 4
    assert mp.validate(sample) == []
    messages = [{"role": "user", "content": [{"type": "video", "video": video()}]}]
    assert processor(messages, sample_id="s").modality_spans[0].modality == "video"
    with pytest.raises(LayoutError, match="MM106"):
        processor.from_ids(ids, media=[picture(0), video()], sample_id="s")
    with pytest.raises(ArgumentError, match="of type image"):
        processor([user(video())], sample_id="s")


# ---------------------------------------------------------------- wrapping


def test_parts_alone(hf, picture):
    parts = {"tokenizer": hf.tokenizer, "image_processor": hf.image_processor}
    processor = mp.wrap_processor(**parts, family="qwen2_5_vl", chat_template=hf.chat_template)
    messages = [user(picture(0), "x")]
    assert processor(messages, sample_id="s") == mp.wrap_processor(hf)(messages, sample_id="s")
    with pytest.raises(ArgumentError, match="no tokenizer"):
        mp.wrap_processor(image_processor=hf.image_processor, family="qwen2_vl")
    with pytest.raises(ArgumentError, match="family of parts without a processor is unknown"):
        mp.wrap_processor(**parts)
    with pytest.raises(ArgumentError, match="no chat template"):
        mp.wrap_processor(**parts, family="qwen2_vl")(messages, sample_id="s")
    blind = mp.wrap_processor(tokenizer=hf.tokenizer, family="qwen2_vl")
    assert len(blind.from_ids([1, 2], sample_id="s")) == 2
    with pytest.raises(ArgumentError, match="no image_processor"):
        blind.from_ids([1, IMAGE], media=[picture(0)], expanded=False, sample_id="s")


class Prompts(Dataset):
    def __init__(self, processor, pictures):
        self.processor, self.pictures = processor, pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.processor([user(self.pictures[i], "x")], response_ids=[i], sample_id=str(i))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers(processor, picture, start):
    data = Prompts(processor, [picture(i) for i in (0, 1, 0)])
    here = [data[i] for i in range(3)]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    for sample, expected in zip(loader, here, strict=True):
        assert sample == expected
        assert np.array_equal(sample.media[0].pixel_values, expected.media[0].pixel_values)
    clone = pickle.loads(pickle.dumps(processor))
    assert (len(processor.cache), len(clone.cache)) == (2, 0)
    assert clone.fingerprint == processor.fingerprint and repr(clone) == repr(processor)


def test_no_heavy_imports():
    code = (
        "import sys, mmpack.processors.wrap;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fixes_of_what_can_not_be_wrapped(hf):
    """A processor of no family, and one that is wrapped already."""

    class LlavaProcessor:
        tokenizer = hf.tokenizer
        image_processor = hf.image_processor

    with pytest.raises(
        ArgumentError, match=r"LlavaProcessor is unknown. Fix: use a processor of one"
    ):
        mp.wrap_processor(LlavaProcessor())
    with pytest.raises(ArgumentError, match=r"is wrapped already\. Fix: use it as it is"):
        mp.wrap_processor(mp.wrap_processor(hf))
