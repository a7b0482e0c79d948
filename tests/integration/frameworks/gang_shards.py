"""A training over several machines with gloo whose weights and moments are sharded: each rank saves its own, by DCP.

A rank that finds its number in the file `$STRIKE` stops in the middle of its next save, once its shard is written.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

EVERY = 5
SIZE = 240
STEPS, PACE_S = int(sys.argv[1]), float(sys.argv[2])
FOLDER, RESUME = Path(os.environ["SPOTD_CHECKPOINT_DIR"]), os.environ.get("SPOTD_RESUME", "")
STRIKE = Path(os.environ["STRIKE"])


class Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        if STRIKE.exists() and STRIKE.read_text() == str(dist.get_rank()):
            STRIKE.with_suffix(".there").touch()
            time.sleep(600)
        return written


def digest(weights: DTensor) -> str:
    return hashlib.sha256(weights.full_tensor().numpy().tobytes()).hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    state = {
        "weights": distribute_tensor(torch.randn(SIZE), mesh, [Shard(0)]),
        "moments": distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)]),
        "step": torch.tensor(0),
    }
    if RESUME:
        dcp.load(state, checkpoint_id=RESUME)
    weights, moments, step = state["weights"], state["moments"], int(state["step"])
    print(f"rank {rank} of {world} begins at step {step} with {digest(weights)}", flush=True)
    while step < STEPS:
        data = torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * step + rank))
        gradient = (weights.full_tensor() - data).sign()
        dist.all_reduce(gradient)
        own = distribute_tensor(gradient / world, mesh, [Shard(0)]).to_local()
        moments.to_local().mul_(0.9).add_(own)
        weights.to_local().sub_(0.01 * moments.to_local())
        step += 1
        time.sleep(PACE_S)
        if step % EVERY == 0:
            state["step"] = torch.tensor(step)
            dcp.save(state, storage_writer=Writer(FOLDER / f"step-{step:06d}"))
            if rank == 0:
                print(f"saved step {step} with {digest(weights)}", flush=True)
            else:
                digest(weights)
    print(f"rank {rank} ends with {digest(weights)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
