"""`events`: the daemon's own account of what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from spotd.cli import stderr, stdout
from spotd.cli.commands.logs import without_schema
from spotd.cli.follow import followed
from spotd.cli.inputs.options import ID, JSON, TABLE, complete_job, output
from spotd.cli.inputs.when import WHEN, When, instants
from spotd.client.daemon import Daemon
from spotd.event_steps import EventStep, steps
from spotd.words import clean, local_text

if TYPE_CHECKING:
    from spotd.api.schemas.streams import EventResponse


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
        stderr.note(f"no events of the kind {' or '.join(map(clean, kinds))}" if kinds else "no events")
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
