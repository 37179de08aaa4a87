"""Experts of a real vLLM engine, replayed in transformers.

vLLM returns `routed_experts` by Model Runner V2, which runs on no CPU. Here its own capturer is bound to the model of
its CPU engine, one prefill per sample, and its rows are cut as its scheduler cuts them.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import close_shared
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, record_routes
from mmpack.adapters.vllm import VllmEngine, to_samples
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError, BackendError
from mmpack.parity.drift import logprob_drift

pytestmark = pytest.mark.engine
EXPERTS, LAYERS, CHOSEN = 8, 4, 2
PROMPTS = ["What is the sum of the angles of a triangle?", "Name a colour."]


@pytest.fixture(scope="module")
def model():
    model = tiny_model("qwen3_vl_moe")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name and "language_model" in name:  # another expert is another answer
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """As Qwen3-VL-MoE checkpoints are: experts are stored transposed, and `norm_topk_prob` is in the config."""
    folder = tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder)
    qwen_vl_processor(family="qwen3_vl_moe", max_pixels=64 * 32 * 32).save_pretrained(folder)
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    config["text_config"]["norm_topk_prob"] = True
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    close_shared()
    with VllmEngine(checkpoint, prefix_caching=False) as engine:
        yield engine


class Captured:
    """The experts of the engine's last step."""

    def __init__(self, engine):
        config = engine.llm.llm_engine.vllm_config
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturing

        self.capturer = capturing.RoutedExpertsCapturer(256, config)
        engine.llm.apply_model(
            lambda model: capturing.bind_routed_experts_capturer(model, self.capturer)
        )

    def of(self, tokens):
        """What its scheduler returns for a finished request: rows of all tokens but the last, in one or two bytes."""
        return self.capturer.snapshot_routing_data(tokens - 1).numpy().copy()


def other_expert(routes):
    return (routes + 1) % EXPERTS


def test_a_rollouts_experts_are_replayed(engine, model):
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    captured = Captured(engine)
    params = SamplingParams(
        max_tokens=6, logprobs=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompts = [engine.prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    inputs = engine.render(prompts)
    outputs = engine.generate(inputs, params, False)
    once = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    for output in outputs:
        [completion] = output.outputs
        ids = [*output.prompt_token_ids, *completion.token_ids]
        engine.generate([tokens_input(ids)], once, True)
        completion.routed_experts = captured.of(len(ids))
    samples = to_samples(outputs, inputs, prompts, params, engine.processor, engine=engine.about)
    assert mp.validate(samples) == []
    for sample in samples:
        assert sample.routed_experts.shape == (len(sample), LAYERS, CHOSEN)
        assert sample.routed_experts.dtype == "uint8" and not sample.routed_experts[-1].any()

    def drift(train):
        batch = mp.pack(train)
        with attach(model), torch.no_grad(), record_routes(model) as taken:
            logprobs = [x.numpy() for x in batch.unpack_loss(packed_logprobs(model, batch))]
        routes = [x.numpy() for x in batch.unpack_tokens(taken.rows)]
        return logprob_drift(samples, logprobs, dtype="float32", routed_experts=routes)

    # the trainer's own routers take the same experts in fp32: rows and layers are where we read them
    for routes, causes in ((lambda x: None, []), (lambda x: x, []), (other_expert, ["routing"])):
        train = [dataclasses.replace(s, routed_experts=routes(s.routed_experts)) for s in samples]
        found = drift(train)
        assert found.ok == (causes == []) and list(found.causes) == causes

    output = outputs[0]
    output.outputs[0].routed_experts = output.outputs[0].routed_experts[3:]
    with pytest.raises(ArgumentError, match="no routed_experts_prompt_start"):
        to_samples(outputs, inputs, prompts, params, engine.processor)


def test_the_cpu_engine_refuses_to_return_them(checkpoint):
    with pytest.raises(BackendError, match="Model Runner V2"):
        VllmEngine(checkpoint, enable_return_routed_experts=True)
