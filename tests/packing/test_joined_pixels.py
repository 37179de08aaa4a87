"""Pixels of a pack: numpy joins them, whatever their dtype and layout."""

import pytest
import torch

from mmpack.packing.tensors import joined


def drawn(dtype, *shapes):
    torch.manual_seed(0)
    if dtype == torch.uint8:
        return [torch.randint(0, 256, shape, dtype=dtype) for shape in shapes]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture(params=[False, True], ids=["pageable", "pinned"])
def pin_memory(request, monkeypatch):
    """Without a GPU torch pins nothing: what is to be pinned is made as usual, and noted."""
    if request.param and not torch.cuda.is_available():
        empty, pinned = torch.empty, set()

        def noted(*args, pin_memory, **options):
            made = empty(*args, **options)
            if pin_memory:
                pinned.add(made.data_ptr())
            return made

        monkeypatch.setattr(torch, "empty", noted)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() in pinned)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(6,), (3, 2, 4)], ids=["patches", "tiles"])
def test_they_are_torch_cats(dtype, shape, pin_memory):
    parts = drawn(dtype, (4, *shape), (0, *shape), (1, *shape))
    parts.append(drawn(dtype, (2 * 5, *shape))[0][::2])  # rows apart
    parts.append(drawn(dtype, (*shape, 3))[0].movedim(-1, 0))  # columns apart
    made = joined(parts, pin_memory)
    assert made.dtype == dtype and made.is_contiguous() and torch.equal(made, torch.cat(parts))
    assert made.is_pinned() == pin_memory


def test_bits_stay(pin_memory):
    bits = torch.tensor([[0x7FC12345, -1, 0x7F800001, -(2**31)]], dtype=torch.int32)
    made = joined([bits.view(torch.float32)], pin_memory)  # payloads of NaN, and -0
    assert torch.equal(made.view(torch.int32), bits)


@pytest.mark.parametrize("count", [1, 2])
def test_memory_is_its_own(count, pin_memory):
    parts = drawn(torch.float32, *[(2, 3)] * count)
    made = joined(parts, pin_memory)
    want = made.clone()
    for part in parts:
        part.zero_()
    assert torch.equal(made, want)
    made.zero_()  # and may be written to


def test_gradients_of_pixels_stay(pin_memory):
    parts = [part.requires_grad_() for part in drawn(torch.float32, (2, 3), (1, 3))]
    (joined(parts, pin_memory) ** 2).sum().backward()
    assert all(torch.equal(part.grad, 2 * part.detach()) for part in parts)
