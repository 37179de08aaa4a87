"""Frameworks' own calls, samples one after the other (THD), run as shared packs: layers see each shared row once.

The head sees every token again: logits [1, T, V / ranks] are where the framework reads them, and cost what they did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from mmpack.adapters.megatron.attention import ATTACHED, Attached, attach
from mmpack.adapters.megatron.inputs import arguments_of, rows_of
from mmpack.adapters.megatron.modules import other_forward, pad_multiple, refuse_first, unwrap
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.megatron.vision import Tower
from mmpack.adapters.processed_media import media_of_inputs
from mmpack.adapters.row_sample import row_sample
from mmpack.families import Family, get_family
from mmpack.layout.runs import placeholder_runs
from mmpack.packing.pack import pack
from mmpack.schema.sample import Sample

CALL = "mmpack, THD"


def attach_thd(model: Any, family: str, tower: Tower | None = None) -> Attached:
    """`attach`, and let forwards with THD `packed_seq_params` share prefixes, as vime, slime and ms-swift call them.

    Args: `family`: whose ids, positions and media the samples have; `position_ids` of a call are not read. Pictures
    come as `pixel_values` and `image_grid_thw`, in the order of their placeholders.
    Raises: as `attach`; ModelError under context parallelism, and in a pipeline without `variable_seq_lengths`.
    """
    about, handle = get_family(family), attach(model, tower)
    for whole in handle.chunks:
        language = unwrap(whole, CALL)[1]
        groups, fixed = language.pg_collection, not language.config.variable_seq_lengths
        for_each = (
            groups.cp.size() > 1,
            "context parallel ranks share samples",
            "use packed_logprobs",
        )
        lengths = (
            groups.pp.size() > 1 and fixed,
            "a pipeline has one length",
            "set variable_seq_lengths",
        )
        refuse_first(CALL, for_each, lengths)
        forward = functools.partial(_forward, whole, language, about, whole.forward)
        vars(whole)[ATTACHED].enter_context(other_forward(whole, forward))
    return handle


def _forward(
    whole: Any, language: Any, family: Family, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    params = kwargs.get("packed_seq_params")
    if isinstance(params, Rows) or getattr(params, "qkv_format", None) != "thd":
        return own(*args, **kwargs)
    other = bool(args) or kwargs.get("labels") is not None
    videos = kwargs.get("pixel_values_videos") is not None
    refuse_first(
        CALL,
        (other, "labels were passed", "read the logits, pass arguments by name"),
        (videos, "videos were passed", "use packed_logprobs"),
    )
    ids = kwargs["input_ids"]
    batch = pack(_samples(ids[0], params, kwargs, family), None, True, pad_multiple(whole))
    batch = batch.to(ids.device)
    rows = rows_of(batch, whole, CALL)
    index = batch.token_rows.new_zeros(ids.shape[1])  # what follows the last sample is any row
    index[: len(batch.token_rows)] = batch.token_rows
    if not language.post_process:
        return own(**arguments_of(rows))
    head, group = language.output_layer, language.pg_collection.tp
    forward = head.forward

    def every_token(hidden: torch.Tensor, *given: Any, **more: Any) -> Any:
        if head.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, False, group=group
            )
        hidden = hidden.index_select(0, index)
        if head.sequence_parallel:
            hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=group)
        return forward(hidden, *given, **more)

    with other_forward(head, every_token):
        return own(**arguments_of(rows))


def _samples(ids: Any, params: Any, given: dict[str, Any], family: Family) -> list[Sample]:
    """The samples of a call, without loss tokens."""
    media = media_of_inputs(given, family, CALL)["image"]
    ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    out, host = [], ids.cpu().numpy()
    for b, (start, stop) in enumerate(pairwise(ends.tolist())):
        tokens = host[start:stop]
        count = len(placeholder_runs(tokens, family).bounds)
        own, media = {"image": media[:count]}, media[count:]
        none = np.zeros(len(tokens), dtype=bool)
        about: dict[str, Any] = {"sample_id": str(b), "group_id": ""}
        about["response_start"] = len(tokens)
        out.append(row_sample(f"{CALL}: sample {b}", tokens, own, none, family, **about))
    return out
