"""`class Trainer(MmpackGRPO, GRPOTrainer)`: TRL's trainer, its logprob passes on packed, prefix-shared batches.

Overridden are the method that every logprob and entropy [B, C] comes from (old, reference and loss passes), the one
that hands out micro-batches, which cuts a step's again by group, the one that calls the reward functions, which refuses
infinite rewards, and those that kept ids and videos pass through. The models are attached in the first only.
Generation, rewards, advantages, losses, corrections and metrics are TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from mmpack.adapters.loss_values import rectangle
from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS, media_of_inputs
from mmpack.adapters.response_lists import (
    KEPT_IDS,
    refuse_missing,
    response_lists,
    scored_lists,
)
from mmpack.adapters.row_sample import prompt_group
from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.trl.batch_rows import media_of_rows, rows_to_samples
from mmpack.adapters.trl.mixin import PassStats, TrainerMixin
from mmpack.adapters.trl.recut import (
    GROUPS,
    VIDEOS,
    chosen,
    concatenated,
    joined_parts,
    largest_group,
    order_of,
)
from mmpack.errors import ArgumentError, ModelError, check_whole, kind_of
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs
from mmpack.parity.fixes import FIXES
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample

__all__ = ["MmpackGRPO", "MmpackRLOO", "PassStats"]

SIZES_LOST = ("strip", "squares")  # pixel layouts (families/base.py) that TRL has no fields for


class MmpackGRPO(TrainerMixin):
    """Mix in before `trl.GRPOTrainer`; takes its arguments. `mmpack_stats` adds up what was computed.

    Every `loss_type` and option of GRPOConfig works as in TRL: the loss is TRL's own code, fed with logprobs and
    entropies that agree with stock ones within the contract ("one model, two layouts": 1e-5 in fp32). Tokens outside
    the attention mask have logprob and entropy 0, as in TRL; so have placeholders inside a completion.

    TRL's own generation keeps no lists of what top-p, top-k and min-p left. A `rollout_func` may return them as
    `kept_ids`, one list of ids per completion token, empty where nothing was sampled: old, reference and loss passes
    are then over these.

    The rows of an optimizer step are sorted by group, and as many of TRL's micro-batches run as one pass as leave it at
    most `max_tokens` tokens, set in a class body. None: those of TRL's own rectangle, or of the largest group if it has
    more. What depends on a micro-batch's tokens (`bnpo`, `entropy_coef`, `top_entropy_quantile`) keeps TRL's.

    A tower that is not trained encodes each picture once for old, reference and loss passes: its features are kept in
    `feature_bytes` on the device and `feature_host_bytes` on the host, both set in a class body; 0 keeps none.

    Raises, when built: MissingExtraError, BackendError for a TRL without the methods that are overridden;
    LayoutError (MM006) for a model of no known family; ModelError for what the packed pass can't do (FSDP 1,
    torch_compile, NEFTune, the router's auxiliary loss); ArgumentError for `max_tokens` below 1.
    """

    max_tokens: int | None = None
    current_gradient_accumulation_steps: Any  # the Trainer's
    _held: dict[str, Any]  # kept ids and videos of the rows that the next passes read
    _ahead: list[Any]  # micro-batches to come of this optimizer step; None: in a later one
    _joined: int = 1  # how many of TRL's micro-batches the present one holds
    _done: int = 0  # micro-batches of this optimizer step that came before
    _groups_kept = False  # whether what is generated keeps the numbers of its groups

    _trainer = "GRPOTrainer"
    _methods: ClassVar = {
        "_prepare_inputs": ("generation_batch",),
        "_generate": ("prompts",),
        "_generate_and_score_completions": ("inputs",),
        "_tokenize_prompts": ("prompts",),
        "_calculate_rewards": (),
        "_get_per_token_logps_and_entropies": ("batch_size", "compute_entropy", "compute_aux_loss"),
        "_compute_loss": ("model", "inputs"),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        self._check_trl("trl")
        self._held = {}
        super().__init__(*args, **kwargs)
        # of TRL before 1.15, where it takes the place of the passes
        liger = getattr(self, "use_liger_kernel", False)
        self._start_packing([("use_liger_kernel", liger, "turn it off")])
        if self.max_tokens is not None:
            check_whole(self._mixin().__name__, "max_tokens", self.max_tokens, least=1)
        if self.use_vllm:
            self.vllm_generation.generate = check_prompts(
                self.vllm_generation.generate, self._mmpack_family, self._mixin().__name__
            )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batch; in training, the rows of its optimizer step cut again. None: they are in a later one."""
        self._groups_kept = self.model.training
        try:
            inputs = super()._prepare_inputs(generation_batch)
        finally:
            self._groups_kept = False
        if not self.model.training:
            self._joined = 1
            return inputs
        steps, at = self.args.steps_per_generation, self._step % self.args.steps_per_generation
        left = self.current_gradient_accumulation_steps - self._done
        if self._done == 0 or at == 0:  # what is left of the step, or of what was generated
            self._ahead = self._recut(self._buffered_inputs[at : at + min(left, steps - at)])
        self._done = 0 if self.accelerator.sync_gradients else self._done + 1
        return self._ahead.pop(0)

    def _recut(self, chunks: Sequence[Any]) -> list[Any]:
        """TRL's micro-batches of one step, as many: the last of each `_joined` holds the rows of all of them."""
        self._joined = 1
        if len(chunks) == 1 or self._rows_depend():
            return list(chunks)
        from trl.trainer import utils

        rows = concatenated([utils.split_pixel_values_by_grid(c) for c in chunks])
        order = order_of(rows[GROUPS].tolist())
        rows = chosen(rows, order)
        prompts, completions = (
            rows[f"{name}_mask"].sum(dim=1).cpu().numpy() for name in ("prompt", "completion")
        )
        width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
        # DeepSpeed's first backward of a step overwrites gradients, later ones add: each must be a real one
        if not self.is_deepspeed_enabled:
            self._joined = self._joinable(
                rows[GROUPS].tolist(), prompts, completions, len(chunks), width
            )
        parts: list[Any] = utils.split_tensor_dict(rows, len(chunks) // self._joined)
        idle = [None] * (self._joined - 1)
        return [x for p in parts for x in (*idle, utils.unsplit_pixel_values_by_grid(p))]

    def _joinable(
        self,
        groups: Sequence[Any],
        prompts: np.ndarray,
        completions: np.ndarray,
        parts: int,
        width: int,
    ) -> int:
        """`joined_parts`, the least of all ranks': each must run as many passes, of as many rows."""
        if parts == 1:
            return 1
        least = max(len(groups) // parts * width, largest_group(groups, prompts, completions))
        own = joined_parts(groups, prompts, completions, parts, self.max_tokens or least)
        if self.accelerator.num_processes == 1:
            return own
        counted = torch.tensor([own], device=self.accelerator.device)
        return int(self.accelerator.gather(counted).min())

    def _rows_depend(self) -> bool:
        """Whether the loss has means over the tokens of a micro-batch: its rows then stay TRL's."""
        return (
            self.loss_type == "bnpo"
            or self.top_entropy_quantile < 1.0
            or self._entropy_bonus_enabled
        )

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """TRL's; it generates with the videos of the prompts, and has no place for them in the passes that follow."""
        out = super()._tokenize_prompts(prompts)
        if PIXELS["video"] in out[2]:
            if self.use_vllm:
                raise ModelError(
                    f"{self._mixin().__name__}: TRL hands vLLM no videos. "
                    "Fix: set use_vllm=False, or pass a rollout_func and pictures of the frames"
                )
            self._held[VIDEOS] = videos_of_prompts(prompts, out[2], self._mmpack_family)
        return out

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. A rollout_func's `kept_ids` are checked and held, and don't reach the reward functions."""
        out = super()._generate(*args, **kwargs)
        completions, mask, fields = out[1], out[2], out[5]
        kept = kept_of_rollout(fields.pop(KEPT_IDS, None), completions, mask)
        if kept is not None:
            self._held[KEPT_IDS] = kept
        return out

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's, with what is held of the rows in its dict, where it shuffles and splits it with the other fields."""
        refuse_pictures(inputs, self._mmpack_family, self._mixin().__name__)
        try:
            out = super()._generate_and_score_completions(inputs)
            if self._groups_kept:
                first = self.accelerator.process_index * len(inputs)
                rows = torch.arange(first, first + len(inputs))
                out = out | {GROUPS: rows // self.num_generations}
            return out | self._held
        finally:
            self._held = {}

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if inputs is None:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self._held = {name: inputs[name] for name in (KEPT_IDS, VIDEOS) if name in inputs}
        steps = getattr(self, "current_gradient_accumulation_steps", 1)  # none before a first step
        scales = steps, self.args.steps_per_generation
        try:
            # TRL's own scaling, for micro-batches of so many more rows
            self.current_gradient_accumulation_steps = scales[0] / self._joined
            self.args.steps_per_generation = scales[1] / self._joined
            return super()._compute_loss(model, inputs)
        finally:
            self.current_gradient_accumulation_steps, self.args.steps_per_generation = scales
            self._held = {}

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, [B, functions]. NaN is "no reward" to it, and it warns; an infinite one becomes 0 in silence."""
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        for b, f in rewards.isinf().nonzero()[:1].tolist():
            raise ArgumentError(
                f"{self._mixin().__name__}: {self.reward_func_names[f]} gave {float(rewards[b, f])} to completion {b} "
                f"of {len(rewards)}, which makes the advantages of its group 0. Fix: return a finite reward, or None"
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
                f"{self._mixin().__name__}: {(unknown or ['the auxiliary loss'])[0]} is not supported in a packed "
                f"batch. Fix: train this model with plain {self._trainer}"
            )
        from trl.extras.profiling import profiling_context

        with profiling_context(self, "_get_per_token_logps_and_entropies"):
            start, device = input_ids.shape[1] - logits_to_keep, input_ids.device
            family = self._mmpack_family
            media = media_of_rows(
                pixel_values, image_grid_thw, num_images, family, image_sizes, image_position_ids
            )
            if VIDEOS in self._held:
                media = [
                    i + v
                    for i, v in zip(media or [[]] * len(input_ids), self._held[VIDEOS], strict=True)
                ]
            mask = attention_mask.cpu()
            samples = rows_to_samples(input_ids, mask, start, family, media)
            columns = mask.argmax(dim=1).tolist()  # of each row's first token
            if KEPT_IDS in self._held:
                rows = zip(samples, columns, self._held[KEPT_IDS], strict=True)
                for sample, first, lists in rows:
                    at = sample.loss_indices
                    ids = sample.input_ids[at]
                    sample.kept_ids = scored_lists(lists, at + first - start, ids)
            size = batch_size or len(samples)
            if len(samples) > size and len(samples) % size == 0:
                prompts = mask[:, :start].sum(dim=1).numpy()
                groups = [prompt_group(s, p) for s, p in zip(samples, prompts, strict=True)]
                completions = mask[:, start:].sum(dim=1).numpy()
                parts = len(samples) // size
                size *= self._joinable(groups, prompts, completions, parts, mask.shape[1])
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
        with self.accelerator.autocast(), attach(model):
            values = packed_logprobs(
                model,
                batch,
                self.temperature,
                self._vision,
                entropy=entropy,
                features=self._features_of(model, batch),
            )
        self._count(batch, samples, width)
        return batch, *(values if isinstance(values, tuple) else (values,))


class MmpackRLOO(MmpackGRPO):
    """Mix in before `trl.RLOOTrainer`; takes its arguments. All else is `MmpackGRPO`'s, without `kept_ids`."""

    _trainer = "RLOOTrainer"

    def _rows_depend(self) -> bool:
        return False

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return super(MmpackGRPO, self)._generate(*args, **kwargs)  # no rollout_func

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """A mean over rows, which the Trainer divides by its own number of micro-batches."""
        return super()._compute_loss(model, inputs) * self._joined


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


def videos_of_prompts(
    prompts: Sequence[Any], fields: Mapping[str, Any], family: Family
) -> list[list[Medium]]:
    """The videos of each prompt, from what the processor made of them all."""
    own = {
        name: fields[name] for name in (PIXELS["video"], GRIDS["video"], SECONDS) if name in fields
    }
    videos = iter(media_of_inputs(own, family, "trl")["video"])
    parts = [
        [p for m in prompt if isinstance(m["content"], list) for p in m["content"]]
        for prompt in prompts
    ]
    return [[next(videos) for p in own if p["type"] == "video"] for own in parts]


def check_prompts(
    generate: Callable[..., Any], family: Family, what: str = "MmpackGRPO"
) -> Callable[..., Any]:
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
                    f"{what}: the engine ran prompt {p} with {len(ran)} ids, TRL trains on {len(sent)} others "
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


def refuse_pictures(rows: Sequence[Any], family: Family, what: str = "MmpackGRPO") -> None:
    """Raise ModelError for rows with pictures of a family whose sizes TRL loses, before it generates and then fails."""
    if family.pixel_layout not in SIZES_LOST:
        return
    for row in rows:
        if isinstance(row, Mapping) and (row.get("images") or row.get("image") is not None):
            raise ModelError(
                f"{what}: TRL does not pass the sizes of {family.name}'s pictures to the model. "
                "Fix: train on text alone, or call mp.pack and packed_logprobs in a loop of your own"
            )
