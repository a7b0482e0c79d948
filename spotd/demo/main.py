"""Plays the demo from start to proof."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from queue import Empty, Queue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonRefused, DaemonUnreachable
from spotd.demo import script
from spotd.demo.script import NIGHT_TARIFF_S, TIME_SCALE, DemoFailed, DemoJob, Session, jobs, session
from spotd.words import FINAL_STATES
from spotd_jobs.pack import pack
from spotd_providers.local.hosts import read_ledger, segments

if TYPE_CHECKING:
    from spotd.api.schemas.costs import CostResponse


# What the demo shows while it runs: a live screen on a terminal, plain lines elsewhere.


SHOWN: Final = frozenset(
    {
        "attempt.intended",
        "attempt.running",
        "attempt.resumed",
        "attempt.notice",
        "attempt.outbid",
        "attempt.preempted",
        "attempt.host_lost",
        "attempt.launch_failed",
        "attempt.done",
        "attempt.user_error",
        "job.waiting_price",
        "job.succeeded",
        "job.failed",
        "job.expired",
        "job.closed",
    }
)
EVENTS_ON_SCREEN: Final = 14


def clock_words(instant: str) -> str:
    """`20:45:10`, the market's time."""
    return datetime.fromisoformat(instant).strftime("%H:%M:%S")


def event_words(event: Mapping[str, Any]) -> str:
    attempt = f" #{event['attempt']}" if event["attempt"] else ""
    return f"{clock_words(event['at'])}  {(event['job_name'] or '') + attempt:14} {event['message']}"


class Lines:
    """One line per event, for pipes and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in SHOWN:
            sys.stdout.write(event_words(event) + "\n")
            sys.stdout.flush()

    def jobs(self, now: str, jobs: Sequence[Mapping[str, Any]]) -> None:
        """Print nothing: events are enough here."""


class Screen:
    """A table of the jobs and the newest events, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._events: deque[Mapping[str, Any]] = deque(maxlen=EVENTS_ON_SCREEN)
        self._now = ""
        self._jobs: Sequence[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, exc, trace)

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in SHOWN:
            self._events.append(event)
            self._draw()

    def jobs(self, now: str, jobs: Sequence[Mapping[str, Any]]) -> None:
        self._now, self._jobs = now, jobs
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"market time {clock_words(self._now)} UTC, {TIME_SCALE} x the wall" if self._now else "starting"
        table = Table(title=title, title_justify="left", expand=True, title_style="bold")
        for name in ("NAME", "STATE", "GPU", "WHERE", "$/H", "SPENT", "SAVED", "PREEMPT", "CHECKPOINT"):
            table.add_column(name, justify="right" if name in {"$/H", "SPENT", "SAVED", "PREEMPT"} else "left")
        for job in self._jobs:
            saved = job["checkpoint"]
            table.add_row(
                job["name"],
                Text(job["state"], style=_STYLES.get(job["state"], "")),
                job["gpu"] or "",
                job["host"] or "",
                "" if job["effective_usd_h"] is None else f"{job['effective_usd_h']:.3f}",
                f"{job['spent_usd']:.4f}",
                f"{job['saved_usd']:.4f}",
                str(job["recoveries"]),
                "" if saved is None else saved["name"],
            )
        lines = Text("\n".join(event_words(e) for e in self._events), overflow="ellipsis", no_wrap=True)
        self._live.update(Group(table, lines))


_STYLES: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "RECOVERING": "yellow",
    "WAITING_PRICE": "cyan",
    "FAILED": "bold red",
}


def opening(jobs: list[str]) -> str:
    """Return the introduction that is printed before the demo begins."""
    night_s = NIGHT_TARIFF_S // TIME_SCALE
    return "\n".join(
        [
            "spotd demo: a market of virtual hosts on this machine, real processes, no account, nothing left behind",
            f"an evening at {TIME_SCALE} times the speed of the wall; the night price comes after {night_s} seconds",
            *jobs,
            "",
        ]
    )


TIME_LIMIT_S: Final = 150.0
START_LIMIT_S: Final = 30.0
BILLS_LIMIT_S: Final = 15.0
CODE_BYTES_MAX: Final = 1_000_000


def main(*, seed: int = 1, keep: bool = False, plain: bool = False, quick: bool = False) -> int:
    """Run the demo; return 0 when every job finished and every hash equals that of its uninterrupted run."""
    queue = jobs(seed)[:1] if quick else jobs(seed)
    try:
        script.check_numpy()
        _say(opening([f"  {job.name:10} {job.about}" for job in queue]))
        with session(seed, keep=keep) as running:
            view = Screen() if sys.stdout.isatty() and not plain else Lines()
            references = [script.start_reference(job, running.folder / "uninterrupted" / job.name) for job in queue]
            _submit(running.daemon, queue)
            with view:
                _watch(running, view, len(queue))
            _say("")
            _receipts(running.daemon)
            proven = _prove(running.daemon, references)
            proven &= _spending(running)
            if keep:
                _say(f"kept: {running.folder}")
        return 0 if proven else 1
    except (DemoFailed, ClientError) as failed:
        sys.stderr.write(f"error: {failed}\n\nhint: spotd demo --keep keeps the logs\n")
        return 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _submit(daemon: Daemon, queue: tuple[DemoJob, ...]) -> None:
    folder = script.training_folder()
    packed = pack(folder, bytes_max=CODE_BYTES_MAX)
    daemon.put_code(packed.sha256, io.BytesIO(packed.data), packed.size)
    for job in queue:
        draft = {"data": job.draft(folder), "flags": {}, "source": "", "base_dir": str(folder)}
        daemon.submit(draft, code_sha256=packed.sha256, secrets={})
        _wait_for_verdict(daemon, job)


