"""One host as its owner sees it: a home folder, GPUs that a script on its PATH reports, and processes that are real.

`nvidia-smi` prints what the files in `smi/` hold, in the shapes of the real one. Nothing here knows the provider: what
exists is read from the folders it leaves and from the process table.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts.processes import find_process, kill_hard, pids_with_environment
from spotd_providers.testkit.harness import WorldMachine

_SMI = """#!/bin/sh
cd "{folder}" || exit 1
echo "$*" >>asked
[ -e hang ] && exec sleep 600
[ -e code ] && exit "$(cat code)"
case "$*" in
*compute-apps=gpu_uuid,pid*) cat apps ;;
*compute-apps=gpu_uuid*) cut -d, -f1 apps ;;
*query-gpu=index*) cat query ;;
*query-gpu=uuid,*) name=${{1#--query-gpu=uuid,}}
  [ -e "more.$name" ] || {{ echo "Field \\"$name\\" is not a valid field to query." ; exit 2; }}
  cat "more.$name" ;;
-L) cat list ;;
*) exit 2 ;;
esac
"""
_DATE = """#!/bin/sh
[ "$*" = +%s ] && [ -e "{folder}/clock" ] && exec cat "{folder}/clock"
exec /bin/date "$@"
"""
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card as `nvidia-smi` reports it; with `slices` it is cut by MIG into these profiles."""

    uuid: str
    name: str = "NVIDIA GeForce RTX 4090"
    vram_mb: int = 24564
    used_mb: str = "11"
    slices: tuple[tuple[str, str], ...] = ()


class FakeHost:
    """A host below `root`; `home` is that of the user who logs in."""

    def __init__(self, name: str, root: Path, *gpus: Gpu) -> None:
        self.name = name
        self.home = root / "home"
        self.bin = root / "bin"
        self.smi = root / "smi"
        self.state = self.home / ".spotd"
        for folder in (self.home, self.bin, self.smi):
            folder.mkdir(parents=True)
        self.profile = ""
        """What the login shell does before it runs a command."""
        if gpus:
            self.program("nvidia-smi", _SMI.format(folder=self.smi))
            (self.smi / "apps").write_text("")
            self.show(*gpus)
        self.program("date", _DATE.format(folder=root))
        # Whatever computer the tests run on: its user's systemd is asked for nothing.
        self.program("loginctl", "#!/bin/sh\necho no\n")
        self.clock = root / "clock"
        self._sleepers: list[subprocess.Popen[bytes]] = []

    def program(self, name: str, text: str) -> None:
        """Put a program before all others on the PATH of probes and jobs."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self.bin}:/usr/local/bin:/usr/bin:/bin"

    def show(self, *gpus: Gpu) -> None:
        """Set what the driver shows."""
        self.gpus = gpus
        rows = [f"{n}, {g.uuid}, {g.name}, {g.vram_mb}, 570.86.15" for n, g in enumerate(gpus)]
        (self.smi / "query").write_text("".join(f"{row}\n" for row in rows))
        modes = [f"{g.uuid}, {'Enabled' if g.slices else '[N/A]'}" for g in gpus]
        (self.smi / "more.mig.mode.current").write_text("".join(f"{row}\n" for row in modes))
        (self.smi / "more.memory.used").write_text("".join(f"{g.uuid}, {g.used_mb}\n" for g in gpus))
        lines = []
        for number, gpu in enumerate(gpus):
            lines.append(f"GPU {number}: {gpu.name} (UUID: {gpu.uuid})")
            lines += [f"  MIG {what:<12} Device {n:>2}: (UUID: {uuid})" for n, (what, uuid) in enumerate(gpu.slices)]
        (self.smi / "list").write_text("".join(f"{line}\n" for line in lines))

    def use(self, *uuids: str) -> None:
        """Let a process of somebody else compute on these cards."""
        (self.smi / "apps").write_text("".join(f"{uuid}, 1\n" for uuid in uuids))

    def folder(self, key: str) -> Path:
        return self.state / "machines" / key

    def plant(self, keys: Sequence[str]) -> None:
        """Make machines that run already, all with one process."""
        self._sleepers.append(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True))
        pid = self._sleepers[-1].pid
        since = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        for key in keys:
            folder = self.folder(key)
            folder.mkdir(parents=True)
            (folder / "meta").write_text("100000 GPU-planted\n")
            (folder / "started").write_text(f"{pid} {since} {BOOT.read_text().strip()} 1\n")

    def machines(self) -> list[WorldMachine]:
        """Return what the folders and the process table hold."""
        folders = self.state / "machines"
        names = sorted(os.listdir(folders)) if folders.is_dir() else []  # noqa: PTH208 - names, not paths
        return [self._machine(name) for name in names]

    def _machine(self, key: str) -> WorldMachine:
        folder = self.folder(key)
        meta = _text(folder / "meta").split()
        is_alive = self.leader(key) is not None or bool(self.members(key))
        return WorldMachine(
            machine_id=f"{self.name}:{key}",
            label=re.sub(r"(-\d+)\.\d+$", r"\1", key) if key.startswith("spotd-") else None,
            exists=is_alive or not (folder / "ended").exists(),
            running=is_alive,
            price=MicroUsdPerHour(int(meta[0])) if meta and meta[0].isdecimal() else None,
            start_script=_text(folder / "boot.sh") or None,
        )

    def leader(self, key: str) -> int | None:
        """Return the pid of a machine's first process, if that is the one that was started."""
        words = _text(self.folder(key) / "started").split()
        if len(words) != 4 or not words[0].isdecimal():
            return None
        found = find_process(int(words[0]))
        is_it = found is not None and not found.dead and found.started == f"{words[2]}:{words[1]}"
        return int(words[0]) if is_it else None

    def members(self, key: str) -> frozenset[int]:
        found = pids_with_environment(f"SPOTD_MACHINE={self.folder(key)}")
        return frozenset(pid for pid in found if (process := find_process(pid)) is not None and not process.dead)

    def kill(self, key: str) -> None:
        """Kill all of a machine at once, as the kernel does when memory ends; its folder stays."""
        leader = self.leader(key)
        if leader is not None:
            kill_hard(leader)
        for _ in range(10):
            if not (left := self.members(key)):
                break
            for pid in left:
                kill_hard(pid)

    def shut_down(self) -> None:
        for machine in self.machines():
            self.kill(machine.machine_id.partition(":")[2])
        for sleeper in self._sleepers:
            sleeper.send_signal(signal.SIGKILL)
            sleeper.wait()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
