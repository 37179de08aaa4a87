"""GRPO on pictures with TRL, on packed batches that share each prompt: `python train.py --steps 2`.

It runs as it is, on a CPU, with a tiny random model and drawn problems. Lines marked `yours` are to be replaced.
"""

import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mmpack.adapters.trl import MmpackGRPO
from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", help="a checkpoint of a supported family; a tiny random one if left out"
)
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--responses", type=int, default=4, help="per prompt")
parser.add_argument("--max-completion-length", type=int, default=16)
parser.add_argument("--output", default="output", help="folder of checkpoints and logs")
args = parser.parse_args()


class PackedTrainer(MmpackGRPO, GRPOTrainer):  # the mixin first
    pass


def reward_digits(completion_ids, **columns):  # yours
    return [sum(ids) % 10 / 10 for ids in completion_ids]


if args.model is None:
    model = tiny_model("qwen2_5_vl")
    processor = qwen_vl_processor("qwen2_5_vl", max_pixels=64 * 28 * 28)
else:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto")
    processor = AutoProcessor.from_pretrained(args.model)

rows = [  # yours: messages, and their pictures in order
    {"prompt": [{"role": "user", "content": e.prompt}], "images": list(e.images)}
    for e in load_exercises(limit=8)
]
config = GRPOConfig(
    output_dir=args.output,
    per_device_train_batch_size=args.responses,  # whole groups in one pack share their prompt
    num_generations=args.responses,
    max_completion_length=args.max_completion_length,
    max_steps=args.steps,
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=args.model is None,
    bf16=args.model is not None,
)
trainer = PackedTrainer(
    model=model,
    reward_funcs=reward_digits,
    args=config,
    train_dataset=Dataset.from_list(rows),
    processing_class=processor,
)
trainer.train()
print(trainer.mmpack_stats)
