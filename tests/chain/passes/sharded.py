"""The chain on several ranks: tensor-parallel layers by torch's own styles with a vocabulary-parallel head, rows split
over ranks (Ulysses), and FSDP2.

Layers' queries, keys, values, gate and up are split by columns, output and down products by rows (Megatron-LM, arXiv
1909.08053 section 3), the head by vocabulary. The tower is whole on each rank.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from chain.passes.axes import alone
from chain.passes.problem import Problem, take_loss
from chain.passes.run import Part, Way, run
from chain.record import Key, Record, joined
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.errors import ArgumentError
from mmpack.invariant import batch_invariant, column_parallel, row_parallel, tree_all_reduce
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.packing.batch import Batch
from mmpack.packing.pack import pack

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
HEADS = ("q_norm", "k_norm")  # one weight for all heads, of which a rank has some
SPLIT = (
    *COLUMNS,
    *HEADS,
    "attention",
    "rotary.q",
    "rotary.k",
)  # places whose values a rank has a part of


def tensor_parallel_run(
    model: Any, problem: Problem, mesh: DeviceMesh, tree: bool = False
) -> Record:
    """The reference's step on the ranks of a mesh, each with its part of a copy of the model; whole on every rank.

    `tree`: within `mmpack.invariant`, what is summed over ranks in its fixed tree; the head is whole then, for a
    vocabulary is seldom so many whole tiles that each rank has some.
    Raises: ArgumentError for a model whose heads or vocabulary the ranks don't divide.
    """
    _check(model, mesh.size())
    part, group = copy.deepcopy(model), mesh.get_group()
    if tree:
        _split_by_tree(part, mesh)
    else:
        _split(part, mesh)

    def logprobs(model: Any, batch: Batch) -> Tensor:
        hidden = model.model(**model_inputs(batch, model)).last_hidden_state
        found = linear_selected_logprobs(
            hidden.flatten(0, 1),
            model.lm_head.weight,
            batch.loss_targets,
            rows=batch.loss_rows,
            rows_unique=batch.loss_rows_unique,
            row_inverse=batch.loss_row_inverse,
            group=None if tree else group,
            support=batch.kept_ids,
        )
        assert isinstance(found, Tensor)
        return found

    def gather(key: Key, x: Tensor) -> Tensor:
        x = _plain(x)
        return whole(x, 2, group) if key[1].endswith(SPLIT) else x

    def gradient(name: str, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            return x.full_tensor()
        if name == "lm_head.weight" and not tree:
            return whole(x, 0, group)
        if name.endswith(tuple(f"{norm}.weight" for norm in HEADS)):
            return tree_all_reduce(x, group)
        owner, _, kind = name.rpartition(".")
        if tree and "language_model" in name and owner.endswith(COLUMNS):
            return whole(x, 0, group)
        if tree and "language_model" in name and owner.endswith(ROWS) and kind == "weight":
            return whole(x, 1, group)
        return x

    def logits(hidden: Tensor) -> Tensor:
        made = linear(hidden, part.lm_head.weight)
        return made if tree else whole(made, 1, group)

    way = Way(logprobs=logprobs, logits=logits, gather=gather, gradient=gradient)
    with batch_invariant(part) if tree else contextlib.nullcontext():
        return run(part, problem, alone(part, problem), way)


def _split(model: Any, mesh: DeviceMesh) -> None:
    """By torch's own styles, and the head by vocabulary."""
    styles: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in COLUMNS[:3]}
    styles |= {f"mlp.{name}": ColwiseParallel() for name in COLUMNS[3:]}
    styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, styles)
    own = model.lm_head.weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    model.lm_head.weight = torch.nn.Parameter(own)


