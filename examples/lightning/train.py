"""A Lightning job. The resume line is `trainer.fit(..., ckpt_path=os.environ.get("SPOTD_RESUME") or None)`.

A Lightning checkpoint is one `.ckpt` file, written under another name and renamed, so it is complete when it appears
and has not changed for the settle time.
"""

from __future__ import annotations

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    L.seed_everything(1)
    x = torch.randn(4096, 32)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), batch_size=64, shuffle=True)
    checkpoints = ModelCheckpoint(
        dirpath=os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"),
        filename="{step}",
        every_n_train_steps=args.save_every,
        save_top_k=3,
        monitor="step",
        mode="max",
    )
    trainer = L.Trainer(max_steps=args.steps, callbacks=[checkpoints], logger=False, enable_progress_bar=False)
    trainer.fit(Regression(), data, ckpt_path=os.environ.get("SPOTD_RESUME") or None)
    trainer.save_checkpoint(os.path.join(os.environ.get("SPOTD_OUTPUT_DIR", "out"), "final.ckpt"))
    print(f"done at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
