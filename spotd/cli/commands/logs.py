"""`logs`, and the following of a job that `submit --wait` shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import ExitCode, of_state
from spotd.cli.follow import Waiting, followed
from spotd.cli.inputs.options import JSON, TABLE, job_argument, output
from spotd.client.daemon import Daemon
from spotd.words import ControlFilter, clean

if TYPE_CHECKING:
    from spotd.api.schemas.streams import LogResponse
    from spotd.cli.inputs.line_filter import Printer


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


def follow_to_end(
    daemon: Daemon,
    ref: str,
    query: dict[str, Any],
    printer: Printer,
    *,
    waiting: Waiting | None = None,
) -> int:
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
        waiting=waiting,
    ):
        printer.show(record)
        state = record["state"] or state
    printer.end()
    return of_state(state)
