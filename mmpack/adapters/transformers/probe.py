"""`probe_side`: a transformers VLM as a side of the probe, in any layout and dtype, by forward hooks on its modules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mmpack.adapters.transformers.attention import attach, is_attached
from mmpack.adapters.transformers.heads import Asked, head_of, logit_cap, read_hidden, reader
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.probe_hooks import BatchRows, Hooks
from mmpack.adapters.transformers.routes import take_routes
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import (
    ArgumentError,
    check_flag,
    check_name,
    check_number,
    check_whole,
    installed_version,
    kind_of,
)
from mmpack.packing.batch import Batch
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad
from mmpack.probe.record import IN, OUT, Recorder
from mmpack.probe.side import Side
from mmpack.schema.sample import Sample

LAYOUTS = ("packed", "shared", "padded", "padded_right", "alone")
_CHUNK = 64  # rows whose logits exist at once


def probe_side(
    model: Any,
    name: str | None = None,
    *,
    layout: str = "packed",
    dtype: torch.dtype | None = None,
    attached: bool | None = None,
    temperature: float = 1.0,
    samples_per_batch: int | None = None,
    kept_ids: bool = True,
) -> Side:
    """A side of `mp.probe.run` that runs a transformers VLM in eval mode, without gradients.

    It records what goes into and comes out of every module of the tower and of the text model, the LM head at the rows
    that predict loss tokens (`lm_head`), and the logprobs of loss tokens (`logprobs`). Modules are named as
    transformers names them, without the wrappers of PEFT, DDP, torch.compile and checkpointing. A module that an
    adapter wraps (`base_layer`) counts as one, with its adapter.

    Args:
        model: a transformers VLM, or PEFT's wrapper of one, with the attention that it has.
        name: of the side, in the report.
        layout: "packed", "shared" (prefixes once), "padded" (left), "padded_right", or "alone" (each sample by itself).
        dtype: run a copy of the model in this dtype. None: the model itself.
        attached: with mmpack's attention, or with the model's own (padded and alone only). None: as the layout needs,
            else as the model is.
        temperature: of the logprobs.
        samples_per_batch: micro-batches of so many samples; None: all in one.
        kept_ids: logprobs are over the samples' kept ids, where they have some; see `packed_logprobs`.

    On a GPU, float32 convolutions are computed without TF32 while it runs.

    Raises: ArgumentError, also where float32 products on a GPU round to TF32, whose noise is not float32's; as `attach`
    and `model_inputs` do.
    """
    what = "probe_side"
    whole = unwrap(model, what)
    check_name(what, "layout", layout, LAYOUTS)
    check_number(what, "temperature", temperature, above=0)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"{what}: dtype is {dtype!r:.60}. Fix: pass torch.float32, torch.bfloat16, …"
        )
    if samples_per_batch is not None:
        check_whole(what, "samples_per_batch", samples_per_batch)
    check_flag(what, "kept_ids", kept_ids)
    if attached is not None:
        check_flag(what, "attached", attached)
        attached = bool(attached)
    if attached is False and layout in ("packed", "shared"):
        raise ArgumentError(
            f"{what}: layout {layout!r} needs mmpack's attention. Fix: pass attached=True, or layout='padded'"
        )
    kind = dtype or next(whole.parameters()).dtype
    words = [layout, str(kind).removeprefix("torch.")]
    about = {
        "layout": layout,
        "dtype": words[1],
        "attached": attached,
        "attention": whole.config.get_text_config()._attn_implementation,
        "model_type": whole.config.model_type,
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
    }
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"{what}: name is {kind_of(name)}. Fix: pass a str")

    def run(samples: Sequence[Sample], recorder: Recorder) -> None:
        own = model if dtype is None or dtype == next(whole.parameters()).dtype else None
        if own is None:
            own = _copy(model, dtype)
        size = 1 if layout == "alone" else samples_per_batch or len(samples)
        with _ready(own, layout, attached), _float32(own), torch.no_grad():
            for start in range(0, len(samples), size):
                some = samples[start : start + size]
                _run_batch(own, _batch(some, layout, own), some, recorder, temperature, kept_ids)

    return Side(name or " ".join(words), run, about)


def _copy(model: Any, dtype: torch.dtype | None) -> Any:
    """The model in another dtype; what it keeps in float32 by itself (rotary frequencies) stays so."""
    made = copy.deepcopy(model)
    frequencies = {
        n: b
        for n, b in unwrap(made, "probe_side").named_buffers()
        if "inv_freq" in n.split(".")[-1]
    }
    kept = {n: b.detach().clone() for n, b in frequencies.items()}
    made.to(dtype)
    for n, buffer in unwrap(made, "probe_side").named_buffers():
        if n in kept and kept[n].dtype == torch.float32:
            buffer.data = kept[n].to(buffer.device)
    return made


@contextlib.contextmanager
def _ready(model: Any, layout: str, attached: bool | None) -> Iterator[None]:
    """Eval mode, and mmpack's attention where the layout needs it; all is put back."""
    whole = unwrap(model, "probe_side")
    wanted = attached if attached is not None else layout in ("packed", "shared") or None
    if wanted is False and is_attached(model):
        raise ArgumentError(
            "probe_side: the model is attached, but attached=False. Fix: call detach(model) first"
        )
    training = {m: m.training for m in whole.modules()}
    whole.eval()
    try:
        with attach(model) if wanted else contextlib.nullcontext():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _float32(model: Any) -> Iterator[None]:
    """float32 products of a GPU in float32: TF32 keeps 10 bits, and kernels differ in when they use it."""
    weight = next(model.parameters())
    if weight.device.type != "cuda" or weight.dtype != torch.float32:
        yield
        return
    if torch.backends.cuda.matmul.allow_tf32:
        raise ArgumentError(
            "probe_side: float32 products round to TF32 here, which is coarser than the probe allows. "
            "Fix: set torch.backends.cuda.matmul.allow_tf32 = False, or dtype=torch.bfloat16"
        )
    convolutions: Any = torch.backends.cudnn
    before = convolutions.allow_tf32
    convolutions.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32 = before


