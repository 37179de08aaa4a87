"""What the loop examples share: a rollout on drawn problems, and the usual hand-written step, padded."""

import torch
from torch.nn.utils.rnn import pad_sequence

from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model

RESPONSES = 4  # per prompt
hf_processor = qwen_vl_processor("qwen2_5_vl", max_pixels=16 * 28 * 28)


def make_model():
    return tiny_model("qwen2_5_vl").train()


def padded(rows):
    """Rows to a batch of the model's forward: ids, masks, labels [B, S]; each picture once per row."""
    prompts = [
        hf_processor.apply_chat_template(
            row["messages"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        for row in rows
    ]
    pairs = [(p["input_ids"][0], row["response_ids"]) for p, row in zip(prompts, rows, strict=True)]
    ids = pad_sequence([torch.cat(pair) for pair in pairs], batch_first=True)
    labels = [torch.cat([torch.full_like(prompt, -100), own]) for prompt, own in pairs]
    return {
        "input_ids": ids,
        "attention_mask": pad_sequence([torch.ones_like(x) for x in labels], batch_first=True),
        "mm_token_type_ids": (ids == hf_processor.image_token_id).int(),
        "pixel_values": torch.cat([p["pixel_values"] for p in prompts]),
        "image_grid_thw": torch.cat([p["image_grid_thw"] for p in prompts]),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "old": torch.cat([row["logprobs"] for row in rows]),
        "advantages": torch.cat([row["advantage"].expand(len(row["logprobs"])) for row in rows]),
    }


def stock_logprobs(model, batch):
    """[N], of all response tokens; logits are made of every row."""
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    logits = model(**{name: batch[name] for name in names}).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return logprobs[targets != -100]


def stock_loss(model, batch):
    """PPO's clipped loss (arXiv 1707.06347 eq. 7), the mean over all response tokens."""
    ratio = (stock_logprobs(model, batch) - batch["old"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
    return -gain.mean()


def make_rows():
    """Rows of a rollout: messages, response ids, the engine's logprobs (the policy's, and some noise), advantages."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for exercise in load_exercises(limit=2):
        pictures = [{"type": "image", "image": image} for image in exercise.images]
        content = [*pictures, {"type": "text", "text": exercise.prompt}]
        for k in range(RESPONSES):
            row = {"messages": [{"role": "user", "content": content}], "id": exercise.exercise_id}
            row["response_ids"] = torch.randint(1000, (5 + 3 * k,), generator=draw)
            row["logprobs"] = torch.zeros(5 + 3 * k)
            rows.append(row | {"advantage": torch.tensor([k - 1.5])})
    with torch.no_grad():
        logprobs = stock_logprobs(make_model(), padded(rows))
    noisy = logprobs + 0.1 * torch.randn(len(logprobs), generator=draw)
    for row, own in zip(rows, noisy.split([len(r["logprobs"]) for r in rows]), strict=True):
        row["logprobs"] = own
    return rows


def show_both(stock, packed):
    """Losses of each step, and how far the weights of both runs lie apart."""
    for k, (a, b) in enumerate(zip(stock[1], packed[1], strict=True)):
        print(f"step {k}: loss {a:.7f} {b:.7f}")
    start = dict(make_model().named_parameters())
    apart = [(p - dict(packed[0])[n]).norm() for n, p in stock[0]]
    moved = [(p - start[n]).norm() for n, p in stock[0]]
    print(f"weights: apart {torch.stack(apart).norm():.2e}, moved {torch.stack(moved).norm():.2e}")
