"""transformers' Trainer with a policy loss: stock rectangles, then packs that share prompts and pictures.

    python examples/trainer_policy.py    # a tiny random Qwen2.5-VL on the CPU; needs mmpack[smoke] and accelerate

In your own Trainer, only the collator and the logprobs in `compute_loss` change.
"""

import tempfile

from stock_step import hf_processor, make_model, make_rows, padded, show_both, stock_loss
from transformers import Trainer, TrainingArguments

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs


class StockTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return stock_loss(model, inputs)


# 1. The loss reads a pack: one row, each prompt and each picture once, logits only for response tokens.
class PackedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = inputs["pack"]
        with attach(model):
            logprobs = packed_logprobs(model, batch)
        out = mp.policy_loss(
            logprobs,
            batch.loss_columns["advantages"],
            batch.cu_loss,
            old_logprobs=batch.loss_columns["rollout_logprobs"],
        )
        self.log(
            mp.metrics(policy=out, pack=batch)
        )  # W&B, TensorBoard or trackio, according to `report_to`
        return out.loss


# 2. Samples are made once, from the sampled ids; the collator packs them.
def samples_of(rows):
    processor = mp.wrap_processor(hf_processor)
    for i, row in enumerate(rows):
        sample = processor(
            row["messages"],
            row["response_ids"].tolist(),
            sample_id=f"s{i}",
            group_id=row["id"],
            rollout_logprobs=row["logprobs"].numpy(),
        )
        yield sample, {"advantages": float(row["advantage"])}


def pack(items):
    return {"pack": mp.collate(items, share_prefix=True)}


# 3. The same two steps with both.
def train(trainer_class, data, collator):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(data),
            max_steps=2,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            logging_steps=1,
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trainer_class(make_model(), args, train_dataset=data, data_collator=collator)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return list(trainer.model.named_parameters()), losses


if __name__ == "__main__":
    rows = make_rows()
    stock = train(StockTrainer, rows, padded)
    show_both(stock, train(PackedTrainer, list(samples_of(rows)), pack))
