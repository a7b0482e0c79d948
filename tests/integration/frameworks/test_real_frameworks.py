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
from tests.integration.runner.holding import HeldBucket
from tests.integration.runner.rig import Machine, Rig, until
from tests.integration.runner.servers import Server
from tests.integration.runner.test_over_http import over_http

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PYTHON = os.environ.get("SPOTD_FRAMEWORKS_PYTHON") or sys.executable
PATIENCE_S = 240.0
CODE = {"train.py": (Path(__file__).parent / "train.py").read_text()}

QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}


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
            env=QUIET,
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


def test_a_rotation_by_the_trainer_while_a_chunk_is_on_its_way_loses_no_file(tmp_path: Path) -> None:
    need("torch", "transformers", "accelerate")
    run = [PYTHON, "train.py", "trainer"]
    with Rig(tmp_path) as rig:
        bucket = HeldBucket(rig, PATIENCE_S)
        with Server(bucket.answer) as server:
            granted = rig.grant(run, code=CODE, settle_s=60.0, stop_grace_s=60.0, lease_s=900.0, keep=8, env=QUIET)
            granted = over_http(rig, server, granted)
            machine = rig.start(granted)
            folder = machine.home / "checkpoints"
            until(lambda: bucket.held or machine.process.poll() is not None, "a chunk on its way", PATIENCE_S)
            # `save_total_limit` is two: when the third is there, the trainer has removed the first.
            until(lambda: (folder / "checkpoint-15/trainer_state.json").exists(), "two more", PATIENCE_S)
            until(lambda: not (folder / "checkpoint-5").exists(), "the rotation", PATIENCE_S)
            bucket.go_on()
            until(lambda: "checkpoint-5" in names(machine), machine.console(), PATIENCE_S)
            rig.order_stop(granted)
            assert machine.wait(PATIENCE_S) == 0
        files = {m["entry"]: {row["path"].partition("/")[2] for row in m["files"]} for m in machine.manifests()}
        assert files["checkpoint-5"] >= {
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
            "trainer_state.json",
        }
        assert all(parts == files["checkpoint-5"] for parts in files.values())
        assert "checkpoint-5" in {offer.name for offer in rig.restores(1)}, "the daemon takes it, with every chunk"


def names(machine: Machine) -> set[str]:
    return {manifest["entry"] for manifest in machine.manifests()}
