"""`mmpack smoke --learn`: the sign of everything. A few supervised steps, then GRPO, whose reward must rise."""

from __future__ import annotations

import statistics

import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.demo.job import Job

SUPERVISED, STEPS = 40, 25


class LearnJob(Job):
    """Eight problems, small pictures, eight short responses each: quick steps."""

    def run(self) -> None:
        """Supervised steps teach the format, with letters at random; GRPO must find the right ones."""
        optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.0)
        draw = torch.Generator().manual_seed(self.options.seed)
        for _ in range(SUPERVISED):
            loss = self.supervised_loss(draw)
            self.update(optimizer)
        before = self.mean_reward()
        self.report.say(f"supervised: loss {loss:.3f}, mean reward {before:.3f}")
        for group in optimizer.param_groups:
            group["lr"] = 2e-3
        for k in range(STEPS):
            self.rollouts = self.roll()
            self.train = [self.train_sample(b) for b in range(len(self.rollouts))]
            self.set_advantages()
            self.gradients(mp.plan(self.train, max_tokens=self.budget(), share_prefix=True))
            self.update(optimizer)
            self.report.say(f"GRPO step {k + 1}: mean reward {self.rewards.mean():.3f}")
        after = self.mean_reward()
        self.report.values["learn"] = {"before": before, "after": after, "gain": after - before}
        figure = f"mean reward {before:.3f} -> {after:.3f}"
        self.report.check("learn", after - before >= 0.2, figure)

    def supervised_loss(self, draw: torch.Generator) -> float:
        """One backward over all problems, each with a letter at random as its answer."""
        samples = []
        for exercise, messages in zip(self.exercises, self.messages, strict=True):
            letter = "ABCD"[int(torch.randint(4, (1,), generator=draw))]
            ids = self.hf_processor.tokenizer(f"{letter}<|im_end|>")["input_ids"]
            samples.append(self.processor(messages, ids, sample_id=exercise.exercise_id))
        self.model.zero_grad()
        with attach(self.model):
            loss = -packed_logprobs(self.model, mp.pack(samples)).mean()
            loss.backward()
        return loss.item()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()

    def mean_reward(self) -> float:
        """Over all prompts, n responses each, from a seed of its own."""
        state = torch.random.get_rng_state()
        torch.manual_seed(1234)
        rolled = self.roll()
        torch.random.set_rng_state(state)
        totals = []
        for b, s in enumerate(rolled):
            scores = self.score(self.exercises[b // self.options.n], s.input_ids[s.loss_indices])
            totals.append(sum(r.value for r in scores))
        return statistics.fmean(totals)