def _split_by_tree(model: Any, mesh: DeviceMesh) -> None:
    """By `mmpack.invariant`: each module keeps its part of the weight, and gets a forward of its own."""
    ranks, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if not name.endswith((*COLUMNS, *ROWS)):
                continue
            by_columns = name.endswith(COLUMNS)
            weight = module.weight.detach().chunk(ranks, 0 if by_columns else 1)[rank]
            module.weight = torch.nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
            if by_columns and module.bias is not None:
                bias = module.bias.detach().chunk(ranks)[rank].clone()
                module.bias = torch.nn.Parameter(bias)
            product = column_parallel if by_columns else row_parallel

            def forward(x: Tensor, module: Any = module, product: Any = product) -> Tensor:
                made: Tensor = product(x, module.weight, module.bias, group=group)
                return made

            module.forward = forward


def fsdp_run(model: Any, problem: Problem, mesh: DeviceMesh) -> Record:
    """The step under FSDP2: each rank packs its share of the samples. Logprobs, loss, and gradients of weights."""
    sharded = copy.deepcopy(model)
    for unit in (*decoder_layers(sharded), *tower_blocks(sharded), sharded.lm_head, sharded):
        fully_shard(unit, mesh=mesh)
    own = list(range(len(problem.samples)))[mesh.get_local_rank() :: mesh.size()]
    if not own:
        raise ArgumentError(
            f"chain: {len(problem.samples)} samples for {mesh.size()} ranks of FSDP2. Fix: use fewer ranks"
        )
    device = problem.old.device
    with attach(sharded):
        batch = pack([problem.samples[i] for i in own]).to(device)
        logprobs = packed_logprobs(sharded, batch, vision="always")
        loss, cells = take_loss(problem, logprobs, own)
        (loss * mesh.size()).backward()  # FSDP2 takes the mean over its ranks
    record = Record({key: cell.to("cpu") for key, cell in cells.items()})
    found: list[Any] = [None] * mesh.size()
    all_gather_object(found, record, group=mesh.get_group())
    out = joined(found)
    out.cells = {key: cell.to(device) for key, cell in out.cells.items()}
    out.parameters = {
        name: p.grad.full_tensor()  # type: ignore[union-attr]
        for name, p in sharded.named_parameters()
        if p.grad is not None
    }
    return out


def sequence_parallel_run(model: Any, problem: Problem, mesh: DeviceMesh) -> Record:
    """The step of one shared pack, whose rows the ranks of a mesh split; whole on every rank. Without the tower's
    stages, for each medium is encoded on one rank.
    """
    group, device = mesh.get_group(), problem.old.device
    batch = pack(problem.samples, share_prefix=True).to(device)

    def logprobs(model: Any, batch: Batch) -> Tensor:
        return packed_logprobs(model, batch, sequence_group=group)

    def gather(key: Key, x: Tensor) -> Tensor:
        return whole_rows(x, len(batch.input_ids), group)

    def gradient(name: str, x: Tensor) -> Tensor:
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        return x

    way = Way(logprobs=logprobs, gather=gather, gradient=gradient, tower=False)
    return run(model, problem, [Part(batch, tuple(range(len(problem.samples))))], way)


def whole_rows(x: Tensor, total: int, group: ProcessGroup) -> Tensor:
    """[1, total, …] of each rank's [1, t, …], in the order of the ranks."""
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(group.size())]
    torch.distributed.all_gather(counts, counts[0].new_full((1,), x.shape[1]), group=group)
    padded = x.new_zeros(1, total, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([p[:, : int(n)] for p, n in zip(parts, counts, strict=True)], 1)


def whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A tensor of which each rank has a part, side by side along `dim` in the order of the ranks."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return torch.cat(parts, dim)


def _plain(x: Tensor) -> Tensor:
    """Collectives may return a tensor that waits when it is read."""
    wait = getattr(x, "wait", None)
    return wait() if wait is not None and type(x).__name__ == "AsyncCollectiveTensor" else x


def _check(model: Any, ranks: int) -> None:
    text = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(text, name) % ranks:
            raise ArgumentError(
                f"chain: {name} is {getattr(text, name)}, which {ranks} ranks don't divide. "
                "Fix: use another number of ranks"
            )
