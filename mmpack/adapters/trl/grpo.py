"""`class Trainer(MmpackGRPO, GRPOTrainer)`: TRL's trainer, its logprob passes on packed, prefix-shared batches.

Overridden are the method that every logprob and entropy [B, C] comes from (old, reference and loss passes), the one
that calls the reward functions, which refuses infinite rewards, and those that kept ids pass through. The models are
attached in the first only. Generation, rewards, advantages, losses, corrections and metrics are TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.loss_values import rectangle
from mmpack.adapters.response_lists import (
    KEPT_IDS,
    refuse_missing,
    response_lists,
    scored_lists,
)
from mmpack.adapters.transformers.attention import attach, refuse_unpackable
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.adapters.transformers.unwrap import is_sharded, unwrap
from mmpack.adapters.trl.batch_rows import media_of_rows, rows_to_samples
from mmpack.adapters.trl.mixin import SUPPORTED, TrainerMixin
from mmpack.cache.features import FeatureStore
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.families import Family, family_of_config
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import placeholder_runs
from mmpack.packing.batch import PackedBatch
from mmpack.parity.fixes import FIXES
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.versions import takes_encoded_media


@dataclass
class PassStats:
    """Sums over forward passes: rows of the text model, patches of the vision tower."""

    passes: int = 0
    samples: int = 0
    tokens: int = 0
    tokens_stock: int = 0
    patches: int = 0
    patches_stock: int = 0

    def add(self, other: PassStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        """A table of three lines."""
        lines = [f"{self.passes:>4} passes {'TRL':>12} {'mmpack':>12} {'ratio':>7}"]
        for name in ("tokens", "patches"):
            stock, own = getattr(self, f"{name}_stock"), getattr(self, name)
            lines.append(f"{name:<11} {stock:>12,} {own:>12,} {stock / max(own, 1):>6.2f}×")
        return "\n".join(lines)


SIZES_LOST = ("strip", "squares")  # pixel layouts (families/base.py) that TRL has no fields for


class MmpackGRPO(TrainerMixin):
    """Mix in before `trl.GRPOTrainer`; takes its arguments. `mmpack_stats` adds up what was computed.

    Every `loss_type` and option of GRPOConfig works as in TRL: the loss is TRL's own code, fed with logprobs and
    entropies that agree with stock ones within the contract ("one model, two layouts": 1e-5 in fp32). Tokens outside
    the attention mask have logprob and entropy 0, as in TRL; so have placeholders inside a completion.

    TRL's own generation keeps no lists of what top-p, top-k and min-p left. A `rollout_func` may return them as
    `kept_ids`, one list of ids per completion token, empty where nothing was sampled: old, reference and loss passes
    are then over these.

    A tower that is not trained encodes each picture once for old, reference and loss passes: its features are kept in
    `feature_bytes` on the device and `feature_host_bytes` on the host, both set in a class body; 0 keeps none.

    Raises, when built: MissingExtraError, BackendError for another TRL than 1.16; LayoutError (MM006) for a model of
    no known family; ModelError for what the packed pass can't do (FSDP 1, torch_compile, the router's auxiliary loss).
    """

    mmpack_stats: PassStats
    feature_bytes: int = 2**29
    feature_host_bytes: int = 0
    _kept_ids: list[Ragged] | None = None  # of the rows that the next passes read

    _trainer, _method = "GRPOTrainer", "_compute_loss"

    def __init__(self, *args: Any, **kwargs: Any):
        self._check_trl("trl")
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        self.mmpack_stats = PassStats()
        self._mmpack_stores: WeakKeyDictionary[torch.nn.Module, FeatureStore] = WeakKeyDictionary()
        policy = unwrap(self.accelerator.unwrap_model(self.model), "MmpackGRPO")
        self._mmpack_family = family_of_config(policy.config)
        refuse_unpackable(policy)
        if self.use_vllm:
            self.vllm_generation.generate = check_prompts(
                self.vllm_generation.generate, self._mmpack_family
            )

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. A rollout_func's `kept_ids` are checked and held, and don't reach the reward functions."""
        out = super()._generate(*args, **kwargs)
        completions, mask, fields = out[1], out[2], out[5]
        self._kept_ids = kept_of_rollout(fields.pop(KEPT_IDS, None), completions, mask)
        return out

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's, with the rows' `kept_ids` in its dict, where it shuffles and splits them with the other fields."""
        refuse_pictures(inputs, self._mmpack_family)
        try:
            out = super()._generate_and_score_completions(inputs)
            return out if self._kept_ids is None else out | {KEPT_IDS: self._kept_ids}
        finally:
            self._kept_ids = None

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._kept_ids = inputs.get(KEPT_IDS)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._kept_ids = None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, [B, functions]. NaN is "no reward" to it, and it warns; an infinite one becomes 0 in silence."""
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        for b, f in rewards.isinf().nonzero()[:1].tolist():
            raise ArgumentError(
                f"MmpackGRPO: {self.reward_func_names[f]} gave {float(rewards[b, f])} to completion {b} of "
                f"{len(rewards)}, which makes the advantages of its group 0. Fix: return a finite reward, or None"
            )
        return rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: Sequence[int] | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        image_position_ids: torch.Tensor | None = None,
        **fields: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's: logprobs and entropies [B, C] of the last C = `logits_to_keep` ids, 0 where nothing is attended.

        `batch_size` rows go into one pack. `mm_token_type_ids` and `token_type_ids` are not read: what a token is
        follows from its id.
        """
        unknown = [name for name, value in fields.items() if value is not None]
        if unknown or compute_aux_loss:
            raise ModelError(
                f"MmpackGRPO: {(unknown or ['the auxiliary loss'])[0]} is not supported in a packed batch. "
                "Fix: train this model with plain GRPOTrainer"
            )
        from trl.extras.profiling import profiling_context

        with profiling_context(self, "_get_per_token_logps_and_entropies"):
            start, device = input_ids.shape[1] - logits_to_keep, input_ids.device
            family = self._mmpack_family
            media = media_of_rows(
                pixel_values, image_grid_thw, num_images, family, image_sizes, image_position_ids
            )
            mask = attention_mask.cpu()
            samples = rows_to_samples(input_ids, mask, start, family, media)
            columns = mask.argmax(dim=1).tolist()  # of each row's first token
            if self._kept_ids is not None:
                rows = zip(samples, columns, self._kept_ids, strict=True)
                for sample, first, lists in rows:
                    at = sample.loss_indices
                    ids = sample.input_ids[at]
                    sample.kept_ids = scored_lists(lists, at + first - start, ids)
            size = batch_size or len(samples)
            logps, entropies = [], []
            for first in range(0, len(samples), size):
                part = samples[first : first + size]
                starts = [column - start for column in columns[first : first + size]]
                values = self._packed_pass(model, part, device, compute_entropy, mask.shape[1])
                made = [rectangle(x, values[0], starts, logits_to_keep) for x in values[1:]]
                logps.append(made[0])
                entropies += made[1:]
            return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _packed_pass(
        self, model: Any, samples: list[Sample], device: torch.device, entropy: bool, width: int
    ) -> tuple[Any, ...]:
        """The pack, logprobs [N] (and entropies [N]) of the samples' loss tokens, from one forward through `model`."""
        batch = pack_shared(samples, model).to(device)
        # a rank without a picture still runs the tower
        vision = "always" if self.accelerator.num_processes > 1 else "auto"
        with self.accelerator.autocast(), attach(model):
            values = packed_logprobs(
                model,
                batch,
                self.temperature,
                vision,
                entropy=entropy,
                features=self._features_of(model, batch),
            )
        stats = PassStats(
            passes=1,
            samples=len(samples),
            tokens=batch.num_tokens,
            tokens_stock=len(samples) * width,
            patches=batch.stats["patches_encoded"],
            patches_stock=sum(_patches(s) for s in samples),
        )
        self.mmpack_stats.add(stats)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in ("tokens", "tokens_stock", "patches", "patches_stock"):
            metrics[f"mmpack/{name}"].append(getattr(stats, name))
        return batch, *(values if isinstance(values, tuple) else (values,))

    def _features_of(self, model: Any, batch: PackedBatch) -> FeatureStore | None:
        """Where features of this model's media are kept: one store for all models whose towers are equal now.

        None where they are not kept: without media or a budget, and where the tower is trained, sharded or has dropout.
        """
        whole = unwrap(model, "MmpackGRPO")
        if not batch.media or not takes_encoded_media(whole):
            return None
        tower = tower_and_projector(whole)
        trained = any(p.requires_grad for p in tower.parameters())
        if self.feature_bytes + self.feature_host_bytes == 0 or trained or tower.random:
            return None
        # ranks must call a sharded tower equally often
        if any(is_sharded(module) for module in tower.modules):
            return None
        store = self._mmpack_stores.get(tower.modules[0])
        # new, or changed: merged adapters, a synced reference
        if store is None or not store.fits(tower):
            fitting = (s for s in self._mmpack_stores.values() if s.fits(tower))
            store = next(fitting, None) or FeatureStore(self.feature_bytes, self.feature_host_bytes)
            self._mmpack_stores[tower.modules[0]] = store
        return store


