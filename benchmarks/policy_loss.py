"""Policy loss forward and backward: each backend of mmpack, and TRL's own Python on padded rectangles.

The `floor` rows are floor.cu's kernels of the same grid: an empty launch, then a stage of such a loss after the other.

GPU time is that of CUDA graph replays of many calls in a row, beside an empty launch taken the same way; host time is
of one call, the GPU running behind. `--peer trl` measures TRL, in a process of its own.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import gpu
import torch

import mmpack as mp

SHAPES = {  # loss tokens of each sample
    "B = 32, N = 13,107": [410] * 31 + [397],
    "B = 512, N = 131,072": [256] * 512,
    "B = 8, N = 131,072": [16384] * 8,
    "B = 4,096, N = 131,072": [32] * 4096,
}
VARIANTS = {
    "grpo": {"kind": "grpo"},
    "gspo": {"kind": "gspo", "aggregation": "sequence_mean_token_mean"},
    "grpo + kl + tis": {"kl_coef": 0.04, "correction": "tis"},
    "gspo + kl + sequence mis": {
        "kind": "gspo",
        "kl_coef": 0.04,
        "correction": "mis",
        "correction_level": "sequence",
    },
}
CALLS = 20  # in one graph

# Of floor.cu, in its order.
STAGES = (
    "empty",
    "two columns read, one written",
    "+ offsets read first",
    "+ 9 sums in the block",
    "+ a ticket",
    "+ the last block reads all sums",
)
GRIDS = {"N = 13,107": (13_107, (32, 128)), "N = 131,072": (131_072, (132, 512))}


def inputs(lengths, device="cuda"):
    g = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(sum(lengths), generator=g)
    lp, ref, rollout = (old + 0.05 * torch.randn(sum(lengths), generator=g) for _ in range(3))
    adv = torch.randn(len(lengths), generator=g)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(
        **{
            name: x.to(device)
            for name, x in zip(
                ("lp", "old", "ref", "rollout", "adv", "cu"),
                (lp, old, ref, rollout, adv, cu),
                strict=True,
            )
        }
    )


def columns_of(options):
    """Columns that this variant reads, besides logprobs and old_logprobs."""
    return ("kl_coef" in options) + ("correction" in options)


def ours(c, options):
    ref = c.ref if "kl_coef" in options else None
    rollout = c.rollout if "correction" in options else None

    def forward(lp=c.lp):
        return mp.policy_loss(lp, c.adv, c.cu, c.old, ref, rollout, **options).loss

    return forward


def check(c, lengths, options):
    """The contract, against the torch path in float64 on the CPU."""
    host = inputs(lengths, "cpu")
    host.lp, host.old, host.ref, host.rollout = (
        x.double() for x in (host.lp, host.old, host.ref, host.rollout)
    )
    want_lp, got_lp = host.lp.requires_grad_(), c.lp.detach().clone().requires_grad_()
    backend = os.environ.pop("MMPACK_BACKEND")
    want = ours(host, options)(want_lp)
    os.environ["MMPACK_BACKEND"] = backend
    got = ours(c, options)(got_lp)
    (want_grad,) = torch.autograd.grad(want, want_lp)
    (got_grad,) = torch.autograd.grad(got, got_lp)
    # At most the mean of |A| times the largest ratio is in a mean of |terms|; this is stricter by that factor.
    gpu.require(
        abs(float(got.detach()) - float(want.detach()))
        <= 1e-6 * max(abs(float(want.detach())), 0.1),
        "loss",
    )
    error = (got_grad.cpu().double() - want_grad).abs().max() / want_grad.abs().max()
    gpu.require(float(error) <= 1e-5, "gradient")


def of_graph(call, calls=CALLS):
    """µs of one call within a graph of many."""
    replay = gpu.graphed(lambda: [call() for _ in range(calls)])
    return statistics.median([gpu.milliseconds(replay) for _ in range(3)]) / calls * 1e3


def empty_launch():
    import triton

    @triton.jit
    def nothing():
        pass

    return of_graph(lambda: nothing[(1,)]())


class FloorArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("left", "right", "starts", "out", "partials")),
        *((name, ctypes.c_void_p) for name in ("ticket", "sums")),
        ("count", ctypes.c_int),
    ]


def stages():
    """Rows of what each stage takes."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "floor.so"
        source = Path(__file__).parent / "floor.cu"
        command = [
            "nvcc",
            "-O3",
            "-arch=native",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-diag-suppress=128",
        ]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        launch = ctypes.CDLL(str(library)).launch_floor
    rows = []
    for name, (count, grids) in GRIDS.items():
        left, right = torch.randn(2, count, device="cuda")
        for blocks in grids:
            starts = torch.linspace(0, count, blocks + 1, device="cuda").int()
            partials = torch.empty(9, blocks, dtype=torch.float64, device="cuda")
            ticket = torch.zeros(1, dtype=torch.int32, device="cuda")
            sums = torch.full((9,), torch.nan, device="cuda")
            columns = left, right, starts, torch.empty_like(left), partials, ticket, sums
            arguments = FloorArguments(*(x.data_ptr() for x in columns), count)
            for stage, what in enumerate(STAGES):

                def call(stage=stage, blocks=blocks, arguments=arguments):
                    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                    gpu.require(launch(stage, blocks, arguments, stream) == 0, "the launch failed")

                shape = f"{name}, {blocks} blocks"
                rows.append(
                    {"what": "floor", "shape": shape, "variant": what, "forward_us": of_graph(call)}
                )
            want = float((left.double() - right).sum())
            gpu.require(
                abs(float(sums[1]) - want) <= 1e-5 * abs(want) + 1e-2, "the sums of the floor"
            )
    return rows


