"""One GRPO step on Geometry3K, or on short clips: from real media to an optimizer step, every stage checked.

`mmpack smoke` runs it. The tutorial in examples/ takes the same step without the checks.

    rollout   an engine samples responses and says what it saw          -> rollout.jsonl
    train     the trainer's side of the same samples, from the same ids -> train.jsonl
    parity    both sides are compared before any number is
    logprobs  of the sampled tokens only: packed, with shared prompts, padded; each against the engine's
    kept ids  two problems once more, sampled with top-p and top-k: ratios over what these left, and over all ids
    loss      advantages over the whole batch, GRPO by micro-batches, AdamW
"""

from __future__ import annotations

from mmpack.demo.step_checks import StepChecks

LAYOUTS = ("packed", "shared_prefix", "padded_left", "padded_right")


class Job(StepChecks):
    """`with Job(options, report) as job: job.run()`. Every check goes to the report with its figure."""

    def run(self) -> None:
        """The whole step. Layouts that differ end it, and so do numbers: no step is taken on either."""
        self.sample_responses()
        self.build_train_side()
        self.check_parity()
        if not self.report.ok:
            return
        self.check_logprobs()
        self.check_kept_ids()
        self.check_loss_mask()
        self.check_advantages()
        self.check_micro_batches()
        if not self.report.ok:
            return
        self.step()
        self.table()

    def table(self) -> None:
        worst = self.report.values["logprobs"]["max_abs_diff"]
        rows = []
        for name in LAYOUTS:
            cost = self.costs[name]
            memory = "n/a" if cost["peak_mb"] is None else f"{cost['peak_mb']:.0f}"
            figures = [f"{cost['tokens']:,}", f"{cost['patches']:,}", f"{cost['seconds']:.2f}"]
            rows.append([name, *figures, memory, f"{worst[name]:.1e}"])
        self.report.values["cost"] = self.costs
        columns = ["", "tokens", "patches", "seconds", "peak MB", "largest logprob difference"]
        self.report.table(columns, rows)
        self.report.say(
            f"parity ok over {self.report.values['parity']['compared']} samples, loss {self.loss:.2e}, "
            f"gradient norm {self.grad_norm:.4f}"
        )
