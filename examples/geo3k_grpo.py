"""One GRPO step on pictures, top to bottom: from geometry problems to `optimizer.step()`.

    python examples/geo3k_grpo.py    # on a CPU, in under a minute; downloads nothing. Needs mmpack[smoke]

The model is tiny and random, and the problems are drawn. In your own loop, replace the engine, the model, the
rewards and the optimizer; the `mp.` calls stay the same.
"""

import torch

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs, rollout
from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model

RESPONSES = 4  # per prompt: GRPO compares them with each other
TEMPERATURE = 1.0
MAX_ROWS = 512  # packed rows per micro-batch

# 1. Problems. A prompt is a list of chat messages: pictures first, then the question and its choices.
torch.manual_seed(0)
exercises = load_exercises(limit=4)  # or a folder, a parquet file or a hub name of Geometry3K
prompts = []
for exercise in exercises:
    pictures = [{"type": "image", "image": image} for image in exercise.images]
    lines = [f"{letter}. {c}" for letter, c in zip("ABCD", exercise.choices, strict=True)]
    question = "\n".join([exercise.prompt, *lines, "Answer with the letter only."])
    prompts.append([{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}])

# 2. The model, and its processor. `wrap_processor` makes samples with it: ids, spans, positions and pixels.
model = tiny_model("qwen2_5_vl")
hf_processor = qwen_vl_processor("qwen2_5_vl", max_pixels=256 * 28 * 28)
processor = mp.wrap_processor(hf_processor)

# 3. Rollout: what the engine sampled, and what it saw. Here transformers' `generate` is the engine.
group_ids = [exercise.exercise_id for exercise in exercises]
rolled = rollout(
    model,
    hf_processor,
    prompts,
    group_ids,
    n=RESPONSES,
    max_new_tokens=16,
    temperature=TEMPERATURE,
)
tokens = sum(sample.num_loss_tokens for sample in rolled)
print(f"rollout: {len(rolled)} responses, {tokens} tokens")

# 4. The trainer's side of the same samples: made again from the messages, but with the sampled ids (tokenizing the
#    text again may give different ids). Rewards are named scores: 1 for the right letter, minus a small price for
#    length, so that a random model has something to learn from.
train = []
for i, sample in enumerate(rolled):
    response_ids = sample.input_ids[sample.loss_indices]
    text = hf_processor.tokenizer.decode(response_ids, skip_special_tokens=True)
    right = text.strip() == exercises[i // RESPONSES].answer_letter
    train.append(
        processor(
            prompts[i // RESPONSES],
            response_ids,
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            rollout_logprobs=sample.rollout_logprobs,
            sampling=sample.sampling,
            rewards=[mp.Score("exact", float(right)), mp.Score("length", -len(text) / 1000)],
        )
    )

# 5. Parity: both sides have the same ids, media, spans and positions, or training stops here with the cause.
report = mp.compare(rolled, train)
print(report.summary())
if not report.ok:
    raise SystemExit("\n".join(report.lines()))

# 6. Advantages over the whole batch, before it is cut into micro-batches.
totals = torch.tensor([sum(score.value for score in sample.rewards) for sample in train])
group_index = torch.tensor([group_ids.index(sample.group_id) for sample in train])
advantages = mp.group_advantages(totals, group_index, kind="grpo")
print(f"advantages: {advantages.min():.2f} to {advantages.max():.2f}")

# 7. Plan: which samples share a micro-batch. A prompt and its pictures are computed once for all of its responses.
plan = mp.plan(train, max_tokens=MAX_ROWS, share_prefix=True)
lengths = sum(map(len, train))
print(f"plan: {len(plan.bins)} micro-batches, {sum(plan.bin_rows)} rows for {lengths} tokens")

# 8. Logprobs of the sampled tokens, before the step. They must equal the rollout's own. Inside `attach`, the model's
#    attention respects the packed row: no sample sees another's response. `unpack_loss` cuts [N] loss tokens into
#    one tensor per sample.
old_logprobs = [None] * len(train)
with torch.no_grad(), attach(model):
    for members in plan.bins:
        batch = mp.pack([train[i] for i in members], share_prefix=True)
        logprobs = packed_logprobs(model, batch, temperature=TEMPERATURE)
        for i, own in zip(members, batch.unpack_loss(logprobs), strict=True):
            old_logprobs[i] = own
    # if you want logits: the same by hand for the last batch, only for the rows that the loss reads
    logits = model(**model_inputs(batch, model), logits_to_keep=batch.loss_rows).logits[0]
    by_hand = mp.selected_logprobs(logits, batch.loss_targets, temperature=TEMPERATURE)
recorded = torch.cat([torch.from_numpy(sample.rollout_logprobs) for sample in train])
off = (torch.cat(old_logprobs) - recorded).abs().max()
between = (by_hand - logprobs).abs().max()
print(f"logprobs: largest difference from the rollout's {off:.1e}, between both ways {between:.1e}")

# 9. The step. Totals are those of the whole batch, so that the losses of all micro-batches add up to its loss. `tis`
#    weights each token by how far the trainer's logprob is from the engine's. The loss itself is about 0 here,
#    because the advantages of a group sum to 0 and responses are equally long; its gradient is not.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loss = 0.0
with attach(model):
    for members in plan.bins:
        batch = mp.pack([train[i] for i in members], share_prefix=True)
        out = mp.policy_loss(
            packed_logprobs(model, batch, temperature=TEMPERATURE),
            advantages[members],
            batch.cu_loss,
            old_logprobs=torch.cat([old_logprobs[i] for i in members]),
            rollout_logprobs=batch.loss_columns["rollout_logprobs"],
            correction="tis",
            total_tokens=plan.total_tokens,
            total_samples=plan.total_samples,
        )
        out.loss.backward()
        loss += out.loss.item()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()

# 10. After the step, tokens of good responses are more likely, and tokens of bad ones less: the sum of
#     advantage times (ratio - 1) is above 0.
gain = 0.0
with torch.no_grad(), attach(model):
    for members in plan.bins:
        batch = mp.pack([train[i] for i in members], share_prefix=True)
        logprobs = packed_logprobs(model, batch, temperature=TEMPERATURE)
        for i, own in zip(members, batch.unpack_loss(logprobs), strict=True):
            ratio = (own - old_logprobs[i]).exp()
            gain += (advantages[i] * (ratio - 1)).sum().item()
print(f"step: loss {loss:.2e}, gradient norm {norm:.3f}, gain {gain / tokens:.1e} per token")
