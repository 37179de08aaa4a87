"""Boxes, IoU rewards and GRPO, top to bottom: a model learns to write boxes that overlap drawn ones.

    python examples/grounding.py    # on a CPU, in about a minute; downloads nothing. Needs mmpack[smoke,grounding]

Each scene shows one coloured box near the middle. The model is tiny and random, and knows no format. The sampler
writes the markers and brackets, the policy chooses the digits, and only these carry loss. In so few steps it
learns only that corners have an order and where boxes usually are; looking closely takes a trained model.
"""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageDraw

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.demo import qwen_vl_processor, tiny_model

SCENES, RESPONSES, STEPS = 3, 16, 16
SIDE = 96  # pixels of a scene
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
ANSWER = "<|box_start|>(000,000),(000,000)<|box_end|>"  # the sampler replaces the zeros

# 1. A model, and its processor. Each family writes coordinates in its own system: Qwen3-VL in thousandths of the
#    picture's sides, Qwen2.5-VL in pixels of the resized picture.
torch.manual_seed(0)
rng = np.random.default_rng(0)
model = tiny_model("qwen3_vl")
processor = mp.wrap_processor(qwen_vl_processor("qwen3_vl", min_pixels=64**2, max_pixels=128**2))
tokenizer = processor.tokenizer
system = mp.grounding.system_of("qwen3_vl")
print(f"coordinates: {system}")

# 2. Ten ids represent digits; the policy writes its answer with them.
digit_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
answer_ids = np.array(tokenizer.encode(ANSWER))
is_digit = answer_ids == int(digit_ids[0])


def scene():
    """A picture, a question, and the true box: in pixels of the file, converted exactly to what the model writes."""
    image = Image.new("RGB", (SIDE, SIDE), (240, 240, 235))
    name = list(COLOURS)[rng.integers(len(COLOURS))]
    x0, y0 = rng.integers(SIDE // 8, SIDE // 3, 2).tolist()
    x1, y1 = rng.integers(SIDE * 2 // 3, SIDE * 7 // 8, 2).tolist()
    ImageDraw.Draw(image).rectangle((x0, y0, x1 - 1, y1 - 1), fill=COLOURS[name])
    sizes = mp.grounding.Sizes(original=image.size)
    box = mp.grounding.convert((x0, y0, x1, y1), "original_pixels", system, sizes)
    question = {"type": "text", "text": f"Where is the {name} box?"}
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    return messages, mp.schema.BboxTarget(tuple(map(float, box)), media_index=0)


def samples_of(scenes):
    """RESPONSES samples of each scene, their digits not chosen yet. A loss span for each digit."""
    out = []
    for g, (messages, target) in enumerate(scenes):
        blank = processor(messages, answer_ids, sample_id=f"{g}", group_id=f"{g}")
        start = blank.loss_spans[0].start
        spans = [mp.LossSpan(start + k, start + k + 1) for k in np.flatnonzero(is_digit).tolist()]
        blank = replace(
            blank,
            loss_spans=spans,
            bbox_targets=[target],
            coordinate_system=system,
            finish_reason=None,
        )
        for k in range(RESPONSES):
            out.append(replace(blank, sample_id=f"{g}/{k}", input_ids=blank.input_ids.copy()))
    return out


def digit_logits(samples):
    """[N, 10], and the batch: the policy's choice among ten digits, at each digit of each sample."""
    batch = mp.pack(samples, share_prefix=True)  # a scene and its question are computed once
    hidden = model.model(**model_inputs(batch, model)).last_hidden_state[0]
    return hidden[batch.loss_rows] @ model.lm_head.weight[digit_ids].T, batch


# 3. The engine, instead of vLLM or SGLang: one digit after the other. A token does not depend on what follows it, so
#    the zeros may stay until their turn.
@torch.no_grad()
def rollout(samples):
    for k in range(int(is_digit.sum())):
        logits, _ = digit_logits(samples)
        chances = logits.view(len(samples), -1, 10)[:, k].softmax(-1)
        for sample, digit in zip(samples, torch.multinomial(chances, 1).flatten(), strict=True):
            sample.input_ids[sample.loss_indices[k]] = int(digit_ids[digit])
    return samples


# 4. Steps of GRPO.
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
rewards_of_steps = []
for step in range(STEPS):
    with attach(model):
        samples = rollout(samples_of([scene() for _ in range(SCENES)]))

        # 5. Rewards: `annotate` reads the box from the token ids, `scores` compares it with the target. A box with
        #    swapped corners is a problem: its reward is 0, and the sample is trained on like any other.
        samples = [mp.grounding.annotate(sample, tokenizer, where="all") for sample in samples]
        for sample in samples:
            sample.rewards = mp.grounding.scores(sample, "iou")
        assert mp.validate(samples) == []
        rewards = torch.tensor([sum(score.value for score in s.rewards) for s in samples])
        group = torch.arange(SCENES).repeat_interleave(RESPONSES)
        advantages = mp.group_advantages(rewards, group, kind="grpo")

        # 6. The step: logprobs of the chosen digits, among the ids that the sampler could choose from.
        logits, batch = digit_logits(samples)
        chosen = torch.searchsorted(digit_ids, batch.loss_targets)
        logprobs = mp.selected_logprobs(logits, chosen)
        out = mp.policy_loss(logprobs, advantages, batch.cu_loss)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    broken = sum("problem" in region.metadata for s in samples for region in s.region_spans)
    rewards_of_steps.append(rewards.mean().item())
    print(
        f"step {step}: mean IoU {rewards_of_steps[-1]:.3f}, {broken} of {len(samples)} boxes broken"
    )

# 7. The last answer as text, and each number with its tokens.
region = samples[-1].region_spans[0]
print(tokenizer.decode(samples[-1].input_ids[region.start : region.stop]))
print(f"box {region.bbox}, tokens of its numbers {region.metadata['numbers']}")
first, last = np.mean(rewards_of_steps[:3]), np.mean(rewards_of_steps[-3:])
print(f"reward: {first:.3f} in the first three steps, {last:.3f} in the last three")
