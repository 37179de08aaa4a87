"""RoPE that depends on a sample's length: each sample of a batch as transformers computes it alone, in a new model."""

import copy
import pickle

import numpy as np
import pytest
import torch
from support.kits import get_kit
from support.kits.base import spread_out
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import (
    SampleCollator,
    attach,
    model_inputs,
    packed_logprobs,
    prefix_logprobs,
    rope,
)
from mmpack.adapters.transformers.media_inputs import token_types
from mmpack.cache import PrefixIndex, RowStore
from mmpack.errors import ModelError
from mmpack.families import get_family

pytestmark = pytest.mark.adapter
LIMIT = 24
KINDS = ("dynamic", "longrope")


def model_of(family, kind):
    """A small model whose RoPE changes above 24 positions; of Gemma that of layers with full attention alone."""
    kit = get_kit(family)
    if not kit.available:
        pytest.skip(f"this transformers has no model of {family}")
    config = copy.deepcopy(kit.model_config(narrow=True))  # the kit holds parts of it
    text = config.get_text_config()
    layered = text.rope_parameters.get("full_attention")
    given = layered or text.rope_parameters
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = head_dim // 2
    more = {"factor": 4.0} if kind == "dynamic" else {
        "original_max_position_embeddings": LIMIT,
        "short_factor": np.linspace(1, 2, half).tolist(),
        "long_factor": np.linspace(4, 9, half).tolist(),
    }  # fmt: skip
    if kind == "dynamic":
        text.max_position_embeddings = LIMIT
    given |= {"rope_type": kind, **more}
    torch.manual_seed(0)
    return spread_out(kit.classes()[0](config), kit.spread).eval()


def samples_of(family, lengths, picture=False):
    """One prompt of 6 ids (and a picture), then responses of these lengths."""
    kit, rng = get_kit(family), np.random.default_rng(1)
    prompt = [("text", rng.integers(0, 1000, 6))]
    if picture:
        prompt += [("image", kit.image, "x"), ("text", [7])]
    return with_pixels(
        [
            make_sample([*prompt, ("response", rng.integers(0, 1000, n))], f"s{i}", family=family)
            for i, n in enumerate(lengths)
        ]
    )


def alone(model, sample):
    """Logprobs of the loss tokens, by a copy of the model that has seen no other sample."""
    fresh, batch, family = copy.deepcopy(model), mp.pad([sample]), get_family(sample.family)
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    positions = batch.position_ids
    given["position_ids"] = positions if family.position_rows > 1 else positions[0]
    if family.token_types is not None:
        given[family.token_types] = token_types(batch.input_ids, family)
    if sample.media:
        inputs = model_inputs(batch, fresh)
        given |= {k: v for k, v in inputs.items() if k.startswith(("pixel", "image"))}
    with torch.no_grad():
        logits = fresh(**given, use_cache=False).logits[0]
    rows = logits.log_softmax(-1)[batch.loss_rows.long()]
    return rows.gather(1, batch.loss_targets[:, None])[:, 0]


LAYOUTS = {
    "packed": mp.pack,
    "rounded up": lambda s: mp.pack(s, pad_to_multiple_of=64),
    "left": lambda s: mp.pad(s, side="left"),
    "right": lambda s: mp.pad(s, side="right"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["internvl", "mistral3", "qwen2_5_vl", "gemma3"])
def test_a_long_sample_changes_no_other(family, kind):
    """A sample's length counts positions, of which a picture of Qwen2.5-VL has fewer than tokens."""
    model = model_of(family, kind)
    samples = samples_of(family, [5, 60, 18, 30, 14, 33], picture=family == "qwen2_5_vl")
    wanted = torch.cat([alone(model, s) for s in samples])
    with torch.no_grad():
        own = packed_logprobs(model, LAYOUTS["left"](samples))  # by the model's own attention
        assert (own - wanted).abs().max() <= 2e-5
        with attach(model):
            for layout, make in LAYOUTS.items():
                found = packed_logprobs(model, make(samples))
                assert (found - wanted).abs().max() <= 2e-5, layout
    # nothing stays behind in the model
    assert torch.equal(alone(model, samples[0]), wanted[: samples[0].num_loss_tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_shared_where_lengths_count_alike(kind):
    model = model_of("mistral3", kind)
    alike = samples_of("mistral3", [5, 9, 17, 18])
    alike += samples_of("mistral3", [40, 40])[:2] if kind == "dynamic" else []
    mixed = samples_of("mistral3", [5, 19])
    for sample in alike[4:]:
        sample.sample_id += "/long"
        sample.input_ids = np.concatenate([[3], sample.input_ids[1:]])
    with torch.no_grad(), attach(model):
        batch = mp.pack(alike, share_prefix=True)
        assert batch.num_tokens < sum(map(len, alike))
        found = batch.unpack_loss(packed_logprobs(model, batch))
        for sample, own in zip(alike, found, strict=True):
            assert (own - alone(model, sample)).abs().max() <= 2e-5
        names = {
            "dynamic": "max_position_embeddings is 24",
            "longrope": r"rope_parameters\['original_max_position_embeddings'\] is 24",
        }
        with pytest.raises(ModelError, match=f"'{kind}' and .*{names[kind]}.* Fix: .*share_prefix"):
            packed_logprobs(model, mp.pack(mixed, share_prefix=True))
        batch = rope.pack_shared(mixed, model)  # as trainers pack, who share where they can
        assert batch.num_tokens == sum(map(len, mixed))
        found = batch.unpack_loss(packed_logprobs(model, batch))
        for sample, own in zip(mixed, found, strict=True):
            assert (own - alone(model, sample)).abs().max() <= 2e-5
        assert rope.pack_shared(alike[:4], model).num_tokens < sum(map(len, alike[:4]))


def test_the_collator():
    model, samples = model_of("mistral3", "dynamic"), samples_of("mistral3", [5, 60, 18])
    wanted = torch.cat([alone(model, s) for s in samples])
    for padding in (None, "left"):
        collator = pickle.loads(pickle.dumps(SampleCollator(model, padding=padding)))
        with torch.no_grad():
            loss = model(**collator(samples)).loss
        assert abs(float(loss + wanted.mean())) <= 2e-5


def test_what_is_refused():
    model = model_of("mistral3", "dynamic")
    long, sample = samples_of("mistral3", [40, 5])
    inner = [("text", long.input_ids[:6]), ("response", long.input_ids[6:16])]
    short = make_sample(inner, "t", family="mistral3")  # ends within the longer one
    with attach(model):
        inputs = model_inputs(mp.pack([long, sample]), model)
        inputs.pop("rope_lengths")
        with pytest.raises(ModelError, match="rope_lengths is missing"):
            model(**inputs)
        with pytest.raises(ModelError, match="16 and 46 positions"):
            packed_logprobs(model, mp.pack([short, long], share_prefix=True))
    index = PrefixIndex(16, bytes_per_token=4, block_size=4)
    with pytest.raises(ModelError, match="the model has RoPE that depends on length"):
        prefix_logprobs(model, sample, index, RowStore(index.num_rows))
    model = get_kit("mistral3").small()  # other models are left alone
    with attach(model):
        assert "rope_lengths" not in model_inputs(mp.pack([sample]), model)
        assert "forward" not in vars(model.model.get_decoder().rotary_emb)
