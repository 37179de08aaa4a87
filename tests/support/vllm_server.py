"""vLLM's own `/render` and `/inference/v1/generate`, over an engine of this process: no sockets, JSON in and out."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.models.serving import BaseModelPath, OpenAIModelRegistry

from mmpack.adapters.vllm import VllmEngine
from mmpack.adapters.vllm.versions import protocol_class, tokens_module

MODEL = "policy"


class Server:
    """`render` answers what the endpoint does, and `generate` takes it."""

    def __init__(self, engine: VllmEngine):
        client = _Client(engine)
        registry = OpenAIModelRegistry(client.model_config, [BaseModelPath(MODEL, MODEL)])
        registry.lora_requests = {}
        settings = {
            "model_config": client.model_config,
            "renderer": client.renderer,
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
        }
        if importlib.util.find_spec("vllm.entrypoints.scale_out"):
            from vllm.entrypoints.scale_out.render.serving import ServingRender
            from vllm.renderers.online_renderer import OnlineRenderer

            online = OnlineRenderer(**settings)
            self._render = ServingRender(registry, online)
        else:  # vLLM 0.24
            from vllm.entrypoints.serve.render.serving import OpenAIServingRender

            online = self._render = OpenAIServingRender(model_registry=registry, **settings)
        serving = tokens_module("serving", "Server").ServingTokens
        self._tokens = serving(client, registry, online, request_logger=None)

    def render(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return self.asked({"model": MODEL, "messages": messages, **fields})

    def asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the endpoint of `/render` answers to a JSON body."""
        return _json(self._render.render_chat_request(ChatCompletionRequest.model_validate(body)))

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        given = protocol_class("GenerateRequest", "Server").model_validate(request)
        return _json(self._tokens.serve_tokens(given))


class _Client:
    """What ServingTokens asks of an engine."""

    errored = False

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self.vllm_config = engine.llm.llm_engine.vllm_config
        self.model_config = engine.llm.model_config
        self.renderer = engine.llm.renderer
        self.input_processor = engine.llm.llm_engine.input_processor

    def check_admission(self, n: int) -> None:
        pass

    async def generate(self, given: Any, params: Any, request_id: str, **_: Any) -> Any:
        [output] = self._engine.generate([given], params, True)
        yield output


def _json(answer: Any) -> dict[str, Any]:
    """As it comes off the wire. An error of the server's raises."""
    found = asyncio.run(answer)
    if not hasattr(found, "model_dump"):
        raise RuntimeError(str(found))
    body: dict[str, Any] = json.loads(json.dumps(found.model_dump(), allow_nan=False))
    if "error" in body:
        raise RuntimeError(body["error"]["message"])
    return body
