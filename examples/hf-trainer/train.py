"""A Hugging Face Trainer on a made-up task, with a tiny model that needs no download.

The resume line is `trainer.train(resume_from_checkpoint=os.environ.get("SPOTD_RESUME") or None)`. The Trainer writes
`trainer_state.json` last, which is how spotd knows that a checkpoint is complete; keep at least two of them.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Parity(Dataset):
    """Is the sum of the tokens even?"""

    def __init__(self, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(5, 100, (size, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.sum() % 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-steps", type=int, default=50)
    args = parser.parse_args()
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=2
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"),
            max_steps=args.steps,
            per_device_train_batch_size=32,
            save_steps=args.save_steps,
            save_total_limit=3,
            logging_steps=50,
            report_to=[],
            seed=1,
        ),
        train_dataset=Parity(),
    )
    trainer.train(resume_from_checkpoint=os.environ.get("SPOTD_RESUME") or None)
    trainer.save_model(os.environ.get("SPOTD_OUTPUT_DIR", "out"))
    print(f"done at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
