"""An accelerate loop with a policy loss: stock rectangles, then packs that share prompts and pictures.

    python examples/accelerate_policy.py    # a tiny random Qwen2.5-VL on the CPU; needs mmpack[smoke] and accelerate

Only the collator and the loss of a batch change.
"""

import functools

import torch
from accelerate import Accelerator
from stock_step import make_model, make_rows, padded, show_both, stock_loss
from torch.utils.data import DataLoader
from trainer_policy import samples_of

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs


# 1. The loss of a pack. `attach` and `packed_logprobs` take the model that `accelerator.prepare` returns.
def packed_loss(model, batch):
    with attach(model):
        logprobs = packed_logprobs(model, batch)
    out = mp.policy_loss(
        logprobs,
        batch.loss_columns["advantages"],
        batch.cu_loss,
        old_logprobs=batch.loss_columns["rollout_logprobs"],
    )
    accelerator.log(mp.metrics(policy=out, pack=batch))
    return out.loss


# 2. The loop is the same for both. accelerate moves a pack to the device like a dict of tensors.
def train(data, collate, loss_of):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=len(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return list(accelerator.unwrap_model(model).named_parameters()), losses


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rows = make_rows()
    stock = train(rows, padded, stock_loss)
    pack = functools.partial(mp.collate, share_prefix=True)
    show_both(stock, train(list(samples_of(rows)), pack, packed_loss))
