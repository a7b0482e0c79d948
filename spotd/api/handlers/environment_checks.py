"""What `spotctl doctor` finds around the daemon: its SQLite, and who else can touch its files.

A finding with `ok` and a hint is a warning: it can stay so, and there is a way to be rid of it.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from spotd.api.schemas.health import CheckResponse

WAL_RESET_FIRST: Final = (3, 7, 0)
WAL_RESET_FIXED: Final = (3, 51, 3)
NETWORK_FILESYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2"}
    | {"glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs"}
)
MOUNTS: Final = Path("/proc/self/mounts")


def row_of(area: str, name: str, detail: str, *, ok: bool, hint: str = "") -> CheckResponse:
    return CheckResponse(area=area, name=name, ok=ok, detail=detail, hint=hint)


def sqlite_row(version: tuple[int, ...]) -> CheckResponse:
    """Warn of the versions whose WAL-reset bug can corrupt a database that two connections write to."""
    detail = f"SQLite {'.'.join(str(part) for part in version)}"
    if not WAL_RESET_FIRST <= version < WAL_RESET_FIXED:
        return row_of("daemon", "sqlite", detail, ok=True)
    # One connection writes and checkpoints, which is the condition under which this bug cannot strike.
    detail += " has the WAL-reset bug, which needs two writers; spotd has one, so keep other programs out"
    fixed = ".".join(str(part) for part in WAL_RESET_FIXED)
    return row_of("daemon", "sqlite", detail, ok=True, hint=f"run spotd with a Python whose SQLite is {fixed} or later")


def config_row(path: Path) -> CheckResponse:
    """Check that the config, which may name where keys are and whom to notify, is its owner's alone."""
    row = mode_row("config", path)
    if row["ok"] and stat.S_IMODE(path.stat().st_mode) & 0o004:
        return row_of("daemon", "config", f"{path} can be read by everybody", ok=True, hint=f"chmod o-r {path}")
    return row


def mode_row(name: str, path: Path) -> CheckResponse:
    """Whether others can change this file or folder."""
    if stat.S_IMODE(path.stat().st_mode) & 0o022:
        return row_of("daemon", name, f"{path} can be changed by others", ok=False, hint=f"chmod go-w {path}")
    return row_of("daemon", name, str(path), ok=True)


def filesystem_row(folder: Path, mounts: str) -> CheckResponse:
    """Whether the state lies on a disk of this computer: locks and shared memory do not hold across a network."""
    kind = filesystem_of(folder.resolve(), mounts)
    if kind not in NETWORK_FILESYSTEMS:
        return row_of("daemon", "filesystem", f"the state is on {kind or 'an unknown filesystem'}", ok=True)
    detail = f"the state is on {kind}, a network filesystem, where SQLite's locks do not hold"
    return row_of(
        "daemon", "filesystem", detail, ok=False, hint="set STATE_DIRECTORY to a folder on a disk of this computer"
    )


def filesystem_of(folder: Path, mounts: str) -> str:
    """Return the kind of filesystem of the folder, from the text of /proc/mounts; empty where unknown."""
    found, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = Path(fields[1].replace("\\040", " "))
        # Of two at the same place the later one covers the earlier.
        if folder.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = fields[2], len(place.parts)
    return found


def mounts_text() -> str:
    """Return what is mounted where, on a system that shows it."""
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
