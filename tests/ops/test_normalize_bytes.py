"""normalize_bytes against indexing; its table against transformers' processors, bit for bit."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.kernels import running

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.ops.patches.normalize import normalize_bytes
from mmpack.processors.settings import vision_settings
from mmpack.video.pixel_settings import byte_values

FACTORS = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def some_bytes(patches, dim=1176):
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (patches, dim), dtype=torch.uint8, generator=rng)
    return rows, torch.randn(3, 256, generator=rng)


def indexed(rows, values, dtype=torch.float32):
    channel = np.arange(rows.shape[1]) // (rows.shape[1] // 3)
    return torch.from_numpy(values.numpy()[channel, rows.numpy()]).to(dtype)


each_path = pytest.mark.parametrize(
    "path", ["torch", pytest.param("triton", marks=pytest.mark.kernel)]
)


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("patches", "dim"), [(0, 1176), (1, 3), (5, 1536), (20_000, 12)])
def test_it_is_indexing(path, patches, dim, dtype, monkeypatch):
    device = running(path, monkeypatch)
    if path == "triton" and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off, in place of rounding")
    rows, values = some_bytes(patches, dim)
    made = normalize_bytes(rows.to(device), values.to(device), dtype)
    assert made.dtype == dtype and torch.equal(made.cpu(), indexed(rows, values, dtype))


@each_path
def test_rows_at_an_odd_address_and_that_are_no_block(path, monkeypatch):
    device = running(path, monkeypatch)
    rows, values = some_bytes(9)
    shifted = rows.to(device).view(-1)[1 : 1 + 8 * 1176].view(8, 1176)
    cut = rows.to(device).repeat(1, 2)[:, 588 : 588 + 1176]
    for some in (shifted, cut):
        made = normalize_bytes(some, values.to(device)).cpu()
        assert torch.equal(made, indexed(some.cpu().contiguous(), values))


@pytest.mark.gpu
def test_more_bytes_than_int32_counts():
    patches = 2**31 // 1176 + 1000
    rows = torch.zeros(patches, 1176, dtype=torch.uint8, device="cuda")
    rows[-1] = torch.arange(1176, device="cuda").to(torch.uint8)
    _, values = some_bytes(1)
    made = normalize_bytes(rows, values.cuda(), torch.bfloat16)
    for at in (0, patches // 2, patches - 1):
        wanted = indexed(rows[at : at + 1].cpu(), values, torch.bfloat16)
        assert torch.equal(made[at].cpu(), wanted[0])


@pytest.mark.parametrize(
    ("rows", "values", "dtype", "says"),
    [
        (torch.zeros(2, 6), torch.zeros(3, 256), torch.float32, "rows are torch.float32"),
        (torch.zeros(2, 7, dtype=torch.uint8), torch.zeros(3, 256), torch.float32, r"\[2, 7\]"),
        (torch.zeros(2, 6, dtype=torch.uint8), torch.zeros(256, 3), torch.float32, r"\[256, 3\]"),
        (torch.zeros(2, 6, dtype=torch.uint8), torch.zeros(3, 256), torch.int32, "dtype is"),
        (
            torch.zeros(2, 6, dtype=torch.uint8),
            torch.zeros(3, 256, device="meta"),
            torch.float32,
            "on cpu, values on meta",
        ),
    ],
)
def test_refused(rows, values, dtype, says):
    with pytest.raises(ArgumentError, match=says):
        normalize_bytes(rows, values, dtype)


def test_without_data():
    rows, values = some_bytes(5)
    fake = normalize_bytes(rows.to("meta"), values.to("meta"), torch.bfloat16)
    assert (fake.shape, fake.dtype) == (rows.shape, torch.bfloat16)


# ---------------------------------------------------------------- the table


def processors():
    """transformers' image processors by name, of Pillow, and of torchvision where that is installed."""
    from importlib.util import find_spec

    import transformers

    for name in ("Qwen2VLImageProcessor", "GotOcr2ImageProcessor"):
        for end in ["Pil"] + ([""] if find_spec("torchvision") else []):
            yield pytest.param(getattr(transformers, name + end), id=name + end)


@pytest.mark.adapter
@pytest.mark.parametrize("make", list(processors()))
@pytest.mark.parametrize(
    "factors",
    [
        {},
        {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {"image_mean": [0.1, 0.7, 0.3], "image_std": [0.123, 3.3, 0.77], "rescale_factor": 0.0041},
    ],
)
def test_the_table_is_what_transformers_makes_of_each_byte(make, factors):
    size = 128
    options = (
        {"patch_size": 16} if "Qwen" in make.__name__ else {"size": {"height": size, "width": size}}
    )
    processor = make(do_resize=False, **options, **factors)
    # every byte in every channel, each in another order
    picture = np.stack([np.arange(size * size) * k % 256 for k in (1, 3, 5)], axis=1)
    picture = picture.astype(np.uint8).reshape(size, size, 3)
    settings = vision_settings(processor)
    kind = "np" if settings["backend"] == "pil" else "pt"
    made = processor(images=[Image.fromarray(picture)], return_tensors=kind)["pixel_values"]
    made = torch.from_numpy(np.asarray(made))
    if made.ndim == 4:  # tiles
        made = made.reshape(1, -1)
        rows = torch.from_numpy(np.moveaxis(picture, 2, 0).reshape(1, -1).copy())
    else:
        plain = make(do_resize=False, do_rescale=False, do_normalize=False, **options)
        rows = plain(images=[Image.fromarray(picture)], return_tensors=kind)["pixel_values"]
        rows = torch.from_numpy(np.asarray(rows).astype(np.uint8))
    for channel in range(3):
        third = rows.shape[1] // 3
        assert len(rows[:, channel * third : (channel + 1) * third].unique()) == 256
    values = torch.from_numpy(byte_values(settings).copy())
    assert torch.equal(normalize_bytes(rows, values), made)


def test_both_backends_differ_in_some_bits():
    fused, steps = (byte_values(FACTORS | {"backend": b}) for b in ("torchvision", "pil"))
    assert not np.array_equal(fused, steps)
    np.testing.assert_allclose(fused, steps, atol=1e-6)


def test_the_table_is_pack_videos_change():
    from mmpack.ops.patches.pack import pack_video
    from mmpack.video.pixel_settings import normalization

    frames = np.arange(2 * 28 * 28 * 3, dtype=np.uint8).reshape(2, 28, 28, 3)
    rows = pack_video(frames, "qwen2_vl")
    values = torch.from_numpy(byte_values(FACTORS | {"backend": "torchvision"}).copy())
    assert rows.shape[1] == get_family("qwen2_vl").patch_dim
    made = normalize_bytes(rows, values)
    assert torch.equal(made, pack_video(frames, "qwen2_vl", **normalization(FACTORS)))


@pytest.mark.parametrize(
    "changes",
    [{"do_rescale": False}, {"do_normalize": False}, {"backend": None}, {"backend": "cv2"}],
)
def test_settings_that_make_no_table(changes):
    with pytest.raises(ArgumentError, match=r"byte_values: .*Fix: "):
        byte_values(FACTORS | {"backend": "pil"} | changes)
    with pytest.raises(ArgumentError, match="normalization"):
        byte_values(None)
