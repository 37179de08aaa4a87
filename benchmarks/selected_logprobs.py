"""selected_logprobs on one GPU: share of a copy's bandwidth, and the peers' on the same rows, each in its own process.

Work: T packed rows of V logits, of which a share is scored. Peers run on all T rows, as people call them, and on the
N compacted rows. `--peers DIR` is a folder in which trl/, verl/ and flash_attn/ lie as in their wheels (or only the
files that `load` names); peers that are missing there are left out, and the report says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks.gpu as gpu
from mmpack.contracts import TOLERANCES, selected_logprob_bound
from mmpack.ops.logprobs.selected import selected_logprobs

PEERS = ("trl", "flash_attn", "verl", "torch", "torch_compiled")
TEMPERATURE = 0.9
CHECKED = 256  # rows that are compared with float64


class Work:
    """Logits, and the rows that are scored. `compact`: only the N rows."""

    def __init__(self, rows: int, vocab: int, share: float, dtype: torch.dtype, compact: bool):
        torch.manual_seed(0)
        scored = torch.rand(rows, device="cuda").argsort()[: int(rows * share)].sort()[0]
        count = len(scored)
        self.rows = torch.arange(count, device="cuda") if compact else scored
        self.logits = torch.empty(count if compact else rows, vocab, device="cuda", dtype=dtype)
        for some in self.logits.split(1024):  # without a second tensor of that size
            some.copy_(torch.randn(some.shape, device="cuda") * 3)
        self.targets = torch.randint(0, vocab, (count,), device="cuda")
        self.up, self.up_entropy = torch.randn(2, count, device="cuda")
        self.vocab, self.count, self.compact = vocab, count, compact
        self.row_bytes = vocab * self.logits.element_size()

    def full(self, values: torch.Tensor, other: int = 0) -> torch.Tensor:
        """Values [N] as [T], `other` in rows that are not scored."""
        out = torch.full((len(self.logits),), other, dtype=values.dtype, device="cuda")
        return out.index_copy_(0, self.rows, values)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the first rows in float64."""
        z = self.logits[self.rows[:CHECKED]].double() / TEMPERATURE
        full = z.log_softmax(-1)
        chosen = full.gather(1, self.targets[:CHECKED, None])[:, 0]
        return chosen, -(full.exp() * full).sum(-1)


def measure(work: Work, name: str, call: Callable, entropy: bool, **row: Any) -> dict[str, Any]:
    """Times of call(logits) -> (logprobs [N], entropies [N] or None), forward and with its gradient to the logits."""
    with torch.no_grad():
        logprobs, entropies = call(work.logits)
        chosen, expected = work.oracle()
        row["max_error"] = (logprobs[:CHECKED] - chosen).abs().max().item()
        if entropies is not None:
            row["max_error_entropy"] = (entropies[:CHECKED] - expected).abs().max().item()
        if name == "mmpack":
            holds = (logprobs[:CHECKED] - chosen).abs() <= selected_logprob_bound(chosen)
            gpu.require(bool(holds.all()), f"logprobs are off by {row['max_error']}")
            off = row.get("max_error_entropy", 0.0)
            gpu.require(off <= TOLERANCES["linear_logprob"].value, f"entropy is off by {off}")
        del logprobs, entropies
        row["forward_ms"] = gpu.milliseconds(lambda: call(work.logits), ahead=True)
        row["forward_extra_bytes"] = gpu.peak_bytes(lambda: call(work.logits))

        row["forward_host_us"] = gpu.host_microseconds(lambda: call(work.logits), calls=20)

    leaf = work.logits.detach().requires_grad_()

    def both() -> Any:
        logprobs, entropies = call(leaf)
        outs, ups = [logprobs], [work.up.to(logprobs.dtype)]
        if entropies is not None:
            outs, ups = [logprobs, entropies], [*ups, work.up_entropy.to(entropies.dtype)]
        return torch.autograd.grad(outs, leaf, ups)

    row["both_ms"] = gpu.milliseconds(both, repeats=9, warmups=2, ahead=True)
    row["both_extra_bytes"] = gpu.peak_bytes(both)
    read = work.count * work.row_bytes
    written = read if row.get("gradient") == "compact" else len(work.logits) * work.row_bytes
    shape = {"T": len(work.logits), "V": work.vocab, "N": work.count, "dtype": str(leaf.dtype)[6:]}
    least = {"forward_bytes": read, "both_bytes": 2 * read + written}
    return {"name": name, **shape, "compacted": work.compact, "entropy": entropy, **row, **least}


def ours(work: Work) -> list[dict[str, Any]]:
    named = {}
    if not work.compact:
        named = {"rows_unique": work.rows, "row_inverse": torch.arange(work.count, device="cuda")}
    out = []
    for gradient, entropy in (
        ("dense", True),
        ("dense", False),
        ("compact", True),
        ("inplace", True),
    ):

        def call(x: torch.Tensor, gradient: str = gradient, entropy: bool = entropy) -> Any:
            got = selected_logprobs(
                x, work.targets, None, TEMPERATURE, entropy, gradient=gradient, **named
            )
            return got if entropy else (got, None)

        # What the gradient is written over is no logits any more: last.
        out.append(measure(work, "mmpack", call, entropy, gradient=gradient))
    return out


def ours_repeated(work: Work, branches: int = 8) -> list[dict[str, Any]]:
    """Each row is read by several loss tokens, in no order."""
    inverse = torch.randperm(work.count * branches, device="cuda") % work.count
    work.targets = torch.randint(0, work.vocab, (len(inverse),), device="cuda")
    work.up, work.up_entropy = torch.randn(2, len(inverse), device="cuda")
    unique, work.rows = work.rows, work.rows[inverse]

    def call(x: torch.Tensor) -> Any:
        return selected_logprobs(
            x, work.targets, None, TEMPERATURE, True, rows_unique=unique, row_inverse=inverse
        )

    return [measure(work, "mmpack", call, True, gradient="dense", tokens_per_row=branches)]


