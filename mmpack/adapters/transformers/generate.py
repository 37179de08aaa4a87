"""Rollouts of transformers' own `generate` as samples: left-padded rectangles, KV cache, sampled logprobs.

Everything recorded is the rollout's own: the processor's ids and grids, `get_rope_index`'s positions, the sampler's
scores. None of it comes from mmpack's layout code, so that parity compares two independent sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from mmpack.adapters.checks import check_each, check_groups, is_list
from mmpack.adapters.processed_media import described_medium
from mmpack.adapters.row_sample import row_sample
from mmpack.errors import ArgumentError, check_number, check_whole, kind_of
from mmpack.families import Family
from mmpack.layout.fingerprint import content_hash
from mmpack.layout.names import numbered_in_groups
from mmpack.processors.messages import parts_of
from mmpack.processors.videos import Clip
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.versions import own_budgets
from mmpack.video.hand_over import hf_kwargs, hf_metadata


def rollout(
    model: Any,
    hf_processor: Any,
    prompts: Sequence[Sequence[dict[str, Any]]],
    group_ids: Sequence[str],
    *,
    n: int = 4,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    prompts_per_batch: int = 4,
    media_root: str | Path | None = None,
    video_policy: str | None = None,
    video_settings: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Sample `n` responses of each prompt (chat messages with their media); torch's global seed decides them.

    `rollout_logprobs` are of the distribution that was sampled from: `temperature` applied, over the ids that `top_p`,
    `top_k` and `min_p` left. These are its `kept_ids`; by default nothing is cut off, and it has none. Samples are
    called `<group_id>/<k>`. The model must be detached: `generate` needs its own attention.

    Args: `media_root`, `video_policy`, `video_settings`: of `wrap_processor`. Videos are sampled and decoded by its
    plan; the processor lays their frames out, with the plan's times.
    Raises: ArgumentError for counts and temperatures out of range, for prompts without one group id each, for families
    whose processor returns no grids, and for videos of unlike pixel limits in one batch of prompts.
    """
    for name, count in (
        ("n", n),
        ("max_new_tokens", max_new_tokens),
        ("prompts_per_batch", prompts_per_batch),
    ):
        check_whole("rollout", name, count)
    check_number("rollout", "temperature", temperature, above=0)
    check_number("rollout", "top_p", top_p, above=0, most=1)
    check_whole("rollout", "top_k", top_k, least=0, fix="pass 0 for no limit")
    check_number("rollout", "min_p", min_p, least=0, most=1)
    if not is_list(prompts):
        raise ArgumentError(
            f"rollout: prompts are {kind_of(prompts)}. Fix: pass a list, with one entry per prompt"
        )
    check_each("rollout", len(prompts), "prompts", {"group_ids": group_ids})
    check_groups("rollout", group_ids)
    if not hasattr(model, "generate"):
        raise ArgumentError(
            f"rollout: the model is {kind_of(model)}, which has no generate. Fix: pass a transformers model"
        )
    # it names settings and media, and lays nothing out
    wrapped = wrap_processor(
        hf_processor,
        media_root=media_root,
        video_policy=video_policy,
        video_settings=video_settings,
    )
    settings = wrapped.settings
    if wrapped.family.pixel_layout in ("tiles", "strip", "padded"):
        raise ArgumentError(
            f"rollout: {wrapped.family.name}'s processor returns no grids for its media. "
            "Fix: call mp.wrap_processor(…).from_ids(ids, media=…, expanded=True) on what generate returned"
        )
    stops = _stop_ids(model, hf_processor.tokenizer)
    filtered = top_p < 1 or top_k > 0 or min_p > 0
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling |= {"min_p": min_p} if min_p > 0 else {}
    by_hand = wrapped.family.video_bounds is not None
    # nothing of the checkpoint's own: a penalty would change the scores
    config = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p or None,
        num_return_sequences=1 if by_hand else n,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=hf_processor.tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sample_ids = iter(numbered_in_groups([g for g in group_ids for _ in range(n)]))
    out: list[Sample] = []
    for start in range(0, len(prompts), prompts_per_batch):
        part = slice(start, start + prompts_per_batch)
        media = [_opened(messages, wrapped) for messages in prompts[part]]
        texts = [wrapped.render(messages) for messages in prompts[part]]
        inputs = _inputs(hf_processor, texts, media, model.device)
        handed = _by_hand(inputs, media, n) if by_hand else inputs
        with torch.no_grad(), _own_config(model, config):
            generated = model.generate(**handed)
        logprobs = _sampled_logprobs(generated, inputs["input_ids"].shape[1])
        kept = _kept_ids(generated) if filtered else None
        positions = _positions(model, inputs, generated.sequences.shape[1])
        shown = [m for own in media for m in own]
        recorded = iter(_recorded(shown, inputs, settings, wrapped.family))
        for p, group_id in enumerate(group_ids[part]):
            own = [next(recorded) for _ in media[p]]
            for b in range(p * n, (p + 1) * n):
                out.append(
                    _sample(
                        generated.sequences[b].cpu().numpy(),
                        inputs["attention_mask"][p].cpu().numpy(),
                        positions[:, p],
                        logprobs[b],
                        None if kept is None else kept[b],
                        own,
                        wrapped,
                        stops,
                        sample_id=next(sample_ids),
                        group_id=group_id,
                        sampling=sampling | {"logprobs": "processed"},
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


Opened = Clip | tuple[Any, tuple[np.ndarray, dict[str, Any]]]  # a video; a picture and its pixels


def _opened(messages: Sequence[dict[str, Any]], wrapped: Processor) -> list[Opened]:
    return [
        wrapped.clip(item, "rollout")
        if kind == "video"
        else (item, wrapped.rgb_pixels(item, "rollout"))
        for kind, item in parts_of(messages, None)
    ]


def _inputs(hf_processor: Any, texts: list[str], media: Sequence[list[Opened]], device: Any) -> Any:
    clips = [m for own in media for m in own if isinstance(m, Clip)]
    return hf_processor(
        text=texts,
        images=[m[0] for own in media for m in own if not isinstance(m, Clip)] or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_mm_token_type_ids=True,
        add_special_tokens=False,  # the chat template wrote them
        **(_of_clips(clips, hf_processor) if clips else {}),
    ).to(device)


def _of_clips(clips: Sequence[Clip], hf_processor: Any) -> dict[str, Any]:
    """Frames and their metadata, for the processor to lay out and not to sample again."""
    options = [hf_kwargs(clip.plan) for clip in clips]
    resizes = [o.pop("do_resize") for o in options]
    if any(o != options[0] for o in options):
        raise ArgumentError(
            "rollout: the plans of one batch have different pixel limits. "
            "Fix: pass prompts_per_batch=1, or use one policy"
        )
    settings = options[0] | {
        # to the size that they have: frames of the other plans don't change
        "do_resize": any(resizes),
        "video_metadata": [hf_metadata(c.plan) for c in clips],
    }
    settings = own_budgets(hf_processor.video_processor) | settings
    return {"videos": [clip.tensor() for clip in clips], "videos_kwargs": settings}


def _by_hand(inputs: Any, media: Sequence[Sequence[Opened]], n: int) -> dict[str, Any]:
    """Each prompt `n` times, clips as images, frame by frame among the pictures; of models with one id for both.

    transformers' forward of such a model takes no row that has pictures and clips, and its generate hands several
    responses of one prompt each other's pictures.
    """
    named = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }
    names = {kind: pair for kind, pair in named.items() if pair[0] in inputs}
    rows = {
        kind: iter(inputs[pixels].split(inputs[grids].prod(dim=1).tolist()))
        for kind, (pixels, grids) in names.items()
    }
    sizes = {kind: iter(inputs[grids].tolist()) for kind, (_, grids) in names.items()}
    out = {
        k: v.repeat_interleave(n, dim=0)
        for k, v in inputs.items()
        if not any(k in pair for pair in named.values())
    }
    pixels, grids = [], []
    for own in media:
        kinds = ["video" if isinstance(m, Clip) else "image" for m in own]
        pixels += [next(rows[kind]) for kind in kinds] * n
        split = [(1, h, w) for t, h, w in (next(sizes[kind]) for kind in kinds) for _ in range(t)]
        grids += split * n
    if pixels:
        out["pixel_values"] = torch.cat(pixels)
        out["image_grid_thw"] = torch.tensor(grids, device=inputs["input_ids"].device)
    out["mm_token_type_ids"] = out["mm_token_type_ids"].clamp(max=1)
    return out


def _sampled_logprobs(generated: Any, prompt_length: int) -> np.ndarray:
    """float32 [B, new]: of each sampled id, under the scores that it was sampled from."""
    new = generated.sequences[:, prompt_length:]
    steps = [
        torch.log_softmax(scores.float(), dim=-1).gather(1, new[:, t, None])[:, 0]
        for t, scores in enumerate(generated.scores)
    ]
    return torch.stack(steps, dim=1).cpu().numpy()


def _kept_ids(generated: Any) -> list[list[np.ndarray]]:
    """The ids of each row that each step's filters left, [B][new]: those whose score is finite."""
    steps = [scores.isfinite().cpu().numpy() for scores in generated.scores]
    return [[np.flatnonzero(kept[b]) for kept in steps] for b in range(len(steps[0]))]


def _positions(model: Any, inputs: Any, length: int) -> np.ndarray:
    """int64 [rows, prompts, length]: the prompt's by `get_rope_index`, then one step per token past the rope delta."""
    mask = inputs["attention_mask"]
    if not hasattr(model.model, "get_rope_index"):  # positions that count tokens
        whole = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
        return (whole.cumsum(dim=1) - 1).clamp(min=0)[None].cpu().numpy()
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    prompt, delta = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        attention_mask=mask,
        **{name: inputs[name] for name in names if name in inputs},
    )
    steps = torch.arange(length - mask.shape[1], device=mask.device)
    decoded = mask.sum(dim=1, keepdim=True) + delta + steps
    whole = torch.cat([prompt, decoded.expand(3, *decoded.shape)], dim=2)
    return whole.cpu().numpy()


