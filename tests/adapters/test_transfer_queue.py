"""TransferQueue as it is, on one node: columns come at their own time, samples leave equal and once per task."""

import numpy as np
import pytest

pytest.importorskip("transfer_queue")
import transfer_queue as tq
from omegaconf import OmegaConf
from support.batch_tensors import assert_same
from support.pictured import pictured
from support.samples import make_sample
from transfer_queue.utils import serial_utils

import mmpack as mp
from mmpack.adapters.transfer_queue import get, put, put_columns, take

pytestmark = [pytest.mark.plane, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def queue(ray_cluster):
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def test_samples_leave_as_they_came():
    samples = pictured()
    samples[1].kept_ids = samples[1].teachers = None  # columns that not all have
    assert put(samples, "whole") == 3
    ids = [s.sample_id for s in samples]
    again, _ = get(ids, "whole")
    assert again == samples
    assert get(ids[::-1], "whole")[0] == samples[::-1]
    for a, b in zip(again, samples, strict=True):
        for mine, theirs in zip(a.media, b.media, strict=True):
            assert np.array_equal(np.asarray(mine.pixel_values), theirs.pixel_values)
    tags = tq.kv_list("whole")["whole"]
    assert tags["s0"] == {
        "group_id": "g0",
        "tokens": len(samples[0]),
        "loss_tokens": samples[0].num_loss_tokens,
        "patches": samples[0].num_patches,
    }


def test_rewards_come_later_and_a_consumer_plans_and_packs():
    rng = np.random.default_rng(0)
    samples = []
    for i in range(6):
        picture = [("text", [1, 2, 3 + i // 3]), ("image", (1, 4, 4), f"p{i // 3}")]
        samples.append(make_sample([*picture, ("response", [7] * (2 + i))], f"a{i}", f"g{i // 3}"))
        samples[i].media[0].pixel_values = np.full((16, 1176), 0.5, np.float32)
    put(samples[:4], "step")
    put(samples[4:], "step")
    assert take("step", 6, "trainer", ["rewards", "advantage"]) == ([], {"advantage": []})
    names = [s.sample_id for s in samples]
    scores = [[mp.Score("exact", float(i % 2))] for i in range(6)]
    logprobs = [-rng.random(s.num_loss_tokens, np.float32) for s in samples]
    put_columns(names[:3], "step", {"rewards": scores[:3], "advantage": [0.5, 1.0, 1.5]})
    first, own = take("step", 6, "trainer", ["rewards", "advantage"])
    assert [s.sample_id for s in first] == names[:3] and own["advantage"] == [0.5, 1.0, 1.5]
    put_columns(names, "step", {"rollout_logprobs": logprobs})
    put_columns(names[3:], "step", {"rewards": scores[3:], "advantage": [2.0, 2.5, 3.0]})
    columns = ["rewards", "advantage", "rollout_logprobs"]
    second, own = take("step", 6, "trainer", columns)
    assert [s.sample_id for s in second] == names[3:]  # each once
    assert take("step", 6, "trainer", columns)[0] == []
    everything, own = take("step", 6, "another task", columns)
    assert sorted(s.sample_id for s in everything) == names
    for i, sample in enumerate(samples):
        sample.rewards, sample.rollout_logprobs = scores[i], logprobs[i]
    ours = [samples[names.index(s.sample_id)] for s in everything]
    assert everything == ours
    for members in mp.plan(everything, max_tokens=64, share_prefix=True).bins:
        made, wanted = (mp.pack([of[i] for i in members]) for of in (everything, ours))
        assert_same(made, wanted)


def test_replayed_columns_may_come_later():
    [sample] = pictured(1)
    kept, teacher = sample.kept_ids, sample.teachers["32B"]
    routes, position_ids = sample.routed_experts, sample.position_ids
    whole = mp.Sample.from_dict(sample.to_dict())
    sample.kept_ids = sample.teachers = sample.routed_experts = sample.position_ids = None
    put([sample], "later")
    later = {"kept_ids": [kept], "teachers.32B": [teacher], "routed_experts": [routes]}
    put_columns(["s0"], "later", later | {"position_ids": [position_ids], "turn": [3]})
    [again], _ = get(["s0"], "later", [*later, "position_ids", "turn"])
    whole.teachers, whole.turn = {"32B": teacher}, 3
    assert again == whole


def test_pixels_cross_as_they_lie_in_memory(monkeypatch):
    """Of what is sent, the pixels are frames of their own: views of the array, and nothing else is as large."""
    [sample] = pictured(1)
    sent = []
    encode = serial_utils.encode

    def counted(value):
        frames = encode(value)
        sent.extend(frames)
        return frames

    for module in (serial_utils, tq.utils.zmq_utils):
        if hasattr(module, "encode"):
            monkeypatch.setattr(module, "encode", counted)
    put([sample], "bytes")
    held = {m.cache_key: m.pixel_values for m in sample.media}
    addresses = [np.frombuffer(frame, np.uint8).ctypes.data for frame in sent if len(frame)]
    assert {p.ctypes.data for p in held.values()} <= set(addresses)
    total, pixels = sum(map(len, sent)), sum(p.nbytes for p in held.values())
    assert pixels < total < pixels + 32 * 2**10


def test_what_is_not_there():
    put(pictured(1), "known")
    lost = r"is not in partition 'known'"
    for call, said in (
        (lambda: get(["s0"], "known", ["mine"]), "get: mine is not there for all 1 samples"),
        (lambda: get(["s0", "x"], "known"), f"get: sample 'x' {lost}"),
        (lambda: put_columns(["x"], "known", {"turn": [1]}), f"put_columns: sample 'x' {lost}"),
        (lambda: put_columns(["s0"], "known", {"turn": [1, 2]}), "turn has 2 values for 1 samples"),
    ):
        with pytest.raises(mp.ArgumentError, match=said):
            call()
    assert take("none", 4, "trainer") == ([], {}) and get([], "known") == ([], {})
