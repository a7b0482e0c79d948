"""The runner under every Python that is installed here: images have what they have."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.runner.rig import Rig

pytestmark = pytest.mark.e2e
VERSIONS = ["3.8", "3.9", "3.10", "3.12", "3.13"]


def find_python(version: str) -> str | None:
    """From SPOTD_TEST_PYTHONS (a list like PATH), the PATH, or pyenv's folder."""
    named = [Path(place) for place in os.environ.get("SPOTD_TEST_PYTHONS", "").split(os.pathsep) if place]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    known = sorted(pyenv.glob(f"{version}.*/bin/python")) + ([Path(on_path)] if on_path else [])
    for candidate in [*named, *known]:
        text = 'import sys; print("%d.%d" % sys.version_info[:2])'
        try:
            asked = subprocess.run([candidate, "-ISc", text], capture_output=True, text=True, timeout=30, check=False)
        except OSError:
            continue
        if asked.stdout.strip() == version:
            return str(candidate)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_is_saved_preempted_and_resumed_under_this_python(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here; name one in SPOTD_TEST_PYTHONS")
    save = (
        'mkdir "$SPOTD_CHECKPOINT_DIR/step-1"; cp code "$SPOTD_CHECKPOINT_DIR/step-1/w"; '
        'touch "$SPOTD_CHECKPOINT_DIR/step-1/DONE"; sleep 60'
    )
    with Rig(tmp_path, python=python) as rig:
        first = rig.start(rig.grant(["/bin/sh", "-c", save], code={"code": "weights\n"}, setup="echo set up"))
        first.event("checkpoint")
        first.process.terminate()
        assert first.wait() == 0
        assert str(first.events("boot")[0].data["python"]).startswith(version + ".")
        second = rig.start(
            rig.grant(
                ["/bin/sh", "-c", 'cat "$SPOTD_RESUME/w"; echo out >"$SPOTD_OUTPUT_DIR/o"'],
                attempt=2,
                restore=rig.restores(1),
            )
        )
        assert second.wait() == 0
        assert second.log() == "weights\n"
        assert second.events("outputs")
        assert "Warning" not in first.console() + second.console()
