"""A real daemon over a real local market, as processes that a test can watch, strike and kill.

The market's own ledger and the files of its machines are what the tests judge by; the daemon's word is compared with
them, never taken for them.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused, DaemonUnreachable
from spotd_jobs.pack import pack
from spotd_providers.local.hosts import Segment, read_ledger, segments
from spotd_providers.local.server.__main__ import stop as stop_market
from spotd_providers.local.settings import find_endpoint
from tests.e2e.preloaded import Forked
from tests.e2e.receipts import disagreements, disagreements_of_all
from tests.waiting import described, until

REPO = Path(__file__).resolve().parents[2]
CRASHABLE = Path(__file__).with_name("crashable.py")
BUSY_S = 1.0
"""How late, on the wall, a poll may be on a machine whose two cores run the suite meanwhile."""
BILLED_S = 20.0
"""Until a bill that differs was read: ten minutes by the clock of the labs that run at sixty times the wall."""
DOWN_S = 4.0
"""From the death of a daemon to the first list of the next one, on such a machine."""
FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
LEAVES_AT_ONCE = '[bids]\nraise_running = false\nhold = "0s"\n'
"""The daemon bids no higher for a machine that is outbid, and ends it at once: its job goes on elsewhere."""


def host(name: str, price: float, *, gpu: str = "RTX_4090", flavour: str = "sudden", on_demand: float = 2.0) -> str:
    return f"""
