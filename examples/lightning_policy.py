"""A LightningModule with a policy loss: stock rectangles, then packs that share prompts and pictures.

    python examples/lightning_policy.py    # a tiny random Qwen2.5-VL on the CPU; needs mmpack[smoke] and lightning

Only the collator and the loss of a batch change.
"""

import functools

import lightning
import torch
from stock_step import make_model, make_rows, padded, show_both, stock_loss
from torch.utils.data import DataLoader
from trainer_policy import samples_of

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs


class Stock(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.losses = []

    def loss_of(self, batch):
        return stock_loss(self.model, batch)

    def training_step(self, batch, index):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.05)


# What changes: the loss reads a pack. Lightning moves it to the device like a dict of tensors.
class Packed(Stock):
    def loss_of(self, batch):
        with attach(self.model):
            logprobs = packed_logprobs(self.model, batch)
        out = mp.policy_loss(
            logprobs,
            batch.loss_columns["advantages"],
            batch.cu_loss,
            old_logprobs=batch.loss_columns["rollout_logprobs"],
        )
        self.log_dict(mp.metrics(policy=out, pack=batch), batch_size=len(batch.token_counts))
        return out.loss


def train(module, data, collate):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=len(data), collate_fn=collate))
    return list(module.model.named_parameters()), module.losses


if __name__ == "__main__":
    rows = make_rows()
    stock = train(Stock(), rows, padded)
    pack = functools.partial(mp.collate, share_prefix=True)
    show_both(stock, train(Packed(), list(samples_of(rows)), pack))
