"""Plays the demo from start to proof."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Final

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError, DaemonRefused, DaemonUnreachable
from spotd.demo import proof
from spotd.demo.script import DemoJob, jobs
from spotd.demo.session import DemoFailed, Session, session
from spotd.demo.view import Lines, Screen, opening
from spotd.words import FINAL_STATES
from spotd_jobs.pack import pack
from spotd_providers.local.hosts import read_ledger, segments

if TYPE_CHECKING:
    from spotd.api.schemas.costs import CostResponse

TIME_LIMIT_S: Final = 150.0
START_LIMIT_S: Final = 30.0
BILLS_LIMIT_S: Final = 15.0
CODE_BYTES_MAX: Final = 1_000_000


def main(*, seed: int = 1, keep: bool = False, plain: bool = False, quick: bool = False) -> int:
    """Run the demo; return 0 when every job finished and every hash equals that of its uninterrupted run."""
    queue = jobs(seed)[:1] if quick else jobs(seed)
    try:
        proof.check_numpy()
        _say(opening([f"  {job.name:10} {job.about}" for job in queue]))
        with session(seed, keep=keep) as running:
            view = Screen() if sys.stdout.isatty() and not plain else Lines()
            references = [proof.start_reference(job, running.folder / "uninterrupted" / job.name) for job in queue]
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
    folder = proof.training_folder()
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


def _prove(daemon: Daemon, references: list[proof.Reference]) -> bool:
    _say("proof: SHA-256 of the final weights, carried across machines / never interrupted")
    proven = True
    for reference in references:
        state = daemon.job(reference.job.name)["job"]["state"]
        if state != "SUCCEEDED":
            _say(f"  {reference.job.name:10} {state}")
            proven = False
            continue
        carried, straight = proof.delivered_sha256(daemon, reference.job), reference.sha256()
        proven &= carried == straight
        word = "equal" if carried == straight else "DIFFERENT"
        _say(f"  {reference.job.name:10} {carried[:16]}... / {straight[:16]}...  {word}")
    return proven
