"""mmpack in the place of vime's or slime's functions, beside them: runs where one can be imported, and megatron-core.

Neither is on a package index. A checkout on PYTHONPATH and megatron-core are enough; no GPU.
"""

import copy
import importlib
import importlib.util
import inspect
from argparse import Namespace

import pytest
import torch
from support.vime_steps import CASES, micro_batch, options
from torch import distributed

from mmpack.adapters.vime import enable
from mmpack.adapters.vime.responses import log_probs_and_entropy
from mmpack.contracts import gradient_fp32_bound

pytest.importorskip("megatron.core")
NAME = next((name for name in ("vime", "slime") if importlib.util.find_spec(name)), "")
if not NAME:
    pytest.skip("neither vime nor slime is installed", allow_module_level=True)

NEAR = {"rtol": 1e-5, "atol": 2e-6}
MORE = {
    "icepop": {
        "use_tis": True,
        "tis_clip": 1.1,
        "tis_clip_low": 0.9,
        "custom_tis_function_path": f"{NAME}.backends.megatron_utils.loss.icepop_function",
    },
    "custom_loss": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "mmpack.adapters.vime.objective.loss",
    },
    "recomputed": {"recompute_loss_function": True, "entropy_coef": 0.01},
    "sft": {"loss_type": "sft_loss"},
}


def their_module():
    return importlib.import_module(f"{NAME}.backends.megatron_utils.loss")


def options_of(case, **more):
    """The case's, less what this revision has no option for."""
    args = options(case, **more)
    if "eps_clip_c" not in inspect.getsource(their_module().policy_loss_function):
        args.eps_clip_c = None
    return args


def start(rank, ranks, rendezvous, **sizes):
    from megatron.core import mpu

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    mpu.initialize_model_parallel(**sizes, create_gloo_process_groups=False)


def stop():
    from megatron.core import mpu

    mpu.destroy_model_parallel()
    distributed.destroy_process_group()
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory):
    start(0, 1, tmp_path_factory.mktemp("one") / "rendezvous")
    yield
    stop()


def step(args, batch, logits):
    """Their whole loss function: what the trainer calls, with its scaling and its log."""
    logits = logits.clone().requires_grad_()
    out, count, log = their_module().loss_function(args, copy.copy(batch), 3, 8, logits)
    out.backward()
    return out.detach(), count, dict(zip(log["keys"], log["values"][1:], strict=True)), logits.grad


def assert_same(mine, theirs, case):
    torch.testing.assert_close(mine[0], theirs[0], **NEAR)
    torch.testing.assert_close(mine[1], theirs[1])
    assert mine[2].keys() == theirs[2].keys(), case
    for name, value in theirs[2].items():
        torch.testing.assert_close(mine[2][name], value, **NEAR, msg=f"{case}: {name}")
    error, peak = (mine[3] - theirs[3]).abs().max(), theirs[3].abs().max()
    assert error <= 2 * gradient_fp32_bound(peak), case
    return float((mine[0] - theirs[0]).abs()), float(error / peak.clamp(min=1e-30))


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_one_rank(case):
    args = options_of(case) if case in CASES else options_of("grpo", **MORE[case])
    batch, logits = micro_batch(case if case in CASES else "grpo")
    own = Namespace(**vars(args) | {"loss_type": "policy_loss"}) if case == "custom_loss" else args
    theirs = step(own, batch, logits)
    if case == "custom_loss":
        mine = step(args, batch, logits)
    else:
        with enable(args):
            assert their_module().get_log_probs_and_entropy is log_probs_and_entropy
            mine = step(args, batch, logits)
    assert their_module().get_log_probs_and_entropy is not log_probs_and_entropy
    assert theirs[3].abs().max() > 0
    print(case, *(f"{x:.1e}" for x in assert_same(mine, theirs, case)))


def test_old_and_reference_passes():
    args, (batch, logits) = options("everything"), micro_batch("everything")
    given = {
        "args": args,
        "unconcat_tokens": batch["unconcat_tokens"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
        "with_entropy": True,
        "top_p_token_ids": batch["rollout_top_p_token_ids"],
        "top_p_token_offsets": batch["rollout_top_p_token_offsets"],
    }
    empty, mine = log_probs_and_entropy(logits, **given)
    other, theirs = their_module().get_log_probs_and_entropy(logits, **given)
    assert empty.shape == other.shape and mine.keys() == theirs.keys()
    for name in theirs:
        for a, b in zip(mine[name], theirs[name], strict=True):
            torch.testing.assert_close(a, b, **NEAR)


RANKS = {
    "tensor": ({"tensor_model_parallel_size": 2}, {}),
    "zigzag": ({"context_parallel_size": 2}, {}),
    "allgather": ({"context_parallel_size": 2}, {"allgather_cp": True}),
}
AT_RANKS = ("grpo", "first_step", "everything", "gspo_tis", "opsm")


@pytest.mark.parametrize("way", RANKS)
def test_two_ranks(way, tmp_path):
    args = (2, way, str(tmp_path / "rendezvous"))
    torch.multiprocessing.spawn(_rank, args, nprocs=2, join=True)


def _rank(rank, ranks, way, rendezvous):
    sizes, more = RANKS[way]
    start(rank, ranks, rendezvous, **sizes)
    for case in AT_RANKS:
        args = options_of(case, **more)
        batch, logits = micro_batch(case)
        batch, logits = _cut(way, rank, ranks, batch, logits)
        theirs = step(args, batch, logits)
        with enable(args):
            mine = step(args, batch, logits)
        print(way, case, rank, *(f"{x:.1e}" for x in assert_same(mine, theirs, case)))
    stop()


def _cut(way, rank, ranks, batch, logits):
    """This rank's part of the batch and of the logits, by slime's own helpers."""
    helpers = importlib.import_module(f"{NAME}.backends.megatron_utils.cp_utils")
    slice_log_prob_with_cp, slice_with_cp = helpers.slice_log_prob_with_cp, helpers.slice_with_cp
    batch = dict(batch)
    if way == "tensor":
        width = logits.shape[-1] // ranks
        return batch, logits[..., rank * width : (rank + 1) * width].contiguous()
    for name in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "opd_reverse_kl"):
        if batch[name] is not None:
            columns = zip(
                batch[name], batch["total_lengths"], batch["response_lengths"], strict=True
            )
            batch[name] = [slice_log_prob_with_cp(*column) for column in columns]
    if way == "zigzag":
        parts = logits[0].split(batch["total_lengths"])
        return batch, torch.cat([slice_with_cp(x, 0.0) for x in parts])[None]
    padding = -logits.shape[1] % ranks
    padded = torch.nn.functional.pad(logits, (0, 0, 0, padding))
    return batch, padded.chunk(ranks, dim=1)[rank].contiguous()
