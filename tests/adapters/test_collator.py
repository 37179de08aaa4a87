"""SampleCollator in a real Trainer, against the same Trainer on rectangles that the test pads itself."""

import copy
import pickle

import pytest
import torch
from support.float64 import Wide, assert_as_exact_as_separate, wide_copy
from support.kits import get_kit
from support.models import relative_difference, small_model, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl
from transformers import Trainer, TrainerCallback, TrainingArguments

from mmpack.adapters.transformers import SampleCollator, attach
from mmpack.adapters.transformers.attention import is_attached
from mmpack.errors import ArgumentError, ModelError, SchemaError
from mmpack.families import get_family

pytestmark = pytest.mark.adapter
FAMILY = get_family("qwen2_5_vl")


def samples(times=1):
    """Four, for two micro-batches: two answers to one prompt, two turns with a video, text only.

    Responses are repeated `times`: a product of fewer than 8 rows with the whole vocabulary is summed in one run by
    some CPU libraries and has ten times the error (9e-6) of any other.
    """
    image, video = ("image", (1, 4, 6), "x"), ("video", (2, 4, 4), "f")
    prompt = [("text", [1, 2]), image, ("text", [7, 8])]
    parts = [
        [*prompt, ("response", [3, 4, 5, 6, 9])],
        [*prompt, ("response", [3, 11])],
        [
            ("text", [5]),
            video,
            image,
            ("response", [12, 13]),
            ("observation", [14, 15]),
            ("response", [16]),
        ],
        [("text", [5, 6, 7]), ("response", [21, 22, 23])],
    ]
    parts = [
        [(k, v * times) if k == "response" else (k, v, *more) for k, v, *more in p] for p in parts
    ]
    out = with_pixels([make_sample(p, f"s{i}") for i, p in enumerate(parts)])
    out[2].media[0].second_per_grid_ts = 1.0
    return out


def stock(batch):
    """Right-padded, with everything that the model's own forward derives positions from."""
    width = max(map(len, batch))
    ids = torch.full((len(batch), width), FAMILY.pad_token_id)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    out = {
        "pixel_values": [],
        "image_grid_thw": [],
        "pixel_values_videos": [],
        "video_grid_thw": [],
    }
    for b, s in enumerate(batch):
        own = torch.from_numpy(s.input_ids)
        ids[b, : len(own)], mask[b, : len(own)] = own, 1
        types[b, : len(own)] = (own == FAMILY.image_token_id) + 2 * (own == FAMILY.video_token_id)
        for span in s.loss_spans:
            labels[b, span.start : span.stop] = own[span.start : span.stop]
        for span in s.modality_spans:
            medium = s.media[span.media_index]
            video = medium.modality == "video"
            out["pixel_values_videos" if video else "pixel_values"].append(
                torch.from_numpy(medium.pixel_values)
            )
            out["video_grid_thw" if video else "image_grid_thw"].append(
                torch.tensor([medium.grid_thw])
            )
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": types,
        "labels": labels,
        "use_cache": False,
    } | {k: torch.cat(v) for k, v in out.items() if v}


class Gradients(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append({n: p.grad.clone() for n, p in model.named_parameters()})


def made():
    return small_model("qwen2_5_vl")


def train(collator, tmp_path, model=None, **options):
    """Losses and gradients of two optimizer steps, of two micro-batches each. `collator`: of a model."""
    model = made() if model is None else model
    seen = Gradients()
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        optim="sgd",  # Adam would turn rounding of near-zero gradients into whole steps
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model,
        args,
        data_collator=collator(model),
        train_dataset=samples(times=8),
        callbacks=[seen],
    )
    trainer.train()
    return [h["loss"] for h in trainer.state.log_history if "loss" in h], seen.seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return train(lambda model: stock, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def exactly(tmp_path_factory):
    """The same in float64."""
    model = wide_copy(made())
    with Wide():
        return train(lambda model: stock, tmp_path_factory.mktemp("exact"), model=model)


@pytest.mark.parametrize(
    "options",
    [
        {"share_prefix": True, "pad_to_multiple_of": 16},
        pytest.param({"padding": "left"}, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_stock_padding(expected, exactly, options, tmp_path):
    """Layers are computed again in the backward, long after the forward; the collator is pickled."""
    packed = "share_prefix" in options
    more = {"gradient_checkpointing": True, "dataloader_num_workers": 1} if packed else {}
    losses, gradients = train(lambda model: SampleCollator(model, **options), tmp_path, **more)
    assert len(losses) == 2
    assert losses == pytest.approx(exactly[0], rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)  # the step changed something
    for step in (0, 1):
        assert_as_exact_as_separate(gradients[step], expected[1][step], exactly[1][step], step)


def test_label_smoothing_would_shift_labels_and_fails(tmp_path):
    with pytest.raises(RuntimeError, match="Size does not match at dimension 1"):
        train(SampleCollator, tmp_path, label_smoothing_factor=0.1)


def test_audio_is_refused():
    """Its placeholders would be embedded as text, without an error."""
    kit = get_kit("qwen2_5_omni")
    if not kit.available:
        pytest.skip("this transformers has no Qwen2.5-Omni")
    parts = [("text", [1]), ("audio", kit.audio, "call"), ("response", [3, 4])]
    data = with_pixels([make_sample(parts, "s", family=kit.family)])
    with pytest.raises(ModelError, match=r"the batch has audio.* Fix: call model"):
        SampleCollator(kit.small(), padding="right")(data)


def test_wrong_use_is_an_error():
    model = tiny_qwen2_5_vl()
    assert len(pickle.dumps(SampleCollator(model))) < 1_000  # it holds no model
    for wrong in ({"padding": "both"}, {"padding": "left", "share_prefix": True}):
        with pytest.raises(ArgumentError, match=r"padding is '.* Fix: pass padding=None"):
            SampleCollator(model, **wrong)
    with attach(model), pytest.raises(ModelError, match="is attached"):
        SampleCollator(model, padding="left")
    bare = samples()[:1]
    bare[0].media[0].pixel_values = None
    with pytest.raises(SchemaError, match="MM404"):
        SampleCollator(model)(bare)
    silent = make_sample([("text", [1, 2])], "silent")
    for chosen in (SampleCollator(model), SampleCollator(tiny_qwen2_5_vl(), padding="right")):
        with pytest.raises(
            ArgumentError, match=r"\(silent, silent\), and the mean over none is NaN"
        ):
            chosen([silent, silent])
    other = make_sample([("text", [1]), ("response", [2])], family="qwen2_vl")
    with pytest.raises(ModelError, match="of qwen2_vl, the model of qwen2_5_vl"):
        SampleCollator(model)([other])


def test_the_model_is_its_own_outside_of_forwards():
    """Between forward and backward too; a deep copy takes batches as the model does."""
    model = made().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = SampleCollator(model, share_prefix=True)(samples())
    ids = torch.tensor([[1, 2, 3]])
    gradients = []
    for own in (model, copy.deepcopy(model)):
        loss = own(**inputs).loss
        assert not is_attached(own)
        own.generate(input_ids=ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}
        )
    with attach(model):
        model.zero_grad()
        model.gradient_checkpointing_disable()
        model(**inputs).loss.backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert is_attached(model)  # as before the forward
    assert all(relative_difference(g, expected) <= 1e-6 for g in gradients)
    with pytest.raises(ModelError, match="visible_until has shape"):
        model(**(inputs | {"visible_until": inputs["visible_until"][1:], "attention_plan": None}))
    assert not is_attached(model)
