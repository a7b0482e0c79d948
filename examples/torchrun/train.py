"""Several processes of one host that train together and save one checkpoint together.

Every process writes its part with PyTorch's distributed checkpoint (DCP); the file `.metadata` comes last, when all
parts are written, and that is how spotd knows that the checkpoint is complete. The resume line is
`load(os.environ["SPOTD_RESUME"], ...)`. All processes must save at the same step: they agree on it after each step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

stop_requested = False


def on_stop(_signal: int, _frame: object) -> None:
    global stop_requested
    stop_requested = True


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step-{step:08d}")
    if dist.get_rank() == 0:
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def load(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def any_rank(device: str, *, requested: bool) -> bool:
    """Whether any process requests it: signals reach the processes at different steps."""
    flag = torch.tensor([int(requested)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait at each step")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_stop)
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(device)
    folder = Path(os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"))

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resume = os.environ.get("SPOTD_RESUME")
    step = load(resume, model, optimizer) if resume else 0
    if rank == 0:
        print(f"starting at step {step} with {dist.get_world_size()} processes on {device}", flush=True)

    stopping = False
    while step < args.steps and not stopping:
        # The data of a step depends on nothing but the step and the rank: a resumed run sees what the first would have.
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step * 1000 + rank)).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.pace)
        stopping = any_rank(device, requested=stop_requested)
        if step % args.save_every == 0 or stopping:
            save(folder, step, model, optimizer)
            if rank == 0:
                print(f"step {step}  loss {loss.item():.5f}  saved", flush=True)

    if rank == 0 and not stopping:
        outputs = Path(os.environ.get("SPOTD_OUTPUT_DIR", "out"))
        outputs.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), outputs / "model.pt")
        weights = torch.cat([value.flatten() for value in model.module.state_dict().values()])
        print(f"done at step {step}, weights {weights.double().sum().item():.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
