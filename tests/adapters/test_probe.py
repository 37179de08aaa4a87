"""Sides of transformers models: what is recorded, beside transformers' own `output_hidden_states` and logits.

Healthy pairs of layouts and dtypes, and faults: tests/probe.
"""

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.models import small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.probe import probe_side
from mmpack.adapters.transformers.probe_hooks import as_rows, plain_name
from mmpack.probe.digest import FLOOR, digest, distance
from mmpack.probe.places import places_of

pytestmark = pytest.mark.adapter

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl")


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()
            made[name] = small_model(name)
        return made[name]

    return get


def test_a_side_may_run_its_samples_in_several_parts(models):
    model, samples = models("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    own = probe_side(model)

    def in_parts(given, recorder):
        own.run(given[:2], recorder)
        own.run(given[:1:-1], recorder)

    report = mp.probe.run(own, mp.probe.Side("in parts", in_parts), samples)
    assert report.ok and report.only == ([], []), report.text()
    strange = mp.probe.Side("strange", lambda given, recorder: own.run(samples, recorder))
    other = [make_sample([("text", [1, 2]), ("response", [3])], "other")]
    with pytest.raises(mp.ArgumentError, match="none of those that are recorded"):
        mp.probe.record(strange, other)
    for given in (None, mp.pack(samples), [mp.pack(samples)]):
        with pytest.raises(mp.ArgumentError, match="expected"):
            mp.probe.record(own, given)


def test_what_is_recorded_is_what_transformers_computes(models):
    model = models("qwen3_vl")
    samples = mixed_batch("qwen3_vl")[-1:]
    record = mp.probe.record(probe_side(model, layout="alone"), samples, passes=0)
    ids = torch.as_tensor(samples[0].input_ids)[None]
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        logprobs = out.logits.log_softmax(-1)[0]
    wanted = {"model.language_model.embed_tokens<out": out.hidden_states[0][0]}
    for k in range(model.config.text_config.num_hidden_layers - 1):
        wanted[f"model.language_model.layers.{k}<out"] = out.hidden_states[k + 1][0]
    wanted["model.language_model.norm<out"] = out.hidden_states[-1][0]
    for name, values in wanted.items():
        assert distance(record.entries[name].values, digest(values)).max() < 4 * FLOOR, name
    rows = [t - 1 for s in samples[0].loss_spans for t in range(s.start, s.stop)]
    heads = record.entries["lm_head<out"].values
    assert distance(heads[rows], digest(out.logits[0, rows])).max() < 1e-5
    assert np.isnan(np.delete(heads, rows, axis=0)[:, -2]).all()
    chosen = torch.stack([logprobs[t, ids[0, t + 1]] for t in rows])
    scored = torch.stack([chosen, torch.ones_like(chosen)], 1)
    assert distance(record.entries["logprobs<out"].values[rows], digest(scored)).max() < 1e-5


def test_a_shared_row_is_recorded_for_every_sample(models):
    model, samples = models("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    record = mp.probe.record(probe_side(model, layout="shared"), samples, passes=0)
    assert not np.isnan(record.entries["model.language_model.norm<out"].values).any()
    first = record.entries["model.visual.patch_embed.proj<in"]
    assert len(first.values) == sum(m.num_patches for s in samples for m in s.media)
    pixels = np.concatenate([m.pixel_values for s in samples for m in s.media])
    assert distance(first.values, digest(torch.from_numpy(pixels))).max() == 0


def test_the_model_stays_as_it_was(models):
    model, samples = models("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    model.train()
    with attach(model):
        before = packed_logprobs(model.eval(), mp.pack(samples)).detach()
        model.train()
        mp.probe.record(probe_side(model), samples)
        assert is_attached(model) and model.training
        assert torch.equal(packed_logprobs(model.eval(), mp.pack(samples)), before)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "wide"},
        {"dtype": "float32"},
        {"dtype": torch.int8},
        {"temperature": 0},
        {"samples_per_batch": True},
        {"attached": False, "layout": "shared"},
        {"name": 3},
    ],
)
def test_wrong_options_are_refused(models, options):
    with pytest.raises(mp.ArgumentError, match="Fix: "):
        probe_side(models("qwen2_5_vl"), **options)
    with pytest.raises(mp.ModelError, match="Fix: "):
        probe_side(torch.nn.Linear(2, 2))


