"""The policy loss of vime and slime by mmpack, against the same loss written out token by token in float64."""

import copy
import sys

import pytest
import torch
from support.ranks import spawned
from support.vime_steps import (
    CASES,
    LENGTHS,
    V,
    install_stub,
    micro_batch,
    options,
    reference,
    sample_mean_reducer,
    stub_megatron,
)
from torch import distributed
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.vime.objective import loss
from mmpack.adapters.vime.responses import kept_support, log_probs_and_entropy, places
from mmpack.contracts import gradient_fp32_bound
from mmpack.errors import ArgumentError, ModelError

NEAR = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name, module in stub_megatron().items():
        monkeypatch.setitem(sys.modules, name, module)


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(x, device) for x in value] if isinstance(value, list) else value


def step(args, batch, logits, reduce=None, device="cpu"):
    kept = {k: v for k, v in batch.items() if k.startswith("rollout_top_p")}  # stay on the host
    batch = {k: moved(v, device) for k, v in batch.items()} | kept
    logits = logits.to(device, copy=True).requires_grad_()
    reduce = reduce or sample_mean_reducer(args, batch)
    out, metrics = loss(args, batch, logits, reduce)
    out.backward()
    return out.detach().cpu(), {k: v.cpu() for k, v in metrics.items()}, logits.grad.cpu()


def expected_step(args, batch, logits):
    logits = logits.double().clone().requires_grad_()
    out, metrics = reference(args, batch, logits)
    out.backward()
    return out.detach(), metrics, logits.grad


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics(case, device):
    args = options(case)
    batch, logits = micro_batch(case)
    out, metrics, grad = step(args, batch, logits, device=device)
    expected, theirs, expected_grad = expected_step(args, batch, logits)
    assert out.dtype == torch.float32 and out.shape == () and expected_grad.abs().max() > 0
    torch.testing.assert_close(out.double(), expected, **NEAR)
    assert ((grad - expected_grad).abs() <= gradient_fp32_bound(expected_grad.abs().max())).all()
    assert metrics.keys() == theirs.keys()
    for name, value in theirs.items():
        assert not metrics[name].requires_grad
        torch.testing.assert_close(metrics[name].double(), value.detach(), **NEAR, msg=name)


def test_a_checkpoint_around_the_loss():
    args, (batch, logits) = options("everything"), micro_batch("everything")
    reduce = sample_mean_reducer(args, batch)
    expected = step(args, batch, logits)
    logits = logits.clone().requires_grad_()
    out, _ = checkpoint(loss, args, batch, logits, reduce, use_reentrant=False)
    out.backward()
    assert torch.equal(out, expected[0]) and torch.equal(logits.grad, expected[2])


def test_what_no_reduction_reads_may_be_anything():
    args, (batch, logits) = options("tis", use_kl_loss=True), micro_batch("tis")
    expected = step(args, batch, logits)
    masked = 2, slice(1, 3)  # response tokens of the third sample
    total, n = LENGTHS[2]
    row = sum(t for t, _ in LENGTHS[:2]) + total - n - 1 + 1
    logits[0, row : row + 2] = torch.nan
    logits[0, 0] = torch.nan  # of a prompt
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "opd_reverse_kl"):
        batch[name][masked[0]][masked[1]] = torch.nan
    got = step(args, batch, logits)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    assert all(torch.equal(x, expected[1][name]) for name, x in got[1].items())


def scaled(args, pg_loss, loss_masks, **_):
    """A correction of somebody's: it weighs by half, and rejects the first sample."""
    masks = [m * (i > 0) for i, m in enumerate(loss_masks)]
    return pg_loss * 0.5, masks, {"halves": torch.full_like(pg_loss, 0.5)}


def sums_of(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    flat = torch.cat(loss_masks)
    return lambda x: (x * flat).sum() * 3


def get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, counts, per_token):
    batch = {
        "response_lengths": response_lengths,
        "loss_masks": loss_masks,
        "rollout_mask_sums": counts,
    }
    return sample_mean_reducer(options("grpo"), batch)


