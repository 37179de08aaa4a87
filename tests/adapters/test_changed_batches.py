"""Batches and models that were changed after they were made: one line that says what, and the fix."""

import copy

import pytest
import torch
from support.models import smallest_qwen2_5_vl, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.errors import ModelError, SchemaError

pytestmark = pytest.mark.adapter


def samples():
    parts = [("text", [1]), ("image", (1, 4, 6), "x"), ("response", [2, 3])]
    return with_pixels([make_sample(parts)])


@pytest.fixture(scope="module")
def model():
    return smallest_qwen2_5_vl()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[:-4], r"has shape \[20, 1176\], the batch's media need \[24, 1176\]"),
        (lambda x: x[:, :-1], r"has shape \[24, 1175\]"),
        (lambda x: None, "is missing"),
    ],
)
def test_pixels_that_were_cut_after_packing(model, change, says):
    for batch in (mp.pack(samples()), mp.pad(samples())):
        batch.pixel_values = change(batch.pixel_values)
        with attach(model), pytest.raises(SchemaError, match=says):
            packed_logprobs(model, batch)


def test_labels_beside_shared_rows():
    """The row after a prefix is the first sample's: labels shifted by a row would score the others by it."""
    peft = pytest.importorskip("peft")
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x")]
    both = with_pixels([make_sample([*prompt, ("response", [n, 3])], f"s{n}") for n in (1, 2)])
    config = peft.LoraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(smallest_qwen2_5_vl(), config).eval()
    with attach(model):
        batch = mp.pack(both, share_prefix=True)
        inputs, labels = model_inputs(batch, model), batch.input_ids[None]
        assert model(**inputs).loss is None
        with pytest.raises(ModelError, match=r"labels .* a prefix.* Fix: .*packed_logprobs"):
            model(**inputs, labels=labels)
        shifted = labels.roll(-1)
        assert model(**inputs, labels=labels, shift_labels=shifted).loss > 0  # shifted by hand

        batch = mp.pack(both)
        inputs, labels = model_inputs(batch, model), torch.full_like(batch.input_ids, -100)
        labels[batch.loss_rows.long() + 1] = batch.loss_targets
        loss = model(**inputs, labels=labels[None]).loss
        assert abs((loss + packed_logprobs(model, batch).mean()).item()) <= 1e-5
        labels[batch.cu_seqlens[1]] = 7
        with pytest.raises(ModelError, match=r"a sample's first label is not -100"):
            model(**inputs, labels=labels[None])
    padded = mp.pad(both)
    assert model(**model_inputs(padded, model), labels=padded.input_ids).loss > 0


def by_numpy(batch, name):
    getattr(batch, name).numpy()[..., 1].__iadd__(1)


def replaced(batch, name):
    changed = getattr(batch, name).clone()
    changed[..., 1] += 1
    setattr(batch, name, changed)


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
@pytest.mark.parametrize("change", [by_numpy, replaced])
def test_rows_that_were_changed_after_packing(model, make, name, change):
    """Loss tokens, media and attention stay those of the samples, and nothing else would say so."""
    says = rf"the batch's {name} are not those .* Fix: change the samples"
    with attach(model):
        for batch in (make(samples()), copy.deepcopy(make(samples())).to("cpu")):
            model_inputs(batch, model)
            change(batch, name)
            for use in (lambda b: model_inputs(b, model), lambda b: b.to("meta")):
                with pytest.raises(mp.ArgumentError, match=says):
                    use(batch)
    batch = make(samples()).to("meta")  # where values are not read, as on a GPU
    batch.check_unchanged()
    getattr(batch, name).add_(1)
    with pytest.raises(mp.ArgumentError, match=f"the batch's {name} are not those"):
        batch.check_unchanged()