def _batch(samples: Sequence[Sample], layout: str, model: Any) -> Batch:
    if layout in ("packed", "shared"):
        batch: Batch = pack(samples, share_prefix=layout == "shared")
    else:
        batch = pad(samples, side="right" if layout == "padded_right" else "left")
    moved: Batch = batch.to(next(model.parameters()).device)
    return moved


def _run_batch(
    model: Any,
    batch: Batch,
    samples: Sequence[Sample],
    recorder: Recorder,
    temperature: float,
    kept_ids: bool,
) -> None:
    whole = unwrap(model, "probe_side")
    members = recorder.places.numbers_of(samples)
    rows = BatchRows(batch, members, recorder.places, whole)
    recorder.begin()
    if batch.routed_experts is not None:
        take_routes(whole)  # its hooks before those of the recorder, which sees what was replayed
    with Hooks(whole, rows, recorder):
        inputs = model_inputs(batch, model)
        hidden = whole.model(**inputs).last_hidden_state
    flat = hidden.reshape(-1, hidden.shape[-1])
    head = head_of(whole)
    heads = rows.head_rows()
    if heads is None:
        return
    chosen, at = heads
    read = recorder.shaken(flat.index_select(0, at.to(flat.device)))
    for start in range(0, len(read), _CHUNK):
        some, part = read[start : start + _CHUNK], chosen.part(start, start + _CHUNK)
        source = recorder.put("lm_head", IN, some, part)
        logits = recorder.shaken(head(some))
        recorder.put("lm_head", OUT, logits, part, source, some.shape[-1])
    read_out = reader(head, batch, Asked(temperature, kept_ids=kept_ids), logit_cap(whole))
    values = read_hidden(head, read_out, recorder.shaken(hidden))
    scored = torch.stack([values, torch.ones_like(values)], dim=1)  # so that errors are of order 1
    for part in rows.loss_rows():
        recorder.put("logprobs", OUT, recorder.shaken(scored), part)
