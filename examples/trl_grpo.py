"""GRPO on pictures with TRL: the stock trainer, then the same run on packed batches that share each prompt.

    python examples/trl_grpo.py [steps]     # a tiny random Qwen2.5-VL on the CPU; needs trl and datasets

What you write is `class PackedTrainer(MmpackGRPO, GRPOTrainer)`.
"""

import sys
import tempfile

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mmpack.adapters.trl import MmpackGRPO
from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model


# 1. The mixin comes first: TRL's own loss, rewards and metrics use logprobs from packed forwards.
class PackedTrainer(MmpackGRPO, GRPOTrainer):
    pass


# 2. Everything else is plain TRL: rows of messages with their pictures, a reward, a config.
def reward_digits(completion_ids, **columns):
    return [sum(ids) % 10 / 10 for ids in completion_ids]


def train(trainer_class, processor, steps):
    rows = [
        {"prompt": [{"role": "user", "content": e.prompt}], "images": list(e.images)}
        for e in load_exercises()[:4]
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=tiny_model("qwen2_5_vl"),
            reward_funcs=reward_digits,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=8,  # whole groups in one pack share their prompt
                num_generations=8,
                num_iterations=2,
                max_completion_length=16,
                max_steps=steps,
                learning_rate=0.1,
                optim="sgd",
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=processor,
        )
        trainer.train()
    return trainer


# 3. The same run twice, and what each of them computed.
if __name__ == "__main__":
    processor = qwen_vl_processor(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    stock, packed = (train(c, processor, steps) for c in (GRPOTrainer, PackedTrainer))
    print("\nstep   loss: TRL     mmpack   gradient norm: TRL     mmpack")
    for a, b in zip(stock.state.log_history, packed.state.log_history, strict=True):
        if "loss" in a:
            print(
                f"{a['step']:>4} {a['loss']:>11.6f} {b['loss']:>10.6f}"
                f" {a['grad_norm']:>20.6f} {b['grad_norm']:>10.6f}"
            )
    print(f"\n{packed.mmpack_stats}")
