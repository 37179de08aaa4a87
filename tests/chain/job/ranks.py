"""The axes of ranks: in torchrun's processes, or on the CPU in processes that are started here."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from chain.compare import Equal, Row, compare
from chain.job.options import ONE_PROCESS, RANKS, Options, shape_of
from chain.job.prepare import prepare
from chain.passes.axes import equal_stages
from chain.record import Record
from torch.multiprocessing.spawn import spawn

from mmpack.errors import ArgumentError

ROWS_FILE = "rows.json"


def refuse_ranks(options: Options) -> None:
    """Raise before processes are started."""
    text = shape_of(options).text
    if "tensor_parallel" in options.axes and "layer_types" in text:
        raise ArgumentError(
            f"chain: {options.model} has linear attention, which tensor_parallel can't split. "
            "Fix: use --axis fsdp, or another model"
        )
    for n in options.tp if "tensor_parallel" in options.axes else ():
        for name in ("num_attention_heads", "num_key_value_heads"):
            if text[name] % n:
                raise ArgumentError(
                    f"chain: {name} is {text[name]}, which {n} ranks don't divide. Fix: use --tp 1, 2 or 4"
                )


def on_ranks(options: Options, device: torch.device, left_out: dict[str, str]) -> list[Row]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    needed = max([n for n in options.tp if "tensor_parallel" in options.axes] + [2])
    if world == 1 and device.type == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            arguments = (needed, folder, options)
            spawn(_spawned, arguments, needed)
            found = json.loads((Path(folder) / ROWS_FILE).read_text(encoding="utf-8"))
        return [Row(**row) for row in found]
    if world == 1:
        for axis in RANKS:
            if axis in options.axes:
                left_out[axis] = (
                    "there is only one process. Fix: run PYTHONPATH=tests torchrun --nproc-per-node 2 -m chain"
                )
        return []
    if not torch.distributed.is_initialized():
        _join(device)
    try:
        return _rank_rows(options, device, left_out)
    finally:
        torch.distributed.destroy_process_group()


def _spawned(rank: int, ranks: int, folder: str, options: Options) -> None:
    """A process of `torch.multiprocessing.spawn`: the first one writes the rows to the folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    rows = _rank_rows(options, torch.device("cpu"), {})
    if rank == 0:
        text = json.dumps([row.to_dict() for row in rows])
        (Path(folder) / ROWS_FILE).write_text(text, encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.distributed.init_process_group("nccl", device_id=device)
    else:
        torch.distributed.init_process_group("gloo")


def _rank_rows(options: Options, device: torch.device, left_out: dict[str, str]) -> list[Row]:
    """Rows of the axes of ranks, on the first rank; on others none."""
    from chain.passes.sharded import (
        fsdp_run,
        sequence_parallel_run,
        tensor_parallel_run,
    )
    from torch.distributed.device_mesh import DeviceMesh

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prepared = prepare(options, device)
    for column in (prepared.problem.old, prepared.problem.ref):
        torch.distributed.broadcast(column, 0)
    rows: list[Row] = []
    if not any(axis in ONE_PROCESS for axis in options.axes):
        rows += prepared.alone
    taken: dict[str, Record] = {}
    sizes = sorted(n for n in options.tp if n <= world and "tensor_parallel" in options.axes)
    for n in options.tp:
        if n > world and "tensor_parallel" in options.axes:
            left_out[f"tensor_parallel {n}"] = f"{world} processes"
    for n in sizes:
        mesh = DeviceMesh(device.type, list(range(n)))
        if rank < n:
            tree = options.invariant
            found = tensor_parallel_run(prepared.model, prepared.problem, mesh, tree=tree)
            if tree and n == sizes[0]:  # products summed by a tree are not those of one piece
                prepared.reference = found
            equal = Equal(*equal_stages("tensor_parallel", str(n))) if tree else Equal()
            rows += prepared.rows("tensor_parallel", str(n), found, equal)
            taken[f"tp {n}"] = found
        torch.distributed.barrier()
    if "sequence_parallel" in options.axes and options.invariant:
        left_out["sequence_parallel"] = "the plain mode has this axis"
    elif "sequence_parallel" in options.axes:
        for n in (n for n in (2, 4) if n <= world):
            mesh = DeviceMesh(device.type, list(range(n)))
            if rank < n:
                found = sequence_parallel_run(prepared.model, prepared.problem, mesh)
                new = prepared.rows("sequence_parallel", str(n), found, Equal())
                rows += [r for r in new if not r.not_run]
            torch.distributed.barrier()
    if "fsdp" in options.axes and options.invariant:
        left_out["fsdp"] = "the plain mode has this axis"
    elif "fsdp" in options.axes:
        mesh = DeviceMesh(device.type, [0, 1])
        if rank < 2:
            sharded = fsdp_run(prepared.model, prepared.problem, mesh)
            rows += [r for r in prepared.rows("fsdp", "2", sharded, Equal()) if not r.not_run]
            if "tp 2" in taken:
                both = compare(
                    "tp 2 against fsdp 2", "", taken["tp 2"], sharded, prepared.exact, Equal(),
                    prepared.bounds,
                )  # fmt: skip
                rows += [row for row in both if not row.not_run]
        torch.distributed.barrier()
    return rows if rank == 0 else []