def test_corrections_and_reducers_of_others():
    here = sys.modules[__name__].__name__
    args = options("grpo", use_tis=True, custom_tis_function_path=f"{here}.scaled")
    batch, logits = micro_batch("grpo")

    def reduce(x):
        return sample_mean_reducer(args, batch)(x)

    out, metrics, grad = step(args, batch, logits, reduce)
    rejected = copy.copy(batch) | {
        "loss_masks": scaled(None, torch.ones(1), batch["loss_masks"])[1]
    }
    plain = step(options("grpo"), rejected, logits)
    torch.testing.assert_close(out, plain[0] / 2)
    torch.testing.assert_close(grad, plain[2] / 2)
    torch.testing.assert_close(metrics["entropy_loss"], plain[1]["entropy_loss"])
    counted = reduce(torch.full((sum(n for _, n in LENGTHS),), 0.5))
    torch.testing.assert_close(metrics["halves"], counted)
    assert metrics["ois"] > 0
    args = options("grpo", custom_pg_loss_reducer_function_path=f"{here}.sums_of")
    per_token = step(options("per_token"), batch, logits)
    torch.testing.assert_close(step(args, batch, logits)[0], 3 * per_token[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["tensor", "zigzag", "allgather"],
)
def test_two_ranks_are_one(way, tmp_path):
    spawned(_rank, 2, tmp_path, way)


def _rank(rank, ranks, way):
    world = distributed.group.WORLD
    if way == "tensor":
        install_stub(tp_group=world)
    else:
        install_stub(cp_group=world, cp_rank=rank, cp_size=ranks)
    for case in ("everything", "gspo_tis", "opsm"):
        _part(case, way, rank, ranks)


def _part(case, way, rank, ranks):
    """Losses and gradients of the ranks add up to those of one."""
    args = options(case, allgather_cp=way == "allgather")
    batch, logits = micro_batch(case)
    expected, theirs, gradient = expected_step(args, batch, logits)
    if way == "tensor":
        part = slice(rank * V // 2, (rank + 1) * V // 2)
        out, metrics, grad = step(args, batch, logits[..., part].contiguous())
        torch.testing.assert_close(out.double(), expected, **NEAR)
        error = (grad - gradient[..., part]).abs()
    else:
        own, index, local = cut(way, rank, ranks, batch)
        rows = torch.nn.functional.pad(logits[0], (0, 0, 0, 1))[index]  # the last one is padding
        out, metrics, grad = step(args, own, rows[None], local)
        total = out.clone()
        distributed.all_reduce(total)
        torch.testing.assert_close(total.double(), expected, **NEAR)
        whole = torch.nn.functional.pad(gradient[0], (0, 0, 0, 1))[index]
        error = (grad[0] - whole).abs()
        for name in metrics:
            distributed.all_reduce(metrics[name])
    assert (error <= 2 * gradient_fp32_bound(gradient.abs().max())).all()
    for name, value in theirs.items():
        torch.testing.assert_close(metrics[name].double(), value.detach(), **NEAR, msg=name)


def cut(way, rank, ranks, batch):
    """A rank's columns, the rows of its logits (-1: padding), and its reduction, token by token."""
    first, index, held = 0, [], []
    for total, n in LENGTHS:
        chunk = -(-total // (2 * ranks))
        mine = [k for k in range(2 * ranks * chunk) if k // chunk in (rank, 2 * ranks - 1 - rank)]
        index += [first + k if k < total else -1 for k in mine]
        held.append([k + 1 - (total - n) for k in mine if total - n - 1 <= k < total - 1])
        first += total
    if way == "allgather":
        half = -(-first // ranks)
        index = [k if k < first else -1 for k in range(rank * half, (rank + 1) * half)]
    own = dict(batch)
    for name in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "opd_reverse_kl"):
        own[name] = [x[at] for x, at in zip(batch[name], held, strict=True)]

    def reduce(x):
        parts = x.split([len(at) for at in held])
        columns = zip(parts, batch["loss_masks"], held, batch["rollout_mask_sums"], strict=True)
        return sum((p * m[at]).sum() / count for p, m, at, count in columns)

    return own, torch.tensor(index), reduce


def test_rows_of_a_layout():
    zigzag = [places([9, 3], [4, 2], "zigzag", rank, 2, 8) for rank in range(2)]
    # chunks of 3 tokens and of 1: rank 0 has the first and the last, rank 1 those between
    assert zigzag[0].rows.tolist() == [6] and zigzag[0].tokens.tolist() == [10]
    assert zigzag[1].rows.tolist() == [1, 2, 3, 4, 6]
    assert zigzag[1].responses[0].tolist() == [0, 1, 2, 3]
    together = sorted(int(t) for p in zigzag for t in p.tokens)
    assert together == places([9, 3], [4, 2], "single", 0, 1, 12).tokens.tolist()
    gathered = [places([9, 3], [4, 2], "allgather", rank, 2, 6) for rank in range(2)]
    assert [p.rows.tolist() for p in gathered] == [[4, 5], [0, 1, 3, 4]]


def test_misuse_is_one_line():
    args, (batch, logits) = options("grpo"), micro_batch("grpo")
    given = {
        "args": args,
        "unconcat_tokens": batch["unconcat_tokens"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    for shown, change, error, message in (
        (logits[0], {}, ArgumentError, r"logits are \[31, 24\], expected \[1, T, V\]"),
        (logits[:, 1:], {}, ArgumentError, "needs 31 rows of logits, there are 30"),
        (logits, {"response_lengths": [9, 1, 7, 3]}, ArgumentError, "9 response tokens of 9"),
        (logits, {"response_lengths": [9]}, ArgumentError, "4 total_lengths and 1 response"),
        (logits, {"top_p_token_ids": []}, ArgumentError, "must be passed together"),
        (logits, {"args": options("grpo", qkv_format="bshd")}, ModelError, "qkv_format is 'bshd'"),
    ):
        with pytest.raises(error, match=message):
            log_probs_and_entropy(shown, **given | change)
    for change, more, message in (
        ({"rollout_log_probs": None}, {"use_tis": True}, "no rollout_log_probs"),
        ({"ref_log_probs": None}, {"use_kl_loss": True}, "no ref_log_probs"),
        ({}, {"rollout_top_p": 0.9}, "no rollout_top_p_token_ids"),
        ({}, {"use_kl_loss": True, "kl_loss_type": "k4"}, "kl_loss_type"),
    ):
        with pytest.raises(ArgumentError, match=message):
            step(options("grpo", **more), batch | change, logits)


def test_kept_ids_that_don_t_fit():
    args, (batch, logits) = options("kept_ids"), micro_batch("kept_ids")
    offsets = batch["rollout_top_p_token_offsets"]
    empty = offsets[0].clone()
    empty[1] = 0
    lacking = [ids.clone() for ids in batch["rollout_top_p_token_ids"]]
    target = int(batch["unconcat_tokens"][0][5])
    lacking[0][: int(offsets[0][1])][lacking[0][: int(offsets[0][1])] == target] = V - 1 - target
    for change, message in (
        ({"rollout_top_p_token_offsets": [empty, *offsets[1:]]}, "sample 0, response token 0 is"),
        ({"rollout_top_p_token_offsets": [offsets[0][:-1], *offsets[1:]]}, "kept_ids"),
        # of the whole sample: lists of its response are elsewhere
        (
            {"rollout_top_p_token_offsets": [_of_all_tokens(offsets[0]), *offsets[1:]]},
            "one more, rising",
        ),
        ({"rollout_top_p_token_offsets": offsets[1:]}, "top_p_token_offsets 3 for 4"),
        ({"rollout_top_p_token_ids": [[0.5], *lacking[1:]]}, "expected integers"),
        ({"rollout_top_p_token_ids": lacking}, "lacks its target|has .* after"),
    ):
        with pytest.raises(ArgumentError, match=message):
            step(args, batch | change, logits)
    support = kept_support(
        [[7, 3, 9]], [[0, 2, 2, 3]], [torch.tensor([1, 2]).numpy()], [3], torch.tensor([5, 9])
    )
    assert support.offsets.tolist() == [0, 1, 2] and support.ids.tolist() == [5, 9]


def _of_all_tokens(offsets):
    return torch.cat([torch.zeros(LENGTHS[0][0] - LENGTHS[0][1], dtype=offsets.dtype), offsets])


@DEVICES
def test_an_empty_list_that_nobody_looked_at_gives_nan(monkeypatch, device):
    """As on a GPU, where masks are not looked at: no number, and not the logprob 0, of a loss token without a list."""
    args, (batch, logits) = options("everything"), micro_batch("everything")
    ends = batch["rollout_top_p_token_offsets"]
    first, count = ends[3][:1], int(ends[3][1])
    batch["rollout_top_p_token_offsets"] = [*ends[:3], torch.cat([first, ends[3][1:] - count])]
    batch["rollout_top_p_token_ids"][3] = batch["rollout_top_p_token_ids"][3][count:]
    monkeypatch.setattr("mmpack.adapters.vime.objective._refuse_empty", lambda *_: None)
    out, metrics, _ = step(args, batch, logits, device=device)
    assert out.isnan() and metrics["loss"].isnan() and metrics["pg_loss"].isnan()
    batch["loss_masks"][3] = torch.tensor([0, 1, 1])  # a tool's
    out, _, grad = step(args, batch, logits, device=device)
    assert out.isfinite() and grad.isfinite().all()


def test_without_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    args, (batch, logits) = options("grpo"), micro_batch("grpo")
    with pytest.raises(ModelError, match="Megatron, which knows the ranks, is not installed"):
        step(args, batch, logits)