def load(peers: Path, file: str) -> types.ModuleType:
    """One file of a peer's package as a module, without the imports of the package around it."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, peers / file)
    if spec is None or spec.loader is None or not (peers / file).exists():
        raise FileNotFoundError(peers / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trl(work: Work, peers: Path) -> list[dict[str, Any]]:
    """What TRL's selective_log_softmax_and_entropy runs on a GPU; it takes a mask of rows."""
    module = load(peers, "trl/kernels/logprob_entropy.py")
    targets = work.full(work.targets)
    mask = None if work.compact else work.full(torch.ones_like(work.targets))

    def call(x: torch.Tensor) -> Any:
        lp, h = module.selective_log_softmax_and_entropy(x, targets, TEMPERATURE, mask)
        return (lp, h) if work.compact else (lp[work.rows], h[work.rows])

    return [measure(work, "trl", call, True)]


def flash_attn(work: Work, peers: Path) -> list[dict[str, Any]]:
    """flash-attn's cross entropy: what verl's logprobs_from_logits calls where flash-attn is installed. No entropy."""
    module = load(peers, "flash_attn/ops/triton/cross_entropy.py")
    targets = work.full(work.targets, other=-100)

    def call(x: torch.Tensor) -> Any:
        losses, _ = module.cross_entropy_loss(x, targets, logit_scale=1 / TEMPERATURE)
        return -(losses if work.compact else losses[work.rows]), None

    return [measure(work, "flash_attn", call, False)]


def verl(work: Work, peers: Path) -> list[dict[str, Any]]:
    """verl's own path, logprobs and entropy: one row after the other, then chunks of 2,048 rows in float32."""
    stand_ins = {
        "tensordict": {"TensorDict": dict},
        "verl": {},
        "verl.utils": {},
        "verl.utils.device": {"get_device_name": None, "get_torch_device": None},
    }
    for name, content in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(content)
    module = load(peers, "verl/utils/torch_functional.py")

    def call(x: torch.Tensor) -> Any:
        z = x[work.rows] / TEMPERATURE
        return (
            module.logprobs_from_logits(z, work.targets),
            module.entropy_from_logits_with_chunking(z) if not z.requires_grad else None,
        )

    return [measure(work, "verl", call, True)]


def plain(x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = torch.log_softmax(x.float() / TEMPERATURE, -1)
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)


def torch_eager(work: Work, peers: Path) -> list[dict[str, Any]]:
    return [measure(work, "torch", lambda x: plain(x[work.rows], work.targets), True)]


def torch_compiled(work: Work, peers: Path) -> list[dict[str, Any]]:
    compiled = torch.compile(lambda x: plain(x[work.rows] if not work.compact else x, work.targets))
    return [measure(work, "torch.compile", compiled, True)]


def versions(peers: Path) -> dict[str, str]:
    found = importlib.metadata.distributions(path=[str(peers)])
    return {one.name.replace("-", "_"): one.version for one in found}


def one_process(name: str, options: Any) -> list[dict[str, Any]]:
    """All measurements of one implementation."""
    peers = {"torch": torch_eager, "torch_compiled": torch_compiled}
    peers |= {"trl": trl, "flash_attn": flash_attn, "verl": verl}
    dtypes = [torch.bfloat16, torch.float32] if name in ("mmpack", "trl") else [torch.bfloat16]
    out = []
    for dtype in dtypes:
        for compact in (
            (True,) if name in ("verl", "torch") else (False, True)
        ):  # they compact anyway
            shape = options.rows, options.vocab, options.share, dtype, compact
            if name == "mmpack":
                out += ours(Work(*shape))
                if not compact and dtype == torch.bfloat16:
                    out += ours_repeated(Work(*shape))
            else:
                out += peers[name](Work(*shape), options.peers)
    return out


def main() -> None:
    options = gpu.arguments(
        "selected_logprobs",
        rows={"type": int, "default": 32_768, "help": "T"},
        vocab={"type": int, "default": 151_936, "help": "V"},
        share={"type": float, "default": 0.4, "help": "of the rows that is scored"},
        peers={"type": Path, "default": Path("peers"), "help": "folder of the peers' packages"},
        only={"help": "one implementation, in this process, as JSON on stdout"},
    )
    if options.only:
        print(json.dumps(one_process(options.only, options)))
        return
    floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
    torch.cuda.empty_cache()
    rows, version = [], versions(options.peers)
    for name in ("mmpack", *PEERS):
        run = subprocess.run(
            [sys.executable, __file__, "--only", name, *sys.argv[1:]],
            capture_output=True,
            text=True,
            timeout=240,
        )
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no output"])[-1]
            if name == "mmpack":
                sys.exit(run.stderr)
            rows.append({"name": name, "not_run": last[:200]})
            continue
        for row in json.loads(run.stdout.splitlines()[-1]):
            rows.append(
                {"name": " ".join([row.pop("name"), *filter(None, [version.get(name)])]), **row}
            )
    for row in rows:
        for part in ("forward", "both"):
            if f"{part}_ms" in row:
                speed = row[f"{part}_bytes"] / row[f"{part}_ms"] * 1e3
                row[f"{part}_share_of_copy"] = speed / floors["copy_bytes_per_second"]
    gpu.write(options.out, "selected_logprobs", floors, rows)


if __name__ == "__main__":
    main()
