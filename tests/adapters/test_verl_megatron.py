"""verl's Megatron engine beside itself: its own padded forward, loss and gradients, and those of mmpack's packs."""

from types import SimpleNamespace

import pytest
import torch
from support.ranks import spawned

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
import itertools

from support.megatron_models import FAMILY, build, start, text_samples

import mmpack as mp
from mmpack.adapters.verl import use

pytestmark = pytest.mark.verl


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_verl_s(ranks, tmp_path):
    spawned(check_step, ranks, tmp_path)


def check_step(rank, ranks):
    from conformance import verl_cpu

    verl_cpu.start()
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    sizes = {} if ranks == 1 else {"pp": 2}
    start(**sizes)
    engine = object.__new__(MegatronEngineWithLMHead)
    engine.module = build(sizes, "rope")
    engine.module[0].module.register_forward_pre_hook(causal, with_kwargs=True)
    engine.tf_config = engine.module[0].config
    off = ("dynamic_context_parallel", "use_fused_kernels", "use_remove_padding", "pad_to_length")
    off += ("pad_bshd_to_minibatch_max", "entropy_from_logits_with_chunking")
    replay = SimpleNamespace(mode="disabled")
    engine.engine_config = SimpleNamespace(
        context_parallel_size=1, router_replay=replay, **dict.fromkeys(off, False)
    )
    config = SimpleNamespace(model_type=FAMILY.name, architectures=["GPT"])
    engine.model_config = SimpleNamespace(
        hf_config=config,
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=FAMILY.pad_token_id),
    )
    engine.enable_routing_replay = False
    stock = one_step(engine)
    handle = use(engine)
    for own, theirs in zip(one_step(engine), stock, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=2e-6)
    assert 0 < handle.stats["tokens"] < handle.stats["tokens_unshared"]
    handle.stop()
    engine.engine_config.dynamic_context_parallel = True
    with pytest.raises(mp.ModelError, match="dynamic_context_parallel is on"):
        use(engine)


def causal(model, args, kwargs):
    """verl's mask [B, S], of rows padded at the end, as local layers take it: Transformer Engine's read that one."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    count = mask.shape[1]
    square = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
    return args, kwargs | {"attention_mask": square}


def one_step(engine):
    """What comes back of a step, and gradients."""
    from verl.utils import tensordict_utils as tu

    (chunk,) = engine.module
    chunk.zero_grad_buffer()
    data = data_of(text_samples(2))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    tu.assign_non_tensor(data, calculate_entropy=True)
    out = engine.forward_backward_batch(data, loss_of)
    found = [p.main_grad.clone() for p in chunk.module.parameters()]
    if out:  # of the last stage
        found += [out["model_output"][name].values() for name in ("log_probs", "entropy")]
        found[-2:] = [values[scored(data)] for values in found[-2:]]
        found.append(torch.tensor(sum(out["loss"])))
    return found


def data_of(samples):
    """A mini-batch as verl's workers get it."""
    from tensordict import TensorDict

    def nested(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    ids = [torch.as_tensor(s.input_ids) for s in samples]
    return TensorDict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(x)) for x in ids]),
            "prompts": nested([x[:9] for x in ids]),
            "responses": nested([x[9:] for x in ids]),
            "loss_mask": nested([torch.ones(len(x) - 9) for x in ids]),
            "temperature": torch.full((len(ids),), 0.7),
        },
        batch_size=[len(ids)],
    )


def scored(data):
    """Rows before response tokens, which verl's losses read."""
    ends = data["input_ids"].offsets().tolist()
    return torch.cat([torch.arange(a + 8, b - 1) for a, b in itertools.pairwise(ends)])


def loss_of(model_output, data, dp_group):
    rows = scored(data)
    values = model_output["log_probs"].values()[rows] + 0.1 * model_output["entropy"].values()[rows]
    targets = data["input_ids"].values()[rows + 1]
    return (values * torch.sin(targets.float())).sum() / 100, {}
