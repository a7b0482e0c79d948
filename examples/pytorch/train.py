"""A plain PyTorch loop that survives preemption: model, optimizer, step and random state in one file.

The resume line is `load(os.environ["SPOTD_RESUME"])`. The file appears under its name only when it is whole.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch

stop_requested = False


def on_stop(_signal: int, _frame: object) -> None:
    global stop_requested
    stop_requested = True


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    final = folder / f"step-{step:08d}.pt"
    if final.exists():
        return
    tmp = folder / f"tmp-{step:08d}"
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(state, tmp)
    tmp.rename(final)
    for old in sorted(folder.glob("step-*.pt"))[:-3]:
        old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_stop)
    folder = Path(os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"))
    outputs = Path(os.environ.get("SPOTD_OUTPUT_DIR", "out"))
    folder.mkdir(parents=True, exist_ok=True)
    outputs.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if resume := os.environ.get("SPOTD_RESUME"):
        state = torch.load(resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        step = state["step"]
    print(f"starting at step {step} on {device}", flush=True)

    while step < args.steps:
        x = torch.randn(64, 32).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.save_every == 0 or stop_requested:
            save(folder, step, model, optimizer)
            print(f"step {step}  loss {loss.item():.5f}  saved", flush=True)
        if stop_requested:
            raise SystemExit(143)

    torch.save(model.state_dict(), outputs / "model.pt")
    print(f"done at step {step}", flush=True)


if __name__ == "__main__":
    main()