def measure(call, lp, floors, moved, graph=True):
    """One row: forward, backward and host times in µs."""
    leaf = lp.detach().clone().requires_grad_()
    one = torch.ones((), device="cuda")
    row = {}
    if graph:
        row["forward_us"] = of_graph(lambda: call(lp))
        both = of_graph(lambda: torch.autograd.grad(call(leaf), leaf, one))
        row["forward_backward_us"] = both
        row["forward_launches_of_empty"] = row["forward_us"] / floors["empty_launch_us"]
        row["bytes_forward"] = moved
        row["copy_us"] = moved / floors["copy_bytes_per_second"] * 1e6
    row["host_forward_us"] = gpu.host_microseconds(lambda: call(lp))
    row["host_forward_backward_us"] = gpu.host_microseconds(
        lambda: torch.autograd.grad(call(leaf), leaf, one)
    )
    return row


def rectangles(c, lengths):
    """What the frameworks keep: [B, T] and a mask."""
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]

    def padded(column):
        out = torch.zeros(mask.shape)
        out[mask] = column.cpu()
        return out.cuda()

    return SimpleNamespace(
        **{name: padded(getattr(c, name)) for name in ("lp", "old", "ref", "rollout")},
        mask=mask.cuda(),
        adv=c.adv,
    )


def trl(c, lengths, options):
    """GRPOTrainer's own loss, given its logprobs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    r = rectangles(c, lengths)
    now = {}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now["lp"], r.lp, None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        importance_sampling_level="sequence" if options.get("kind") == "gspo" else "token",
        loss_type="grpo" if options.get("kind") == "gspo" else "bnpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=options.get("kl_coef", 0.0),
        max_completion_length=max(lengths),
        use_vllm="correction" in options,
        vllm_importance_sampling_correction=True,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros(r.mask.shape, dtype=torch.int64, device="cuda")
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": r.mask.float(),
        "advantages": r.adv,
        "old_per_token_logps": r.old,
        "ref_per_token_logps": r.ref,
        "num_items_in_batch": r.mask.sum().float(),
        "importance_sampling_ratio": (r.old - r.rollout).exp().clamp(max=2.0),
    }

    def forward(lp):
        now["lp"] = lp
        return GRPOTrainer._compute_loss(trainer, trainer.model, batch)

    return forward, r.lp


def no_tokens():
    """The launch of a batch without a loss token: what is left is the ticket and the merge."""
    os.environ["MMPACK_BACKEND"] = "triton"
    c = inputs([0] * 32)
    return of_graph(lambda: mp.policy_loss(c.lp, c.adv, c.cu, c.old).loss)


def main():
    args = gpu.arguments(
        "policy_loss",
        peer={"choices": ["trl"]},
        backends={"nargs": "+", "default": ["triton", "torch"]},
    )
    floors = {
        "copy_bytes_per_second": gpu.copy_bytes_per_second(),
        "empty_launch_us": empty_launch(),
    }
    if not args.peer and "triton" in args.backends:
        floors["no_tokens_us"] = no_tokens()
    rows = stages() if not args.peer and "triton" in args.backends else []
    for shape, lengths in SHAPES.items():
        for variant, options in VARIANTS.items():
            c = inputs(lengths)
            moved = 4 * sum(lengths) * (3 + columns_of(options))  # each column read, one written
            if args.peer:
                call, lp = trl(c, lengths, options)
                row = measure(call, lp, floors, moved, graph=False)
                row["forward_us"] = gpu.milliseconds(lambda call=call, lp=lp: call(lp)) * 1e3
                rows.append({"what": args.peer, "shape": shape, "variant": variant} | row)
                continue
            for backend in args.backends:
                os.environ["MMPACK_BACKEND"] = backend
                check(c, lengths, options)
                row = measure(ours(c, options), c.lp, floors, moved)
                rows.append({"what": backend, "shape": shape, "variant": variant} | row)
    gpu.write(args.out, "policy_loss", floors, rows)


if __name__ == "__main__":
    sys.exit(main())
