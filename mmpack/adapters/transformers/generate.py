"""Rollouts of transformers' own `generate` as samples: left-padded rectangles, KV cache, sampled logprobs.

Everything recorded is the rollout's own: the processor's ids and grids, `get_rope_index`'s positions, the sampler's
scores. None of it comes from mmpack's layout code, so that parity compares two independent sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from mmpack.errors import ArgumentError
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.layout.runs import placeholder_runs
from mmpack.processors.settings import text_hash
from mmpack.processors.wrap import media_of, wrap_processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan


def rollout(
    model: Any,
    hf_processor: Any,
    prompts: Sequence[Sequence[dict[str, Any]]],
    group_ids: Sequence[str],
    *,
    n: int = 4,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    prompts_per_batch: int = 4,
) -> list[Sample]:
    """Sample `n` responses of each prompt (chat messages with their images); torch's global seed decides them.

    `rollout_logprobs` are of the distribution that was sampled from: `temperature` applied, nothing cut off.
    Samples are called `<group_id>/<k>`. The model must be detached: `generate` needs its own attention.

    Raises ArgumentError for families whose processor returns no grids.
    """
    wrapped = wrap_processor(hf_processor)  # names settings and pictures, processes nothing
    settings = wrapped.settings
    if wrapped.family.pixel_layout == "tiles":
        raise ArgumentError(
            f"rollout: {wrapped.family.name}'s processor returns no grids of its media. "
            "Fix: mp.wrap_processor(…).from_ids(ids, media=…, expanded=True) for what generate returned"
        )
    stops = _stop_ids(model, hf_processor.tokenizer)
    config = GenerationConfig(  # nothing of the checkpoint's own: a penalty would change the scores
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        num_return_sequences=n,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=hf_processor.tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    out: list[Sample] = []
    for start in range(0, len(prompts), prompts_per_batch):
        part = slice(start, start + prompts_per_batch)
        inputs = _inputs(hf_processor, prompts[part], model.device)
        with torch.no_grad(), _own_config(model, config):
            generated = model.generate(**inputs)
        logprobs = _sampled_logprobs(generated, inputs["input_ids"].shape[1])
        positions = _positions(model, inputs, generated.sequences.shape[1])
        media = [
            [wrapped.rgb_pixels(item, "rollout") for item in media_of(messages, None)]
            for messages in prompts[part]
        ]
        grids = iter(inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist())
        for p, group_id in enumerate(group_ids[part]):
            own = [_with_grid(pixels, next(grids), settings) for pixels in media[p]]
            for k in range(n):
                b = p * n + k
                out.append(
                    _sample(
                        f"{group_id}/{k}",
                        group_id,
                        generated.sequences[b].cpu().numpy(),
                        inputs["attention_mask"][p].cpu().numpy(),
                        positions[:, p],
                        logprobs[b],
                        own,
                        hf_processor.tokenizer,
                        stops,
                        settings,
                        {"temperature": temperature, "top_p": 1.0, "top_k": 0},
                    )
                )
    return out


@contextmanager
def _own_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    kept, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = kept


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the checkpoint's, else the tokenizer's."""
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = tokenizer.eos_token_id
    return [int(i) for i in stops] if isinstance(stops, (list, tuple)) else [int(stops)]


def _inputs(hf_processor: Any, prompts: Sequence[Any], device: Any) -> Any:
    texts = [
        hf_processor.tokenizer.apply_chat_template(
            list(messages),
            chat_template=hf_processor.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        for messages in prompts
    ]
    images = [image for messages in prompts for image in media_of(messages, None)]
    return hf_processor(
        text=texts,
        images=images or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_mm_token_type_ids=True,
    ).to(device)


def _sampled_logprobs(generated: Any, prompt_length: int) -> np.ndarray:
    """float32 [B, new]: of each sampled id, under the scores that it was sampled from."""
    new = generated.sequences[:, prompt_length:]
    steps = [
        torch.log_softmax(scores.float(), dim=-1).gather(1, new[:, t, None])[:, 0]
        for t, scores in enumerate(generated.scores)
    ]
    return torch.stack(steps, dim=1).cpu().numpy()


def _positions(model: Any, inputs: Any, length: int) -> np.ndarray:
    """int64 [3, prompts, length]: the prompt's by `get_rope_index`, then one a step past the rope delta."""
    mask = inputs["attention_mask"]
    given = {"image_grid_thw": inputs["image_grid_thw"]} if "image_grid_thw" in inputs else {}
    prompt, delta = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        attention_mask=mask,
        **given,
    )
    steps = torch.arange(length - mask.shape[1], device=mask.device)
    decoded = mask.sum(dim=1, keepdim=True) + delta + steps
    whole = torch.cat([prompt, decoded.expand(3, *decoded.shape)], dim=2)
    return whole.cpu().numpy()


def _with_grid(
    image: tuple[np.ndarray, dict[str, Any]], grid: list[int], settings: dict[str, Any]
) -> Medium:
    pixels, known = image
    content = content_hash("image", pixels)
    t, h, w = (int(n) for n in grid)
    return Medium(
        media_id=f"image:{content[:16]}",
        modality="image",
        cache_key=cache_key(content, (t, h, w), settings["image"]),
        grid_thw=(t, h, w),
        num_tokens=t * h * w // settings["image"]["merge_size"] ** 2,
        content_hash=content,
        **known,
    )


def _sample(
    sample_id: str,
    group_id: str,
    sequence: np.ndarray,
    prompt_mask: np.ndarray,
    positions: np.ndarray,
    logprobs: np.ndarray,
    runs: list[Medium],
    tokenizer: Any,
    stops: list[int],
    settings: dict[str, Any],
    sampling: dict[str, Any],
) -> Sample:
    """One row of the rectangle: cut the padding on the left, and what follows the end of the response."""
    left = int(len(prompt_mask) - prompt_mask.sum())
    response = sequence[len(prompt_mask) :]
    ends = np.flatnonzero(np.isin(response, stops))
    count = int(ends[0]) + 1 if len(ends) else len(response)
    prompt_length = len(prompt_mask) - left
    whole = slice(left, len(prompt_mask) + count)
    ids = sequence[whole].astype(np.int64)
    found = placeholder_runs(ids[:prompt_length], settings["family"])
    media = list({m.cache_key: m for m in runs}.values())
    place = {m.cache_key: i for i, m in enumerate(media)}
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        family=settings["family"],
        input_ids=ids,
        media=media,
        modality_spans=[
            ModalitySpan(int(a), int(b), "image", place[m.cache_key])
            for a, b, m in zip(found.starts, found.stops, runs, strict=True)
        ],
        loss_spans=[LossSpan(prompt_length, len(ids), turn=0)],
        position_ids=np.ascontiguousarray(positions[:, whole]),
        attention_mask=np.ones(len(ids), dtype=np.int8),
        processor=settings,
        processor_fingerprint=fingerprint(settings),
        rollout_logprobs=logprobs[:count].astype(np.float32),
        sampling=sampling | {"logprobs": "processed"},
        finish_reason="stop" if len(ends) else "length",
        metadata={RESPONSE_TEXT_KEY: text_hash(tokenizer.decode(response[:count].tolist()))},
    )
