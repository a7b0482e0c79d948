"""What real frameworks write is taken when it is whole, and what was taken can be loaded by them again.

Each runs in the interpreter named by `SPOTD_FRAMEWORKS_PYTHON` (this one without it), which needs the libraries of the
extra `frameworks`: `make frameworks`. A library that is missing there skips its test.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spotd_jobs.runner import complete
from tests.runner.rig import Machine, Rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PYTHON = os.environ.get("SPOTD_FRAMEWORKS_PYTHON") or sys.executable
PATIENCE_S = 240.0
CODE = {"train.py": (Path(__file__).parent / "train.py").read_text()}


class Framework(NamedTuple):
    """A framework: its function in `train.py`, what it needs, and how its checkpoints are named."""

    name: str
    libraries: tuple[str, ...]
    named: str
    settle_s: float = 60.0
    """Far away where the framework has a mark of its own: then it is the mark that counts."""


FRAMEWORKS = [
    Framework("trainer", ("torch", "transformers", "accelerate"), r"checkpoint-\d+"),
    Framework("lightning", ("torch", "lightning"), r"step=\d+\.ckpt|last\.ckpt", 0.3),
    Framework("dcp", ("torch",), r"step-\d+"),
    Framework("deepspeed_layout", ("torch",), r"global_step\d+"),
    Framework("safetensors_sharded", ("torch", "safetensors", "huggingface_hub"), r"step-\d+", 0.3),
    Framework("accelerate", ("torch", "accelerate"), r"checkpoint_\d+", 0.3),
    Framework("orbax", ("jax", "orbax.checkpoint"), r"\d+", 0.3),
]


@functools.cache
def has(library: str) -> bool:
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({library!r}) is None)"
    return subprocess.run([PYTHON, "-c", look], capture_output=True, check=False).returncode == 0


def need(*libraries: str) -> None:
    missing = [library for library in libraries if not has(library)]
    if missing:
        pytest.skip(f"{PYTHON} has no {', '.join(missing)}: make frameworks, or set SPOTD_FRAMEWORKS_PYTHON")


def resumed_at(machine: Machine) -> int:
    found = until(lambda: re.search(r"resumed at (\d+)", machine.log()), machine.console(), PATIENCE_S)
    return int(found[1])


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_a_framework_goes_on_from_what_was_stored_after_a_kill_and_after_a_notice(
    framework: Framework, tmp_path: Path
) -> None:
    need(*framework.libraries)

    def grant(rig: Rig, attempt: int, **more: Any) -> Any:
        return rig.grant(
            [PYTHON, "train.py", framework.name, *more.pop("words", ())],
            attempt=attempt,
            code=CODE,
            settle_s=framework.settle_s,
            stop_grace_s=60.0,
            lease_s=900.0,
            keep=8,
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"},
            **more,
        )

    with Rig(tmp_path) as rig:
        first = rig.start(grant(rig, 1))
        # More than are kept: the framework's own rotation has begun.
        until(lambda: len(first.events("checkpoint")) >= 4 or first.process.poll() is not None, "rotation", PATIENCE_S)
        first.kill()
        assert len(first.events("checkpoint")) >= 4, first.console() + first.log()

        granted = grant(rig, 2, restore=rig.restores(1))
        second = rig.start(granted)
        newest = rig.restores(1)[0]
        step = resumed_at(second)
        assert step > 0
        assert second.events("restored")[0].data["name"] == newest.name
        second.event("checkpoint", PATIENCE_S)
        rig.order_stop(granted)
        assert second.wait(PATIENCE_S) == 0
        saved = rig.restores(2)
        assert saved, second.log()

        third = rig.start(grant(rig, 3, restore=saved, words=["1"]))
        assert resumed_at(third) > step
        assert third.wait(PATIENCE_S) == 0
        for machine in (first, second, third):
            assert machine.events("checkpoint_fallback") == []
            for manifest in machine.manifests():
                assert re.fullmatch(framework.named, manifest["entry"]), "only finished checkpoints are stored"
                assert not any(complete.is_temporary(part) for part in manifest["entry"].split("/"))
                assert not any(row["path"].endswith(complete.INCOMPLETE_MARK) for row in manifest["files"])
