"""`mmpack probe chain`: models of real or tiny shapes with random weights, drawn samples, and all axes on them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.multiprocessing.spawn import spawn

from mmpack._version import __version__
from mmpack.adapters.transformers.chain.axes import (
    OWN_ATTENTION,
    axes_here,
    equal_stages,
    padded_alone,
    processed_run,
    reference,
    within_mode,
)
from mmpack.adapters.transformers.chain.exact import exact_copy, exact_logprobs, plain_logprobs
from mmpack.adapters.transformers.chain.problem import KL_COEF, Problem, make_problem
from mmpack.adapters.transformers.chain.run import Way, run
from mmpack.bench.models import MODELS, Shape, random_model
from mmpack.errors import ArgumentError, check_name
from mmpack.families import get_family
from mmpack.probe.chain.compare import Bounds, Equal, Row, bounds_of, compare
from mmpack.probe.chain.record import Record
from mmpack.probe.chain.report import ChainReport
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.sample import Sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = {"qwen2.5-vl": "qwen2.5-vl-7b", "qwen3-vl": "qwen3-vl-8b"}
SIZES = ("tiny", "layer")
ONE_PROCESS = (
    "batch", "pictures", "padding", "packed", "shared", "processor_cache", "feature_cache",
    "prefix_cache",
)  # fmt: skip
RANKS = ("tensor_parallel", "fsdp")
AXES = (*ONE_PROCESS, *RANKS)
ROWS_FILE = "rows.json"
_IDS = 150_000  # below the special ones


@dataclass(frozen=True)
class Options:
    """`tp`: ranks of the tensor-parallel axis. `layers`: of the decoder. `invariant`: within `mmpack.invariant`."""

    model: str = "qwen2.5-vl"
    size: str = "tiny"
    dtype: str = "float32"
    device: str = "cpu"
    axes: Sequence[str] = ONE_PROCESS
    tp: Sequence[int] = (1, 2, 4)
    layers: int = 2
    seed: int = 0
    invariant: bool = False

    def __post_init__(self) -> None:
        for name, names in (("model", FAMILIES), ("size", SIZES), ("dtype", DTYPES)):
            check_name("probe chain", name, getattr(self, name), names)
        for axis in self.axes:
            check_name("probe chain", "axis", axis, AXES)


def chain(options: Options) -> ChainReport:
    """Run the axes and compare each stage with the reference: every sample alone, batch 1, no cache, one rank.

    Axes of ranks run in the processes of torchrun, or on the CPU in processes that are started here. Of torchrun's
    ranks the first has the rows.
    Raises: ArgumentError for a device that isn't there, or axes that can't run.
    """
    start = time.perf_counter()
    device = _device(options.device)
    _refuse_ranks(options)
    report = ChainReport(_setting(options, device))
    if any(axis in ONE_PROCESS for axis in options.axes) and int(os.environ.get("RANK", "0")) == 0:
        report.rows += _one_process(options, device, report.left_out)
    if any(axis in RANKS for axis in options.axes):
        report.rows += _on_ranks(options, device, report.left_out)
    report.seconds = time.perf_counter() - start
    return report


@dataclass
class Prepared:
    """A model and what every run on it is compared with.

    `alone`: rows of the reference itself beside transformers' own attention and torch's head, in the same dtype:
    what the reference is off is allowed to every run, so it is held to them first.
    """

    model: Any
    problem: Problem
    reference: Record
    exact: Record
    bounds: Bounds
    uncached: list[Sample]  # the same samples of a processor that keeps nothing
    alone: list[Row]

    def rows(self, axis: str, value: str, record: Record, equal: Equal) -> list[Row]:
        partial = axis == "prefix_cache"
        return compare(
            axis, value, record, self.reference, self.exact, equal, self.bounds, partial=partial
        )


def prepare(options: Options, device: torch.device) -> Prepared:
    """The model in evaluation mode, the problem, the reference, and the exact values of a wider copy."""
    dtype = DTYPES[options.dtype]
    family = get_family(
        FAMILIES[options.model].rpartition("-")[0].replace("-", "_").replace(".", "_")
    )
    shape = _shape(options)
    model = random_model(shape, device, dtype).eval()
    samples, uncached, companions = draw(family.name, options.size, options.seed)
    # float64 costs little where the model is tiny, and a GPU's float32 is wide enough beside bfloat16
    wide = exact_copy(model, torch.float64 if options.size == "tiny" else torch.float32)
    blank = torch.zeros(sum(s.num_loss_tokens for s in samples), device=device)
    problem = make_problem(samples, companions, blank, options.seed)
    with torch.no_grad():
        logprobs = [exact_logprobs(wide, part.batch) for part in padded_alone(wide, problem)]
    problem = make_problem(samples, companions, torch.cat(logprobs), options.seed)
    exact = run(
        wide, problem, padded_alone(wide, problem), Way(attached=False, logprobs=exact_logprobs)
    )
    del wide
    bounds = bounds_of(exact, problem.advantages, KL_COEF, dtype)
    # some modules note things in their first forward, and kernels are chosen
    take = within_mode(reference) if options.invariant else reference
    take(model, problem)
    own = take(model, problem)
    way = Way(attached=False, logprobs=plain_logprobs)
    plain = run(model, problem, padded_alone(model, problem), way)
    rows = compare("alone", "attached", own, plain, exact, Equal(), bounds)
    return Prepared(model, problem, own, exact, bounds, uncached, rows)


def _one_process(options: Options, device: torch.device, left_out: dict[str, str]) -> list[Row]:
    prepared = prepare(options, device)
    axes = axes_here(prepared.model)
    axes["processor_cache"] = {"off": processed_run(prepared.uncached)}
    rows = list(prepared.alone)
    for axis in options.axes:
        if axis in RANKS:
            continue
        if axis not in axes:
            left_out[axis] = (
                f"transformers {transformers.__version__} takes no encoded media. Fix: 5.19 or newer"
            )
            continue
        for value, take in axes[axis].items():
            equal = Equal()
            if options.invariant:
                if (axis, value) in OWN_ATTENTION:
                    left_out[f"{axis} {value}"] = "transformers' own attention is not invariant"
                    continue
                equal, take = Equal(*equal_stages(axis, value)), within_mode(take)
            rows += prepared.rows(axis, value, take(prepared.model, prepared.problem), equal)
    return rows


def _shape(options: Options) -> Shape:
    """Real widths and few layers; or a tiny model whose heads four ranks divide, with logits that are far from even."""
    real = MODELS[FAMILIES[options.model]]
    deep = {"deepstack_visual_indexes": [0, 1]} if real.family == "qwen3_vl" else {}
    windows = {} if deep else {"fullatt_block_indexes": [1]}
    vision = real.vision | {"depth": 2} | deep | windows
    text = real.text | {"num_hidden_layers": options.layers}
    if options.size == "layer":
        return replace(real, text=text, vision=vision)
    sections = {"mrope_section": [3, 3, 2] if deep else [2, 1, 1]}
    text |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.1,
        "rope_parameters": real.text["rope_parameters"] | sections,
    }
    if deep:
        text["head_dim"] = 16
    vision |= {
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    return replace(real, text=text, vision=vision)


def draw(family: str, size: str, seed: int = 0) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Four samples by a real image processor with its cache, the same without, and companions with 0, 1 and 3 pictures.

    Two samples share a prompt with a picture, one has two pictures, one has none.
    """
    made = [_draw(wrap, family, size, seed) for wrap in (1 << 30, 0)]
    samples, companions = made[0]
    return samples, made[1][0], companions


