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


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory):
    """One rank on the CPU."""
    from megatron.core import mpu

    torch.compiler.set_stance("force_eager")
    rendezvous = tmp_path_factory.mktemp("one") / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    mpu.destroy_model_parallel()
    distributed.destroy_process_group()
    torch.compiler.set_stance("default")


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
    assert_same(mine, theirs, case)


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