def _recorded(
    media: Sequence[Opened], inputs: Any, settings: dict[str, Any], family: Family
) -> Iterator[Medium]:
    """The media, with grids and seconds as the processor returned them."""
    none = torch.zeros(0, 3)
    grids = {
        kind: iter(inputs.get(f"{kind}_grid_thw", none).tolist()) for kind in ("image", "video")
    }
    if "image_sizes" in inputs:  # in pixels, whole patches
        sizes = (inputs["image_sizes"] // family.patch_size).tolist()
        grids["image"] = iter([[1, *size] for size in sizes])
    seconds = iter(inputs.get("second_per_grid_ts", ()))
    for m in media:
        if isinstance(m, Clip):
            per_grid = next(seconds, None)
            known = m.plan.medium_fields() | m.known
            known["second_per_grid_ts"] = m.seconds(None if per_grid is None else float(per_grid))
            yield _with_grid("video", m.content_hash, next(grids["video"]), known, settings)
        else:
            pixels, known = m[1]
            content = content_hash("image", pixels)
            yield _with_grid("image", content, next(grids["image"]), known, settings)


def _with_grid(
    kind: str, content: str, grid: list[int], known: dict[str, Any], settings: dict[str, Any]
) -> Medium:
    tokens = int(np.prod(grid)) // settings[kind]["merge_size"] ** 2
    return described_medium(kind, content, grid, tokens, settings, known)


def _sample(
    sequence: np.ndarray,
    prompt_mask: np.ndarray,
    positions: np.ndarray,
    logprobs: np.ndarray,
    kept: list[np.ndarray] | None,
    media: list[Medium],
    processor: Processor,
    stops: list[int],
    **fields: Any,
) -> Sample:
    """One row of the rectangle: cut the padding on the left, and what follows the end of the response."""
    left = int(len(prompt_mask) - prompt_mask.sum())
    response = sequence[len(prompt_mask) :]
    ends = np.flatnonzero(np.isin(response, stops))
    count = int(ends[0]) + 1 if len(ends) else len(response)
    start = len(prompt_mask) - left
    whole = slice(left, len(prompt_mask) + count)
    return row_sample(
        "rollout",
        sequence[whole],
        {kind: [m for m in media if m.modality == kind] for kind in ("image", "video")},
        np.arange(start + count) >= start,
        processor.family,
        response_start=start,
        processor=processor,
        position_ids=np.ascontiguousarray(positions[:, whole]),
        rollout_logprobs=logprobs[:count].astype(np.float32),
        kept_ids=None if kept is None else Ragged.of(kept[:count]),
        finish_reason="stop" if len(ends) else "length",
        **fields,
    )
