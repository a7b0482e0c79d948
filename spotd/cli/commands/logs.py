"""`logs`, and the following of a job that `submit --wait` shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from spotd.cli import stderr, stdout
from spotd.cli.entry import ExitCode, of_state
from spotd.cli.inputs.options import ID, JSON, TABLE, complete_job, job_argument, output
from spotd.cli.inputs.ranges import WHEN, When, instants
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonUnreachable, Json
from spotd.lists import FAMILIES, EventStep, steps
from spotd.words import ControlFilter, clean, local_text

if TYPE_CHECKING:
    from spotd.api.schemas.answers import EventResponse, LogResponse
    from spotd.cli.inputs.line_filter import Printer


# Following a stream of the daemon across its restarts.


PATIENCE_S: Final = 60.0
"""How long a daemon that went away may take to come back."""
AGAIN_S: Final = 0.5
_CONNECTED_S: Final = 5.0
"""A try that lasted so long was connected, whether or not a record came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How time passes between two tries."""

    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic


def followed(
    stream: Callable[[dict[str, Any]], Iterator[Json]],
    query: dict[str, Any],
    *,
    cursor: str,
    drop: tuple[str, ...],
    is_last: Callable[[Json], bool],
    waiting: Waiting | None = None,
) -> Iterator[Json]:
    """Yield the records up to the last, none twice, though the daemon restarts meanwhile.

    Args:
        cursor: the record's key that is given back as `after`.
        drop: parameters that state where to begin, and no longer hold once a record came.

    Raises:
        DaemonUnreachable: it was not there at first, or did not come back.
    """
    waiting = waiting or Waiting()
    query = {**query, "follow": 1}
    lost_at: float | None = None
    was_there = False
    while True:
        began = waiting.monotonic()
        try:
            for record in stream(query):
                was_there, lost_at = True, None
                query = {**query, **dict.fromkeys(drop), "after": record[cursor]}
                yield record
                if is_last(record):
                    return
            was_there, lost_at = True, None
        except DaemonUnreachable as exc:
            now = waiting.monotonic()
            was_there = was_there or now - began > _CONNECTED_S
            if not was_there:
                raise
            if lost_at is None or now - began > _CONNECTED_S:
                lost_at = now
            elif now - lost_at > PATIENCE_S:
                raise DaemonUnreachable(
                    f"the daemon has been away for {PATIENCE_S:.0f} s; jobs on their machines go on", hint=exc.hint
                ) from exc
        waiting.sleep(AGAIN_S)


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit 1 if it failed.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, 1_000_000),
    help="Only the last so many lines; with --grep, of those that match.",
)
@click.option("--attempt", type=click.IntRange(1, 1_000_000), help="Only this attempt.")
@click.option("--raw", is_flag=True, help="Leave control sequences in: the host's text can then steer your terminal.")
@click.option("--grep", metavar="TEXT", help="Only lines that contain TEXT.")
@click.option("-E", "--regexp", is_flag=True, help="TEXT is a regular expression, given up where it takes too long.")
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: small letters are capital ones.")
@click.option("-C", "--context", type=click.IntRange(0, 1000), default=0, help="With --grep: so many lines around.")
@output(TABLE, JSON)
def logs(
    *,
    ref: str,
    follow: bool,
    tail: int | None,
    attempt: int | None,
    raw: bool,
    grep: str | None,
    regexp: bool,
    ignore_case: bool,
    context: int,
    output: str,
) -> int:
    """What a job wrote, over all its machines; kept after they are gone."""
    if grep is None and (regexp or ignore_case or context):
        raise click.UsageError("-E, -i and -C belong to --grep")
    query: dict[str, Any] = {"tail": tail, "attempt": attempt}
    daemon = Daemon()
    printer: Printer = TextPrinter(raw=raw) if output != JSON else JsonPrinter() if follow else DocumentPrinter()
    if grep is not None:
        from spotd.cli.inputs.line_filter import FilteringPrinter, LastHitsPrinter, LineFilter, expression, plain_text

        matches = (expression if regexp else plain_text)(grep, ignore_case=ignore_case)
        shown = printer
        printer = FilteringPrinter(shown, LineFilter(matches, context=context), raw=raw)
        if tail is not None:
            last = LastHitsPrinter(shown, LineFilter(matches, context=context), count=tail, raw=raw)
            query["tail"] = None
            if not follow:
                printer = last
            else:
                for record in daemon.logs(ref, query):
                    last.show(record)
                last.end()
                query["after"] = last.cursor
    if follow:
        return follow_to_end(daemon, ref, query, printer)
    any_written = False
    for record in daemon.logs(ref, query):
        printer.show(record)
        any_written = any_written or record["kind"] == "log"
    printer.end()
    if not any_written and output == TABLE and tail != 0:
        stderr.note(f"{clean(ref)} has written nothing yet; spotctl why {clean(ref)} says what it is doing")
    return ExitCode.OK


def without_schema(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "schema"}


class TextPrinter:
    """Output of the job on stdout, everything about it on stderr."""

    def __init__(self, *, raw: bool) -> None:
        self._raw = raw
        self._controls = ControlFilter()
        self._at_line_start = True

    def show(self, record: LogResponse) -> None:
        if record["kind"] == "log":
            self._write(record["text"] if self._raw else self._controls.feed(record["text"]))
            return
        self.end()
        if not record["text"]:
            return
        stderr.note(f"--- {clean(record['text'])} ---")

    def end(self) -> None:
        """Print what was held back, and begin a line for what comes next on the screen."""
        self._write(self._controls.end())
        self._controls = ControlFilter()
        if not self._at_line_start and stdout.is_terminal():
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            stdout.write(text)
            self._at_line_start = text.endswith("\n")


class DocumentPrinter:
    """All records as one document."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def show(self, record: LogResponse) -> None:
        self._records.append(without_schema({**record}))

    def end(self) -> None:
        stdout.document({"schema": 1, "logs": self._records})


