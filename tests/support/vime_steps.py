"""Micro-batches as vime's and slime's actor hands them to its loss, their options, and the loss in float64."""

from __future__ import annotations

import sys
import types
from argparse import Namespace

import torch
from torch import Tensor

V = 24
LENGTHS = [(9, 4), (5, 1), (11, 7), (6, 3)]  # total, response

# What their parsers set where nothing is said.
DEFAULTS = {
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "use_unbiased_kl": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "get_mismatch_metrics": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "use_opsm": False,
    "opsm_delta": 0.05,
    "calculate_per_token_loss": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "allgather_cp": False,
    "log_probs_chunk_size": -1,
    "qkv_format": "thd",
    "loss_type": "policy_loss",
    "recompute_loss_function": False,
}

# Options by a name, and what of the batch they need besides.
CASES: dict[str, dict] = {
    "grpo": {},
    "first_step": {"no_old": True},
    "temperature": {"rollout_temperature": 0.7},
    "per_token": {"calculate_per_token_loss": True},
    "dual_clip": {"eps_clip_c": 1.05, "eps_clip_high": 0.02},
    "entropy": {"entropy_coef": 0.01},
    "k1": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"},
    "k3": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    "low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "unbiased_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "rollout_logprobs": {"use_rollout_logprobs": True},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "tis_of_rollout": {"use_tis": True, "tis_clip": 1.1, "use_rollout_logprobs": True},
    "opsm": {"use_opsm": True, "opsm_delta": -0.05},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.1},
    "gspo_tis": {
        "advantage_estimator": "gspo",
        "eps_clip": 0.3,
        "eps_clip_high": 0.3,
        "use_tis": True,
        "tis_clip": 1.1,
        "eps_clip_c": 1.02,
    },
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
    "kept_ids": {"rollout_top_p": 0.8, "entropy_coef": 0.01},
    "everything": {
        "rollout_temperature": 1.3,
        "rollout_top_p": 0.8,
        "entropy_coef": 0.02,
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        "kl_loss_type": "k3",
        "use_tis": True,
        "tis_clip": 1.05,
        "use_opsm": True,
        "eps_clip_c": 1.2,
    },
}


def options(case: str, **more) -> Namespace:
    return Namespace(**DEFAULTS | {k: v for k, v in CASES[case].items() if k != "no_old"} | more)


def micro_batch(case: str, lengths=LENGTHS) -> tuple[dict, Tensor]:
    """A batch, and logits [1, T, V] float32 whose policy is near the old one; the same for one case every time."""
    torch.manual_seed(sum(map(ord, case)))
    tokens = [torch.randint(0, V, (total,)) for total, _ in lengths]
    logits = 2 * torch.randn(1, sum(total for total, _ in lengths), V)
    masks = [torch.ones(n, dtype=torch.int) for _, n in lengths]
    masks[2][1:3] = 0  # a tool's
    scored = _log_softmax_at(
        logits[0].double() / options(case).rollout_temperature, tokens, lengths
    )

    def near(spread):
        return [(x + spread * torch.randn(len(x))).float() for x in scored]

    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [n for _, n in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([m.sum() for m in masks]).float(),
        "advantages": [torch.randn(()).expand(n).clone() for _, n in lengths],
        "log_probs": None if CASES[case].get("no_old") else near(0.2),
        "ref_log_probs": near(0.4),
        "rollout_log_probs": near(0.2),
        "opd_reverse_kl": near(0.1),
    }
    batch["rollout_mask_sums"][:2] = batch["rollout_mask_sums"][
        :2
    ].sum()  # one rollout of two samples
    if options(case).rollout_top_p < 1:
        kept = [_lists(logits, tokens, lengths, i, masks[i]) for i in range(len(lengths))]
        batch["rollout_top_p_token_ids"] = [ids for ids, _ in kept]
        batch["rollout_top_p_token_offsets"] = [ends for _, ends in kept]
    return batch, logits


def _lists(logits, tokens, lengths, i, mask):
    """The five likeliest ids and the token, in no order; none for a tool's token."""
    total, n = lengths[i]
    first = sum(t for t, _ in lengths[:i]) + total - n - 1
    ids, ends = [], [0]
    for k in range(n):
        if mask[k]:
            top = {*logits[0, first + k].topk(5).indices.tolist(), int(tokens[i][total - n + k])}
            ids += sorted(top, reverse=True)
        ends.append(len(ids))
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


def _log_softmax_at(logits: Tensor, tokens, lengths) -> list[Tensor]:
    logs, out, first = logits.log_softmax(-1), [], 0
    for ids, (total, n) in zip(tokens, lengths, strict=True):
        rows = torch.arange(first + total - n - 1, first + total - 1)
        out.append(logs[rows, ids[total - n :]])
        first += total
    return out


def sample_mean_reducer(args: Namespace, batch: dict):
    """Their reduction: each sample's sum over its mask, over the tokens of its rollout; or the plain sum."""
    one = args.calculate_per_token_loss

    def reduce(x):
        parts = x.split(batch["response_lengths"])
        return sum(
            (part * mask).sum() / (1 if one else count.clamp(min=1))
            for part, mask, count in zip(
                parts, batch["loss_masks"], batch["rollout_mask_sums"], strict=True
            )
        )

    return reduce


