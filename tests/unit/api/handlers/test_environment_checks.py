"""What `doctor` warns of on the computer that the daemon runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd.api.handlers.doctor import config_row, filesystem_row, mode_row, row_of, server_row, with_way_out
from spotd.api.responses import ApiRefusal, ApiUnavailable, Invalid, NotFound
from spotd_jobs.spec.problems import Problem
from tests.cases import every
from tests.unit.daemon.rig import Rig

MOUNTS = """/dev/sda1 / ext4 rw 0 0
proc /proc proc rw 0 0
server:/homes /home nfs4 rw 0 0
/dev/sdb1 /home/me/fast xfs rw 0 0
//nas/share /mnt/the\\040share cifs rw 0 0
me@host: /srv/remote fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("mode", "ok", "hint"), [(0o600, True, ""), (0o640, True, ""), (0o644, True, "o-r"), (0o664, False, "go-w")]
)
def test_a_config_that_others_can_read_or_change_is_told_with_the_command_that_helps(
    mode: int, ok: bool, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    path.chmod(mode)
    row = config_row(path)
    assert row["ok"] is ok
    assert row["hint"] == (f"chmod {hint} {path}" if hint else "")


SAFE = {"server_version": "16.4", "fsync": "on", "full_page_writes": "on", "synchronous_standby_names": ""}


@every(
    ("settings", "ok", "detail", "hint"),
    [
        (SAFE, True, "16.4; commits wait for its disk and for no standby", "set synchronous_standby_names to"),
        (
            {**SAFE, "synchronous_standby_names": "ANY 1 (b)"},
            True,
            "16.4; commits wait for its disk and for the standbys ANY 1 (b)",
            "",
        ),
        ({**SAFE, "fsync": "off"}, False, "PostgreSQL 16.4 runs with fsync off: a crash", "set fsync = on"),
        (
            {**SAFE, "fsync": "off", "full_page_writes": "off"},
            False,
            "PostgreSQL 16.4 runs with fsync and full_page_writes off",
            "set fsync = on",
        ),
        ({}, True, "of an unknown version; commits wait", "set synchronous_standby_names"),
    ],
)
def test_a_server_that_may_lose_commits_is_wrong(settings: dict[str, str], ok: bool, detail: str, hint: str) -> None:
    row = server_row(settings)
    assert row["ok"] is ok
    assert row["detail"].startswith(detail)
    assert row["hint"].startswith(hint)


def test_a_state_folder_that_others_can_change_is_wrong(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert not mode_row("state folder", tmp_path)["ok"]
    tmp_path.chmod(0o700)
    assert mode_row("state folder", tmp_path)["ok"]


@every(
    ("folder", "kind", "ok"),
    [
        ("/var/lib/spotd", "ext4", True),
        ("/home/me/spotd", "nfs4", False),
        ("/home/me/fast/spotd", "xfs", True),
        ("/mnt/the share/spotd", "cifs", False),
        ("/srv/remote", "fuse.sshfs", False),
        ("/srv/remote-not", "ext4", True),
    ],
)
def test_a_state_on_a_network_filesystem_is_wrong(folder: str, kind: str, ok: bool) -> None:
    row = filesystem_row(Path(folder), MOUNTS)
    assert row["ok"] is ok
    assert kind in row["detail"]
    assert bool(row["hint"]) is not ok


def test_where_the_system_does_not_tell_nothing_is_claimed() -> None:
    assert filesystem_row(Path("/var/lib/spotd"), "")["ok"]


@every(
    ("area", "way"),
    [("daemon", "log"), ("store", "[store]"), ("notify", "[notify]"), ("vast", "[providers.vast]")],
)
def test_what_is_wrong_has_a_way_out_though_its_check_names_none(area: str, way: str) -> None:
    assert way in with_way_out(row_of(area, "a check", "it is broken", ok=False))["hint"]
    for kept in (row_of(area, "a check", "fine", ok=True), row_of(area, "a check", "no", ok=False, hint="do this")):
        assert with_way_out(kept) == kept


@pytest.mark.anyio
async def test_no_finding_of_a_daemon_lacks_a_way_out(rig: Rig) -> None:
    async with rig.ready():
        rig.control_loop.shared_silence = ("3 of 3 hosts are silent at once",)
        rig.policy.gates.append(lambda: "another daemon may act")
        rows = (await rig.handlers().doctor.report())["checks"]
    wrong = [row for row in rows if not row["ok"]]
    assert {row["name"] for row in wrong} >= {"silent hosts", "launches"}
    assert [row for row in wrong if not row["hint"]] == []
    assert [row for row in rows if row["name"] == "sqlite" and (row["hint"] or not row["ok"])] == []


@every("kind", [NotFound, Invalid, ApiUnavailable])
def test_a_refusal_that_names_no_way_out_has_the_one_of_its_kind(kind: type[ApiRefusal]) -> None:
    assert kind("it is so").hint == kind.way_out != ""
    assert kind("it is so", hint="do this").hint == "do this"
    assert kind("it is so", problems=(Problem(key="a", message="b", hint="c"),)).hint == ""