def _wait_for_verdict(daemon: Daemon, job: DemoJob) -> None:
    """Wait until the job has a machine or waits for its price: the script's events count launches, so order matters."""
    deadline = time.monotonic() + START_LIMIT_S
    while daemon.job(job.name)["job"]["state"] in {"QUEUED", "PROVISIONING"}:
        if time.monotonic() > deadline:
            raise DemoFailed(f"{job.name} did not start: {daemon.why(job.name)['why']['sentence']}")
        time.sleep(0.05)


def _watch(running: Session, view: Lines | Screen, count: int) -> None:
    """Print the progress until every job is final."""
    records: Queue[Mapping[str, Any] | DaemonRefused] = Queue(maxsize=10_000)
    threading.Thread(target=_listen, args=(running.daemon, records), name="events", daemon=True).start()
    deadline = time.monotonic() + TIME_LIMIT_S
    while True:
        running.check_alive()
        page = running.daemon.jobs({})
        view.jobs(page["now"], sorted(page["jobs"], key=lambda j: str(j["submitted_at"])))
        for event in _drain(records):
            view.event(event)
        if sum(j["state"] in FINAL_STATES for j in page["jobs"]) == count:
            time.sleep(0.3)
            for event in _drain(records):
                view.event(event)
            return
        if time.monotonic() > deadline:
            raise DemoFailed(f"the jobs did not finish within {TIME_LIMIT_S:.0f} s; the daemon's log is {running.log}")
        time.sleep(0.2)


def _listen(daemon: Daemon, records: Queue[Mapping[str, Any] | DaemonRefused]) -> None:
    try:
        for event in daemon.events({"follow": "1"}):
            records.put(event)
    except DaemonUnreachable:
        return  # the demo is over, or the watch finds the daemon gone
    except DaemonRefused as refused:
        records.put(refused)


def _drain(records: Queue[Mapping[str, Any] | DaemonRefused]) -> Iterator[Mapping[str, Any]]:
    while True:
        try:
            found = records.get_nowait()
        except Empty:
            return
        if isinstance(found, DaemonRefused):
            raise found
        yield found


def _costs(daemon: Daemon) -> CostResponse:
    """Return the receipts once the market's bill of every machine was read, or after a while without."""
    deadline = time.monotonic() + BILLS_LIMIT_S
    while True:
        total = daemon.cost(None)
        lines = [line for receipt in total["receipts"] for line in receipt["attempts"] if line["seconds"]]
        if all(line["billed_usd"] is not None for line in lines) or time.monotonic() > deadline:
            return total
        time.sleep(0.2)


def _receipts(daemon: Daemon) -> None:
    total = _costs(daemon)
    _say("receipts")
    for receipt in sorted(total["receipts"], key=lambda r: str(r["name"])):
        places = " -> ".join(a["host"] for a in receipt["attempts"] if a["started_at"])
        _say(
            f"  {receipt['name']:10} spent ${receipt['spent_usd']:.4f}, on-demand ${receipt['on_demand_usd']:.4f},"
            f" saved ${receipt['saved_usd']:.4f}, preemptions {receipt['recoveries']},"
            f" lost {receipt['lost_s'] / 60:.0f} min   {places}"
        )
        if receipt["summary"]:
            _say(f"  {'':10} {receipt['summary']}")
    _say(
        f"  {'together':10} spent ${total['spent_usd']:.4f}, on-demand ${total['on_demand_usd']:.4f},"
        f" saved ${total['saved_usd']:.4f}, preemptions {total['recoveries']}"
    )


def _spending(running: Session) -> bool:
    """Print what the market billed, from its own ledger, which the daemon cannot write; return whether none is left."""
    spans = segments(read_ledger(running.market / "ledger.jsonl"))
    left = sorted({span.machine_id for span in spans if span.end is None})
    billed = sum(span.amount(span.end or span.start) for span in spans)
    machines = len({span.machine_id for span in spans})
    word = "none is left" if not left else f"LEFT: {', '.join(left)}"
    _say(f"the market's own ledger: {machines} machines, ${billed / 1_000_000:.4f}, {word}")
    return not left


def _prove(daemon: Daemon, references: list[script.Reference]) -> bool:
    _say("proof: SHA-256 of the final weights, carried across machines / never interrupted")
    proven = True
    for reference in references:
        state = daemon.job(reference.job.name)["job"]["state"]
        if state != "SUCCEEDED":
            _say(f"  {reference.job.name:10} {state}")
            proven = False
            continue
        carried, straight = script.delivered_sha256(daemon, reference.job), reference.sha256()
        proven &= carried == straight
        word = "equal" if carried == straight else "DIFFERENT"
        _say(f"  {reference.job.name:10} {carried[:16]}... / {straight[:16]}...  {word}")
    return proven
