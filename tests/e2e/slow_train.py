"""The example's training with saves that take time and room, so that a test can strike in the middle of one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import train  # type: ignore[import-not-found]  # the example's script lies beside this one in the packed workdir

SAVE_S = float(os.environ.get("SAVE_S", "0"))
BALLAST = int(os.environ.get("BALLAST", "0"))
RELEASE = Path(os.environ.get("RELEASE", "/nonexistent"))
"""Once this file exists, the rest goes as fast as it can."""
plain_save = train.save


def pause(seconds: float) -> None:
    if not RELEASE.exists():
        time.sleep(seconds)


def save(state: dict[str, Any], folder: Path) -> None:
    """A big file grows slowly under the temporary name before the rest is written and renamed."""
    if BALLAST and not RELEASE.exists():
        tmp = folder / f"tmp-ballast-{state['step']}"
        tmp.mkdir(parents=True, exist_ok=True)
        rng = np.random.Generator(np.random.PCG64(state["step"]))
        with (tmp / "ballast.bin").open("wb") as out:
            for _ in range(8):
                out.write(rng.bytes(BALLAST // 8))
                out.flush()
                time.sleep(SAVE_S / 8)
        plain_save(state, folder / ".staging")
        made = folder / ".staging" / f"step-{state['step']:08d}"
        (tmp / "ballast.bin").rename(made / "ballast.bin")
        final = folder / made.name
        if not final.exists():
            hidden = folder / f".moving-{made.name}"
            made.rename(hidden)
            hidden.rename(final)
        tmp.rmdir()
        for old in sorted(folder.glob("step-*"))[:-3]:
            for path in old.iterdir():
                path.unlink()
            old.rmdir()
    else:
        plain_save(state, folder)


train.save = save
train.time = SimpleNamespace(sleep=pause)

if __name__ == "__main__":
    sys.exit(train.main())
