"""A training over several machines with gloo: each rank has data of its own, gradients are averaged, rank 0 saves.

The gradients travel as one tensor, so that their sums are made in the same order after a resume.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

EVERY = 5
STEPS, PACE_S = int(sys.argv[1]), float(sys.argv[2])
FOLDER, RESUME = Path(os.environ["SPOTD_CHECKPOINT_DIR"]), os.environ.get("SPOTD_RESUME", "")


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = 0
    if RESUME:
        saved = torch.load(Path(RESUME) / "state.pt", weights_only=True)
        step = int(saved["step"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    print(f"rank {rank} of {world} begins at step {step}", flush=True)
    while step < STEPS:
        data = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=data)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        together = parameters_to_vector(gradients)
        dist.all_reduce(together)
        vector_to_parameters(together / world, gradients)
        optimizer.step()
        step += 1
        time.sleep(PACE_S)
        if rank == 0 and step % EVERY == 0:
            folder = FOLDER / f"step-{step:06d}"
            folder.mkdir(parents=True)
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "state.pt")
            (folder / "DONE").touch()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"rank {rank} ends with {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
