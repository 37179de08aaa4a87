"""verl's engine on two ranks, beside stock verl's shards: unlike numbers of bins, and Ulysses."""

import pickle
from dataclasses import replace

import pytest
import torch
from support.families import mixed_batch
from support.models import small_model
from support.ranks import spawned
from support.verl_steps import Step, assert_same_step, trained, with_columns

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_two_ranks_are_verl_s(tmp_path, verl_on_cpu, name="qwen3_vl"):
    from mmpack.adapters.verl.data import from_samples

    samples = [
        replace(s, loss_spans=s.loss_spans[-1:], sample_id=f"{s.sample_id}/{k}")
        for k in range(2)
        for s in mixed_batch(name)
        if all(
            m.modality == "image" for m in s.media
        )  # stock verl's towers run once more for videos
    ]
    small_model(name).save_pretrained(tmp_path / "model")
    spawned(check, 2, tmp_path, tmp_path / "model", pickle.dumps(from_samples(samples)))


def check(rank, ranks, checkpoint, pickled):
    from conformance.verl_cpu import make_engine, start

    start()
    whole = pickle.loads(pickled)
    stock = make_engine(checkpoint)
    draw = torch.Generator().manual_seed(0)
    whole.batch["advantages"] = torch.randn(whole.batch["responses"].shape, generator=draw)
    with_columns(stock, whole, micro_batch_size_per_gpu=3)
    whole.reorder(torch.tensor([0, 3, 1, 4, 2, 5]))
    half = whole[rank * 3 : rank * 3 + 3]
    given = {"micro_batch_size_per_gpu": 1, "global_batch_size": len(whole)}
    wanted = mean_loss(trained(stock, half, **given))
    external = {"external_lib": "mmpack.adapters.verl.enable", "use_remove_padding": True}
    packed = make_engine(checkpoint, **external)
    found = trained(packed, half, **given)
    counts = [None] * ranks
    torch.distributed.all_gather_object(counts, found.micro_batches)
    assert len(set(counts)) == 1 and counts[0] < 3, counts
    assert_same_step(mean_loss(found), wanted)
    split = make_engine(checkpoint, ulysses=2, **external)
    found = trained(split, whole, **given)
    assert split.handle.stats["tokens"] < split.handle.stats["tokens_unshared"]
    assert_same_step(found, wanted)


def mean_loss(step: Step) -> Step:
    """The loss of all ranks: verl's are scaled so that their mean is that."""
    loss = torch.tensor(step.loss, dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    return step._replace(loss=float(loss) / torch.distributed.get_world_size())