def reference(args: Namespace, batch: dict, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of logits [1, T, V] float64, written out sample by sample and token by token.

    PPO's clip (arXiv 1707.06347 eq. 7), dual clip (1912.09729 eq. 5), GSPO (2507.18071 eq. 5 to 7), CISPO (2506.13585
    eq. 4), truncated importance sampling (Yao et al. 2025), off-policy sequence masking (DeepSeek-V3.2, 2512.02556),
    Schulman's estimates of KL.
    """
    terms: dict[str, list] = {}
    tokens, lengths = batch["unconcat_tokens"], batch["total_lengths"]
    total_loss, first, opsm_fraction = logits.new_zeros(()), 0, logits.new_zeros(())
    sums: dict[str, Tensor] = {}
    for i, (ids, total) in enumerate(zip(tokens, lengths, strict=True)):
        n, mask = batch["response_lengths"][i], batch["loss_masks"][i].double()
        z = logits[0, first + total - n - 1 : first + total - 1] / args.rollout_temperature
        first += total
        y = ids[total - n :]
        full = z.log_softmax(-1)
        entropy = -(full.exp() * full).sum(-1)
        logs = full
        if args.rollout_top_p < 1:
            keep = torch.zeros_like(z, dtype=torch.bool)
            ends, kept = (batch[f"rollout_top_p_token_{k}"][i].tolist() for k in ("offsets", "ids"))
            for k in range(n):
                keep[k, kept[ends[k] : ends[k + 1]] or [int(y[k])]] = True
            logs = z.masked_fill(~keep, -1e30).log_softmax(-1)
        lp = logs[torch.arange(n), y]
        trained = lp.detach() if batch["log_probs"] is None else batch["log_probs"][i].double()
        rollout, ref = (batch[f"{k}_log_probs"][i].double() for k in ("rollout", "ref"))
        old = rollout if args.use_rollout_logprobs else trained
        adv = batch["advantages"][i].double()
        high = 1 + args.eps_clip_high
        of_sample = ((old - lp) * mask).sum() / mask.sum().clamp(min=1)
        gap = of_sample.expand(n) if args.advantage_estimator == "gspo" else old - lp
        ratio = (-gap).exp()
        clipped = ratio.clamp(1 - args.eps_clip, high)
        if args.advantage_estimator == "cispo":
            pg, cut = -clipped.detach() * adv * lp, clipped != ratio
        else:
            pg, cut = -torch.minimum(ratio * adv, clipped * adv), -clipped * adv > -ratio * adv
            if args.eps_clip_c is not None:
                pg = torch.where(adv < 0, torch.minimum(pg, -args.eps_clip_c * adv), pg)
        if args.use_opsm:
            held = (adv < 0) & (of_sample > args.opsm_delta)
            pg = torch.where(held, 0.0, pg)
            opsm_fraction = opsm_fraction + held.double().sum() / mask.sum().clamp(min=1)
        named = {"entropy_loss": entropy, "pg_clipfrac": cut.double(), "ppo_kl": gap}
        if args.use_tis:
            tis = (trained - rollout).exp()
            pg = pg * tis.clamp(args.tis_clip_low, args.tis_clip)
            named |= {
                "tis": tis,
                "tis_abs": (tis - 1).abs(),
                "tis_clipfrac": (tis.clamp(args.tis_clip_low, args.tis_clip) != tis).double(),
                "ois": ratio,
            }
        compared = lp if args.use_rollout_logprobs else old
        named |= {"pg_loss": pg, "train_rollout_logprob_abs_diff": (compared - rollout).abs()}
        named["opd_reverse_kl"] = batch["opd_reverse_kl"][i].double()
        if args.use_kl_loss:
            d = lp - ref
            kl = {"k1": d, "k2": d**2 / 2}.get(args.kl_loss_type, (-d).exp() - 1 + d)
            if args.use_unbiased_kl:
                kl = (lp - old).exp() * kl
            named["kl_loss"] = kl.clamp(-10, 10) if args.kl_loss_type == "low_var_kl" else kl
        for name, x in named.items():
            count = 1 if args.calculate_per_token_loss else batch["rollout_mask_sums"][i].double()
            terms.setdefault(name, []).append((x * mask).sum() / count)
    sums = {name: torch.stack(x).sum() for name, x in terms.items()}
    total_loss = sums["pg_loss"] - args.entropy_coef * sums["entropy_loss"]
    if args.use_kl_loss:
        total_loss = total_loss + args.kl_loss_coef * sums["kl_loss"]
    sums["loss"] = total_loss
    if args.use_opsm:
        sums["opsm_clipfrac"] = opsm_fraction
    return total_loss, sums


def stub_megatron(tp_group=None, cp_group=None, cp_rank: int = 0, cp_size: int = 1) -> dict:
    """Modules for sys.modules that answer as `megatron.core.mpu` does."""
    mpu = types.ModuleType("megatron.core.mpu")
    mpu.get_tensor_model_parallel_group = lambda: tp_group
    mpu.get_context_parallel_group = lambda: cp_group
    mpu.get_context_parallel_rank = lambda: cp_rank
    mpu.get_context_parallel_world_size = lambda: cp_size
    core = types.ModuleType("megatron.core")
    core.mpu = mpu
    root = types.ModuleType("megatron")
    root.core = core
    return {"megatron": root, "megatron.core": core, "megatron.core.mpu": mpu}


def install_stub(**ranks) -> None:
    sys.modules.update(stub_megatron(**ranks))