[[providers.local.hosts]]
name = "{name}"
gpu = "{gpu}"
flavour = "{flavour}"
on_demand = {on_demand}
spot = {{ kind = "fixed", price = {price} }}
"""


class Lab:
    """One install: its folder, its market, and the daemon process of the moment."""

    def __init__(
        self,
        folder: Path,
        *,
        hosts: str,
        scale: float = 60.0,
        daemon: str = "",
        market: str = "",
        virtual0: datetime = datetime(2026, 3, 2, 12, tzinfo=UTC),
        poll_s: float = 0.25,
    ) -> None:
        """`poll_s` is on the wall; the config says it in the daemon's time."""
        self.folder = folder
        self.market_folder = folder / "market"
        for name in ("run", "state"):
            (folder / name).mkdir(mode=0o700, parents=True)
        (folder / "config.toml").write_text(
            f"""[daemon]
install = "lab"
poll_every = "{max(1, round(scale * poll_s))}s"
time_scale = {scale}
{daemon}
[providers.local]
directory = "{self.market_folder}"
{market}
{hosts}
""",
            encoding="utf-8",
        )
        clock = {"real0": time.time(), "virtual0": virtual0.isoformat(), "scale": scale}
        (folder / "state" / "clock.json").write_text(json.dumps(clock), encoding="utf-8")
        self.api = Daemon(folder / "run" / "spotd.sock")
        self.ledgers = [self.market_folder / "ledger.jsonl"]
        """Of every market that bills it."""
        self._seldom_s = scale * (poll_s + 2 * BUSY_S)  # at the beginning of a span, and at its end
        self._down_s = scale * DOWN_S
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.starts = 0
        self.environment: dict[str, str] = {}
        """What the daemon finds in its environment besides."""
        self.shares_machines = False
        """Machines pass from job to job, so that bills and receipts agree as a whole only."""
        self.fresh = False
        """The daemon is executed by an interpreter of its own, and not forked (see `preloaded`)."""
        self.before_start: Callable[[], None] = lambda: None
        self._described = ExitStack()
        self._described.enter_context(described(self.last_state))

    # --- the daemon ---

    def start(self, *, crash_at: str = "", wait: bool = True) -> None:
        self.starts += 1
        self.before_start()
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SPOTD_")},
            "STATE_DIRECTORY": str(self.folder / "state"),
            "RUNTIME_DIRECTORY": str(self.folder / "run"),
            "SPOTD_CRASH_AT": crash_at,
            **self.environment,
        }
        arguments = ["--config", str(self.folder / "config.toml")]
        with (self.folder / f"spotd-{self.starts}.log").open("wb") as log:
            self.process = (
                _executed(arguments, environment, log)
                if self.fresh
                else Forked(arguments, environment=environment, output=log)
            )
        if wait:
            until(self.ready, what="the daemon to answer", within=120)

    @property
    def unseen_s(self) -> float:
        """For how long, by its clock, what becomes of a machine may not be seen."""
        return self._seldom_s + (self._down_s if self.starts > 1 else 0)

    def ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended: {self.log_tail()}"
        return self.answers()

    def answers(self) -> bool:
        try:
            self.api.status()
        except DaemonUnreachable:
            return False
        return True

    def last_state(self) -> str:
        """What a wait in vain shows: the jobs as the daemon has them, what the market bills, and the end of the log."""
        try:
            jobs = [f"{job['name']}: {job['state']} ({job['reason']})" for job in self.api.jobs({})["jobs"]]
        except (DaemonUnreachable, DaemonRefused) as exc:
            jobs = [str(exc)]
        return "\n".join([*jobs, *map(str, self.open_machines()), self.log_tail()])

    def log_tail(self) -> str:
        log = self.folder / f"spotd-{self.starts}.log"
        return log.read_text(encoding="utf-8", errors="replace")[-3000:] if self.starts else ""

    @property
    def is_dead(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """As a power cut of the daemon alone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.exit_code(within=30)

    def exit_code(self, *, within: float = 60) -> int:
        """The exit code of the daemon, which is about to end."""
        assert self.process is not None
        until(lambda: self.is_dead, what="the daemon to end", within=within)
        return self.process.wait()

    def close(self) -> None:
        self._described.close()
        self.kill()
        if self.market_folder.exists():
            stop_market(self.market_folder)

    # --- jobs ---

    def submit(
        self,
        name: str,
        run: str,
        *,
        workdir: Path | None = None,
        secret_values: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> str:
        """The id of a queued job; tried again while the daemon is down, as a person would."""
        data: dict[str, Any] = {
            "name": name,
            "run": run,
            "image": "none",
            "resources": {"gpu": ["RTX_4090:1"], "disk": "10GB"},
            "price": {"max_price": 1.0},
            "checkpoint": {"every": "10m", "settle": "10s", "stop_grace": "90s"},
            **changes,
        }
        sha256 = None
        if workdir is not None:
            data["workdir"] = str(workdir)
            packed = pack(workdir, bytes_max=10_000_000)
            sha256 = packed.sha256
            self.api.put_code(sha256, io.BytesIO(packed.data), packed.size)
        draft = {"data": data, "flags": {}, "source": "", "base_dir": str(self.folder)}
        return str(self.api.submit(draft, code_sha256=sha256, secrets=secret_values or {})["job"]["id"])

    def job(self, ref: str) -> dict[str, Any]:
        return dict(self.api.job(ref)["job"])

    def receipts(self, ref: str) -> list[dict[str, Any]]:
        """What the job cost, attempt by attempt."""
        return [dict(one) for one in self.api.cost(ref)["receipts"]]

    def state(self, ref: str) -> str:
        return str(self.job(ref)["state"])

    def wait_final(self, *refs: str, within: float = 120.0) -> None:
        def done() -> bool:
            try:
                return all(self.state(ref) in FINAL for ref in refs)
            except DaemonUnreachable:
                assert not self.is_dead, self.log_tail()
                return False

        until(done, what=f"{', '.join(refs)} to be final", within=within, every=0.1)

    def delivered(self, ref: str, name: str) -> str:
        files = self.api.files(ref, None)["files"]
        path = next(f["path"] for f in files if Path(f["path"]).name == name)
        return b"".join(self.api.read_file(ref, None, path)).decode().strip()

    def events(self, ref: str | None = None) -> list[dict[str, Any]]:
        return [dict(one) for one in self.api.events({"job": ref} if ref else {})]

    # --- the market ---

    def control(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An order to the market that no customer could give."""
        endpoint = until(lambda: find_endpoint(self.market_folder), what="the market to run", within=30)
        url = urlsplit(endpoint.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
        with closing(connection):
            return self._ordered(connection, what, body, endpoint.token)

    def _ordered(
        self, connection: http.client.HTTPConnection, what: str, body: Mapping[str, Any], token: str
    ) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        connection.request("POST", f"/control/{what}", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (answer.status, text)
        return dict(json.loads(text))

    def ledger(self) -> tuple[Segment, ...]:
        return tuple(span for path in self.ledgers for span in segments(read_ledger(path)))

    def open_machines(self) -> list[Segment]:
        return [s for s in self.ledger() if s.end is None]

    def running_machines(self) -> list[Segment]:
        return [s for s in self.open_machines() if not s.paused]

    def machine_folder(self, machine_id: str) -> Path:
        return self.market_folder / "machines" / "hosts" / machine_id

    def now(self) -> datetime:
        clock = self._clock()
        start = datetime.fromisoformat(clock["virtual0"])
        return start + timedelta(seconds=(time.time() - clock["real0"]) * clock["scale"])

    def real(self, at: datetime) -> float:
        """The second on the wall at which the daemon's clock shows this instant."""
        clock = self._clock()
        start = datetime.fromisoformat(clock["virtual0"])
        return float(clock["real0"]) + (at - start).total_seconds() / float(clock["scale"])

    def _clock(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state" / "clock.json").read_text()))


def _executed(arguments: list[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(CRASHABLE), *arguments],
        env=environment,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def lab(folder: Path, **options: Any) -> Iterator[Lab]:
    made = Lab(folder, **options)
    try:
        yield made
        if not made.is_dead:
            assert_receipts_agree(made)
    finally:
        made.close()


def assert_receipts_agree(found: Lab, job: str | None = None) -> None:
    """What each machine of the job, or of all, was booked at is what its market billed (`receipts`).

    What a machine did while no daemon ran is known only from its bill, which is asked for minutes after its end.
    """
    give_up_at = time.monotonic() + BILLED_S
    while True:
        cost = found.api.cost(job)
        spans = [s for s in found.ledger() if job is None or s.key.split("-")[-2] == job]
        receipts = [*cost["receipts"]]
        if cost["more"]:
            known = {receipt["id"] for receipt in receipts}
            billed = {span.key.split("-")[-2] for span in spans}
            receipts += [one for ref in sorted(billed - known) for one in found.api.cost(ref)["receipts"]]
        compare = disagreements_of_all if found.shares_machines else disagreements
        wrong, apart = compare(receipts, spans, unseen_s=found.unseen_s)
        if not wrong or time.monotonic() > give_up_at:
            break
        time.sleep(0.2)
    print(f"RECEIPTS {len(apart)} machines, apart by {max(apart, default=0):.1f} of {found.unseen_s:.1f} s at most")
    assert not wrong, "\n".join(wrong)


def training_folder(tmp_path: Path) -> Path:
    """A workdir with the example's script and its slow sister."""
    folder = tmp_path / "code"
    folder.mkdir()
    for source in (REPO / "examples" / "numpy" / "train.py", Path(__file__).parent / "slow_train.py"):
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


def straight_sha256(folder: Path, flags: str) -> str:
    """What the same script ends with when nothing interrupts it. It saves nothing, which changes no weight."""
    target = folder / f"straight-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
    target.mkdir()
    script = REPO / "examples" / "numpy" / "train.py"
    subprocess.run(
        [sys.executable, str(script), *flags.split(), "--save-every", "1000000"],
        cwd=target,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return (target / "out" / "weights.sha256").read_text().strip()


def assert_books_are_clean(found: Lab, *, reconcile_s: float) -> None:
    """No machine is left, none was doubled, and none billed longer than a reconcile period after its job's end.

    `reconcile_s` is virtual seconds.
    """
    spans = found.ledger()
    assert [s for s in spans if s.end is None] == []
    ends: dict[str, datetime] = {}
    for job in found.api.jobs({})["jobs"]:
        assert job["state"] in FINAL
        ends[job["id"]] = datetime.fromisoformat(str(job["ended_at"])).astimezone(UTC)
    by_job: dict[str, list[Segment]] = {}
    for span in spans:
        by_job.setdefault(span.key.split("-")[2], []).append(span)
    for job_id, mine in by_job.items():
        last = max(s.end for s in mine if s.end is not None)
        assert last <= ends[job_id] + timedelta(seconds=reconcile_s), f"job {job_id} was billed until {last}"
        running = sorted((s for s in mine if not s.paused and s.start != s.end), key=lambda s: s.start)
        for before, after in pairwise(running):
            if before.machine_id != after.machine_id:
                assert before.end is not None
                assert before.end <= after.start, f"job {job_id} had {before.machine_id} and {after.machine_id} at once"


__all__ = ["DaemonRefused", "DaemonUnreachable", "Lab", "assert_books_are_clean", "host", "lab", "until"]
