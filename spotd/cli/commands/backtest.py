"""`backtest`: what a job would have cost and when it would have ended, ceiling by ceiling, in a recorded market."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spotd import words
from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode, unusable
from spotd.cli.inputs.draft import read_draft
from spotd.cli.inputs.options import JSON, TABLE, Parsed, complete_file, output, plot_option, require_here, shown_option
from spotd.cli.inputs.ranges import (
    PURCHASE,
    RANGE,
    SELLS,
    WHEN,
    CeilingRange,
    When,
    ceilings_around,
    instants,
    number,
)
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.paths import state_dir
from spotd_jobs.spec.model import GpuAlternative, JobSpec, MarketChoice, PolicyName, Resources
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import SpecError
from spotd_jobs.spec.units import parse_duration, parse_size
from spotd_providers.contract.values import ProviderName

if TYPE_CHECKING:
    from spotd.backtest.result import Result
    from spotd.backtest.traces import TraceDefaults
    from spotd.config.model import BidsSection, MovesSection

OWN: Final = "own"
_SPAN_MIN: Final = timedelta(seconds=1)
_SPAN_MAX: Final = timedelta(days=365)
_STEP_MAX: Final = timedelta(hours=1)
RUNS_MAX: Final = 50_000
"""A few gigabytes of memory and an hour of two cores."""
_FEE_MAX: Final = 10


def _span(*, least: timedelta = _SPAN_MIN, most: timedelta = _SPAN_MAX) -> Parsed:
    def parse(text: str) -> timedelta:
        span = parse_duration(text)
        if span > most:
            raise click.BadParameter(f"{text!r} is longer than {most.total_seconds() / 3600:g} h")
        if span < least:
            raise click.BadParameter(f"{text!r} is shorter than {least.total_seconds():g} s")
        return span

    return Parsed("span", parse)


def _fee(text: str) -> tuple[str, int]:
    provider, equals, factor = text.partition("=")
    try:
        value = round(float(factor) * 1_000_000) if equals else 0
    except (ValueError, OverflowError):
        value = 0
    if not provider or not 100_000 <= value <= _FEE_MAX * 1_000_000:
        raise click.BadParameter(f"{text!r} is no fee multiplier such as vast=1.20, from 0.1 to {_FEE_MAX}")
    return provider, value


@click.command()
@click.argument("job", metavar="JOB", shell_complete=complete_file)
@click.option("--history", metavar="DIR|own", required=True, help="Recorded prices; own: those of the daemon.")
@click.option("--ceiling", type=RANGE, metavar="1.5..3.0", help="Per GPU-hour; 12/h..24/h: of the machine.")
@shown_option("--ceilings", metavar="N", type=click.IntRange(1, 100), default=7, help="How many in the range.")
@click.option("--work", type=_span(), metavar="24h", help="How long the job runs if nothing stops it.")
@click.option("--deadline", type=_span(), metavar="36h", help="From submission on.  [default: the job's span]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    type=click.Choice([one.value for one in PolicyName]),
    help="May be repeated: slack-pacing, greedy ...  [default: the job's]",
)
@shown_option("--starts", metavar="N", type=click.IntRange(1, 10_000), default=40, help="Instants of submission.")
@click.option(
    "--step",
    type=_span(most=_STEP_MAX),
    metavar="1m",
    help="How often the daemon decides.  [default: 1m; 5m with a deadline]",
)
@shown_option("--seed", metavar="N", type=click.IntRange(0, 2**63 - 1), default=1, help="Which instants.")
@shown_option("--restart", metavar="6m", type=_span(least=timedelta(0)), default="6m", help="Launch to first step.")
@click.option("--every", type=_span(), metavar="15m", help="Between checkpoints.  [default: the job's, else 15m]")
@click.option(
    "--checkpoint-size",
    "size",
    metavar="20GB",
    help="Of one, where traffic is billed.  [default: 0]",
    type=Parsed("size", parse_size),
    default="0B",
)
@shown_option(
    "--vanished",
    type=click.Choice(("lost", "kept")),
    default="lost",
    help="Spot machines whose offer leaves the market.",
)
@click.option(
    "--fee",
    "fees",
    type=Parsed("fee", _fee),
    multiple=True,
    metavar="vast=1.20",
    help="Fee multiplier.  [default: the daemon's with own, else 1.00]",
)
@click.option("--sells", type=SELLS, metavar="H100:8", help="What a trace sells, if it does not say.")
@click.option("--spot-price", type=PURCHASE, metavar="DOLLARS", help="Per hour, of a trace without prices.")
@click.option("--on-demand-price", type=PURCHASE, metavar="DOLLARS", help="The same on demand.")
@shown_option(
    "--patience",
    type=number(most=1000, above=True),
    default="1.5",
    help="How much slower than the fastest ceiling the recommended one may be.",
)
@click.option("--processes", metavar="N", type=click.IntRange(1, 256), help="[default: all cores]")
@plot_option()
@output(TABLE, JSON)
def backtest(*, job: str, history: str, output: str, plot: Path | None, **given: Any) -> None:
    """What JOB would have cost and when it would have ended under each ceiling, in a recorded market.

    The recorded prices go through the very code that decides in production. JOB is a job file or a queued job. How
    fast machines start and how long the job runs is not in the record: these are assumptions, stated below each table.

    \b
    spotctl backtest train.toml --history own --ceiling 1.5..3.0 --work 24h
    spotctl backtest train.toml --history prices/ --ceiling 0.2..0.5 --work 24h --plot out.svg
    """
    # Here and not above: the core is a third of a second of imports, which --help does not need.
    from spotd.backtest.recorded import BacktestRefused
    from spotd.cli.views.backtest_view import document, show

    spec = _spec(job)
    _require_one_machine(spec.resources)
    ceilings = _ceilings(spec, given["ceiling"], given["ceilings"])
    deadline = _deadline(spec, given["deadline"])
    try:
        result = _result(spec, history, ceilings, deadline, given)
    except BacktestRefused as exc:
        raise CommandFailed(exc.message, hint=exc.hint) from exc
    if plot is not None:
        from spotd.cli.views.backtest_view import draw_backtest

        draw_backtest(result, plot)
    if output == JSON:
        document(result)
    else:
        show(result)


def _result(
    spec: JobSpec, history: str, ceilings: CeilingRange, deadline: timedelta | None, given: Mapping[str, Any]
) -> Result:
    from spotd.backtest.recorded import Assumptions, VanishedRule
    from spotd.backtest.result import answered
    from spotd.backtest.traces import TraceDefaults

    bids, moves = _of_config()
    fees = {**(_own_fees() if history == OWN else {}), **dict(given["fees"])}
    every = given["every"] or spec.checkpoint.every or timedelta(minutes=15)
    terms = Assumptions(
        work_s=_work_s(spec, given["work"]),
        restart_s=round(given["restart"].total_seconds()),
        every_s=max(1, round(every.total_seconds())),
        checkpoint_bytes=given["size"],
        step_s=max(1, round((given["step"] or _usual_step(deadline)).total_seconds())),
        vanished=VanishedRule(given["vanished"]),
        fee_ppm={ProviderName(name): fee for name, fee in fees.items()},
        raise_bids=bids.raise_running,
        hold_max=bids.hold,
        moves_max=moves.most,
    )
    if history == OWN:
        require_here("recorded prices lie")
    place = state_dir() / "prices.sqlite" if history == OWN else Path(history)
    if history == OWN and not os.access(place, os.R_OK):
        raise CommandFailed(
            f"the price history of the daemon, {place}, {'cannot be read' if place.exists() else 'does not exist'}",
            code=ExitCode.LOCAL_IO,
            hint="run it as the daemon's user, set STATE_DIRECTORY to its state folder, or give --history FILE",
        )
    processes = given["processes"] or _cores()
    usual = PolicyName.CEILING if deadline is None else PolicyName.SLACK_PACING
    policies = tuple(dict.fromkeys(given["policies"])) or ((spec.schedule.policy or usual).value,)
    if deadline is None and set(policies) != {PolicyName.CEILING.value}:
        raise click.UsageError("a policy other than ceiling weighs time against money, so it needs --deadline 36h")
    if deadline is not None and spec.resources.market is not MarketChoice.AUTO:
        stderr.note('the job\'s market is not "auto", so that no policy can fall back to on-demand')
    runs = len(ceilings.limits) * len(policies) * given["starts"]
    if runs > RUNS_MAX:
        raise CommandFailed(
            f"{len(ceilings.limits)} ceilings, {len(policies)} policies, {given['starts']:,} starts: {runs:,} runs",
            hint=f"take fewer: at most {RUNS_MAX:,} are played",
        )
    with stderr.ProgressLine("playing", runs, text=str) as line:
        return answered(
            spec,
            place,
            ceilings=ceilings.limits,
            starts=given["starts"],
            seed=given["seed"],
            terms=terms,
            defaults=TraceDefaults(
                sells=given["sells"], spot_price=given["spot_price"], on_demand_price=given["on_demand_price"]
            ),
            patience=float(given["patience"]),
            processes=processes,
            progress=line.add,
            policies=policies,
            deadline=deadline,
        )


def _of_config() -> tuple[BidsSection, MovesSection]:
    """Return what the config lets a daemon do with bids and machines that run; the usual where it cannot be read."""
    from spotd.config.load import load
    from spotd.config.model import BidsSection, MovesSection
    from spotd.config.values import ConfigError

    try:
        config = load(None).config
    except ConfigError as exc:
        stderr.warning(f"[bids] and [moves] are taken to be the usual ones, since the config is not in order: {exc}")
        return BidsSection(), MovesSection()
    return config.bids, config.moves


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spec(job: str) -> JobSpec:
    """Return the job of a file, or else of the queue."""
    if Path(job).is_file() or job.endswith(".toml") or job == "-":
        draft = read_draft(job, {})
        draft.check()
        return parse_job(merge(draft.data, draft.flags), draft.source, base=Path(draft.base_dir))
    detail = Daemon().job(job)
    try:
        return parse_job(detail["spec"], job)
    except SpecError as exc:
        raise unusable(f"job {job} cannot be read", exc) from exc


def _require_one_machine(wanted: Resources) -> None:
    if wanted.nodes > 1:
        raise CommandFailed(
            f"a history holds prices of single machines, and the job asks for {wanted.nodes_words} machines",
            hint="without nodes it is played on one machine, at the price of one",
        )


def _usual_step(deadline: timedelta | None) -> timedelta:
    """Return a minute, as in production; with a deadline every step of every run is a decision, so fewer are made."""
    return timedelta(minutes=1 if deadline is None else 5)


def _deadline(spec: JobSpec, given: timedelta | None) -> timedelta | None:
    """Return the deadline as a span from each submission; an instant of this year says nothing of one in the past."""
    stated = spec.schedule.deadline
    if given is None and stated is not None and stated.span is None:
        stderr.note("the job's deadline is an instant, which no past submission has: it is left out; see --deadline")
    return given or (None if stated is None else stated.span)


def _work_s(spec: JobSpec, given: timedelta | None) -> int:
    stated = given or spec.work.time
    if stated is None:
        raise CommandFailed(
            f"nothing states how long {spec.name} runs", hint='--work 24h, or time = "24h" under [work] in the job file'
        )
    return max(1, round(stated.total_seconds()))


def _ceilings(spec: JobSpec, given: Any, count: int) -> CeilingRange:
    if given is not None:
        found: CeilingRange = given.divided(count)
        return found
    if spec.price is None:
        raise CommandFailed(
            f"{spec.name} has no max_price to try ceilings around", hint="--ceiling 1.5..3.0, in dollars per GPU-hour"
        )
    return ceilings_around(spec.price).divided(count)


def _own_fees() -> dict[str, int]:
    """Return the daemon's fee multipliers; without a daemon none are known."""
    try:
        rows: Sequence[Mapping[str, Any]] = Daemon().providers()["providers"]
    except ClientError as exc:
        stderr.warning(f"the fee multipliers are not known and taken to be 1.00: {exc.message}; give --fee vast=1.20")
        return {}
    return {row["name"]: round(row["fee_multiplier"] * 1_000_000) for row in rows}