class JsonPrinter:
    """Every record as a line of JSON."""

    def show(self, record: LogResponse) -> None:
        stdout.record({**record})

    def end(self) -> None:
        """Do nothing: a record is never held back."""


def follow_to_end(daemon: Daemon, ref: str, query: dict[str, Any], printer: Printer) -> int:
    """Print all of the job's output; return the exit code of its final state.

    Raises:
        DaemonUnreachable: it was not there at first, or went away and did not come back.
    """
    state = ""
    record: LogResponse
    for record in followed(
        lambda now: daemon.logs(ref, now),
        query,
        cursor="cursor",
        drop=("tail",),
        is_last=lambda record: record["kind"] == "end",
    ):
        printer.show(record)
        state = record["state"] or state
    printer.end()
    return of_state(state)


# `events`: the daemon's own account of what happened.


SCREEN_MAX = 200
"""How many events a terminal gets where nothing states how many."""


@click.command()
@click.argument("ref", metavar="[JOB]", required=False, shell_complete=complete_job)
@click.option("-f", "--follow", is_flag=True, help="Go on as things happen.")
@click.option("--since", type=WHEN, metavar="SPAN|INSTANT", help="Only those at or after this.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind, such as attempt or job.failed; repeatable."
)
@click.option("-n", "--limit", type=click.IntRange(0, 1_000_000), help="Only the newest so many.")
@output(TABLE, JSON, ID)
def events(
    *, ref: str | None, follow: bool, since: When | None, kinds: tuple[str, ...], limit: int | None, output: str
) -> None:
    """What happened and why, oldest first: all of it, or what belongs to one job.

    A step is one line, and so are the checkpoints between two steps of a job. -o json has every event.
    """
    daemon = Daemon()
    most = SCREEN_MAX if limit is None and since is None and output == TABLE and stdout.is_terminal() else None
    limit = limit if most is None else most
    query: dict[str, Any] = {"job": ref, "limit": limit, "since": instants(daemon, since)[0]}
    if kinds:
        query["kind"] = list(kinds)
    if output == JSON and not follow:
        stdout.document({"schema": 1, "events": [without_schema(record) for record in daemon.events(query)]})
        return
    if follow:
        for record in followed(daemon.events, query, cursor="id", drop=("limit", "since"), is_last=lambda _: False):
            _show(record, output)
        return
    found = list(daemon.events(query))
    shown = len(found)
    if output == TABLE:
        for step in steps(found):
            _show_step(step)
    else:
        for record in found:
            _show(record, output)
    if not shown and output == TABLE:
        known = f"; kinds begin with {', '.join(FAMILIES)}"
        stderr.note(f"no events of the kind {' or '.join(map(clean, kinds))}{known}" if kinds else "no events")
    if shown == most:
        stderr.note(f"the newest {most} events; spotctl events -n {10 * SCREEN_MAX} shows more")


def _show(event: EventResponse, output: str) -> None:
    if output == JSON:
        stdout.record({**event})
    elif output == ID:
        stdout.line(str(event["id"]))
    else:
        _show_step(EventStep(event=event))


def _show_step(step: EventStep) -> None:
    event = step.event
    subject = event["job_name"] or event["job"] or "-"
    if event["attempt"] is not None:
        subject += f"#{event['attempt']}"
    said = ", ".join(part for part in (step.message, step.local_span) if part)
    stdout.line(f"{local_text(event['at'])}  {clean(subject)}  {clean(event['kind'])}  {said}", indent=4)
