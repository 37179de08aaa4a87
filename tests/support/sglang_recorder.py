"""Routes recorded by SGLang's own classes on the CPU, as its model runner and scheduler call them; no model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

SLOTS = 2048  # of the cache, each of one token
LONGEST = 1024  # sequence
REQUESTS = 4
CHUNK = 512  # tokens of a batch, at most


class Recorder:
    """One model runner's capturer, and its cache, whose free slots are in a random order.

    `shared`: columns of a shared expert that the kernel computes beside the routed ones. `overlap`: a batch is handed
    over after the next one has run, as SGLang's scheduler does unless told otherwise.
    """

    def __init__(self, capturer: Any, shared: int, overlap: bool) -> None:
        from sglang.srt.layers.moe.topk import TopKConfig
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.capturer, self.shared, self.overlap = capturer, shared, overlap
        self.top_k = TopKConfig(top_k=capturer.topk_size + shared)
        self.allocator = TokenToKVPoolAllocator(SLOTS, torch.int64, "cpu", None, need_sort=False)
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))
        self.allocator.free(self.allocator.alloc(SLOTS)[order])
        self.pool = ReqToTokenPool(REQUESTS, LONGEST, "cpu", enable_memory_saver=False)
        self.pending: Any = None

    def request(self, cached: Tensor | None = None) -> Any:
        """A new one; `cached`: slots of a prefix that another request has computed."""
        [row] = self.pool.alloc_rows(1)
        made = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), length=0)
        if cached is not None:
            self._place(made, cached)
        return made

    def slots(self, request: Any) -> Tensor:
        """Of its tokens so far, a view: what is written there is what SGLang reads."""
        return self.pool.req_to_token[request.kv.req_pool_idx, : request.length]

    def forward(self, *parts: tuple[Any, Tensor]) -> None:
        """One batch: experts [tokens, layers, k] of the next tokens of each request; layer 0 has none."""
        from sglang.srt.layers.moe.topk import capture_routed_experts_if_allowed

        sizes = [len(experts) for _, experts in parts]
        slots = self.allocator.alloc(sum(sizes))
        for (request, _), own in zip(parts, slots.split(sizes), strict=True):
            self._place(request, own)
        taken = torch.cat([experts for _, experts in parts])
        last = torch.full((len(taken), self.shared), 99)  # the shared expert's id
        for layer in range(1, taken.shape[1]):
            routed = torch.cat([taken[:, layer], last], -1).to(torch.int32)
            capture_routed_experts_if_allowed(self.top_k, layer, routed)
        batch = SimpleNamespace(out_cache_loc=slots, out_cache_loc_virtual=None)
        recorded = self.capturer.on_forward_end(
            batch, can_run_graph=False, cuda_graph_batch=None, no_copy_to_cpu=self.overlap
        )
        self.flush()
        self.pending = recorded

    def flush(self) -> None:
        """Hand over the last batch."""
        if self.pending is not None:
            self.pending.map_device_tensors(Tensor.cpu)
            self.pending.finalize()
        self.pending = None

    def finish(self, request: Any, prompt: list[int], response: list[int]) -> Tensor:
        """int32 [rows, layers, k], what the scheduler sends for a finished request."""
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor,
        )

        done = SimpleNamespace(
            kv=request.kv,
            return_routed_experts=True,
            routed_experts_start_len=0,
            origin_input_ids=prompt,
            output_ids_through_stop=response,
        )
        scheduler: Any = SimpleNamespace(req_to_token_pool=self.pool)
        SchedulerBatchResultProcessor._maybe_collect_routed_experts(scheduler, done)
        return done.routed_experts

    def _place(self, request: Any, slots: Tensor) -> None:
        stop = request.length + len(slots)
        self.pool.write((request.kv.req_pool_idx, slice(request.length, stop)), slots)
        request.length = stop


@contextmanager
def recorder(config: Any, shared: int = 0, overlap: bool = False) -> Iterator[Recorder]:
    """For a model of this text config. Only settings of the server and the pinning of memory are made up here."""
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.state_capturer import routed_experts as module

    features = SimpleNamespace(enable_return_routed_experts=True)
    model: Any = SimpleNamespace(
        shared_experts_config=SimpleNamespace(num_fused_shared_experts=shared)
    )
    with pytest.MonkeyPatch.context() as patch, get_parallel().override(num_dp_ranks=1):
        patch.setattr(module, "get_exec", lambda: SimpleNamespace(features=features))
        patch.setattr(module, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=CHUNK))
        patch.setattr(common, "_cuda_host_register", lambda *_: None)  # needs a GPU
        capturer = module.RoutedExpertsCapturer.create(
            model=model,
            model_config=SimpleNamespace(hf_text_config=config),
            num_tokens=SLOTS + 1,  # slot 0 is for padding
            max_running_requests=REQUESTS,
            device="cpu",
        )
        module.set_global_experts_capturer(capturer)
        try:
            yield Recorder(capturer, shared, overlap)
        finally:
            module.destroy_global_experts_capturer()
