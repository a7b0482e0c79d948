"""A training on a GPU that repeats itself bit by bit and saves gigabytes: the workload of bench_training."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

DIM, LAYERS, BATCH = 4096, 24, 2048
"""1.6 GB of weights, and as much of momentum."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True, help="folder for a file of seconds by step, per start")
    args = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read by CUDA's library when it is loaded
    import torch

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(1)
    weights = [(torch.randn(DIM, DIM, device="cuda") * DIM**-0.5).requires_grad_() for _ in range(LAYERS)]
    optimizer = torch.optim.SGD(weights, lr=1e-3, momentum=0.9)
    folder = Path(os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"))
    outputs = Path(os.environ.get("SPOTD_OUTPUT_DIR", "out"))
    for path in (folder, outputs, args.times):
        path.mkdir(parents=True, exist_ok=True)
    step = restored(torch, weights, optimizer)
    times: dict[int, float] = {}
    while step < args.steps and not asked:
        began = time.perf_counter()
        generator = torch.Generator(device="cuda").manual_seed(step)
        x = torch.randn(BATCH, DIM, device="cuda", generator=generator)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for weight in weights:
                x = torch.nn.functional.gelu(x @ weight) + x
        loss = (x.float() ** 2).mean() * 1e-3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        step += 1
        times[step] = time.perf_counter() - began
        if step % args.save_every == 0 or asked:
            state = {"step": step, "weights": [w.detach() for w in weights], "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"tmp-{step:08d}")
            (folder / f"tmp-{step:08d}").rename(folder / f"step-{step:08d}.pt")
            for old in sorted(folder.glob("step-*.pt"))[:-2]:
                old.unlink()
            (args.times / f"{os.environ.get('SPOTD_ATTEMPT', '0')}-{os.getpid()}.json").write_text(json.dumps(times))
    if asked:
        raise SystemExit(143)
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().cpu().numpy().tobytes())
    (outputs / "weights.sha256").write_text(digest.hexdigest())


def restored(torch: Any, weights: list[Any], optimizer: Any) -> int:
    """Take what spotd restored, if anything; return its step."""
    resume = os.environ.get("SPOTD_RESUME")
    if not resume:
        return 0
    state = torch.load(resume, map_location="cuda", weights_only=True)
    with torch.no_grad():
        for weight, saved in zip(weights, state["weights"], strict=True):
            weight.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
