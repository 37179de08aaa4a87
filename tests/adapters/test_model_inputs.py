"""model_inputs: what the tower encodes, an idle tower, and what is refused."""

import copy
import functools

import pytest
import torch
from support.families import some_slow
from support.models import (
    logprobs_and_gradients,
    small_model,
    smallest_qwen2_5_vl,
    with_pixels,
)
from support.samples import make_sample

import mmpack as mp
from mmpack import versions
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers import inputs as inputs_module
from mmpack.errors import ModelError, SchemaError
from mmpack.families import FAMILIES
from mmpack.packing.calls import NONE, Counts
from mmpack.versions import takes_encoded_media

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def model():
    return smallest_qwen2_5_vl()


@pytest.fixture
def attached(model):
    with attach(model):
        yield model


@pytest.fixture
def patches(model):
    """Patches of each call of the tower."""
    seen = []
    hook = model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    yield seen
    hook.remove()


def two_media():
    """Three samples, two of one prompt: an image of 24 patches three times, a video of 32 twice."""
    image, video = ("image", (1, 4, 6), "x"), ("video", (2, 4, 4), "f")
    parts = [
        [("text", [1]), image, ("response", [2, 3])],
        [("text", [1]), image, video, ("response", [4])],
        [video, ("text", [9]), image, ("response", [5, 6])],
    ]
    return with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])


@pytest.mark.parametrize(
    ("make", "images", "videos"),
    [(mp.pack, 3, 2), (functools.partial(mp.pack, share_prefix=True), 2, 2), (mp.pad, 3, 2)],
)
def test_each_medium_is_encoded_once_where_the_forward_allows_it(
    attached, patches, make, images, videos, monkeypatch
):
    """Else, and of a padded batch, each occurrence, which gives the same."""
    batch, once = make(two_media()), takes_encoded_media(attached) and make is not mp.pad
    with torch.no_grad():
        values = packed_logprobs(attached, batch)
    assert sorted(patches) == ([24 + 32] if once else [32 * videos, 24 * images])
    assert batch.stats["patches_encoded"] == sum(patches)
    assert batch.stats["patches"] == (136 if make is mp.pad else 56)
    monkeypatch.setattr(inputs_module, "takes_encoded_media", lambda model: False)
    with torch.no_grad():
        again = packed_logprobs(attached, batch)
    assert batch.stats["patches_encoded"] == 24 * images + 32 * videos
    assert (values - again).abs().max() <= 1e-5


def test_text_runs_no_tower_unless_asked_for(attached, patches):
    batch = mp.pack([make_sample([("text", [1, 2]), ("response", [3, 4])])])
    values, gradients = logprobs_and_gradients(attached, batch)
    assert patches == [] and batch.stats["patches_encoded"] == 0
    assert not any("visual" in name for name in gradients)

    idle, with_tower = logprobs_and_gradients(attached, batch, vision="always")
    assert patches == [4] and batch.stats["patches_encoded"] == 4
    assert torch.equal(idle, values)
    tower = [name for name, _ in attached.named_parameters() if "visual" in name]
    assert tower and all((with_tower[name] == 0).all() for name in tower)
    for name, gradient in gradients.items():
        assert torch.equal(with_tower[name], gradient), name


def test_text_where_other_ranks_run_a_sharded_tower(attached, monkeypatch):
    """Where the forward takes no encoded media, this rank can't call the tower with them: that must not be silent."""
    for name in ("has_sharded_tower", "is_sharded"):
        monkeypatch.setattr(inputs_module, name, lambda _: True)
    for module in (inputs_module, versions):
        monkeypatch.setattr(module, "takes_encoded_media", lambda _: False)
    batch = mp.pack([make_sample([("text", [1, 2]), ("loss", [3])])])
    for runs in (None, NONE):  # nothing is known, or no rank has media
        batch.tower_runs = runs
        model_inputs(batch, attached)
    batch.tower_runs = Counts(1)
    with pytest.raises(mp.ModelError, match="newer, or put media into every batch"):
        model_inputs(batch, attached)


def test_packed_rows_need_an_attached_model(model):
    batch = mp.pack(two_media())
    with pytest.raises(mp.ModelError, match="ignores visible_until"):
        model_inputs(batch, model)
    inputs = model_inputs(mp.pad(two_media()), model)
    assert "attention_mask" in inputs and "visible_until" not in inputs
    assert inputs["use_cache"] is False
    with attach(model):
        inputs = model_inputs(mp.pad(two_media()), model)
        assert "attention_mask" not in inputs and inputs["use_cache"] is False
        assert model_inputs(batch, model)["use_cache"] is False


def test_what_is_refused(attached):
    batch = mp.pack([make_sample([("text", [1])], family="qwen2_vl")])
    with pytest.raises(mp.ModelError, match="batch is of qwen2_vl, the model of qwen2_5_vl"):
        model_inputs(batch, attached)
    bare = two_media()
    bare[2].media[0].pixel_values = bare[1].media[1].pixel_values = None
    with pytest.raises(mp.SchemaError, match=r"f.pixel_values is missing .MM404"):
        model_inputs(mp.pack(bare), attached)
    with pytest.raises(mp.ArgumentError, match="vision is 'never'"):
        model_inputs(mp.pack(two_media()), attached, vision="never")


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


