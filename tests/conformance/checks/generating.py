"""The model's own `generate` with a KV cache as the rollout, packed rows as the trainer: the same logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conformance.agree import close
from conformance.checks.layouts import other_inputs
from conformance.subject import Subject
from support.kits.samples import draw_pixels, sample_of

from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan

NEW = 4


def generate(subject: Subject) -> None:
    """Greedy tokens behind a picture, a picture and a clip, and text."""
    kit, model = subject.kit, subject.model
    random = np.random.default_rng(5)
    text = [("text", random.integers(0, kit.text_ids, n)) for n in (4, 3, 5)]
    clip = ("image", kit.other, "y") if kit.video is None else ("video", kit.video, "f")
    picture = ("image", kit.image, "x")
    asked: list[list[tuple[Any, ...]]] = [
        [text[0], picture, text[1]],
        [text[0], picture, text[1], clip, text[2]],
        [text[2]],
    ]
    prompts = [sample_of(kit, parts, f"p{i}") for i, parts in enumerate(asked)]
    draw_pixels(prompts)
    rolled = [_generated(subject, prompt) for prompt in prompts]
    with attach(model), torch.no_grad():
        batch = pack([sample for sample, _ in rolled], share_prefix=True)
        found = packed_logprobs(model, batch)
    close(found, torch.cat([logprobs for _, logprobs in rolled]), "shared", "generate")


def _generated(subject: Subject, prompt: Sample) -> tuple[Sample, torch.Tensor]:
    """The prompt with what greedy decoding adds, and its logprobs [new] as the scores give them."""
    model = subject.model
    inputs = other_inputs(model_inputs(pad([prompt]), model), model, prompt)
    # positions are the model's own here, past the prompt too
    inputs = {n: v for n, v in inputs.items() if n not in ("use_cache", "position_ids")}
    with torch.no_grad():
        out = model.generate(
            **inputs,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=subject.family.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
    new = out.sequences[0, len(prompt) :]
    scores = torch.stack([logits[0] for logits in out.logits]).log_softmax(-1)
    whole = np.concatenate([prompt.input_ids, new.numpy()])
    sample = replace(
        prompt, input_ids=whole, loss_spans=[LossSpan(len(prompt), len(whole), "response")]
    )
    return sample, scores.gather(1, new[:, None])[:, 0]
