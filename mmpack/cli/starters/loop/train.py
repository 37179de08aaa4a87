"""GRPO on pictures in plain PyTorch: `python train.py --steps 2`.

It runs as it is, on a CPU, with a tiny random model, drawn problems and `generate` as the engine. Lines marked `yours`
are to be replaced by your model, your prompts, your reward and your engine.
"""

import argparse

import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, rollout
from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--model", help="a checkpoint of a supported family; a tiny random one if left out"
)
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--prompts", type=int, default=4, help="per step")
parser.add_argument("--responses", type=int, default=4, help="per prompt")
parser.add_argument("--max-new-tokens", type=int, default=16)
parser.add_argument("--max-tokens", type=int, default=4096, help="rows of a micro-batch")
parser.add_argument("--learning-rate", type=float, default=1e-5)
args = parser.parse_args()
torch.manual_seed(0)

if args.model is None:
    model = tiny_model("qwen2_5_vl")
    hf_processor = qwen_vl_processor("qwen2_5_vl", max_pixels=256 * 28 * 28)
else:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto", device_map="auto")
    hf_processor = AutoProcessor.from_pretrained(args.model)
processor = mp.wrap_processor(hf_processor)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
exercises = load_exercises()  # yours: rows with messages, pictures and an answer


def messages_of(exercise):
    choices = "\n".join(f"{a}. {c}" for a, c in zip("ABCD", exercise.choices, strict=True))
    text = f"{exercise.prompt}\n{choices}\nAnswer with the letter only."
    pictures = [{"type": "image", "image": image} for image in exercise.images]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def reward_of(exercise, text):  # yours
    return float(text.strip() == exercise.answer_letter) - len(text) / 1000


for step in range(args.steps):
    some = [exercises[(step * args.prompts + k) % len(exercises)] for k in range(args.prompts)]
    prompts = [messages_of(exercise) for exercise in some]

    # 1. The engine's side. yours: samples of vLLM's or sglang's outputs, by mmpack.adapters.
    rolled = rollout(
        model,
        hf_processor,
        prompts,
        [f"{step}-{k}" for k in range(len(prompts))],
        n=args.responses,
        max_new_tokens=args.max_new_tokens,
    )

    # 2. The trainer's side: from the messages, with the ids as they were sampled.
    train, rewards = [], []
    for i, sample in enumerate(rolled):
        k = i // args.responses
        ids = sample.input_ids[sample.loss_indices]
        text = hf_processor.tokenizer.decode(ids, skip_special_tokens=True)
        rewards.append(reward_of(some[k], text))
        names = {"sample_id": sample.sample_id, "group_id": sample.group_id}
        recorded = {"rollout_logprobs": sample.rollout_logprobs, "sampling": sample.sampling}
        train.append(processor(prompts[k], ids, **names, **recorded))

    # 3. Parity: training stops where the two sides differ, with the cause.
    report = mp.compare(rolled, train)
    if not report.ok:
        raise SystemExit("\n".join(report.lines()))

    # 4. Advantages of the whole batch, then micro-batches in which each prompt is computed once.
    groups = torch.tensor([i // args.responses for i in range(len(train))])
    advantages = mp.group_advantages(torch.tensor(rewards), groups).to(model.device)
    plan = mp.plan(train, max_tokens=args.max_tokens, share_prefix=True)

    # 5. One step. Totals are the batch's, so that the losses of its micro-batches add up.
    optimizer.zero_grad()
    loss = 0.0
    with attach(model):
        for members in plan.bins:
            batch = mp.pack([train[i] for i in members], share_prefix=True).to(model.device)
            out = mp.policy_loss(
                packed_logprobs(model, batch, temperature=1.0),
                advantages[members],
                batch.cu_loss,
                rollout_logprobs=batch.loss_columns["rollout_logprobs"],
                correction="tis",
                total_tokens=plan.total_tokens,
                total_samples=plan.total_samples,
            )
            out.loss.backward()
            loss += float(out.loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = sum(rewards) / len(rewards)
    print(f"step {step}: reward {mean:.3f}, loss {loss:.2e}, gradient norm {float(norm):.3f}")
