"""A machine that is less than was sold is refused by its canary; the job goes on elsewhere, and `spotctl` says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import Lab, host, lab, until

pytestmark = pytest.mark.e2e
TOOL = """#!/bin/sh
cd "{folder}"
(set -C; echo "$HOME" > first) 2>/dev/null
memory=24564
[ "$(cat first)" = "$HOME" ] && memory=8192
echo "0, NVIDIA GeForce RTX 4090, 0, 4, $memory, 70.0, 31"
"""
"""The driver's tool: the machine that asks first has another card than was sold."""


def with_tool(found: Lab, folder: Path) -> None:
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(TOOL.format(folder=folder))
    tool.chmod(0o755)
    found.environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.lengthy
def test_a_machine_with_a_smaller_card_than_was_sold_is_left_for_another(tmp_path: Path) -> None:
    hosts = host("h0", 0.30) + host("h1", 0.90)
    with lab(tmp_path / "lab", hosts=hosts, daemon='[canary]\ntime = "2m"\n') as found:
        with_tool(found, tmp_path / "tools")
        found.start()
        job = found.submit("train", "echo trained", price={"max_price": 2.0})
        found.wait_final(job)
        refused, ran = found.job(job)["attempts"]
        assert (refused["host"], refused["reason"]) == ("h0", "contract_broken")
        lack = "its canary found a GPU of 8.0 GiB, the least is 19.0 GiB"
        assert refused["detail"] == f"the provider did not sell what was asked: {lack}"
        assert (ran["host"], ran["reason"], found.state(job)) == ("h1", "done", "SUCCEEDED")
        notes = [event["message"] for event in found.events(job) if event["kind"] == "host.note"]
        assert [note.partition(",")[0] for note in notes] == ["canary: 1 GPU", "canary: 1 GPU"]
        assert "canary: 1 GPU, 24.0 GiB, disk " in notes[1]
        assert "canary: 1 GPU, 24.0 GiB" in spotctl(found, "why", job).stdout
        assert lack in spotctl(found, "show", job).stdout
        assert "it took " in notes[0]
        assert "$0.00" in notes[0]
        until(lambda: not found.open_machines(), what="the machines to end")
        assert refused["spent_usd"] > 0, "its time is paid for"
        assert_no_traceback(found)
