"""Videos in messages, by every way they come; recorded, and decoded again. Pixels and ids: test_videos_upstream.py."""

import dataclasses
import pickle

import numpy as np
import pytest
from PIL import Image

import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError, LayoutError, VideoError
from mmpack.processors import videos
from mmpack.processors.kinds import kind_of_file, kind_of_item
from mmpack.video.choose_frames import sample as plan_of
from mmpack.video.frame_plan import FramePlan

pytestmark = pytest.mark.adapter

VIDEO, START, END = 151656, 151652, 151653
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def files():
    return [exercise.video for exercise in clip_exercises(2)]


@pytest.fixture
def root(tmp_path, files):
    (tmp_path / "clips").mkdir()
    for name, data in zip(("a", "b"), files, strict=True):
        (tmp_path / "clips" / f"{name}.mp4").write_bytes(data)
    return tmp_path


@pytest.fixture
def make(qwen_tok, root):
    def make(family="qwen2_5_vl", fps=2.0, **options):
        policy = options.get("video_policy")
        settings = {"video_settings": {"fps": fps}} if fps and policy != "vllm" else {}
        hf = qwen_vl_processor(family, tokenizer=qwen_tok, min_pixels=3136, max_pixels=99 * 28 * 28)
        return mp.wrap_processor(hf, media_root=root, **(settings | options))

    return make


