"""`spotctl`, `spotd` and the daemon's log, as a user at a terminal has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.harness import Lab


def spotctl(lab: Lab, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """How a `spotctl` process ended that talks to this lab's daemon. It never shows a traceback."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPOTD_")}
    environment |= {"SPOTD_SOCKET": str(lab.folder / "run" / "spotd.sock"), "TZ": "UTC", "COLUMNS": "200"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spotctl")), *arguments],
        env=environment,
        cwd=lab.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def log_lines(lab: Lab, event: str) -> list[dict[str, Any]]:
    """Every line of this event that the lab's daemons have logged so far."""
    found = []
    for path in sorted(lab.folder.glob("spotd-*.log")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("{") and line.endswith("}"):
                row = json.loads(line)
                if row.get("event") == event:
                    found.append(row)
    return found


def assert_no_traceback(lab: Lab) -> None:
    for path in lab.folder.glob("spotd-*.log"):
        text = path.read_text(encoding="utf-8")
        assert "Traceback" not in text, text[-4000:]
