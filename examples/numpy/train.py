"""A small neural network in numpy that can be killed at any moment and goes on bit for bit where it was.

Everything the next step depends on (weights, momentum, step number, the random generator) is in a checkpoint, and a
checkpoint appears under its name only when it is whole: it is written to `tmp-...` and renamed. The resume line is
`state = load(os.environ["SPOTD_RESUME"])`.

    python train.py --steps 400            # also without spotd: checkpoints in ./checkpoints, weights in ./out
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

SIZES = (16, 32, 32, 4)
stop_requested = False


def fresh(seed: int) -> dict:
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = [rng.normal(0, 0.3, (a, b)) for a, b in zip(SIZES, SIZES[1:])]
    return {"step": 0, "weights": weights, "momentum": [np.zeros_like(w) for w in weights], "rng": rng}


def train_step(state: dict) -> float:
    """One batch of a made-up regression task; only `state` decides what comes out."""
    x = state["rng"].normal(size=(32, SIZES[0]))
    y = np.sin(x[:, :4]) + 0.1 * x[:, 4:8]
    layers = [x]
    for w in state["weights"][:-1]:
        layers.append(np.tanh(layers[-1] @ w))
    error = layers[-1] @ state["weights"][-1] - y
    grad = error / len(x)
    for i in reversed(range(len(state["weights"]))):
        dw = layers[i].T @ grad
        if i:
            grad = (grad @ state["weights"][i].T) * (1 - layers[i] ** 2)
        state["momentum"][i] = 0.9 * state["momentum"][i] - 0.05 * dw
        state["weights"][i] = state["weights"][i] + state["momentum"][i]
    state["step"] += 1
    return float(np.mean(error**2))


def save(state: dict, folder: Path) -> None:
    """Complete checkpoints only: the name appears with the last byte."""
    final = folder / f"step-{state['step']:08d}"
    if final.exists():
        return
    tmp = folder / f"tmp-{state['step']:08d}-{os.getpid()}"
    tmp.mkdir(parents=True)
    arrays = {f"w{i}": w for i, w in enumerate(state["weights"])}
    arrays |= {f"m{i}": m for i, m in enumerate(state["momentum"])}
    inner = state["rng"].bit_generator.state["state"]
    arrays["rng"] = np.array(
        [inner["state"] >> 64, inner["state"] & (2**64 - 1), inner["inc"] >> 64, inner["inc"] & (2**64 - 1)],
        dtype=np.uint64,
    )
    with (tmp / "state.npz").open("wb") as out:
        np.savez(out, step=state["step"], **arrays)
        out.flush()
        os.fsync(out.fileno())
    (tmp / "DONE").touch()
    tmp.rename(final)
    for old in sorted(folder.glob("step-*"))[:-3]:
        for path in old.iterdir():
            path.unlink()
        old.rmdir()


def load(path: str) -> dict:
    with np.load(Path(path) / "state.npz") as saved:
        count = len(SIZES) - 1
        high, low, inc_high, inc_low = (int(v) for v in saved["rng"])
        bits = np.random.PCG64(0)
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": (high << 64) | low, "inc": (inc_high << 64) | inc_low},
            "has_uint32": 0,
            "uinteger": 0,
        }
        return {
            "step": int(saved["step"]),
            "weights": [saved[f"w{i}"] for i in range(count)],
            "momentum": [saved[f"m{i}"] for i in range(count)],
            "rng": np.random.Generator(bits),
        }


def weights_sha256(state: dict) -> str:
    digest = hashlib.sha256()
    for w in state["weights"]:
        digest.update(np.ascontiguousarray(w).tobytes())
    return digest.hexdigest()


def on_stop(_signal: int, _frame: object) -> None:
    global stop_requested
    stop_requested = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--ignore-sigterm", action="store_true", help="behave badly: only SIGKILL ends this process")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.ignore_sigterm else on_stop)

    folder = Path(os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"))
    outputs = Path(os.environ.get("SPOTD_OUTPUT_DIR", "out"))
    folder.mkdir(parents=True, exist_ok=True)
    outputs.mkdir(parents=True, exist_ok=True)

    resume = os.environ.get("SPOTD_RESUME", "")
    state = load(resume) if resume else fresh(args.seed)
    print(f"starting at step {state['step']} of {args.steps}", flush=True)

    loss = float("nan")
    while state["step"] < args.steps:
        loss = train_step(state)
        if state["step"] % args.save_every == 0 or stop_requested:
            save(state, folder)
            print(f"step {state['step']}  loss {loss:.5f}  saved", flush=True)
        if stop_requested:
            print("asked to stop: saved and leaving", flush=True)
            return 143
        time.sleep(args.pace)

    np.savez(outputs / "weights.npz", *state["weights"])
    digest = weights_sha256(state)
    (outputs / "weights.sha256").write_text(digest + "\n")
    print(f"done at step {state['step']}  weights sha256 {digest}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
