"""A pass of verl's real FSDP engine on a CPU, stock and packed: the same logprobs and entropies."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from conformance.agree import NotHere, expect
from conformance.subject import Subject

from mmpack.contracts import TOLERANCES
from mmpack.errors import installed_version

TEMPERATURE = 0.7


def verl(subject: Subject) -> None:
    """The drawn samples, each with what follows its last observation as the response."""
    if installed_version("verl") is None:
        raise NotHere("verl is not installed")
    from conformance.verl_cpu import make_engine, start

    from mmpack.adapters.verl import use
    from mmpack.adapters.verl.data import from_samples

    start()
    samples = [replace(s, loss_spans=s.loss_spans[-1:]) for s in subject.samples]
    data = from_samples(samples)
    with tempfile.TemporaryDirectory() as folder:
        subject.kit.small(spread=2.0).save_pretrained(folder)
        engine = make_engine(Path(folder))
    stock = _inferred(engine, data)
    handle = use(engine)
    with handle:
        own = _inferred(engine, data)
    mask = data.batch["response_mask"].bool()
    bound = TOLERANCES["layouts"].value
    for name in ("log_probs", "entropy"):
        off = float((own[name] - stock[name])[mask].abs().max())
        expect(off <= bound, f"{name} are off by {off:.2e} from verl's, allowed is {bound}")
    expect(not torch.equal(own["log_probs"], stock["log_probs"]), "verl's own forward ran")
    rows, unshared = handle.stats["tokens"], handle.stats["tokens_unshared"]
    expect(rows < unshared, f"nothing is shared: {rows} rows of {unshared}")


def _inferred(engine: Any, data: Any) -> dict[str, torch.Tensor]:
    """log_probs and entropy [B, R], as verl's trainer hands the batch out and reads them."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    batch = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(
        batch,
        temperature=TEMPERATURE,
        calculate_entropy=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(data),
        use_remove_padding=False,
        use_fused_kernels=False,
    )
    with engine.eval_mode():
        output = engine.infer_batch(batch)["model_output"]
    return {name: no_padding_2_padding(values, batch) for name, values in output.items()}
