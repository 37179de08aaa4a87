"""A model that reads text only, of a family without pictures: a shared pack beside each sample alone."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.models import spread_out

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.families import FAMILIES
from mmpack.families.qwen3 import QWEN3
from mmpack.schema.spans import LossSpan

pytestmark = pytest.mark.adapter
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def registered():
    with patch.dict(FAMILIES):
        FAMILIES.pop("qwen3", None)
        assert mp.register_family(QWEN3).placeholder_ids == {}
        yield


def test_text_packs_as_alone():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = spread_out(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)))
    prompt, answers = list(range(3, 12)), ([20, 21, 22], [30])
    samples = [
        mp.Sample(
            f"s{k}", "q", "qwen3", np.array(prompt + a), [], [], [LossSpan(9, 9 + len(a), turn=0)]
        )
        for k, a in enumerate(answers)
    ]
    alone = []
    for sample in samples:
        ids = torch.as_tensor(sample.input_ids)[None]
        logprobs = model(input_ids=ids).logits[0, 8:-1].log_softmax(-1)
        alone.append(logprobs.gather(-1, ids[0, 9:, None])[:, 0])
    alone = torch.cat(alone)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (alone * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    batch = mp.pack(samples, share_prefix=True)
    assert batch.num_tokens == 9 + 3 + 1 and tuple(batch.position_ids.shape) == (1, 13)
    with attach(model):
        logprobs = packed_logprobs(model, batch)
    assert (logprobs - alone).abs().max() <= 1e-5
    (logprobs * weights).sum().backward()
    for name, weight in model.named_parameters():
        assert (weight.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
