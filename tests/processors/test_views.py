"""Pictures cut into views: what wrapped parts make of them beside transformers' image processor and model."""

import copy

import numpy as np
import pytest
import transformers
from PIL import Image
from support.kits import get_kit
from support.replicas.chat_templates import MINICPM
from support.replicas.minicpm_processor import minicpm_tokenizer

import mmpack as mp
from mmpack.errors import ArgumentError, LayoutError
from mmpack.processors.views import VIEW, pictures

pytestmark = [
    pytest.mark.adapter,
    pytest.mark.skipif(
        not get_kit("minicpmv4_6").available, reason="this transformers has no MiniCPM-V 4.6"
    ),
]
SIZES = ((100, 150), (60, 40), (130, 70))  # four slices, none, two


@pytest.fixture(scope="module")
def tokenizer():
    return minicpm_tokenizer()


def picture(height, width, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def image_processor(**settings):
    values = {"scale_resolution": 64, "max_slice_nums": 4} | settings
    return transformers.MiniCPMV4_6ImageProcessorPil(**values)


def wrapped(tokenizer, chat_template=MINICPM, **settings):
    return mp.wrap_processor(
        tokenizer=tokenizer,
        image_processor=image_processor(**settings),
        family="minicpmv4_6",
        chat_template=chat_template,
    )


def asked(*images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_numbers_run_through_a_sample_and_can_be_left_out(tokenizer):
    images = [picture(*size, seed=k) for k, size in enumerate(SIZES)]
    processor = wrapped(tokenizer)
    sample = processor(asked(*images[:2]), response_ids=[5, 248_046], sample_id="a")
    longer = processor.append(sample, messages=asked(images[2]), response_ids=[6])
    text = tokenizer.decode(longer.input_ids.tolist())
    assert [text.count(f"<image_id>{k}</image_id>") for k in range(4)] == [1, 1, 1, 0]
    whole = [*asked(*images[:2]), {"role": "assistant", "content": "x"}, *asked(images[2])]
    without_thinking = MINICPM.replace(r"<think>\n\n</think>\n\n", "")
    spread = wrapped(tokenizer, without_thinking)(whole, assistant_loss=True, sample_id="b")
    text = tokenizer.decode(spread.input_ids.tolist())
    assert [text.count(f"<image_id>{k}</image_id>") for k in range(4)] == [1, 1, 1, 0]
    plain = wrapped(tokenizer, use_image_id=False)(asked(images[0]), sample_id="c")
    assert "<image_id>" not in tokenizer.decode(plain.input_ids.tolist())


def test_ids_of_an_engine_are_expanded_as_messages_are(tokenizer):
    images = [picture(*size) for size in SIZES]
    processor = wrapped(tokenizer)
    sample = processor(asked(*images), response_ids=[5, 6], sample_id="a")
    prompt = tokenizer(processor.render(asked(*images)), add_special_tokens=False)["input_ids"]
    again = processor.from_ids(
        [*prompt, 5, 6],
        images,
        expanded=False,
        loss_spans=[(len(prompt), len(prompt) + 2)],
        sample_id="a",
    )
    assert again.input_ids.tolist() == sample.input_ids.tolist()
    assert mp.compare([sample], [again]).ok
    recorded = [copy.copy(m) for m in sample.media]  # views as a trace has them
    from_views = processor.from_ids(prompt, recorded, expanded=False, sample_id="b")
    assert from_views.input_ids.tolist() == sample.input_ids.tolist()[:-2]


def test_what_is_refused(tokenizer):
    processor = wrapped(tokenizer)
    with pytest.raises(ArgumentError, match=r"cuts this picture into 5 views.*Fix: call views"):
        processor.medium(picture(100, 150))
    views = processor.views(picture(100, 150))
    assert [v.metadata[VIEW] for v in views] == [[k, 2, 2] for k in range(5)]
    for broken in (views[1:], views[:-1], views[:2] + views[3:], views[::-1]):
        with pytest.raises(LayoutError, match="all views of a picture, in order"):
            pictures(broken)
    with pytest.raises(ArgumentError, match="downsample_mode is 4x"):
        wrapped(tokenizer, downsample_mode="4x")
    with pytest.raises(ArgumentError, match=r"has no video policy.*Fix: pass a Medium with"):
        processor.views((np.zeros((2, 64, 64, 3), np.uint8), {"fps": 1.0}))


def test_a_processor_of_other_views_is_refused():
    """SmolVLM, whose slices come before the whole; what is written: the conformance check `layout`."""
    hf = get_kit("smolvlm").processor()
    for split, count in ((True, 5), (False, 1)):
        hf.image_processor.do_image_splitting = split
        sample = mp.wrap_processor(hf)(asked(picture(90, 120)), response_ids=[5], sample_id="s")
        assert [len(views) for views in pictures(sample.media)] == [count]
    hf.image_seq_len = 9
    match = "image_seq_len is 9, but smolvlm has 4 tokens per view"
    with pytest.raises(ArgumentError, match=match):
        mp.wrap_processor(hf)


@pytest.mark.parametrize("side", [56, 60])
def test_tokens_by_size_are_those_of_the_processor(side):
    """LLaVA-OneVision: padding cut along either side, more tiles than nine, and tiles that are no whole patches."""
    kit = get_kit("llava_onevision")
    hf, random = kit.processor(), np.random.default_rng(0)
    hf.image_processor.size = {"height": side, "width": side}
    sizes = [[side * rows, side * columns] for rows in range(1, 5) for columns in range(1, 5)]
    hf.image_processor.image_grid_pinpoints = sizes
    wrapped = mp.wrap_processor(hf)
    for height, width in [(300, 300), (33, 250), (250, 31), *random.integers(20, 300, (6, 2))]:
        image = picture(int(height), int(width))
        sample = wrapped(asked(image), response_ids=[5], sample_id="s")
        text = hf.apply_chat_template(asked(image), tokenize=False, add_generation_prompt=True)
        wanted = hf(text=[text], images=[image], return_tensors="np")
        assert sample.input_ids[:-1].tolist() == wanted["input_ids"][0].tolist()
        assert sample.media[0].size == (width, height) and mp.validate(sample) == []
    hf.vision_aspect_ratio = "anyres_max_4"
    with pytest.raises(
        ArgumentError, match="vision_aspect_ratio of the processor is 'anyres_max_4'"
    ):
        mp.wrap_processor(hf)
