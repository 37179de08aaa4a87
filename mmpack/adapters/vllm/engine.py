"""A vLLM engine in this process: rollouts as samples, scores of samples, weights in and checked.

Its processor is the one that vLLM loads from the checkpoint, its positions are those of the model's own function.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig

from mmpack.adapters.processed_media import SECONDS
from mmpack.adapters.vllm.engine_inputs import from_samples
from mmpack.adapters.vllm.samples import EVERY_ID, PROCESSED, asked_logprobs, item_of, to_samples
from mmpack.adapters.vllm.versions import (
    known_settings,
    label_outputs,
    label_weights,
    media_cache,
    metadata_keyword,
)
from mmpack.errors import ArgumentError, BackendError, ModelError, check_flag, require
from mmpack.families import family_of_config
from mmpack.processors.messages import parts_of
from mmpack.processors.wrap import wrap_processor
from mmpack.schema.sample import Sample
from mmpack.video.hand_over import hf_metadata

POSITION_RULE = "max"  # of vLLM's get_mrope_input_positions, where a family has more than one
RAW = "raw_logprobs"
LONGEST = 4096  # tokens of a prompt and its response, where max_model_len is None
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights and positions are asked of the model itself
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a trainer shares the process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# settings of vLLM by where kept ids come from
_KEPT_SETTINGS: dict[str | None, dict[str, Any]] = {
    "sampling_mask": {"return_sampling_mask": True},
    "logprobs": {"max_logprobs": EVERY_ID},
}


class VllmEngine:
    """`with VllmEngine(checkpoint) as engine: samples = engine.rollout(prompts, group_ids)`.

    Args:
        checkpoint: a folder or a hub name.
        dtype: `float32`, `bfloat16`, … or `auto`.
        prefix_caching: keys and values of shared prompts are computed once.
        media_cache_gb: GiB of processed media that are kept for when they come again; 0: each is processed every time.
        chunked_prefill: prompts are cut into pieces of at most this many tokens; None: each in one piece.
        kept_ids: samples name the ids that top-k, top-p and min-p left, and `rollout_logprobs` are over these. By
            vLLM's Model Runner V2, which needs Triton and a `top_k`; without Triton, on a CPU, by asking for the
            logprobs of every id that can be left.
        max_model_len: longest prompt and response together, in tokens; None: 4096, or the model's own if less.
        media_root, video_policy, video_settings: of `wrap_processor`: which files messages may name, and how their
            videos are sampled. vLLM gets the planned frames, and samples nothing itself.
        options: further arguments of `vllm.LLM`.

    Raises: what `load_vllm` does; BackendError for a checkpoint or a setting that vLLM rejects.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        dtype: str = "float32",
        prefix_caching: bool = True,
        media_cache_gb: float = 4.0,
        chunked_prefill: int | None = None,
        kept_ids: bool = False,
        max_model_len: int | None = None,
        media_root: str | Path | None = None,
        video_policy: str | None = None,
        video_settings: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        vllm = load_vllm()
        check_flag("VllmEngine", "kept_ids", kept_ids)
        self.logprobs_mode = PROCESSED if kept_ids else RAW
        # where kept ids come from: V2's own lists, or the logprobs of the model runner that does without Triton
        triton = require("vllm.triton_utils", "vllm", "VllmEngine").HAS_TRITON if kept_ids else None
        kept_from = None if triton is None else "sampling_mask" if triton else "logprobs"
        settings = {
            "block_size": 32,
            "enforce_eager": True,
            "limit_mm_per_prompt": {"image": 8, "video": 1},
            "max_num_seqs": 64,
            "mm_device_do_normalize": False,  # pixels are normalised once, by the processor
            "mm_processor_cache_gb": media_cache_gb,
            "skip_mm_profiling": True,
            **_KEPT_SETTINGS.get(kept_from, {}),
        }
        settings = known_settings(vllm, settings) | options
        self._version: str | None = None  # of the weights that were loaded last
        try:
            length = max_model_len
            if not length:
                text = AutoConfig.from_pretrained(checkpoint).get_text_config()
                length = min(LONGEST, int(text.max_position_embeddings))
            self.llm = vllm.LLM(
                model=str(checkpoint),
                dtype=dtype,
                enable_prefix_caching=prefix_caching,
                enable_chunked_prefill=chunked_prefill is not None,
                max_num_batched_tokens=chunked_prefill or length,
                max_model_len=length,
                logprobs_mode=self.logprobs_mode,
                **settings,
            )
        except Exception as error:  # pydantic's, the platform's, the model's
            reason = " ".join(str(error).split())[:300]
            raise BackendError(
                f"VllmEngine: vLLM rejects {str(checkpoint)!r:.200} ({type(error).__name__}: {reason}). "
                "Fix: pass a checkpoint and settings that vllm.LLM takes"
            ) from error
        self.hf_processor = self.llm.renderer.get_mm_processor().info.get_hf_processor()
        rules = family_of_config(self.llm.model_config.hf_config).position_rules
        self.processor = wrap_processor(
            self.hf_processor,
            position_rule=POSITION_RULE if POSITION_RULE in rules else rules[0],
            media_root=media_root,
            video_policy=video_policy,
            video_settings=video_settings,
        )
        self.about = {
            "name": "vllm",
            "version": vllm.__version__,
            "dtype": str(self.llm.model_config.dtype).removeprefix("torch."),
            "prefix_caching": prefix_caching,
            "media_cache": self.llm.model_config.multimodal_config.mm_processor_cache_gb > 0,
            "chunked_prefill": chunked_prefill,
            "kept_ids": kept_from,
        }

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the weights and the KV cache back. A second call does nothing."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()

    def rollout(
        self,
        prompts: Sequence[Sequence[dict[str, Any]]],
        group_ids: Sequence[str],
        *,
        n: int = 4,
        max_new_tokens: int = 32,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        together: bool = True,
    ) -> list[Sample]:
        """Sample `n` responses of each prompt; torch's global seed decides them.

        Args:
            prompts: chat messages, their media as `mp.wrap_processor` takes them.
            together: all requests in one batch, or one after the other.

        `rollout_logprobs` are raw: of the model, whatever `temperature`, `top_p`, `top_k` (0: off) and `min_p` are.
        With an engine of `kept_ids=True` they are processed: at that temperature, over the kept ids.

        Raises: ArgumentError where such an engine samples with temperature 0 or leaves every id in (`top_k` of 0 too,
        by Model Runner V2); BackendError where the media of one prompt don't fit into the media cache.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_new_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._asked(temperature, top_p, top_k, min_p),
        )
        opened = [self.open(messages) for messages in prompts]
        handed = [self._prompt(m, media) for m, media in zip(prompts, opened, strict=True)]
        inputs = self.render(handed)
        places = [self.positions(given) for given in inputs]
        order = [p for p in range(len(prompts)) for _ in range(n)]
        outputs = self.generate([inputs[p] for p in order], params, together)
        return to_samples(
            outputs,
            [inputs[p] for p in order],
            [handed[p] for p in order],
            params,
            self.processor,
            media=[opened[p] for p in order],
            group_ids=[group_ids[p] for p in order],
            positions=[places[p] for p in order],
            logprobs_mode=self.logprobs_mode,
            engine=self.about,
        )

    def _asked(self, temperature: float, top_p: float, top_k: int, min_p: float) -> dict[str, Any]:
        """The part of SamplingParams that asks for logprobs, and for kept ids where they are read off them."""
        kept_from = self.about["kept_ids"]
        if kept_from is None:
            return {"logprobs": 1}
        cut = top_k > 0 or (kept_from == "logprobs" and (top_p < 1 or min_p > 0))
        if temperature <= 0 or not cut:
            wanted = "top_k" if kept_from == "sampling_mask" else "top_p, top_k or min_p"
            raise ArgumentError(
                f"VllmEngine.rollout: temperature={temperature}, top_p={top_p}, top_k={top_k}, min_p={min_p}, "
                "and these settings leave no list of kept ids. "
                f"Fix: use temperature above 0 and {wanted}, or an engine without kept_ids"
            )
        if kept_from == "sampling_mask":
            return {"logprobs": 1}
        vocabulary = self.llm.model_config.get_vocab_size()
        asked = asked_logprobs(top_k, vocabulary, every_id=self.about["dtype"] != "float32")
        return {"logprobs": asked, "flat_logprobs": True, "detokenize": False}

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """float32 [n] of each sample: raw logprobs of its loss tokens under the engine's weights, by one prefill."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, output_kind=kind)
        outputs = self.generate(from_samples(samples), params, True)
        return [
            np.array(
                [output.prompt_logprobs[i][int(s.input_ids[i])].logprob for i in s.loss_indices],
                dtype=np.float32,
            )
            for output, s in zip(outputs, samples, strict=True)
        ]

    def prompt(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What `LLM.generate` takes: ids of the rendered messages, one placeholder per medium, and the media."""
        return self._prompt(messages, self.open(messages))

    def open(self, messages: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """The media of messages by modality: pictures as they are given, videos as their planned frames (`Clip`)."""
        media: dict[str, list[Any]] = {}
        for k, (kind, item) in enumerate(parts_of(messages, None)):
            where = f"VllmEngine: media[{k}]"
            if kind == "video":
                item = self.processor.clip(item, where)
            elif isinstance(item, (str, Path, bytes)):
                item = Image.fromarray(self.processor.rgb_pixels(item, where)[0])
            media.setdefault(kind, []).append(item)
        return media

    def _prompt(
        self, messages: Sequence[dict[str, Any]], media: dict[str, list[Any]]
    ) -> dict[str, Any]:
        ids = self.processor.tokenizer(self.processor.render(messages), add_special_tokens=False)
        out: dict[str, Any] = {"prompt_token_ids": ids["input_ids"]}
        if media:
            out["multi_modal_data"] = dict(media)
        if "video" in media:
            # frames and metadata as vLLM's own loaders hand them to its processors
            metadata = [hf_metadata(clip.plan) for clip in media["video"]]
            out["multi_modal_data"]["video"] = [
                (clip.tensor(), known | {"do_sample_frames": False})
                for clip, known in zip(media["video"], metadata, strict=True)
            ]
            out["mm_processor_kwargs"] = {"do_sample_frames": False}
            if SECONDS in self.hf_processor.model_input_names:
                out["mm_processor_kwargs"] |= metadata_keyword(self.llm.renderer, metadata)
            if not all(clip.plan.settings.get("do_resize", True) for clip in media["video"]):
                out["mm_processor_kwargs"]["do_resize"] = False
        return out

    def render(self, prompts: Sequence[dict[str, Any]]) -> list[Any]:
        """Engine inputs of prompts: expanded ids, placeholder ranges, and every medium's pixels, cached or not.

        The media cache is vLLM's own for inputs that leave its process; the other one, between its processes, takes
        the pixels of media that come again out of an input. Raises: BackendError where one prompt's media don't fit.
        """
        try:
            rendered: list[Any] = self.llm.renderer.render_cmpl(prompts, skip_mm_cache=True)
        except AssertionError as error:  # vLLM's: one of them pushed out another before it was read
            if "cached item" not in str(error):
                raise
            raise BackendError(
                "VllmEngine: one prompt's media don't fit into the media cache. Fix: pass a larger "
                "media_cache_gb, or 0"
            ) from error
        return rendered

    def media_cache_hits(self) -> int:
        """How many media of all prompts so far came out of the media cache, and were not processed again."""
        cache = media_cache(self.llm.renderer)
        return 0 if cache is None else int(cache.make_stats().hits)

    def positions(self, given: Any) -> tuple[np.ndarray, int]:
        """int64 [3, P] and rope delta of an engine input's prompt, by the model's own function."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        features = []
        for modality, ranges in given.get("mm_placeholders", {}).items():
            for k, where in enumerate(ranges):
                digest = given["mm_hashes"][modality][k]
                item = item_of(given, modality, k, {}, "VllmEngine.positions")
                features.append(MultiModalFeatureSpec(item, modality, digest, where, digest))
        ask = partial(_ask_positions, ids=given["prompt_token_ids"], features=features)
        [(positions, delta)] = self.llm.apply_model(ask)
        return positions.numpy().astype(np.int64), int(delta)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Put a state dict of the trainer's into the running engine; what came of the old weights is forgotten."""
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(tensors.items())}
        )
        self.llm.llm_engine.reset_encoder_cache()
        if not self.llm.reset_prefix_cache():
            raise BackendError(
                "VllmEngine.load_weights: requests are running, and they would keep keys and values of the old "
                "weights. Fix: finish or abort them first"
            )
        label_weights(self.llm.llm_engine, version)
        self._version = version

    def weight_checksums(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return sha256 hex by the trainer's names: of its state dict, and of what the engine computes with.

        The trainer's tensors, of 32 bits or fewer, are cast to the engine's dtype first; −0 counts as 0.
        Raises: ModelError if a tensor has no place in the engine, or another size there (a tensor-parallel shard).
        """
        dtype = getattr(torch, self.about["dtype"])
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        [found] = self.llm.apply_model(partial(_checksums, shapes=shapes))
        return {name: _digest(t, dtype) for name, t in tensors.items()}, dict(found)

    def unlike_weights(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors whose checksums differ in the engine. Raises: as `weight_checksums`."""
        mine, theirs = self.weight_checksums(tensors)
        return [name for name in mine if mine[name] != theirs[name]]

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def generate(self, inputs: Sequence[Any], params: Any, together: bool) -> list[Any]:
        """RequestOutputs in order. Not by `LLM.generate`, which drops the media of an engine input without an error."""
        outputs: list[Any] = []
        for batch in [inputs] if together else [[one] for one in inputs]:
            for one in batch:
                request_id = str(next(self.llm.request_counter))
                self.llm.llm_engine.add_request(request_id, one, params)
            outputs += self.llm.wait_for_completion(use_tqdm=False)
        label_outputs(outputs, self._version)
        return outputs


# ---- the weights that a vLLM model computes with ----------------------------------------------------


def _checksums(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Checksums of the tensors of a vLLM model, under the names of `shapes` (the trainer's)."""
    fused: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        place, rank = _place(model, name)
        fused.setdefault(place, []).append((rank, name))
    out: dict[str, str] = {}
    for place, members in fused.items():
        whole = _read(model, place)
        names = [name for _, name in sorted(members)]
        rows = [shapes[name][0] for name in names]
        if tuple(whole.shape) != (sum(rows), *shapes[names[0]][1:]):
            raise ModelError(
                f"weight_checksums: {place} has shape {list(whole.shape)}, expected "
                f"{sum(rows)} rows of {names[0]}. Fix: use an engine with tensor_parallel_size=1"
            )
        parts = zip(names, whole.split(rows), strict=True)
        out |= {name: _digest(part, part.dtype) for name, part in parts}
    return out


def _place(model: Any, name: str) -> tuple[str, int]:
    """The engine's name of a tensor, and its rank among those fused into it, by the model's own tables."""
    mapped = (model.hf_to_vllm_mapper.apply_list([name]) or [name])[0]
    for whole, parts in model.packed_modules_mapping.items():
        for rank, part in enumerate(parts):
            if f".{part}." in mapped and part != whole:
                return mapped.replace(f".{part}.", f".{whole}."), rank
    return mapped, 0


@torch.no_grad()
def _read(model: Any, place: str) -> torch.Tensor:
    owner, _, leaf = place.rpartition(".")
    try:
        module = model.get_submodule(owner)
        tensor: torch.Tensor = getattr(module, leaf).detach()
    except AttributeError:
        raise ModelError(
            f"weight_checksums: {place} is not in the engine. Fix: pass a model of the same architecture"
        ) from None
    if leaf != "weight" or not hasattr(module, "cpu_linear"):
        return tensor
    columns = tensor.shape[1] if tensor.ndim == 2 else module.input_size_per_partition
    identity = torch.eye(columns, dtype=tensor.dtype, device=tensor.device)
    product: torch.Tensor = module.quant_method.apply(module, identity, None)
    return product.T


def _digest(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    values = tensor.detach().to("cpu", dtype).float().contiguous() + 0.0
    digest = hashlib.sha256(f"{tuple(values.shape)}\0".encode())
    digest.update(values.numpy().data)
    return digest.hexdigest()


# ---- the package ------------------------------------------------------------------------------------


def load_vllm() -> Any:
    """The package, its environment variables set before it reads them; those that are set already stay.

    Raises: MissingExtraError without it; BackendError if it is set to run engines in processes of their own, or if its
    CPU build lacks libnuma.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise BackendError(
            "VllmEngine: VLLM_ENABLE_V1_MULTIPROCESSING is on, and the engine is not in this process. "
            "Fix: set it to 0"
        )
    vllm = require("vllm", "vllm", "VllmEngine")
    platform = require("vllm.platforms", "vllm", "VllmEngine").current_platform
    if sys.platform == "linux" and platform.is_cpu() and not _loads("libnuma.so.1"):
        raise BackendError(
            "VllmEngine: vLLM's CPU build needs the library libnuma.so.1, which is not installed. "
            "Fix: apt-get install libnuma1 (Debian, Ubuntu), or your system's package for it"
        )
    return vllm


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _ask_positions(model: Any, ids: list[int], features: list[Any]) -> Any:
    return model.get_mrope_input_positions(ids, features)