# `history import`: prices of the time before this daemon polled, in the formats of a back-test.


KEPT: Final = timedelta(days=90)
PAGES_MAX: Final = 10_000


@click.command("import")
@click.argument("sources", nargs=-1, required=True, metavar="PROVIDER|FILE|FOLDER...", shell_complete=complete_file)
@click.option("--since", type=WHEN, metavar="SPAN|INSTANT", help="From then on.  [default: 90d, the longest]")
@click.option("--sells", type=SELLS, metavar="H100:8", help="What a trace sells, if it does not say.")
@click.option("--spot-price", type=PURCHASE, metavar="DOLLARS", help="Per hour, of a trace without prices.")
@click.option("--on-demand-price", type=PURCHASE, metavar="DOLLARS", help="The same on demand.")
def import_prices(
    *,
    sources: Sequence[str],
    since: When | None,
    sells: GpuAlternative | None,
    spot_price: int | None,
    on_demand_price: int | None,
) -> None:
    """Take over past prices: a provider's own records, or recorded lists in the formats that backtest reads.

    They are kept apart from what the daemon polls, count for history and backtest where nothing was polled, and
    never for a decision. Importing the same twice changes nothing; what came before an interruption stays.

    \b
    spotctl history import aws
    spotctl history import prices/ october.csv.gz
    """
    daemon = Daemon()
    known = daemon.providers()
    until = datetime.fromisoformat(known["now"])
    begin = instants(daemon, since)[0]
    first = until - KEPT if begin is None else max(until - KEPT, datetime.fromisoformat(begin))
    since_s, until_s = int(first.timestamp()), int(until.timestamp())
    if since_s >= until_s:
        raise click.UsageError("--since is not before now")
    providers = {provider["name"] for provider in known["providers"]}
    for source in sources:
        # A folder that has the name of a provider is given as ./aws; what is neither, the daemon refuses.
        if source in providers or not Path(source).exists():
            _import_provider(daemon, source, since_s)
            continue
        from spotd.backtest.traces import TraceDefaults

        defaults = TraceDefaults(sells=sells, spot_price=spot_price, on_demand_price=on_demand_price)
        _import_list(daemon, Path(source), since_s, until_s, defaults)


