"""GLM-V and Mistral 3: rollouts by transformers' generate, what mmpack makes of them, and where both sides part."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from support.kits import get_kit

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, rollout
from mmpack.adapters.trl.batch_rows import media_of_rows, rows_to_samples

pytestmark = pytest.mark.adapter
VERSION = Version(transformers.__version__)
RANDOM = np.random.default_rng(0)
SHAPES = ((70, 95, 3), (120, 60, 3))
PICTURES = [Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)) for shape in SHAPES]
FRAMES = RANDOM.integers(0, 256, (5, 60, 90, 3), dtype=np.uint8)
CLIP = (FRAMES, {"fps": 3.0, "frames_indices": [0, 3, 5, 7, 9], "total_num_frames": 20})


@pytest.fixture(scope="module", params=["glm4v", "glm46v", "mistral3"])
def made(request):
    """A family's kit, its processor, a small model."""
    kit = get_kit(request.param)
    return kit, kit.processor(), kit.small()


def prompts_of(kit):
    """Two pictures; a picture and a clip, which old processors expand wrongly beside each other."""
    one, two = ({"type": "image", "image": p} for p in PICTURES)
    ask = {"type": "text", "text": "what 12 ?"}
    prompts = [[{"role": "user", "content": [one, ask, two, ask]}]]
    if kit.video is not None:
        clip = {"type": "video", "video": CLIP}
        beside = [one] if Version("5.17") <= VERSION else []
        prompts.append([{"role": "user", "content": [ask, clip, *beside, ask]}])
    return prompts


@pytest.mark.few(1)
def test_a_rollout_is_what_the_trainer_sees(made):
    kit, hf, model = made
    prompts = prompts_of(kit)
    torch.manual_seed(0)
    # before 5.23 generate gives two responses of one prompt each other's pictures; GLM's prompts mmpack repeats itself
    count = 2 if kit.video is not None or Version("5.23") <= VERSION else 1
    kinds = {"max_new_tokens": 3, "n": count, "prompts_per_batch": 1}
    rolled = rollout(model, hf, prompts, [f"g{i}" for i in range(len(prompts))], **kinds)
    assert mp.validate(rolled) == []
    wrapped = mp.wrap_processor(hf)
    train = []
    for sample in rolled:
        (span,) = sample.loss_spans
        own = wrapped(
            prompts[int(sample.group_id[1:])],
            sample.input_ids[span.start :],
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            rollout_logprobs=sample.rollout_logprobs,
        )
        train.append(own)
    report = mp.compare(rolled, train, require=("input_ids", "media", "loss_spans"))
    assert report.ok, report.summary()
    for sample, own in zip(rolled, train, strict=True):
        assert np.array_equal(sample.position_ids, own.position_ids)
    with attach(model), torch.no_grad():
        found = packed_logprobs(model, mp.pack(train, share_prefix=True))
    wanted = np.concatenate([s.rollout_logprobs for s in train])
    assert np.abs(found.numpy() - wanted).max() < 1e-4


@pytest.mark.few(1)
def test_frames_have_their_times(made):
    """Other times are found; what is left after a drop is what the processor writes of the frames that are left."""
    kit, hf, _ = made
    if kit.video is None:
        pytest.skip("a video is a series of images")
    wrapped = mp.wrap_processor(hf)

    def sample(frames, indices):
        about = CLIP[1] | {"frames_indices": indices}
        content = [{"type": "video", "video": (frames, about)}, {"type": "text", "text": "?"}]
        return wrapped([{"role": "user", "content": content}], [5, 6], sample_id="s", group_id="g")

    sides = [sample(FRAMES, CLIP[1]["frames_indices"]), sample(FRAMES, [0, 4, 6, 9, 11])]
    for left, right in (sides, sides[::-1]):
        report = mp.compare([left], [right])
        assert list(report.causes) == ["frame_sampling"], report.summary()
    four = sample(FRAMES[:4], [0, 3, 5, 7])
    for dropped, left in ((0, slice(2, 4)), (1, slice(0, 2))):
        cut = mp.video.drop_frames(four, 0, [dropped])
        wanted = sample(FRAMES[left], [0, 3, 5, 7][left])
        assert np.array_equal(cut.input_ids, wanted.input_ids)


def test_trl_rows_of_padded_pictures_give_the_models_own_logprobs():
    """Mistral 3's batches have no grids: pictures [n, 3, height, width] and the size of each."""
    kit = get_kit("mistral3")
    hf, model = kit.processor(), kit.small()
    texts = ["<s>[INST][IMG]see 1[IMG]what?[/INST]the end", "<s>[INST][IMG]see[/INST]so it is"]
    shown = [PICTURES, PICTURES[:1]]
    out = hf(text=texts, images=shown, padding=True, add_special_tokens=False, return_tensors="pt")
    start = out["input_ids"].shape[1] - 2
    media = media_of_rows(out["pixel_values"], None, [2, 1], kit.about, out["image_sizes"])
    samples = rows_to_samples(out["input_ids"], out["attention_mask"], start, kit.about, media)
    assert mp.validate(samples) == []
    with torch.no_grad():
        logits = model(**out).logits[:, start - 1 : -1].log_softmax(-1)
        wanted = logits.gather(2, out["input_ids"][:, start:, None])[..., 0]
        with attach(model):
            found = packed_logprobs(model, mp.pack(samples))
    assert torch.allclose(found.view(2, 2), wanted, atol=1e-5, rtol=0)