def _draw(cache: int, name: str, size: str, seed: int) -> tuple[list[Sample], list[Sample]]:
    family, rng = get_family(name), np.random.default_rng(seed)
    processor = _processor(name, cache)
    text, side = (1, family.patch_size * 4) if size == "tiny" else (24, family.patch_size * 28)

    def ids(n: int) -> list[int]:
        return rng.integers(0, _IDS, n * text).tolist()

    def picture(w: int, h: int) -> np.ndarray:
        return rng.integers(0, 256, (side * h // 2, side * w // 2, 3), dtype=np.uint8)

    def sample(sample_id: str, parts: list[Any], n: int, group: str) -> Sample:
        """`parts`: ids or pictures."""
        out: list[int] = []
        for part in parts:
            if isinstance(part, list):
                out += part
            else:
                placeholder = family.placeholder_ids["image"]
                out += [family.vision_start_id, placeholder, family.vision_end_id]
        media = [part for part in parts if not isinstance(part, list)]
        return processor.from_ids(
            out + ids(n),
            media=media,
            expanded=False,
            loss_spans=[(len(out), len(out) + n * text)],
            sample_id=sample_id,
            group_id=group,
        )

    prompt = [ids(6), picture(3, 2), ids(4)]
    samples = [
        sample("a0", prompt, 5, "a"),
        sample("a1", prompt, 8, "a"),
        sample("b0", [ids(5), picture(2, 2), ids(3), picture(4, 2), ids(2)], 6, "b"),
        sample("c0", [ids(9)], 7, "c"),
    ]
    companions = [
        sample("d0", [ids(11)], 3, "d"),
        sample("d1", [ids(2), picture(5, 2), ids(3)], 4, "d"),
        sample("d3", [ids(3), picture(2, 3), ids(1), picture(2, 2), picture(3, 2)], 2, "d"),
    ]
    return samples, companions


def _processor(family: str, cache_bytes: int) -> Processor:
    """Released image settings and a tokenizer of one word: ids are drawn, no text is read."""
    from tokenizers import Tokenizer, models

    settings: dict[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 28 * 28}}
    if family == "qwen3_vl":
        half = [0.5, 0.5, 0.5]
        settings |= {"patch_size": 16, "image_mean": half, "image_std": half}
    return wrap_processor(
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        ),
        image_processor=transformers.Qwen2VLImageProcessorPil(**settings),
        family=family,
        cache_bytes=cache_bytes,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"probe chain: device is {name!r}. Fix: 'cpu' or 'cuda'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError("probe chain: no CUDA device is here. Fix: --device cpu")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ArgumentError(f"probe chain: device is {name!r}. Fix: 'cpu' or 'cuda'")
    return device


def _refuse_ranks(options: Options) -> None:
    """Raise before processes are started."""
    text = _shape(options).text
    for n in options.tp if "tensor_parallel" in options.axes else ():
        for name in ("num_attention_heads", "num_key_value_heads"):
            if text[name] % n:
                raise ArgumentError(
                    f"probe chain: {name} is {text[name]}, which {n} ranks don't divide. Fix: --tp 1, 2 or 4"
                )


def _setting(options: Options, device: torch.device) -> dict[str, Any]:
    names = [] if device.type == "cpu" else [torch.cuda.get_device_name(device)]
    return {
        "model": options.model,
        "size": options.size,
        "layers": options.layers,
        "dtype": options.dtype,
        "device": (names or ["cpu"])[0],
        "invariant": options.invariant,
        "seed": options.seed,
        "mmpack": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


# -- ranks -------------------------------------------------------------------------------------------------------------


def _on_ranks(options: Options, device: torch.device, left_out: dict[str, str]) -> list[Row]:
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
                    "one process. Fix: torchrun --nproc-per-node 2 -m mmpack probe chain"
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
    from torch.distributed.device_mesh import DeviceMesh

    from mmpack.adapters.transformers.chain.sharded import fsdp_run, tensor_parallel_run

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prepared = prepare(options, device)
    for column in (prepared.problem.old, prepared.problem.ref):
        torch.distributed.broadcast(column, 0)
    rows = [] if any(axis in ONE_PROCESS for axis in options.axes) else list(prepared.alone)
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
