"""PackLoader keeps groups whole where it is asked to, and PackBatches goes on past dead samples."""

import pytest
from support.groups import answered
from support.same import assert_equal
from torch.utils.data import DataLoader

import mmpack as mp
from mmpack.adapters.torch import PackBatches, PackLoader
from mmpack.planning import CostModel

COST = CostModel(row=1.0)


def group(name, prompt, answers):
    start = 1000 * (1 + int(name))
    return [
        answered(f"{name}/{k}", name, [start] * prompt, [start + 1 + k] * n)
        for k, n in enumerate(answers)
    ]


# one group of 800 rows, which a plan splits, beside four of 100
SKEWED = group("0", 20, [195] * 4) + [s for g in range(1, 5) for s in group(str(g), 10, [45] * 2)]


def loader(samples=SKEWED, **options):
    options = {"max_tokens": 1000, "ranks": 2, "share_prefix": True, "cost": COST} | options
    return PackLoader(samples, prefetch=0, **options)


@pytest.mark.parametrize("keep", [True, False])
def test_groups_are_kept_as_a_plan_keeps_them(keep):
    plan = mp.plan(SKEWED, max_tokens=1000, ranks=2, share_prefix=True, cost=COST, keep_groups=keep)
    ranks_of_first = set()
    for rank in range(2):
        [(step, batches)] = [(s, list(s)) for s in loader(keep_groups=keep, rank=rank)]
        assert step.bins == [plan.bins[b] for b in plan.ranks[rank]]
        if any(name.startswith("0/") for batch in batches for name in batch.sample_ids):
            ranks_of_first.add(rank)
    assert len(ranks_of_first) == (1 if keep else 2)


def test_a_state_knows_whether_groups_were_kept():
    options = {"max_tokens": 300, "ranks": 1}
    kept = loader(keep_groups=True, **options)
    next(iter(next(iter(kept))))
    state = kept.state_dict()
    assert state["batch"] == 1
    with pytest.raises(mp.ArgumentError, match="keep_groups=True, this one's is False"):
        loader(**options).load_state_dict(state)
    del state["planned"]["keep_groups"]  # of an mmpack that had no such option
    loader(**options).load_state_dict(state)
    with pytest.raises(mp.ArgumentError, match="keep_groups=False, this one's is True"):
        kept.load_state_dict(state)


def with_dead(path):
    """Five groups of two: one of the second and all of the third are dead, one of the last is over the budget."""
    samples = [s for g in range(5) for s in group(str(g), 10, [20, 30])]
    samples[8] = group("4", 10, [2000])[0]

    class Items(list):
        def __getitem__(self, i):
            if i in (2, 4, 5):
                raise OSError(5, "Input/output error", f"picture-{i}")
            return super().__getitem__(i)

    options = {"groups": [str(i // 2) for i in range(10)], "groups_per_step": 1, "ranks": 1}
    letters = mp.schema.DeadLetters(path)
    return loader(Items(samples), dead_letters=letters, max_tokens=100, **options), letters


def places(letters):
    return [(x.code, x.place) for x in letters]


def test_batches_go_on_past_the_dead(tmp_path):
    plain, letters = with_dead(tmp_path / "plain.jsonl")
    expected = []
    for step in plain:
        about = [step.number, step.total_tokens, step.total_samples, places(step.dead)]
        expected += [[b.sample_ids, b.input_ids, b.position_ids, *about] for b in step]
    wanted = sorted(places(letters.read()))
    assert len(wanted) == 4 and {code for code, _ in wanted} == {"MM501", "MM405"}
    for workers in (0, 1):
        there, letters = with_dead(tmp_path / f"{workers}.jsonl")
        got = [
            [x.batch.sample_ids, x.batch.input_ids, x.batch.position_ids]
            + [x.step, x.total_tokens, x.total_samples, places(x.dead)]
            for x in DataLoader(PackBatches(there), batch_size=None, num_workers=workers)
        ]
        assert_equal(got, expected)
        assert sorted(places(letters.read())) == wanted
    there, _ = with_dead(tmp_path / "two.jsonl")
    loader = iter(DataLoader(PackBatches(there), batch_size=None, num_workers=2))
    with pytest.raises(mp.ArgumentError, match="dead_letters with 2 workers"):
        next(loader)
    loader._shutdown_workers()  # now, and not in the midst of another test
