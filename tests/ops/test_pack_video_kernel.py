"""The kernels of patch packing against numpy's index and torch's own gradient of it, bit for bit."""

import pytest
import torch
from support.clips import PIXELS, clips_of, normalised, rows_by_index, shapes_of
from support.kernels import running

from mmpack.families import get_family
from mmpack.ops.patches.pack import pack_video, unpack_video
from mmpack.ops.patches.tables import patch_tables
from mmpack.video.patches import plan_patches

pytestmark = pytest.mark.kernel

CHANGES = [
    {},
    PIXELS,
    {"rescale_factor": 1 / 255},
    {"mean": (120.0, 100.5, 3.25), "std": (57.0, 58.0, 59.5)},
]
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture
def device(monkeypatch):
    """New memory holds NaN (integers: their largest value), so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield running("triton", monkeypatch)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_frames_again(device, name, last):
    shapes = shapes_of(name, last)
    plan, clips = plan_patches(shapes, name), clips_of(shapes, device=device)
    wanted = rows_by_index(clips, plan)
    apart = pack_video(clips, plan)
    assert apart.dtype == torch.uint8 and torch.equal(apart, wanted)
    buffer = torch.cat([c.view(-1) for c in clips])
    assert torch.equal(pack_video(buffer, plan), wanted)
    assert all(map(torch.equal, unpack_video(wanted, plan), clips))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_frames_of_rows_that_differ_from_their_repeats(device, name, last):
    """A frame that fills two slots is what stands in the first."""
    plan = plan_patches(shapes_of(name, last), name)
    patch = get_family(name).patch_dim
    rows = torch.randint(256, (plan.num_rows, patch), dtype=torch.uint8, device=device)
    for i, frames in enumerate(unpack_video(rows, plan)):
        index = torch.from_numpy(plan.scatter_index(i)).to(device).view(-1)
        wanted = rows.view(-1)[index + int(plan.row_offsets[i]) * patch]
        assert torch.equal(frames.reshape(-1), wanted)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_addresses_of_no_word(device, name, shift):
    """One buffer, and one of several clips, that start beside the words that their lines could be read in."""
    shapes = shapes_of(name, True)
    plan, clips = plan_patches(shapes, name), clips_of(shapes, device=device)
    wanted = rows_by_index(clips, plan)
    values = torch.cat([c.view(-1) for c in clips])
    buffer = torch.cat([values[:shift], values])[shift:]
    assert buffer.data_ptr() % 16 == shift
    assert torch.equal(pack_video(buffer, plan), wanted)
    clips[1] = buffer[clips[0].numel() :][: clips[1].numel()].view(shapes[1])
    assert torch.equal(pack_video(clips, plan), wanted)
    rows = torch.cat([wanted.view(-1)[:shift], wanted.view(-1)])[shift:].view(wanted.shape)
    assert all(map(torch.equal, unpack_video(rows, plan), clips))


@pytest.mark.parametrize("change", CHANGES[1:])
@pytest.mark.parametrize(("name", "last"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_normalised(device, name, last, change):
    shapes = shapes_of(name, last, [(3, 2, 2), (1, 1, 1)])
    plan, clips = plan_patches(shapes, name), clips_of(shapes, device=device)
    clips[0].view(-1)[:256] = torch.arange(256, device=device)
    wanted = normalised(rows_by_index(clips, plan), **change)
    made = pack_video(clips, plan, **change)
    assert made.dtype == torch.float32 and torch.equal(made, wanted)
    if device.type == "cuda":  # the interpreter cuts to bfloat16 where GPUs round
        made = pack_video(clips, plan, dtype=torch.bfloat16, **change)
        assert torch.equal(made, wanted.bfloat16())


@pytest.mark.parametrize("last", [True, False])
def test_temporal_patches_that_are_left_out(device, last):
    shapes = shapes_of("qwen2_vl", last, [(7, 1, 2), (4, 2, 1), (3, 1, 1)])
    plan = plan_patches(shapes, "qwen2_vl", keep=[[0, 2, 3], None, [1]])
    clips = clips_of(shapes, device=device)
    rows = pack_video(clips, plan)
    assert torch.equal(rows, rows_by_index(clips, plan))
    kept = [[0, 1, 4, 5, 6], [0, 1, 2, 3], [2]]
    for back, clip, frames in zip(unpack_video(rows, plan), clips, kept, strict=True):
        assert torch.equal(back[frames], clip[frames])
        left = [k for k in range(len(clip)) if k not in frames]
        assert not back[left].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("keep", [None, [[1, 2], [0]]])
def test_gradients(device, dtype, keep):
    """Whole numbers, so that a sum over repeats is exact in every dtype."""
    shapes = shapes_of("qwen2_vl", True, [(5, 1, 2), (1, 1, 1)])
    plan = plan_patches(shapes, "qwen2_vl", keep=keep)
    clips = [c.to(dtype).requires_grad_() for c in clips_of(shapes, device=device)]
    rows = pack_video(clips, plan)
    assert rows.dtype == dtype
    weight = torch.randint(-9, 9, rows.shape, device=device).to(dtype)
    found = torch.autograd.grad(rows, clips, weight)
    wanted = torch.autograd.grad(rows_by_index(clips, plan), clips, weight)
    assert all(map(torch.equal, found, wanted))
    values = rows.detach().requires_grad_()
    frames = torch.cat([c.reshape(-1) for c in unpack_video(values, plan)])
    weight = torch.randint(-9, 9, frames.shape, device=device).to(dtype)
    (found,) = torch.autograd.grad(frames, values, weight)
    wanted, start = torch.zeros_like(values).view(-1), 0
    for i, shape in enumerate(shapes):
        index = torch.from_numpy(plan.scatter_index(i)).to(device).view(-1)
        first = int(plan.row_offsets[i]) * values.shape[1]
        wanted[index[index >= 0] + first] = weight[start : start + len(index)][index >= 0]
        start += len(index)
        assert len(index) == torch.Size(shape).numel()
    assert torch.equal(found.view(-1), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(device, read, change):
    """Any number of tokens, from any dtype to any."""
    shapes = shapes_of("qwen3_vl", True, [(3, 3, 5), (1, 1, 1), (2, 7, 3)])
    plan = plan_patches(shapes, "qwen3_vl")
    clips = [c.to(read) for c in clips_of(shapes, device=device)]
    for made in (torch.float32, torch.bfloat16, torch.float16):
        rows = pack_video(clips, plan, dtype=made, **change)
        wanted = rows_by_index(clips, plan)
        wanted = normalised(wanted, **change) if change else wanted
        assert rows.dtype == made and torch.equal(rows, wanted.to(made))


def test_tiles_and_single_frames(device):
    """InternVL's tiles: patches row by row, one frame each."""
    shapes = [(2, 56, 28, 3), (1, 28, 84, 3)]
    plan, clips = plan_patches(shapes, "internvl"), clips_of(shapes, device=device)
    assert plan.family.temporal_patch_size == 1
    assert torch.equal(pack_video(clips, plan), rows_by_index(clips, plan))


@pytest.mark.gpu
def test_beyond_2_to_the_31st_value(device):
    shapes = [(32, 224, 224, 3)] * 500
    tables = patch_tables(plan_patches(shapes, "qwen2_5_vl"), device)
    size = torch.Size(shapes[0]).numel()
    buffer = torch.randint(256, (500 * size,), dtype=torch.uint8, device=device)
    assert buffer.numel() > 2**31
    rows = pack_video(buffer, tables)
    alone = pack_video(buffer[-size:].view(shapes[0]), "qwen2_5_vl")
    assert torch.equal(rows[-len(alone) :], alone)
    assert torch.equal(unpack_video(rows, tables)[-1].reshape(-1), buffer[-size:])