def test_names_lose_their_wrappers():
    for name in (
        "model.language_model.layers.3.self_attn.o_proj",
        "base_model.model.model.language_model.layers.3.self_attn.o_proj",
        "module.model.language_model.layers.3._checkpoint_wrapped_module.self_attn.o_proj",
        "model.language_model.layers.3._orig_mod.self_attn.o_proj",
    ):
        assert plain_name(name) == "model.language_model.layers.3.self_attn.o_proj"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_tower_rows_stand_in_the_order_of_pixels(models, name):
    """What the merger made of a medium is what transformers hands on, row by row: also of Qwen2.5-VL's windows."""
    model = models(name)
    samples = mixed_batch(name)
    large = (3, 4, 4) if name == "internvl" else (1, 12, 10)  # of several windows or tiles
    parts = [("text", [1]), ("image", large, "large"), ("response", [2, 3])]
    samples += with_pixels([make_sample(parts, "z", family=name)])
    record = mp.probe.record(probe_side(model), samples, passes=0)
    last = {"qwen2_5_vl": "visual.merger.mlp.2", "qwen3_vl": "visual.merger.linear_fc2"}
    module = last.get(name, "multi_modal_projector.linear_2")
    entry = record.entries[f"model.{module}<out"]
    batch = mp.pack([samples[-1]])
    given = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad(), attach(model):
        model(**model_inputs(batch, model))
    handle.remove()
    [span] = samples[-1].modality_spans
    wanted = digest(given[0][0, span.start : span.stop])
    own = [p for p in range(len(entry.values)) if record.places.describe(entry.space, p)["sample"] == "z"]  # fmt: skip
    assert distance(entry.values[own], wanted).max() < 20 * FLOOR
    tokens = [record.places.describe(entry.space, p)["token"] for p in own]
    assert tokens == [*range(span.start, span.stop)]


def test_a_patch_is_the_token_that_it_is_merged_into():
    """A video's frames have text between them; tiles hold patches row by row, behind a class token."""
    film = make_sample([("text", [1]), ("video", (3, 4, 4), "v"), ("response", [2])], family="qwen3_vl")  # fmt: skip
    places = places_of([film])
    tokens = [t for s in film.modality_spans for t in range(s.start, s.stop)]
    assert len(film.modality_spans) == 3
    for space, each in (("1", 4), ("1/4", 1)):
        found = [places.describe(space, p)["token"] for p in range(places.count(space))]
        assert found == [t for t in tokens for _ in range(each)]
    tiles = make_sample([("image", (2, 4, 4), "t"), ("response", [2])], family="internvl")
    places, start = places_of([tiles]), tiles.modality_spans[0].start
    square = [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    for space, tile in (("1", square), ("17/16", [0, *square])):
        found = [places.describe(space, p)["token"] - start for p in range(places.count(space))]
        assert found == [*tile, *(4 + t for t in tile)]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((2, 7, 5), True),  # [B, S, H]
        ((3, 2, 7, 5), True),  # [k, B, S, d]
        ((2, 4, 7, 5), True),  # [B, heads, S, d]
        ((2, 2, 7, 5), True),  # as many heads as samples
        ((2, 7, 7, 5), False),  # as many heads as rows: which is which?
        ((14, 5), True),
        ((4, 9, 5), False),
    ],
)
def test_rows_by_their_axes(sizes, found):
    """B 2, S 7: a value that is its row's number lies at that row."""
    number = torch.arange(14.0)
    if sizes == (14, 5):
        tensor = number[:, None].expand(sizes)
    elif sizes in ((2, 7, 5), (3, 2, 7, 5)):
        tensor = number.view(2, 7, 1).expand(sizes)
    elif len(sizes) == 4:
        tensor = number.view(2, 1, 7, 1).expand(2, sizes[1], 7, 5)
    else:
        tensor = torch.zeros(sizes)
    rows = as_rows(tensor, 14, (2, 7))
    assert (rows is not None) is found
    if found:
        assert torch.equal(rows, number[:, None].expand(rows.shape))
