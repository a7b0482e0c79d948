"""`spotctl budget`, `ceiling` and `forget`: what owners change about jobs and machines that exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.commands.jobs import job_or_array, show_changed
from spotd.cli.failures import CommandFailed
from spotd.cli.inputs.options import ID, JSON, TABLE, job_argument, output, require_yes, show_data
from spotd.client.daemon import Daemon
from spotd.words import clean, count, dollars, price

if TYPE_CHECKING:
    from spotd.api.schemas.jobs import ForgottenResponse, JobResponse


@click.command()
@job_argument
@click.argument("amount", metavar="+USD|=USD")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def budget(*, ref: str, amount: str, yes: bool, output: str) -> None:
    """Change what a job may cost in all: `+20` adds dollars, `=140` or `140` sets them. It may have expired already."""
    daemon = Daemon()
    if not yes and stderr.can_ask():
        detail = daemon.job(ref)
        job: JobResponse = detail["job"]
        limit: float | None = detail["budget_usd"]
        before = "no limit" if limit is None else dollars(limit)
        question = f"change the budget of {clean(job['name'])} from {before} by {clean(amount)}"
        if not amount.startswith("+"):
            question = f"change the budget of {clean(job['name'])} from {before} to ${clean(amount.removeprefix('='))}"
        require_yes(f"{question} ({dollars(job['spent_usd'])} is spent)?", otherwise="nothing was changed")
        ref = job["id"]
    answer = daemon.set_budget(ref, amount)
    changed = answer["job"]

    def about() -> str:
        usd = daemon.job(changed["id"])["budget_usd"]
        return f"may cost {dollars(usd)} in all, {dollars(changed['spent_usd'])} of it is spent; it "

    show_changed(answer, output, about)
    if changed["state"] == "EXPIRED":
        stderr.note(f"spotctl retry {changed['id']} queues it again with this budget")


@click.command()
@job_argument
@click.argument("limit", metavar="USD")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def ceiling(*, ref: str, limit: str, yes: bool, output: str) -> None:
    """Change the ceiling of a job, or of each job of an array: 2.40 per GPU-hour, 19.20/h for the machine.

    `config` takes the ceiling of the config again. A running machine that costs more is given up in order.
    """
    daemon = Daemon()
    if not yes and stderr.can_ask():
        detail, jobs = job_or_array(daemon, ref)
        usd = None if detail is None else detail["ceiling_usd_gpu_h"]
        name = f"{count(len(jobs), 'job')} of {ref}" if detail is None else detail["job"]["name"]
        before = "" if usd is None else f" from ${price(usd)} per GPU-hour"
        require_yes(clean(f"change the ceiling of {name}{before} to {limit}?"), otherwise="nothing was changed")
        ref = ref if detail is None else detail["job"]["id"]
    answer = daemon.set_ceiling(ref, limit)

    def about() -> str:
        usd = daemon.job(answer["job"]["id"])["ceiling_usd_gpu_h"]
        return "has no ceiling; it " if usd is None else f"accepts up to ${price(usd)} per GPU-hour; it "

    show_changed(answer, output, about)


@click.command()
@click.argument("machine", metavar="MACHINE")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def forget(*, machine: str, yes: bool, output: str) -> None:
    """Give up a machine that can neither be seen nor ended: its account is dead, or it is listed no more.

    MACHINE is its id at the provider, its key, or JOB-NUMBER. Nothing more is booked for it, and its slot is free.
    """
    if not yes:
        if not stderr.can_ask():
            raise CommandFailed(
                "a machine is given up only with a confirmation", hint=f"spotctl forget {machine} --yes"
            )
        stderr.note("spotd does not end this machine: if it still exists, its provider goes on to bill it unseen")
        stderr.note("end it in the provider's own console first; spotd ends it if it is ever listed again")
        require_yes(f"give up {clean(machine)}?", otherwise="nothing was changed")
    answer = Daemon().forget(machine)
    gone: ForgottenResponse = answer["forgotten"]
    name = gone["machine"] or gone["key"]
    if not show_data(answer, output, [name]):
        owner = "" if gone["job"] is None else f", attempt {gone['attempt']} of job {gone['job']}"
        stdout.line(clean(f"{name} at {gone['provider']}{owner} is given up"))