def ask(*items, **part):
    parts = [{"type": "video", "video": item} for item in items] or [{"type": "video", **part}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which came second?"}]}]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_hand_one_in_is_one_sample(make, files, root, family):
    processor = make(family)
    whole = processor(ask("clips/a.mp4"), [1, 2], sample_id="s")
    [medium] = whole.media
    assert medium.source == "clips/a.mp4" and mp.validate(whole) == []
    plan = plan_of(root / "clips" / "a.mp4", **processor.settings["video"]["sampling"])
    known = plan.medium_fields()
    for name, value in known.items():
        assert np.array_equal(getattr(medium, name), value), name
    frames = mp.video.decode(files[0], plan)
    about = {"fps": plan.fps, "frames_indices": plan.indices, "total_num_frames": plan.total_frames}
    ways = {
        "path part": ask(path="clips/a.mp4"),
        "bytes": ask(files[0]),
        "plan": ask(("clips/a.mp4", plan)),
        "recorded": ask((files[0], medium)),
        "frames": ask((frames, about)),
        "frames and plan": ask((frames, plan)),
        "pictures": ask((list(map(Image.fromarray, frames)), about)),
    }
    others = {name: processor(asked, [1, 2], sample_id="s") for name, asked in ways.items()}
    others["bare"] = processor(ask(video=None), [1, 2], media=["clips/a.mp4"], sample_id="s")
    for name, other in others.items():
        assert np.array_equal(other.input_ids, whole.input_ids), name
        assert np.array_equal(other.position_ids, whole.position_ids), name
        assert other.media[0].cache_key == medium.cache_key, name
        assert np.array_equal(other.media[0].pixel_values, medium.pixel_values), name
        assert mp.compare([whole], [other]).ok, name


def test_ids_of_an_engine(make, root):
    processor = make()
    prompt = processor(ask("clips/a.mp4"), sample_id="s")
    again = processor.from_ids(prompt.input_ids, media=["clips/a.mp4"], sample_id="s")
    assert again == prompt
    raw = [9, START, VIDEO, END, 5]
    short = processor.from_ids(raw, media=["clips/b.mp4"], expanded=False, sample_id="s")
    more = processor.append(prompt, observation_ids=raw, media=["clips/b.mp4"], expanded=False)
    assert more.media[1] == short.media[0]
    assert [m.source for m in more.media] == ["clips/a.mp4", "clips/b.mp4"]
    assert len(more) == len(prompt) + len(short) and mp.validate(more) == []


def test_each_video_is_processed_once(make, files, monkeypatch, tmp_path):
    """By content and plan: under another name, too, and not under another plan."""
    calls = []
    decode = videos.decode
    monkeypatch.setattr(videos, "decode", lambda *a, **k: calls.append(a) or decode(*a, **k))
    processor = make()
    one = processor(ask(files[0], "clips/a.mp4", "clips/b.mp4", files[0]), sample_id="s")
    assert len(calls) == 2 and len(one.media) == 2
    processor(ask(files[1]), sample_id="s")
    assert len(calls) == 2
    other = plan_of(files[1], **processor.settings["video"]["sampling"] | {"fps": 1.0})
    processor(ask((files[1], other)), sample_id="s")
    assert len(calls) == 3
    copy = pickle.loads(pickle.dumps(processor))
    assert copy(ask("clips/a.mp4"), sample_id="s") == processor(ask("clips/a.mp4"), sample_id="s")
    assert len(calls) == 4  # workers start with an empty cache
    cache = mp.video.FrameCache(tmp_path / "frames", 1 << 24)
    for _ in range(2):
        assert make(frame_cache=cache)(ask(files[0]), sample_id="s").media == one.media[:1]
    assert (cache.stats.misses, cache.stats.hits) == (1, 1)


@pytest.mark.parametrize(
    ("family", "policy"),
    [("qwen2_vl", None), ("qwen2_5_vl", "qwen_vl_utils"), ("qwen3_vl", None), ("qwen3_vl", "vllm")],
)
def test_a_trace_gives_the_plan_and_the_very_frames_back(make, root, tmp_path, family, policy):
    processor = make(family, video_policy=policy)
    whole = processor(ask("clips/a.mp4"), [1, 2], sample_id="s")
    mp.write_trace(tmp_path / "t.jsonl", [whole])
    [read] = mp.read_trace(tmp_path / "t.jsonl")
    sampling = read.processor["video"]["sampling"]
    assert sampling == processor.settings["video"]["sampling"]
    plan = plan_of(root / "clips" / "a.mp4", **sampling)
    back = FramePlan.from_medium(read.media[0], sampling)
    assert back == dataclasses.replace(plan, container_timestamps=None)
    again = make(family, video_policy=policy).from_ids(
        read.input_ids, media=read.media, loss_spans=read.loss_spans, sample_id="s"
    )
    assert again == whole
    assert np.array_equal(again.media[0].pixel_values, whole.media[0].pixel_values)


def test_a_file_that_changed_is_refused(make, root, files):
    processor = make()
    whole = processor(ask("clips/a.mp4"), sample_id="s")
    recorded = dataclasses.replace(whole.media[0])
    recorded.pixel_values = None
    assert make().from_ids(whole.input_ids, media=[recorded], sample_id="s") == whole
    (root / "clips" / "a.mp4").write_bytes(files[0] + b"\0")
    with pytest.raises(ArgumentError, match="not the video that was recorded \\(file_hash"):
        make().from_ids(whole.input_ids, media=[recorded], sample_id="s")
    other = dataclasses.replace(recorded, file_hash=None, content_hash="0" * 64)
    with pytest.raises(ArgumentError, match="\\(content_hash"):
        make().from_ids(whole.input_ids, media=[other], sample_id="s")
    (root / "clips" / "a.mp4").unlink()
    with pytest.raises(ArgumentError, match="not a file below media_root"):
        make().from_ids(whole.input_ids, media=[recorded], sample_id="s")


def test_seconds_as_the_engine_rounded_them_are_kept(make):
    """vLLM casts them to its dtype, and its positions follow: so do the trainer's, given the rollout's video."""
    exact = make()(ask("clips/a.mp4"), [1, 2], sample_id="s")
    rounded = dataclasses.replace(exact.media[0], second_per_grid_ts=1.5)
    rounded.pixel_values = None
    followed = make()(ask(rounded), [1, 2], sample_id="s")
    assert followed.media[0].second_per_grid_ts == 1.5
    wanted, _ = mp.mrope_positions(
        followed.input_ids,
        "qwen2_5_vl",
        video_grid_thw=[rounded.grid_thw],
        second_per_grid_ts=[1.5],
        rule=followed.processor["position_rule"],
    )
    assert np.array_equal(followed.position_ids, wanted)
    assert not np.array_equal(followed.position_ids, exact.position_ids)


def test_a_plan_of_other_settings_is_recorded_with_its_medium(make, files):
    processor = make()
    sampling = processor.settings["video"]["sampling"]
    plan = plan_of(files[0], **sampling | {"fps": 4.0, "max_pixels": 20 * 28 * 28})
    [medium] = processor(ask((files[0], plan)), sample_id="s").media
    assert medium.grid_thw == plan.grid_thw
    assert medium.metadata == {"sampling": plan.processor_settings()}
    assert FramePlan.from_medium(medium, medium.metadata["sampling"]).indices == plan.indices
    again = processor(ask((files[0], medium)), sample_id="s").media[0]
    assert again == medium and np.array_equal(again.pixel_values, medium.pixel_values)


def frames(n=4, size=64):
    return np.zeros((n, size, size, 3), np.uint8)


@pytest.mark.parametrize(
    ("item", "error", "match"),
    [
        (frames(), ArgumentError, "frames alone have no times"),
        ((frames(), {}), ArgumentError, "has no fps"),
        (
            (frames(), {"fps": 2.0, "frames_indices": [0, 1]}),
            ArgumentError,
            "frames_indices has 2 numbers for 4 frames",
        ),
        (
            (frames(), {"fps": 2.0, "frames_indices": [0, 1, 2, 9], "total_num_frames": 9}),
            ArgumentError,
            "go up to 9, total_num_frames is 9 .* Fix: pass the file's total_num_frames",
        ),
        (([frames()[0], frames(1, 32)[0]], {"fps": 2.0}), ArgumentError, "of one size"),
        ((b"x", {"fps": 2.0}), ArgumentError, "the video comes with dict"),
        (b"no video", VideoError, "Fix: "),
        ("clips/none.mp4", ArgumentError, "not a file below media_root"),
        ("../a.mp4", ArgumentError, "not below media_root"),
    ],
)
def test_refused(make, item, error, match):
    with pytest.raises(error, match=match) as caught:
        make()(ask(item), sample_id="s")
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_plans_that_do_not_fit(make, files):
    processor = make()
    wrong = plan_of(files[0], policy="transformers_qwen3_vl")
    with pytest.raises(ArgumentError, match="the plan is for 'qwen3_vl'"):
        processor(ask((files[0], wrong)), sample_id="s")
    plan = plan_of(files[0], **processor.settings["video"]["sampling"])
    with pytest.raises(ArgumentError, match="4 frames of 64×64, the plan has"):
        processor(ask((frames(), plan)), sample_id="s")
    with pytest.raises(ArgumentError, match="the plan is for one with"):
        processor(ask((files[1], plan)), sample_id="s")
    forged = dataclasses.replace(plan, grid_thw=(plan.grid_thw[0], 2, 2))
    with pytest.raises(LayoutError, match="makes a grid of"):
        processor(ask((files[0], forged)), sample_id="s")


def test_settings_of_sampling(make):
    with pytest.raises(ArgumentError, match="has no setting 'speed'"):
        make(video_settings={"speed": 2})
    with pytest.raises(ArgumentError, match="policy 'best' is unknown"):
        make(video_policy="best")
    from support.replicas.internvl_processor import internvl_processor

    with pytest.raises(ArgumentError, match="takes a video as images"):
        mp.wrap_processor(internvl_processor()).medium((frames(), {"fps": 1.0}))
    settings = make(fps=None).settings["video"]["sampling"]
    assert settings["policy"] == "transformers_qwen2_vl" and not settings["do_sample_frames"]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x20ftypisom", "video"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0avifheic", "video"),
        (b"\0\0\0\x18ftypavif\0\0\0\0mif1", "image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1", "image"),
        (b"\0\0\0\x18ftypM4A \0\0\0\0mp42", "audio"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "audio"),
        (b"\x1a\x45\xdf\xa3\x01", "video"),
        (b"RIFF\0\0\0\0AVI LIST", "video"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (b"G" + b"\0" * 187 + b"G", "video"),
        (b"GIF89a" + b"\0" * 200, "image"),
        (b"\0\0\0\x18ftypmsf1\0\0\0\0hevcmsf1", "image"),
    ],
)
def test_kinds_of_files(head, kind):
    assert kind_of_file(head) == kind


def test_kinds_of_items():
    assert kind_of_item("a.mp4") is None and kind_of_item(frames()[0]) == "image"
    assert kind_of_item(frames()) == kind_of_item((frames(), {})) == "video"
