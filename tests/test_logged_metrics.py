"""Metrics of micro-batches, merged, are those of one micro-batch of all; names are flat, values floats."""

import json

import numpy as np
import pytest
import torch
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.cache import FeatureStore
from mmpack.errors import ArgumentError
from mmpack.losses.policy.call import METRICS

LENGTHS = [3, 1, 4, 2, 5]


def columns(seed=0):
    draw = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy")
    out = {name: -torch.rand(n, generator=draw) * 2 for name in names}
    return out | {"entropy": -out["entropy"]}, torch.randn(len(LENGTHS), generator=draw)


def loss_of(first, last, **options):
    """`policy_loss` of the samples [first, last), with the totals of all."""
    own, advantages = columns()
    cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    rows = slice(int(cu[first]), int(cu[last]))
    own = {name: x[rows] for name, x in own.items()}
    return mp.policy_loss(
        own.pop("logprobs").requires_grad_(),
        advantages[first:last],
        cu[first : last + 1] - cu[first],
        **own,
        total_tokens=sum(LENGTHS),
        total_samples=len(LENGTHS),
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"correction": "tis"},
        {"correction": "mis", "correction_low": 0.5, "correction_high": 1.2},
        {"kl_coef": 0.1, "entropy_coef": 0.01, "dual_clip": 1.5},
    ],
    ids=str,
)
def test_micro_batches_give_the_metrics_of_the_step(options):
    whole = loss_of(0, 5, **options)
    parts = [loss_of(0, 2, **options), loss_of(2, 2, **options), loss_of(2, 5, **options)]
    found = mp.metrics(policy=parts)
    assert found.keys() == {f"policy/{name}" for name in ("loss", *whole.metrics)}
    expected = {"loss": whole.loss.item()} | {k: float(v) for k, v in whole.metrics.items()}
    for name, value in expected.items():
        assert found[f"policy/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert set(whole.metrics) <= set(METRICS)
    one = mp.metrics(policy=whole)
    assert one == pytest.approx({f"policy/{k}": v for k, v in expected.items()}, rel=1e-6)


def test_teachers_are_weighed_by_what_they_speak_of():
    def distilled(lists):
        teacher = mp.ops.ScoredSupport(
            torch.tensor([0, *np.cumsum([len(x) for x in lists])]),
            torch.arange(sum(map(len, lists))),
            torch.tensor([x for own in lists for x in own]),
        )
        logprobs = torch.full((sum(map(len, lists)),), -1.0)
        cu = torch.tensor([0, len(lists)], dtype=torch.int32)
        return mp.distillation_loss(
            {"32B": logprobs}, {"32B": teacher}, cu, tail="ignore", total_tokens=4
        )

    lists = [[-0.5], [], [-1.5], [-0.25]]
    whole = mp.metrics(maths=distilled(lists))
    split = mp.metrics(maths=[distilled(lists[:3]), distilled(lists[3:])])
    assert whole == pytest.approx(split, abs=1e-6) and whole["maths/32B/tokens"] == 3.0
    assert whole["maths/32B/divergence"] > 0


def test_plans_batches_reports_and_numbers():
    parts = [("text", range(5)), ("response", [1, 2, 3])]
    samples = [make_sample(parts, f"s{i}") for i in range(4)]
    plan = mp.plan(samples, max_tokens=16, share_prefix=True, ranks=2)
    packs = [mp.pack([samples[i] for i in b], share_prefix=True) for b in plan.bins]
    report = mp.compare(
        samples, [*samples[:3], make_sample([parts[0], ("response", [1, 2, 9])], "s3")]
    )
    found = mp.metrics(
        plan=plan,
        pack=packs,
        parity=report,
        lr=torch.tensor([0.5]),
        run={"epoch": np.float32(2), "features": FeatureStore(10)},
    )
    assert all(type(x) is float for x in found.values()) and json.dumps(found)
    assert found["lr"] == 0.5 and found["run/epoch"] == 2.0 and found["run/features/hits"] == 0.0
    assert found["plan/total_tokens"] == 12.0 and found["plan/fill"] == plan.stats["fill"]
    assert found["plan/fills/max_tokens"] == plan.stats["fills"]["max_tokens"]
    assert "plan/loads" not in found and "plan/seconds" not in found  # a list, and None
    assert found["pack/tokens_unshared"] == 32.0
    assert found["pack/tokens"] == sum(b.num_tokens for b in packs) < 32.0
    assert found["parity/ok"] == float(report.ok) == 0.0
    assert found["parity/findings"] == report.total_findings > 0
    assert sum(v for k, v in found.items() if k.startswith("parity/causes/")) >= 1.0


def test_a_probe_report():
    from mmpack.probe.report import Kind, ModuleRow, ProbeReport

    rows = [
        ModuleRow(name, "out", i, "text", Kind(4, 1e-3, 1e-4, i, 10.0 * i), {})
        for i, name in enumerate(("embed", "layer"))
    ]
    report = ProbeReport("a", "b", None, rows, None, None, None)
    assert mp.metrics(probe=report) == {
        "probe/ok": 1.0,
        "probe/modules": 2.0,
        "probe/parted": 1.0,
        "probe/worst": 10.0,
    }


@pytest.mark.parametrize(
    "parts",
    [
        {"a": "text"},
        {"a": []},
        {"a": None},
        {"a": torch.zeros(2)},
        {"a": full_sample()},
        {"a": {"b": 1}, "a/b": 2},
        {"a": [mp.ParityReport(True, 1, ())] * 2},
    ],
    ids=lambda parts: next(iter(parts.values())).__class__.__name__,
)
def test_what_has_no_numbers(parts):
    with pytest.raises(ArgumentError, match=r"^metrics: 'a(/b)?' (is|occurs) .*Fix: ") as caught:
        mp.metrics(**parts)
    assert "\n" not in str(caught.value)