BATCHES = {
    "pictures": lambda: mp.pack(two_media(), share_prefix=True),
    "text": lambda: mp.pack(
        [make_sample([("text", [1, 2]), ("response", [3])], f"{k}") for k in "ab"]
    ),
    "padded": lambda: mp.pad(two_media()),
    "padded text": lambda: mp.pad([make_sample([("text", [1, 2]), ("response", [3])])]),
}


@pytest.mark.parametrize(
    ("name", "vision"), [("pictures", "auto"), ("text", "always"), ("padded", "auto")]
)
def test_inputs_are_of_one_model_as_it_was_attached(model, name, vision):
    other = copy.deepcopy(model)
    with attach(model):
        inputs = model_inputs(BATCHES[name](), model, vision=vision)
        ids = inputs["input_ids"]  # read as the tensor
        assert ids.shape == inputs["position_ids"].shape[-2:] and len(ids) == len(ids[:])
        assert torch.equal(ids, ids[:]) and ids.sum() == ids[:].sum()
        expected = logits_of(model, inputs)
        with attach(other), pytest.raises(mp.ModelError, match="made for another model"):
            other(**inputs)
        # as wrappers move them
        copied = inputs | {"input_ids": inputs["input_ids"].clone().to("cpu")}
        assert torch.equal(logits_of(model, copied), expected)
    for target in (model, model.model, other, other.model, copy.deepcopy(model)):
        for given in (inputs, copied):
            with pytest.raises(
                mp.ModelError, match=r"detached before its forward|made for another"
            ):
                target(**given)
    with attach(model):
        assert torch.equal(logits_of(model, inputs), expected)


def test_inputs_of_padded_text_with_a_tower_are_of_one_model(model):
    """Its own attention obeys the mask; the embeddings that the tower is added to are one model's."""
    inputs = model_inputs(BATCHES["padded text"](), model, vision="always")
    other = copy.deepcopy(model)
    for refused in (other, other.model):
        with pytest.raises(mp.ModelError, match="these inputs were made for another model"):
            refused(**inputs)
    plain = model_inputs(BATCHES["padded text"](), model)
    assert torch.equal(logits_of(model, inputs), logits_of(model, plain))


def test_inputs_that_are_used_again_have_the_tower_s_weights_of_now():
    model = smallest_qwen2_5_vl()
    with attach(model):
        batch = BATCHES["pictures"]()
        inputs = model_inputs(batch, model)
        before = logits_of(model, inputs)
        for parameter in model.model.visual.parameters():
            parameter.data.mul_(1.5)  # which no version counts
        after = logits_of(model, inputs)
        assert torch.equal(after, logits_of(model, model_inputs(batch, model)))
        assert (after - before).abs().max() > 1e-3


# ---- batches and models that were changed after they were made ----


def samples():
    parts = [("text", [1]), ("image", (1, 4, 6), "x"), ("response", [2, 3])]
    return with_pixels([make_sample(parts)])


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


# ---- every family's tiny model ----


PACKABLE = [name for name, family in FAMILIES.items() if family.packing == "yes"]


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = small_model(name)
        return made[name]

    return get


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some_slow(FAMILIES))
def test_an_idle_tower_runs_all_of_the_tower_and_changes_nothing(models, name):
    model = models(name)
    samples = [make_sample([("text", [1, 2]), ("response", [3, 4])], family=name)]
    batch = mp.pack(samples) if name in PACKABLE else mp.pad(samples)
    with attach(model) if name in PACKABLE else torch.enable_grad():
        values, gradients = logprobs_and_gradients(model, batch)
        idle, with_tower = logprobs_and_gradients(model, batch, vision="always")
    assert torch.equal(idle, values)
    used = {n for n, _ in model.named_parameters() if "visual" in n or "vision" in n}
    used |= {n for n, _ in model.named_parameters() if "multi_modal_projector" in n}
    used -= {n for n in used if "lambda" in n or "mask_token" in n}
    assert used <= with_tower.keys() and not used & gradients.keys()
    assert all((with_tower[n] == 0).all() for n in used)
    assert all(torch.equal(with_tower[n], gradients[n]) for n in gradients)


@pytest.mark.parametrize("bad", [-1, 151_936, 10**9])
def test_ids_that_the_model_lacks(models, bad):
    model = models("qwen2_5_vl")
    batch = mp.pad([make_sample([("text", [1, 2, 3]), ("response", [4, 5])])])
    batch.input_ids[0, 1] = bad
    batch.id_range = None
    batch.__post_init__()
    with pytest.raises(mp.ModelError, match=rf"has id {bad}, the model's ids are 0 to 151935"):
        model_inputs(batch, model)


def test_tiles_and_a_vocabulary_of_another_checkpoint():
    model = small_model("internvl")
    parts = [("text", [1]), ("image", (2, 8, 8), "x"), ("response", [3])]
    batch = mp.pack(with_pixels([make_sample(parts, family="internvl")]))
    with attach(model):
        with pytest.raises(mp.ModelError, match=r"\[8, 8\] patches.*reads \[4, 4\]"):
            packed_logprobs(model, batch)
        model.config.image_token_id = 151671  # InternVL3.5's
        with pytest.raises(mp.ModelError, match=r"image token is 151671.*151667"):
            packed_logprobs(model, batch)
