"""`engine_side`: a real vLLM engine as a side of the probe, its modules under transformers' names.

vLLM fuses what transformers keeps apart: qkv_proj and gate_up_proj are cut into their parts, SiluAndMul gives what
goes into down_proj, and a norm that adds the residual gives what transformers' layer returned.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.vllm.engine import VllmEngine
from mmpack.adapters.vllm.engine_inputs import from_samples
from mmpack.errors import ArgumentError, ModelError, installed_version, kind_of
from mmpack.probe.places import TEXT, Places
from mmpack.probe.record import IN, OUT, Recorder, Rows
from mmpack.probe.side import Side
from mmpack.probe.tower_rows import TowerCall, rows_of_tower, window_order
from mmpack.schema.sample import Sample

NAMES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^visual\.", "model.visual."),
    (r"^language_model\.lm_head$", "lm_head"),
)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# modules whose input no module made: attention, the activation, the merge of patches, pixels
READ = re.compile(r"(o_proj|attn\.proj|down_proj|linear_fc2|patch_embed\.proj)$")
NORM = re.compile(r"norm\d?$|ln_q$|layernorm$")
SKIPPED = re.compile(r"(attn\.attn|apply_rotary_emb|act_fn|input_norm|rotary_pos_emb|rotary_emb)$")


def engine_side(engine: VllmEngine, name: str = "vllm") -> Side:
    """A side of `mp.probe.run` that scores samples with a vLLM engine in this process, one after the other.

    Prefix cache and encoder cache are emptied before each sample, so that every row is computed. Logprobs are the
    engine's own raw ones, over all ids: compare them with those of `probe_side(…, kept_ids=False)`.
    Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
    Raises: ArgumentError for what is no VllmEngine; ModelError where the engine cuts a prompt into chunks.
    """
    if not isinstance(engine, VllmEngine):
        raise ArgumentError(
            f"engine_side: engine is {kind_of(engine)}, expected a VllmEngine. Fix: pass a VllmEngine"
        )
    config = engine.llm.model_config
    about = {
        "layout": "vllm",
        "dtype": str(config.dtype).removeprefix("torch."),
        "model_type": config.hf_config.model_type,
        "torch": torch.__version__,
        "vllm": installed_version("vllm"),
    }

    vision_config = getattr(config.hf_config, "vision_config", None)

    def run(samples: Sequence[Sample], recorder: Recorder) -> None:
        for number, sample in zip(recorder.places.numbers_of(samples), samples, strict=True):
            engine.llm.llm_engine.reset_encoder_cache()
            engine.reset_prefix_cache()
            recorder.begin()
            score = _Scored(sample, number, recorder, vision_config)
            with _hooked(engine, score):
                outputs = _scored(engine, sample)
            score.put_logprobs(outputs)

    return Side(name, run, about)


def _scored(engine: VllmEngine, sample: Sample) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    [output] = engine.generate(from_samples([sample]), params, together=True)
    return output


@contextlib.contextmanager
def _hooked(engine: VllmEngine, score: _Scored) -> Iterator[None]:
    handles: list[Any] = []
    engine.llm.apply_model(lambda model: score.install(model, handles))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Scored:
    """One sample's pass: hooks that put rows of [L, …] and of media into the recorder."""

    def __init__(self, sample: Sample, number: int, recorder: Recorder, vision_config: Any):
        self.sample, self.recorder = sample, recorder
        self.places: Places = recorder.places
        into, tokens = self.places.chosen(number)
        self.text = Rows(TEXT, torch.from_numpy(tokens), into)
        scored = {t - 1 for s in sample.loss_spans for t in range(s.start, s.stop)}
        kept = np.array([int(t) in scored for t in tokens], dtype=bool)
        self.heads = Rows(TEXT, torch.from_numpy(tokens[kept]), into[kept])
        self.calls = self._media(number, vision_config)
        self.call: TowerCall | None = None
        self.last = {"layers": 0, "blocks": 0}
        self.deepstack = 0

    def _media(self, number: int, vision_config: Any) -> list[tuple[tuple[int, ...], TowerCall]]:
        """Grid and call of each distinct medium, images first as vLLM runs them."""
        found: dict[str, TowerCall] = {}
        of = {(int(s), int(m)): o for o, (s, m, _, _) in enumerate(self.places.media)}
        for j, medium in enumerate(self.sample.media):
            order = window_order(medium.grid_thw, vision_config)
            fresh = TowerCall([[]], [medium.num_patches], [order])
            call = found.setdefault(medium.cache_key, fresh)
            call.occurrences[0].append(of[number, j])
        grids = {m.cache_key: (m.modality, tuple(m.grid_thw)) for m in self.sample.media}
        keys = sorted(found, key=lambda key: grids[key][0])
        return [(grids[key][1], found[key]) for key in keys]

    def install(self, model: Any, handles: list[Any]) -> None:
        for name, _ in model.named_modules():
            for kind in self.last:
                if found := re.search(rf"\.{kind}\.(\d+)$", name):
                    self.last[kind] = max(self.last[kind], int(found[1]))
        visual = getattr(model, "visual", None)
        if visual is not None:
            self.deepstack = len(getattr(visual, "deepstack_visual_indexes", None) or ())
            handles.append(visual.register_forward_pre_hook(self._next_call, with_kwargs=True))
        for name, module in model.named_modules():
            plain = name
            for pattern, other in NAMES:
                plain = re.sub(pattern, other, plain)
            if name.endswith("layers.0.self_attn.rotary_emb"):
                handles.append(module.register_forward_pre_hook(self._positions))
            if name.endswith("logits_processor"):
                handles.append(module.register_forward_hook(self._head))
                continue
            if any(True for _ in module.children()) or SKIPPED.search(name) or plain == "lm_head":
                continue
            if plain == name and not plain.startswith("model."):
                continue
            before = self._before(plain)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            parent = model.get_submodule(name.rpartition(".")[0])
            handles.append(module.register_forward_hook(self._after(plain, parent)))

    def _next_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """The tower runs some media of one modality, in their order: those of the same grids."""
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        grids = grids.tolist() if torch.is_tensor(grids) else grids
        taken = TowerCall([], [])
        for grid in map(tuple, grids):
            at = next((i for i, (own, _) in enumerate(self.calls) if own == grid), None)
            if at is None:
                raise ModelError(
                    f"engine_side: vLLM's tower reads a grid {list(grid)} that no other medium of "
                    f"{self.sample.sample_id!r:.60} has. Fix: pass samples that this engine's own processor made"
                )
            _, one = self.calls.pop(at)
            taken.occurrences += one.occurrences
            taken.patches += one.patches
            taken.orders += one.orders
        self.call = taken

    def _positions(self, module: Any, args: Any) -> None:
        positions = args[0] if args[0].ndim == 2 else args[0][None]
        self._put("model.language_model.rotary_emb", IN, positions.movedim(-1, 0))

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args or not torch.is_tensor(args[0]) or not args[0].is_floating_point():
                return None
            if NORM.search(name):
                if len(args) > 1 or kwargs.get("residual") is not None:
                    return None  # the sum is returned with the output
                given = args[0]
                self._stream(name, given)
            elif READ.search(name):
                given = self.recorder.shaken(args[0])
                self._put(name, IN, given)
                return (given, *args[1:]), kwargs
            return None

        return hook

    def _after(self, name: str, parent: Any) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            parts = list(output) if isinstance(output, tuple) else [output]
            if not torch.is_tensor(parts[0]):
                return None
            if NORM.search(name) and len(parts) == 2 and torch.is_tensor(parts[1]):
                parts[1] = self.recorder.shaken(parts[1])
                self._stream(name, parts[1])  # the sum that it read
            parts[0] = self.recorder.shaken(parts[0])
            self._put_out(name, parts[0], parent)
            return tuple(parts) if isinstance(output, tuple) else parts[0]

        return hook

    def _put_out(self, name: str, values: torch.Tensor, parent: Any) -> None:
        stem, _, last = name.rpartition(".")
        if last not in FUSED:
            self._put(name, OUT, values)
            return
        if last == "gate_up_proj":
            sizes = [values.shape[-1] // 2] * 2
        else:
            sizes = [parent.q_size, parent.kv_size, parent.kv_size]
        for part, piece in zip(FUSED[last], values.split(sizes, -1), strict=True):
            self._put(f"{stem}.{part}", OUT, piece)

    def _stream(self, name: str, values: torch.Tensor) -> None:
        """What a norm reads: transformers' layer returned it, or it was made between modules."""
        found = re.search(r"(.*\.(layers|blocks))\.(\d+)\.(input_layernorm|norm1)$", name)
        if found is not None:
            number = int(found[3])
            added = found[2] == "layers" and number - 1 < self.deepstack
            if number > 0 and not added:
                self._put(f"{found[1]}.{number - 1}", OUT, values)
                return
        elif name == "model.language_model.norm":
            self._put(f"model.language_model.layers.{self.last['layers']}", OUT, values)
            return
        elif re.search(r"visual\.merger\.(ln_q|norm)$", name):
            self._put(f"model.visual.blocks.{self.last['blocks']}", OUT, values)
            return
        self._put(name, IN, values)

    def _head(self, module: Any, args: tuple[Any, ...], logits: torch.Tensor) -> None:
        """Logits of all rows but the last; those of the last alone are another call."""
        hidden = args[1]
        if len(hidden) != len(self.sample) - 1 or not len(self.heads.into):
            return
        rows = Rows(TEXT, self.heads.take, self.heads.into)
        self.recorder.put("lm_head", IN, self.recorder.shaken(hidden), rows)
        self.recorder.put(
            "lm_head", OUT, self.recorder.shaken(logits), rows, "lm_head<in", hidden.shape[-1]
        )

    def put_logprobs(self, output: Any) -> None:
        if not len(self.heads.into):
            return
        ids, given = self.sample.input_ids.tolist(), output.prompt_logprobs
        chosen = [given[t + 1][ids[t + 1]].logprob for t in self.heads.take.tolist()]
        values = torch.tensor([[lp, 1.0] for lp in chosen], dtype=torch.float32)
        rows = self.heads.part(0, len(chosen))
        self.recorder.put("logprobs", OUT, values, rows)

    def _put(self, name: str, side: str, values: torch.Tensor) -> None:
        if "visual" in name:
            if self.call is None:
                return
            flat = values.reshape(len(values), -1)
            rows = rows_of_tower(self.call, self.places, len(flat), name)
            if rows is not None:
                self.recorder.put(name, side, flat, rows)
            return
        if len(values) != len(self.sample):
            raise ModelError(
                f"engine_side: vLLM runs {len(values)} rows at {name}, {self.sample.sample_id!r:.60} has "
                f"{len(self.sample)}. Fix: make the engine by VllmEngine(…, chunked_prefill=None)"
            )
        self.recorder.put(name, side, values, self.text)