def kept_of_rollout(
    given: Any, completions: Sequence[Sequence[int]], mask: Sequence[Sequence[int]] | None
) -> list[Ragged] | None:
    """One Ragged per completion, of a list for each of its ids. `mask`: 1 where the policy sampled; None: everywhere.

    Raises: ArgumentError for other lengths, and for an empty list of a token that was sampled.
    """
    if given is None:
        return None
    where = "MmpackGRPO: rollout_func"
    if not isinstance(given, Sequence) or len(given) != len(completions):
        what = f"has {len(given)} rows" if isinstance(given, Sequence) else f"is {kind_of(given)}"
        raise ArgumentError(
            f"{where}: kept_ids {what}, there are {len(completions)} completions. Fix: pass one for each completion"
        )
    out = []
    for b, (own, ids) in enumerate(zip(given, completions, strict=True)):
        lists = response_lists(own, len(ids), f"{where}, completion {b}")
        sampled = np.ones(len(ids), bool) if mask is None else np.asarray(mask[b]).astype(bool)
        refuse_missing(lists, sampled, f"{where}, completion {b}")
        out.append(lists)
    return out


def check_prompts(generate: Callable[..., Any], family: Family) -> Callable[..., Any]:
    """TRL's `generate` of vLLM, wrapped: it returns the engine's own prompt ids too, which TRL drops unread.

    The wrapped one raises ModelError where they are not the ids that TRL trains on.
    """

    @functools.wraps(generate)
    def checked(prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        out = generate(prompts, *args, **kwargs)
        for p, (sent, ran) in enumerate(zip(prompts, out[0], strict=True)):
            if list(sent) != list(ran):
                cause = _cause(np.asarray(sent), np.asarray(ran), family)
                raise ModelError(
                    f"MmpackGRPO: the engine ran prompt {p} with {len(ran)} ids, TRL trains on {len(sent)} others "
                    f"({cause}). Fix: {FIXES[cause]}"
                )
        return out

    return checked


def _cause(sent: np.ndarray, ran: np.ndarray, family: Family) -> str:
    """The cause that the two sides' ids fit."""
    kinds = list(family.placeholder_ids.values())
    if not np.array_equal(sent[~np.isin(sent, kinds)], ran[~np.isin(ran, kinds)]):
        return "chat_template"
    lengths = [r.stops - r.starts for r in (placeholder_runs(x, family) for x in (sent, ran))]
    if len(lengths[0]) != len(lengths[1]):
        return "dropped_image"
    doubled = (lengths[1] >= 2 * lengths[0] - 1) & (lengths[1] > lengths[0])
    return "double_expansion" if doubled.any() else "max_pixels"


def refuse_unsupported(trainer: Any) -> None:
    """Raise ModelError for settings of a trainer that the packed pass can't obey."""
    sharded = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    other = "turn it off, or train with plain GRPOTrainer"
    options = (
        ("FSDP 1", getattr(sharded, "fsdp_version", 2) == 1, "fsdp_config={'version': 2}"),
        ("the router's auxiliary loss", trainer.aux_loss_enabled, other),
        ("torch_compile", trainer.args.torch_compile, other),
    )
    refuse_on("MmpackGRPO", options)


def refuse_pictures(rows: Sequence[Any], family: Family) -> None:
    """Raise ModelError for rows with pictures of a family whose sizes TRL loses, before it generates and then fails."""
    if family.pixel_layout not in SIZES_LOST:
        return
    for row in rows:
        if isinstance(row, Mapping) and (row.get("images") or row.get("image") is not None):
            raise ModelError(
                f"MmpackGRPO: TRL {SUPPORTED} does not pass the sizes of {family.name}'s pictures to the model. "
                "Fix: train on text alone, or call mp.pack and packed_logprobs in a loop of your own"
            )


def _patches(sample: Sample) -> int:
    """What the tower of a rectangle encodes of a sample: each medium as often as it occurs."""
    return sum(int(np.prod(m.grid_thw)) for m in occurring_media(sample))
