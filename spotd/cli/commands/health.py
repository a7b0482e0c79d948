"""`providers`, `doctor`, `reconcile`: is everything as it should be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.entry import ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, output, require_yes, show_data
from spotd.cli.views.table import Cell, Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonUnreachable
from spotd.words import NOTHING, clean, count, dollars, local_text, seconds_between, short_span, span_text

if TYPE_CHECKING:
    from spotd.api.schemas import answers


# `providers --hosts` and `--forget`: what is remembered of hosts.


_COLUMNS: Sequence[Column[answers.HostResponse]] = (
    Column("HOST", lambda row: clean(f"{row['provider']}/{row['host']}"), least=10),
    Column("BEHIND", lambda row: f"{row['ranks_behind']:.1%}", right=True),
    Column("FAILED", lambda row: _count(row["failed_starts"]), right=True),
    Column("SLOW", lambda row: _count(row["slow_starts"]), right=True),
    Column("EARLY", lambda row: _count(row["early_losses"]), right=True),
    Column("LOST", lambda row: _count(row["losses"]), right=True),
    Column("HOURS", lambda row: f"{row['machine_h']:.1f}", right=True),
    Column("LAST", lambda row: local_text(row["at"]), drop=2),
    Column("AVOIDED UNTIL", lambda row: local_text(row["cools_until"]), drop=1),
)
_NOTE = (
    "a host ranks BEHIND by a share of its price for starts that FAILED or were SLOW and machines lost EARLY;"
    " these fade by half in 3 days, machines LOST and HOURS in 14"
)


def show_hosts(output: str) -> None:
    answer = Daemon().hosts()
    rows: list[answers.HostResponse] = answer["hosts"]
    if show_data(answer, output, [f"{row['provider']}/{row['host']}" for row in rows]):
        return
    if not rows:
        stderr.note("no host is remembered: none that has a name was used, or all of it has faded")
        return
    show_table(_COLUMNS, rows)
    stderr.note(_NOTE)
    if answer["more"]:
        stderr.note("hosts that rank no further behind are left out")


def forget_host(host: str, output: str) -> None:
    answer = Daemon().forget_host(host)
    gone: list[answers.ForgottenHostResponse] = answer["forgotten"]
    names = [f"{row['provider']}/{row['host']}" for row in gone]
    if not show_data(answer, output, names):
        for name in names:
            stdout.line(clean(f"{name} is forgotten: it ranks by its price again"))


def _count(value: float) -> str:
    return f"{value:.1f}" if value else NOTHING


def _columns(now: str, *, money: bool) -> Sequence[Column[answers.ProviderResponse]]:
    """Return the columns of `providers`, with those of the balance where a provider states one."""
    balance: Sequence[Column[answers.ProviderResponse]] = (
        Column("BALANCE", lambda row: dollars(row.get("balance_usd")), right=True),
        Column("LASTS", _runway, right=True),
    )
    return (
        Column("PROVIDER", lambda row: row["name"]),
        Column("HEALTH", _health),
        Column("OFFERS", lambda row: str(row["offers"]), right=True),
        Column("MACHINES", lambda row: str(row["machines"]), right=True),
        Column("POLLED", lambda row: _poll_age(row, now), right=True),
        Column("REQ/H", lambda row: str(row["requests_h"]), right=True, drop=3),
        Column("REQ/MIN", lambda row: str(row["requests_min"]), right=True, drop=4),
        *(balance if money else ()),
        Column("FEE", lambda row: f"x{row['fee_multiplier']:.2f}", right=True, drop=1),
        Column("CAN", _powers, least=8, drop=2),
        Column("DETAIL", lambda row: row["detail"], least=10),
    )


def _health(row: answers.ProviderResponse) -> Cell:
    return Cell("off", "dim") if not row["enabled"] else Cell("ok", "green") if row["ok"] else Cell("failing", "red")


def _poll_age(row: answers.ProviderResponse, now: str) -> str:
    polled = seconds_between(row["last_poll_at"], now)
    return NOTHING if polled is None else f"{short_span(polled)} ago"


def _runway(row: answers.ProviderResponse) -> str:
    """Return how long the balance lasts at what is spent now."""
    runway = row.get("runway_s")
    return NOTHING if runway is None else span_text(runway)


def _powers(row: answers.ProviderResponse) -> str:
    return ",".join(power["power"] for power in row["capabilities"] if power["available"])


@click.command()
@click.option("--explain", is_flag=True, help="Say why each missing power is missing.")
@click.option("--hosts", is_flag=True, help="What is remembered of hosts, the worst first.")
@click.option("--forget", metavar="HOST", help="Forget what is remembered of this host.")
@output(TABLE, JSON, ID)
def providers(*, explain: bool, hosts: bool, forget: str | None, output: str) -> None:
    """Health, last poll, offers seen and powers of each provider."""
    if forget is not None:
        forget_host(forget, output)
        return
    if hosts:
        show_hosts(output)
        return
    answer = Daemon().providers()
    rows: list[answers.ProviderResponse] = answer["providers"]
    if show_data(answer, output, [row["name"] for row in rows]):
        return
    if not rows:
        stderr.note("no providers are configured")
        return
    show_table(_columns(answer["now"], money=any(row.get("balance_usd") is not None for row in rows)), rows)
    if explain:
        for row in rows:
            for power in row["capabilities"]:
                if not power["available"]:
                    stdout.line(clean(f"{row['name']}: no {power['power']}: {power['reason']}"))


@click.command()
@output(TABLE, JSON)
def doctor(*, output: str) -> int:
    """Check the daemon, its store and every provider; one line each, with a way out. Exits 1 if something is wrong."""
    daemon = Daemon()
    try:
        shape: answers.DoctorResponse = daemon.doctor()
    except DaemonUnreachable as exc:
        if output == JSON:
            check: answers.CheckResponse = {
                "area": "daemon", "name": "reachable", "ok": False, "detail": exc.message, "hint": exc.hint
            }  # fmt: skip
            stdout.document({"schema": 1, "ok": False, "checks": [check]})
            return ExitCode.UNREACHABLE
        raise
    if not show_data(shape, output):
        _show_checks(daemon, shape)
    return ExitCode.OK if shape["ok"] else ExitCode.JOB_FAILED


def _show_checks(daemon: Daemon, shape: answers.DoctorResponse) -> None:
    reached: answers.CheckResponse = {
        "area": "daemon", "name": "reachable", "ok": True, "detail": f"answers at {daemon.place}", "hint": ""
    }  # fmt: skip
    for check in [reached, *shape["checks"]]:
        mark = "FAIL" if not check["ok"] else "warn" if check["hint"] else "ok  "
        stdout.line(f"{mark}  {clean(check['area'])}: {clean(check['name'])}: {clean(check['detail'])}", indent=6)
        if check["hint"]:
            stdout.line(f"      hint: {clean(check['hint'])}", indent=12)
    failed = sum(not check["ok"] for check in shape["checks"])
    warnings = sum(bool(check["ok"] and check["hint"]) for check in shape["checks"])
    well = f"nothing is wrong; {count(warnings, 'warning')}" if warnings else "all is well"
    stderr.note(well if shape["ok"] else f"{failed} of {len(shape['checks']) + 1} checks failed")


@click.command()
@click.option("--adopt", is_flag=True, help="When the state is lost: take back jobs and machines by the store.")
@click.option("-y", "--yes", is_flag=True, help="With --adopt: do not ask.")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --adopt: the secrets of the jobs as NAME=value lines; others are read from this environment.",
)
@output(TABLE, JSON)
def reconcile(*, adopt: bool, yes: bool, secret_file: Path | None, output: str) -> int:
    """Ask every provider for its machines now, and set right what differs.

    With --adopt, show what the checkpoint store knows of jobs that the state lacks, and rebuild them once that is
    agreed to, by an answer or by -y.
    """
    if not adopt and (yes or secret_file is not None):
        raise click.UsageError("--yes and --secret-file are for --adopt")
    shape: answers.ReconcileResponse = Daemon().reconcile()
    if adopt:
        return _adopt(yes=yes, secret_file=secret_file, output=output)
    if show_data(shape, output):
        return ExitCode.OK
    for listing in shape["listings"]:
        found = count(listing["machines"], "machine") if listing["complete"] else "no complete list"
        stdout.line(clean(": ".join(part for part in (listing["provider"], found, listing["error"]) if part)))
    for action in shape["actions"]:
        stdout.line(clean(action))
    if not shape["actions"]:
        stdout.line("nothing to set right")
    return ExitCode.OK


ADOPTED_SHOWN = 50
"""More jobs than this are counted."""


def _adopt(*, yes: bool, secret_file: Path | None, output: str) -> int:
    daemon = Daemon()
    plan: answers.AdoptionResponse = daemon.adoption()
    if output == TABLE:
        _show_adoption(plan)
    agreed = yes
    if plan["jobs"] and not yes and stderr.can_ask():
        require_yes("take back these jobs?", otherwise="nothing was changed")
        agreed = True
    if not agreed or not plan["jobs"]:
        show_data(plan, output)
        if plan["jobs"]:
            stderr.note("nothing was changed; spotctl reconcile --adopt --yes does it")
        return ExitCode.OK
    from spotd.cli.inputs.draft import collect  # loads what reads job files

    values = collect(plan["secrets"], file=secret_file, environ=os.environ)
    done = daemon.adopt(values)
    if not show_data(done, output):
        stdout.line(f"{count(len(done['jobs']), 'job')} taken back")
    return ExitCode.OK


def _show_adoption(plan: answers.AdoptionResponse) -> None:
    for job in plan["jobs"][:ADOPTED_SHOWN]:
        stdout.line(clean(f"take back: {job['name']} ({job['id']}): {_fate(job)}"))
    if len(plan["jobs"]) > ADOPTED_SHOWN:
        stdout.line(f"take back: {len(plan['jobs']) - ADOPTED_SHOWN:,} jobs more")
    for stray in plan["strays"]:
        stdout.line(clean(f"end: {stray['machine']} at {stray['provider']} ({stray['key']}): no job has it"))
    for line in plan["unreadable"]:
        stdout.line(clean(f"cannot be read: {line}"))
    if plan["others"]:
        stdout.line(f"left alone: {count(plan['others'], 'job')} of another install with this label")
    if plan["unlisted"]:
        stdout.line(clean(f"no complete list of machines yet: {', '.join(plan['unlisted'])}"))
    if plan["secrets"]:
        stdout.line(clean(f"needed again: {', '.join(plan['secrets'])}"))
    if not plan["jobs"]:
        stdout.line("the state knows every job of the store")


def _fate(job: answers.AdoptedJobResponse) -> str:
    if job["state"] and job["state"] != "CANCELLING":
        return f"it had ended as {job['state']}"
    saved = f"{count(job['checkpoints'], 'checkpoint')}, ${job['spent_usd'] or 0:.2f} spent"
    goes_on = "is cancelled" if job["state"] else "goes on"
    if job["attempt"] is None:
        return f"it {goes_on}, without a machine; {saved}"
    where = job["provider"] or "an unknown provider"
    machine = f"with machine {job['machine']} at {where}" if job["machine"] else f"once {where} was searched"
    return f"it {goes_on} {machine}, attempt {job['attempt']}; {saved}"


# `notify test`: does a notification arrive.


@click.group()
def notify() -> None:
    """Notifications, by the channels of the config's [notify.NAME]."""


@notify.command()
@click.argument("channel", required=False)
@output(TABLE, JSON, ID)
def test(*, channel: str | None, output: str) -> int:
    """Send one message by CHANNEL, or by each. Exits 1 if one was not taken."""
    answer = Daemon().test_notifications(channel)
    rows: list[answers.ChannelTestResponse] = answer["channels"]
    if not show_data(answer, output, [row["channel"] for row in rows]):
        for row in rows:
            detail = "was taken" if row["ok"] else row["error"]
            stdout.line(f"{'ok  ' if row['ok'] else 'FAIL'}  {clean(row['channel'])}: {clean(detail)}")
    return ExitCode.OK if all(row["ok"] for row in rows) else ExitCode.JOB_FAILED
