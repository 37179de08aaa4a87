"""verl's engines on two ranks, beside stock verl's shards: unlike numbers of bins, Ulysses, VeOmni's model."""

import pickle
from dataclasses import replace

import pytest
import torch
from support.families import mixed_batch
from support.models import small_model
from support.ranks import spawned
from support.verl_steps import Step, assert_same_step, trained, with_columns

pytestmark = [pytest.mark.verl, pytest.mark.slow]
EXTERNAL = {"external_lib": "mmpack.adapters.verl.enable", "use_remove_padding": True}


@pytest.mark.parametrize(
    ("name", "check"), [("qwen3_vl", "fsdp2"), ("qwen3_vl_moe", "veomni"), ("qwen3_5", "veomni")]
)
def test_two_ranks_are_verl_s(tmp_path, verl_on_cpu, name, check):
    from mmpack.adapters.verl.data import from_samples

    samples = [
        replace(s, loss_spans=s.loss_spans[-1:], sample_id=f"{s.sample_id}/{k}")
        for k in range(2)
        for s in mixed_batch(name)
        if all(
            m.modality == "image" for m in s.media
        )  # stock verl's towers run once more for videos
    ]
    model = small_model(name).bfloat16().float()  # VeOmni rounds weights
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    model.save_pretrained(tmp_path / "model")
    data = from_samples(samples)
    draw = torch.Generator().manual_seed(0)
    data.batch["advantages"] = torch.randn(data.batch["responses"].shape, generator=draw)
    data.reorder(torch.tensor([0, 3, 1, 4, 2, 5]))
    run = check_fsdp if check == "fsdp2" else check_veomni
    spawned(run, 2, tmp_path, tmp_path / "model", pickle.dumps(data), name)


def check_fsdp(rank, ranks, checkpoint, pickled, name):
    from conformance.verl_cpu import make_engine, start

    start()
    whole = pickle.loads(pickled)
    half, wanted = stock_step(rank, make_engine(checkpoint), whole)
    found = trained(make_engine(checkpoint, **EXTERNAL), half, **given(whole))
    counts = [None] * ranks
    torch.distributed.all_gather_object(counts, found.micro_batches)
    assert len(set(counts)) == 1 and counts[0] < 3, counts
    assert_same_step(mean_loss(found), wanted)
    split = make_engine(checkpoint, ulysses=2, **EXTERNAL)
    assert_same_step(trained(split, whole, **given(whole)), wanted)
    assert split.handle.stats["tokens"] < split.handle.stats["tokens_unshared"]


def check_veomni(rank, ranks, checkpoint, pickled, name):
    """Beside stock VeOmni, one row each; its Qwen3.5 needs kernels of GPUs, so there beside stock FSDP."""
    from conformance.verl_cpu import make_engine, make_veomni_engine, start

    start()
    whole = pickle.loads(pickled)
    runs = name != "qwen3_5"
    stock = make_veomni_engine(checkpoint) if runs else make_engine(checkpoint)
    _, wanted = stock_step(rank, stock, whole, use_remove_padding=runs)
    split = make_veomni_engine(checkpoint, ulysses=2, **EXTERNAL)
    assert_same_step(trained(split, whole, **given(whole)), wanted)
    assert split.handle.stats["tokens"] < split.handle.stats["tokens_unshared"]


def given(whole, **more):
    return {"micro_batch_size_per_gpu": 1, "global_batch_size": len(whole)} | more


def stock_step(rank, stock, whole, **settings):
    with_columns(stock, whole, micro_batch_size_per_gpu=1, **settings)
    half = whole[rank * 3 : rank * 3 + 3]
    return half, mean_loss(trained(stock, half, **given(whole, **settings)))


def mean_loss(step: Step) -> Step:
    """The loss of all ranks: verl's are scaled so that their mean is that."""
    loss = torch.tensor(step.loss, dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    return step._replace(loss=float(loss) / torch.distributed.get_world_size())