def _import_list(daemon: Daemon, place: Path, since_s: int, now_s: int, defaults: TraceDefaults) -> None:
    # Here and not above: the readers of a back-test need the core, a third of a second of imports.
    from spotd.backtest.recorded import BacktestRefused
    from spotd.backtest.traces import read_lists

    try:
        found = read_lists(place, since=since_s, now=now_s, defaults=defaults)
    except BacktestRefused as exc:
        raise CommandFailed(exc.message, hint=exc.hint) from exc
    stored = rejected = 0
    with stderr.ProgressLine("importing", found.prices, text=str) as line:
        for body, size in found.requests():
            answer = daemon.import_offers(body)
            stored, rejected = stored + answer["prices"], rejected + answer["rejected"]
            line.add(size)
    for note in found.notes:
        stderr.note(words.clean(note))
    _conclude(str(place), stored, rejected)


def _import_provider(daemon: Daemon, name: str, since_s: int) -> None:
    stored = rejected = pages = 0
    after = ""
    with stderr.ProgressLine("importing", None, text=str) as line:
        while pages < PAGES_MAX:
            answer = daemon.import_prices(name, since_s, after)
            stored, rejected, pages = stored + answer["prices"], rejected + answer["rejected"], pages + 1
            line.add(answer["prices"])
            after = answer["next"]
            if not after:
                return _conclude(name, stored, rejected)
    raise CommandFailed(
        f"{name} has sent {PAGES_MAX:,} pages and more to come", hint="import a shorter time: --since 30d"
    )


def _conclude(source: str, stored: int, rejected: int) -> None:
    stdout.line(f"{words.clean(source)}: {words.count(stored, 'price')} imported")
    if rejected:
        stderr.warning(f"{words.count(rejected, 'row')} could not be used")
