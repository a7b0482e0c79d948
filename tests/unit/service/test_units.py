"""The units in systemd/: they verify, and the service is as shut in as a network client can be."""

from __future__ import annotations

import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from tests.cases import every

UNITS = Path(__file__).parents[3] / "systemd"
NAMES = ["spotd.service", "spotd-user.service"]
EXPOSURE_MAX = 15
"""Tenths: 1.5."""

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


@analyze
@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_exposed_no_more_than_the_goal(name: str) -> None:
    unit = str(UNITS / name)
    done = _run("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", "--no-pager", unit)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


@analyze
@pytest.mark.parametrize("name", NAMES)
def test_a_unit_has_no_key_that_systemd_does_not_know(name: str) -> None:
    done = _run("verify", "--man=no", str(UNITS / name))
    # Since 254, and named in the unit as such; older ones pass over them with a warning.
    known = [line for line in done.stderr.splitlines() if not re.search("RestartSteps|RestartMaxDelaySec", line)]
    assert not any("Unknown" in line for line in known), done.stderr


@every("name", NAMES)
def test_a_unit_speaks_the_daemons_language(name: str) -> None:
    parser = RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    parser.read(UNITS / name)
    service = parser["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].endswith("spotd run")
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(service["WatchdogSec"]) >= 30
    assert int(service["TimeoutStopSec"]) > 30
    assert service["LimitCORE"] == "0", "a core file holds the keys of providers and stores"


@every("name", ["spotd.service", "spotd-user.service"])
def test_restarts_go_on_for_ever_with_a_growing_pause(name: str) -> None:
    parser = RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    parser.read(UNITS / name)
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    assert "StartLimitBurst" not in parser["Unit"]
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    assert "RestartPreventExitStatus" not in service
    assert int(service["RestartSec"]) >= 1
    assert int(service["RestartSteps"]) > 1
    assert service["RestartMaxDelaySec"] == "5min"
