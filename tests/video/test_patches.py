"""Patch plans and `pack_video`: hashes of what transformers' processors made, torch's indexing and its gradient."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.clips import PIXELS, clips_of, digest, frames_of, normalised, rows_by_index, shapes_of

import mmpack as mp
from mmpack.families import FAMILIES, get_family
from mmpack.ops.patches.pack import pack_video, unpack_video
from mmpack.ops.patches.tables import patch_tables
from mmpack.video import normalization
from mmpack.video.patches import plan_patches, row_view, token_view

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/patches/patches.json"
CASES = json.loads(FIXTURE.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['family']}-{c['shape']}")
@pytest.mark.parametrize("last", [True, False])
def test_rows_are_those_of_transformers_processors(case, last):
    frames = torch.from_numpy(frames_of(*case["shape"][:3]))
    frames = frames if last else frames.permute(0, 3, 1, 2)
    plan = plan_patches([frames.shape], case["family"])
    assert plan.grids.tolist() == [case["grid"]]
    assert digest(pack_video(frames, plan)) == case["rows_uint8"]
    change = normalization(case["settings"])
    assert digest(pack_video(frames, plan, **change)) == case["rows_float32"]
    assert digest(pack_video(frames.float(), case["family"], **change)) == case["rows_float32"]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_many_clips_in_one_call(name, last):
    shapes = shapes_of(name, last)
    plan, clips = plan_patches(shapes, name), clips_of(shapes)
    rows = pack_video(clips, plan)
    assert torch.equal(rows, rows_by_index(clips, plan))
    assert torch.equal(pack_video(torch.cat([c.view(-1) for c in clips]), plan), rows)
    assert torch.equal(pack_video([c.numpy() for c in clips], name), rows)
    for i, clip in enumerate(clips):  # no clip depends on its company
        start, stop = plan.row_offsets[i : i + 2]
        assert torch.equal(pack_video(clip, name), rows[start:stop])
    back = unpack_video(rows, plan)
    assert all(map(torch.equal, back, clips))
    assert len({b.untyped_storage().data_ptr() for b in back}) == 1


CLIPS = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4
)


@given(CLIPS, st.sampled_from(["qwen2_vl", "qwen3_vl", "internvl"]), st.booleans(), st.data())
def test_round_trip(sizes, name, last, data):
    shapes = shapes_of(name, last, sizes)
    temporal = get_family(name).temporal_patch_size
    patches = [-(-n // temporal) for n, *_ in sizes]
    keep = [
        data.draw(st.none() | st.sets(st.integers(0, t - 1), min_size=1).map(sorted))
        for t in patches
    ]
    plan, clips = plan_patches(shapes, name, keep=keep), clips_of(shapes)
    back = unpack_video(pack_video(clips, plan), plan)
    assert plan.num_rows == plan.grids.prod(axis=1).sum() == plan.row_offsets[-1]
    for i, (clip, found, numbers) in enumerate(zip(clips, back, keep, strict=True)):
        numbers = range(patches[i]) if numbers is None else numbers
        frames = [f for k in numbers for f in range(k * temporal, (k + 1) * temporal)]
        mine = np.zeros(len(clip), bool)
        mine[[f for f in frames if f < len(clip)]] = True
        assert torch.equal(found[mine], clip[mine]) and not found[~mine].any()


def test_what_the_plan_tells():
    plan = plan_patches(
        [(5, 56, 84, 3), (6, 28, 28, 3), (1, 28, 56, 3)], "qwen2_vl", keep=[None, [0, 2], None]
    )
    assert plan.grids.tolist() == [[3, 4, 6], [2, 2, 2], [1, 2, 4]]
    assert plan.frame_index.tolist() == [[0, 1], [2, 3], [4, 4], [0, 1], [4, 5], [0, 0]]
    assert plan.frame_mask.tolist() == [[True, True]] * 2 + [[True, False]] + [[True, True]] * 2 + [
        [True, False]
    ]
    assert plan.clip_index.tolist() == [0, 0, 0, 1, 1, 2]
    assert plan.kept.tolist() == [0, 1, 2, 0, 2, 0]


def test_offsets_are_what_the_tower_attends_within():
    vision_utils = pytest.importorskip("transformers.vision_utils", reason="from 5.9 on")
    plan = plan_patches(shapes_of("qwen2_5_vl", True), "qwen2_5_vl")
    wanted = vision_utils.get_vision_cu_seqlens(torch.from_numpy(plan.grids))
    assert plan.cu_seqlens.tolist() == wanted.tolist() and plan.cu_seqlens.dtype == np.int32


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("last", [True, False])
def test_views_share_memory(name, last):
    family = get_family(name)
    (shape,) = shapes_of(name, last, [(4, 2, 2)])
    frames = np.arange(np.prod(shape)).reshape(shape)
    cells = token_view(frames, family)
    assert np.shares_memory(cells, frames)
    rows = cells.reshape(-1, family.patch_dim)
    grid = plan_patches([shape], name).grids[0]
    assert np.shares_memory(row_view(rows, grid, family), rows)
    assert np.array_equal(row_view(rows, grid, family), cells)
    tensor = torch.from_numpy(frames)
    assert token_view(tensor, family).data_ptr() == tensor.data_ptr()
    assert np.array_equal(token_view(tensor, family).numpy(), cells)
    turned = frames.swapaxes(1, -1)  # strides don't matter
    assert np.shares_memory(turned, frames)


@pytest.mark.parametrize("change", [{}, PIXELS, {"rescale_factor": 1 / 255}])
def test_gradients(change):
    shapes = shapes_of("qwen2_vl", True, [(3, 1, 2), (1, 1, 1)])
    plan = plan_patches(shapes, "qwen2_vl")
    clips = [c.float().requires_grad_() for c in clips_of(shapes)]
    rows, wanted = pack_video(clips, plan, **change), rows_by_index(clips, plan)
    wanted = normalised(wanted, **change) if change else wanted
    assert torch.equal(rows, wanted)
    weight = torch.randn_like(rows)
    found = torch.autograd.grad(rows, clips, weight)
    for a, b in zip(found, torch.autograd.grad(wanted, clips, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep", [None, [[0], None]])
def test_under_compile(keep):
    shapes = shapes_of("qwen2_vl", True, [(3, 1, 2), (1, 1, 1)])
    tables = patch_tables(plan_patches(shapes, "qwen2_vl", keep=keep))
    clips = [c.float().requires_grad_() for c in clips_of(shapes)]

    def step(a, b):
        return pack_video([a, b], tables, **PIXELS) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows = compiled(*clips)
    assert torch.equal(rows, step(*clips))
    weight = torch.randn_like(rows)
    found, wanted = (torch.autograd.grad(f(*clips), clips, weight) for f in (compiled, step))
    assert all(map(torch.equal, found, wanted))


def test_opcheck():
    shapes = shapes_of("qwen2_vl", True, [(3, 1, 1), (2, 1, 2)])
    for keep in (None, [[1], None]):
        tables = patch_tables(plan_patches(shapes, "qwen2_vl", keep=keep))
        buffers = tables.layout
        clips = [c.float() for c in clips_of(shapes)]
        change = ([0.5, 0.4, 0.3], [0.2, 0.3, 0.25], 1 / 255, torch.float32, True)
        torch.library.opcheck(torch.ops.mmpack.pack_video.default, (clips, *buffers, *change))
        rows = torch.randn(tables.num_rows, 1176)
        torch.library.opcheck(torch.ops.mmpack.unpack_video.default, (rows, *buffers, True))


def test_no_clips():
    plan = plan_patches([], "qwen2_vl")
    assert pack_video([], plan).shape == (0, 1176)
    with pytest.raises(mp.ArgumentError, match="can't become"):
        pack_video([], plan, dtype=torch.int64)
    assert plan.num_rows == 0


@pytest.mark.parametrize(
    ("shapes", "keep", "why"),
    [
        ([(4, 28, 28)], None, r"clip 0 has shape \[4, 28, 28\]"),
        ([(4, 28, 28, 3), (4, 3, 28, 28)], None, "channels come first in some"),
        ([(4, 30, 28, 3)], None, "4 frames of 28×30, not multiples of 28"),
        ([(0, 28, 28, 3)], None, "0 frames"),
        ([(4, 28, 28, 3)], [], "0 entries for 1 clips"),
        ([(4, 28, 28, 3)], [[1, 0]], "ascending"),
        ([(4, 28, 28, 3)], [[2]], "temporal patches 0 to 1"),
        ([(4, 28, 28, 3)], [[False, True]], r"keep\[0\] is False, expected int"),
        ([(4.5, 28, 28, 3)], None, "shape of clip 0 is 4.5"),
    ],
)
def test_shapes_that_are_refused(shapes, keep, why):
    with pytest.raises(mp.ArgumentError, match=why) as caught:
        plan_patches(shapes, "qwen2_vl", keep=keep)
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_what_is_refused():
    plan = plan_patches([(2, 28, 28, 3)], "qwen2_vl")
    good = torch.zeros(2, 28, 28, 3, dtype=torch.uint8)
    for frames, more, why in [
        (torch.zeros(4, 28, 28, 3), {}, r"clip 0 of shape \[4, 28, 28, 3\]"),
        ([good, good], {}, "2 clips for 1"),
        (torch.zeros(5), {}, "holds 5 values"),
        (good, {"mean": (0.5,) * 3}, "mean and std must be passed together"),
        (good, {"rescale_factor": 0.5, "dtype": torch.uint8}, "can't become torch.uint8"),
        (good, {"mean": (0.5,) * 2, "std": (0.5,) * 3}, "mean is .*3 numbers"),
        (good, {"mean": (0.5,) * 3, "std": (0.5, 0.0, 0.5)}, "std holds 0.0"),
        (good, {"rescale_factor": float("nan")}, "rescale_factor holds nan"),
        (good, {"dtype": "float32"}, "dtype is 'float32'"),
        ([None], {}, "a clip is NoneType"),
        (good.long(), {}, "frames are torch.int64"),
        (good.double(), {"dtype": torch.float32}, "torch.float64 can't become torch.float32"),
    ]:
        with pytest.raises(mp.ArgumentError, match=why):
            pack_video(frames, plan, **more)
    two = plan_patches([(2, 28, 28, 3)] * 2, "qwen2_vl")
    with pytest.raises(mp.ArgumentError, match="2 dtypes or devices"):
        pack_video([good, good.float()], two)
    with pytest.raises(mp.ArgumentError, match=r"rows have shape \[3, 1176\]"):
        unpack_video(torch.zeros(3, 1176), plan)
    with pytest.raises(mp.ArgumentError, match="do_rescale or do_normalize"):
        normalization({"do_rescale": True})
    switched = {"do_rescale": False, "do_normalize": True}
    for settings, why in [
        (switched, "image_mean is None"),
        ({"do_rescale": True, "do_normalize": False}, "rescale_factor holds None"),
    ]:
        with pytest.raises(mp.ArgumentError, match=why):
            normalization(settings)
