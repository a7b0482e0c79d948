"""The metrics, computed from one reading: a pure function, in names and units as Prometheus wants them.

Labels are bounded. GPUs are those of the table of names, all others are "other"; providers are those of the config;
reasons, states and controllers are ours. Only running jobs have series of their own, and no more than `JOBS_MAX`. No
host chooses a label: of what hosts write, only figures are taken.

Money that can be corrected downwards is a gauge. A counter that falls would be taken for one that began anew, and its
whole value counted once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.health import HealthHandlers
from spotd.api.requests import utc_instant
from spotd.api.schemas.answers import ProviderResponse
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, CostSums, IntentKind
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndKind, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.metering import (
    accrued,
    compared_cost,
    machines_of,
    on_demand_accrued,
    spent,
    spent_in_month,
    spent_on_day,
)
from spotd.core.prepaid import spending_rate
from spotd.core.pricing import PPM, Needs, total_per_hour
from spotd.daemon.controllers import Controller
from spotd.daemon.controllers import Metrics as ControllerFigures
from spotd.daemon.hosts.monitor import HostUse, use_of
from spotd.daemon.market.pollers import Poller
from spotd.history import DISK_GB
from spotd.store import Reads
from spotd_providers.contract.gpus import GPUS
from spotd_providers.contract.values import MICRO, Market, ProviderName, as_usd

# What the metrics are made of: references to frozen values of the running daemon, and sums of its state.
#
# References are taken on the event loop, which costs next to nothing. Sums are read by the state's reader, and all that
# is computed from both is computed in a thread.


JOBS_MAX: Final = 200
"""So many running jobs have series of their own, the oldest; the others are counted."""
TRIES: Final = 3
_Ends = Mapping[tuple[ProviderName, EndReason], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSums:
    """What only the state knows: it survives a restart."""

    jobs: Mapping[JobState, int]
    costs: Mapping[ProviderName, CostSums]
    ends: _Ends
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PollFigures:
    """Requests and failures of one provider since it was opened."""

    requests: int
    offers_errors: int
    machines_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything that one answer to a scraper is made of."""

    now: datetime
    version: str
    world: World | None
    decided_at: datetime | None
    market: MarketSnapshot
    policy: Policy
    is_held: bool
    contained: int
    sums: StoredSums
    providers: Sequence[ProviderResponse]
    polls: Mapping[ProviderName, PollFigures]
    controllers: Mapping[str, ControllerFigures]
    running: Sequence[Attempt]
    running_total: int
    uses: Mapping[AttemptId, HostUse]
    channels: Mapping[str, tuple[int, bool]]
    """How many notifications wait for each channel, and whether it works."""


class MetricsReader:
    """Reads the running daemon."""

    def __init__(self, context: HandlerContext, controllers: Sequence[Controller]) -> None:
        self._context = context
        self._controllers = controllers
        self._ends: tuple[object, _Ends] | None = None

    async def read(self) -> Reading:
        """Return what is true now.

        Raises:
            ApiUnavailable: the state cannot be read now.
        """
        context = self._context
        sums = await self._consistent_sums()
        providers = await HealthHandlers(context).providers()
        state = context.control_loop.state
        world = None if state is None else state.world
        running = [] if world is None else _running(world)
        shown = running[:JOBS_MAX]
        notifier, now = context.notifier, context.clock.now()
        return Reading(
            now=now,
            version=str(context.facts.get("version", "")),
            world=world,
            decided_at=None if state is None else state.at,
            market=context.offer_cache.snapshot(),
            policy=context.policy.current,
            is_held=bool(context.control_loop.held),
            contained=len(context.control_loop.contained),
            sums=sums,
            providers=providers,
            polls={name: _polls(entry.poller) for name, entry in context.providers.items() if entry.poller is not None},
            controllers={one.name: one.metrics for one in self._controllers},
            running=shown,
            running_total=len(running),
            channels={}
            if notifier is None
            else {name: (notifier.waiting[name], not status.error) for name, status in notifier.status.items()},
            uses={item.id: use_of(context.host_monitor, item.id, now) for item in shown},
        )

    async def _consistent_sums(self) -> StoredSums:
        """Return sums of the state that the newest decision has left, unless one follows the other too quickly."""
        loop = self._context.control_loop
        tries = 0
        while True:
            state, tries = loop.state, tries + 1
            sums = await self._read_sums(None if state is None else _ends_key(state.world))
            if loop.state is state or tries == TRIES:
                return sums

    async def _read_sums(self, key: object) -> StoredSums:
        known = self._ends[1] if self._ends is not None and self._ends[0] == key else None
        sums = await self._context.read(lambda reads: _sums(reads, known))
        self._ends = (key, sums.ends)
        return sums


def _ends_key(world: World) -> object:
    """Return what changes whenever an attempt ends: to count all that ever ended reads every one of them."""
    ends = frozenset((a.id, a.end_reason) for a in world.attempts.values())
    return ends, frozenset((job.id, job.attempts_made, job.totals.preemptions) for job in world.jobs.values())


def _running(world: World) -> list[Attempt]:
    """Return the machines whose command runs, the oldest first."""
    found = [a for a in world.attempts.values() if a.state.counts and a.running_at is not None]
    return sorted(found, key=lambda a: (a.intended_at, a.id.job, a.id.number))


def _polls(poller: Poller) -> PollFigures:
    return PollFigures(
        requests=poller.request_counts.total,
        offers_errors=poller.offers.metrics.errors,
        machines_errors=poller.machines.metrics.errors,
    )


def _sums(reads: Reads, ends: _Ends | None) -> StoredSums:
    return StoredSums(
        jobs=reads.counts_by_state(),
        costs=reads.costs_of_providers(),
        ends=reads.ends_of_attempts() if ends is None else ends,
        quarantined=reads.count_quarantined(),
    )


OTHER: Final = "other"
_GPUS: Final = frozenset(info.name for info in GPUS)
NAME_MAX: Final = 64
_NEEDS: Final = Needs(disk_gb=DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
_Samples = Iterable[tuple[tuple[str, ...], float | None]]


def families(reading: Reading) -> Iterator[Metric]:
    """Yield every metric; one without samples is left out of the answer's series, not of its names."""
    yield from _process(reading.version, leads=True)
    yield from _jobs_and_machines(reading)
    yield from _prices(reading)
    yield from _money(reading)
    yield from _providers(reading)
    yield from _loop(reading)
    yield from _running_jobs(reading)


def _process(version: str, *, leads: bool) -> Iterator[Metric]:
    yield _gauge("spotd_info", "Constant 1, with the version of the daemon", ("version",), [((version,), 1)])
    yield _one("spotd_leads", "1 where this daemon decides, 0 while it waits for another", int(leads))


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    found = GaugeMetricFamily(name, text, labels=labels)
    for values, figure in samples:
        if figure is not None:
            found.add_metric(values, figure)
    return found


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    found = CounterMetricFamily(name, text, labels=labels)
    for values, figure in samples:
        found.add_metric(values, figure)
    return found


def _one(name: str, text: str, figure: float | None) -> Metric:
    return _gauge(name, text, (), [((), figure)])


def _jobs_and_machines(reading: Reading) -> Iterator[Metric]:
    sums, world = reading.sums, reading.world
    yield _gauge("spotd_jobs", "Jobs, ended ones too", ("state",), [((s.value,), n) for s, n in sums.jobs.items()])
    attempts = () if world is None else world.attempts.values()
    machines: Counter[ProviderName] = Counter()
    for item in attempts:
        if item.machine.may_compute and item.ref is not None:
            machines[item.provider] += machines_of([item])
    by_provider = [((row["name"],), machines[ProviderName(row["name"])]) for row in reading.providers]
    yield _gauge("spotd_machines", "Machines of this install that may compute", ("provider",), by_provider)
    intents = () if world is None else world.intents.values()
    strays = sum(1 for one in intents if one.kind is IntentKind.TERMINATE and one.attempt is None and one.is_open)
    yield _one("spotd_stray_machines", "Machines that no job owns and whose end is owed", strays)
    yield _one("spotd_jobs_quarantined", "Failed jobs that spotd could not go on with", sums.quarantined)
    ends = [((name, reason.value), count) for (name, reason), count in sorted(sums.ends.items())]
    yield _counter("spotd_attempts_ended", "Attempts that have ended, by reason", ("provider", "reason"), ends)
    taken: Counter[str] = Counter({row["name"]: 0 for row in reading.providers})
    for (name, reason), count in sums.ends.items():
        taken[name] += count if reason.traits.kind is EndKind.TAKEN else 0
    preempted = [((name,), count) for name, count in sorted(taken.items())]
    yield _counter("spotd_preemptions", "Machines that a provider has taken back", ("provider",), preempted)


def _gpu_label(gpu: str) -> str:
    return gpu if gpu in _GPUS else OTHER


def _prices(reading: Reading) -> Iterator[Metric]:
    lowest: dict[tuple[str, str, str], float] = {}
    for provider, shown in reading.market.by_provider.items():
        rules = reading.policy.providers.get(provider)
        if rules is None or shown.at is None or reading.now - shown.at > rules.quote_ttl:
            continue  # there is no such offer any more
        for (gpu, count), group in shown.offer_index.by_gpu.items():
            best: dict[Market, int] = {}
            for offer in group if count > 0 else ():
                known = best.get(offer.market)
                if known is not None and offer.gpu_price * rules.fee_ppm >= known * PPM:
                    continue  # its other terms only add to it
                total = total_per_hour(offer, _NEEDS, rules.fee_ppm, offer.gpu_price)
                best[offer.market] = total if known is None else min(known, total)
            for market, total in best.items():
                key = (_gpu_label(gpu), provider, market.value)
                price = total / count / MICRO
                lowest[key] = min(price, lowest.get(key, price))
    text = f"Lowest effective price of an offer in dollars per GPU-hour, with fee and {DISK_GB} GB of disk"
    yield _gauge("spotd_effective_price_usd", text, ("gpu", "provider", "market"), sorted(lowest.items()))
    ceilings = {_gpu_label(gpu): as_usd(price) for gpu, price in reading.policy.ceilings.items()}
    if reading.policy.ceiling_default is not None:
        ceilings["default"] = as_usd(reading.policy.ceiling_default)
    rows = [((gpu,), price) for gpu, price in sorted(ceilings.items())]
    yield _gauge("spotd_ceiling_usd", "Configured ceiling in dollars per GPU-hour", ("gpu",), rows)


def _money(reading: Reading) -> Iterator[Metric]:
    world, now = reading.world, reading.now
    attempts = () if world is None else world.attempts.values()
    running: Counter[ProviderName] = Counter()
    compared: Counter[ProviderName] = Counter()
    rates: Counter[str] = Counter({row["name"]: 0 for row in reading.providers})
    for item in attempts:
        running[item.provider] += accrued(item.meter, now)
        job = None if world is None else world.jobs.get(item.id.job)
        own = on_demand_accrued(item.meter, now)
        compared[item.provider] += own if job is None else compared_cost(job.state, accrued(item.meter, now), own)
        rates[item.provider] += spending_rate(item)
    names = sorted({*reading.sums.costs, *running, *(ProviderName(row["name"]) for row in reading.providers)})
    stored = {name: reading.sums.costs.get(name, CostSums()) for name in names}
    yield _counter(
        "spotd_booked_usd",
        "Dollars booked for machines, as metered; what runs is booked at its end, credits and bills are not in it",
        ("provider",),
        [((n,), as_usd(s.amount - s.corrected + s.free)) for n, s in stored.items()],
    )
    yield _gauge(
        "spotd_spent_usd",
        "Dollars spent, with what runs now, credits and corrections by bills",
        ("provider",),
        [((n,), as_usd(s.amount + running[n])) for n, s in stored.items()],
    )
    yield _gauge(
        "spotd_saved_usd",
        "Dollars that the same hours would have cost on-demand beyond what was spent",
        ("provider",),
        [((n,), as_usd(s.on_demand + compared[n] - s.amount - running[n])) for n, s in stored.items()],
    )
    yield _gauge(
        "spotd_spend_rate_usd",
        "Dollars per hour that machines cost now",
        ("provider",),
        [((name,), as_usd(rate)) for name, rate in sorted(rates.items())],
    )
    day = None if world is None else as_usd(spent_on_day(world, now))
    month = None if world is None else as_usd(spent_in_month(world, now))
    yield _gauge(
        "spotd_budget_spent_usd",
        "Dollars spent since midnight UTC, and since the first of the month",
        ("period",),
        [(("day",), day), (("month",), month)],
    )
    limits = {"day": reading.policy.budget_day, "month": reading.policy.budget_month}
    yield _gauge(
        "spotd_budget_limit_usd",
        "Configured budget in dollars",
        ("period",),
        [((period,), as_usd(limit)) for period, limit in limits.items() if limit is not None],
    )


def _providers(reading: Reading) -> Iterator[Metric]:
    label, rows = ("provider",), [row for row in reading.providers if row["enabled"]]

    def age(text: str | None) -> float | None:
        return None if text is None else max(0.0, (reading.now - utc_instant(text)).total_seconds())

    def each(figures: Mapping[str, float | None]) -> _Samples:
        return [((name,), figure) for name, figure in figures.items()]

    yield _gauge("spotd_provider_up", "1 where a provider answers as it should", label,
                 each({row["name"]: float(row["ok"]) for row in rows}))  # fmt: skip
    yield _gauge("spotd_provider_offers", "Offers of the newest answer", label,
                 each({row["name"]: row["offers"] for row in rows}))  # fmt: skip
    yield _gauge("spotd_provider_poll_age_seconds", "Time since the question of the newest answer about prices", label,
                 each({row["name"]: age(row["last_poll_at"]) for row in rows}))  # fmt: skip
    yield _gauge("spotd_provider_listing_age_seconds", "Time since the newest list of our machines", label,
                 each({row["name"]: age(row["last_listing_at"]) for row in rows}))  # fmt: skip
    yield _gauge("spotd_provider_balance_usd", "Dollars that are left of money paid in advance", label,
                 each({row["name"]: row["balance_usd"] for row in rows}))  # fmt: skip
    yield _gauge("spotd_provider_balance_runway_seconds", "How long they last at the pace of now", label,
                 each({row["name"]: row["runway_s"] for row in rows}))  # fmt: skip
    polls = sorted(reading.polls.items())
    yield _counter("spotd_provider_requests", "Requests since the provider was opened", label,
                   [((name,), poll.requests) for name, poll in polls])  # fmt: skip
    errors = [((name, call), count) for name, poll in polls
              for call, count in (("offers", poll.offers_errors), ("machines", poll.machines_errors))]  # fmt: skip
    yield _counter("spotd_provider_poll_errors", "Polls that failed", ("provider", "call"), errors)


def _loop(reading: Reading) -> Iterator[Metric]:
    runs = SummaryMetricFamily("spotd_controller_run_seconds", "Runs of each loop of the daemon", labels=["controller"])
    for name, one in reading.controllers.items():
        runs.add_metric([name], count_value=one.runs, sum_value=one.total_duration_s)
    yield runs
    label = ("controller",)
    last = [((name,), one.last_duration_s) for name, one in reading.controllers.items()]
    yield _gauge("spotd_controller_last_run_seconds", "Length of the newest run", label, last)
    errors = [((name,), one.errors) for name, one in reading.controllers.items()]
    yield _counter("spotd_controller_errors", "Runs that failed", label, errors)
    age = None if reading.decided_at is None else max(0.0, (reading.now - reading.decided_at).total_seconds())
    yield _one("spotd_decision_age_seconds", "Time since the newest decision was written", age)
    yield _one("spotd_decisions_held", "1 while nothing is decided, since the state cannot be written",
               float(reading.is_held))  # fmt: skip
    yield _one("spotd_launches_paused", "1 while nothing may be launched", float(bool(reading.policy.launches_paused)))
    yield _one("spotd_failures_contained", "What the newest decision left out, since it failed", reading.contained)
    channels = reading.channels.items()
    yield _gauge("spotd_notifications_waiting", "Notifications that wait for a channel", ("channel",),
                 [((name,), waiting) for name, (waiting, _) in channels])  # fmt: skip
    yield _gauge("spotd_notification_channel_up", "1 where the newest message was taken", ("channel",),
                 [((name,), float(works)) for name, (_, works) in channels])  # fmt: skip


def _running_jobs(reading: Reading) -> Iterator[Metric]:
    yield _one("spotd_running_jobs_not_shown", f"Running jobs beyond {JOBS_MAX}, which have no series of their own",
               reading.running_total - len(reading.running))  # fmt: skip
    if reading.world is None:
        return
    named: list[tuple[Attempt, tuple[str, ...]]] = []
    for item in reading.running:
        job = reading.world.jobs.get(item.id.job)
        named.append((item, (item.id.job, _plain(job.name if job is not None else ""))))
    labels = ("job", "name")

    def each(name: str, text: str, figures: Iterable[float | None]) -> Metric:
        rows = zip(named, figures, strict=True)
        return _gauge(name, text, labels, [(values, figure) for (_, values), figure in rows])

    now = reading.now
    yield each("spotd_job_checkpoint_age_seconds", "Age of the newest checkpoint, or of the run where it has none",
               [_checkpoint_age(reading, item).total_seconds() for item, _ in named])  # fmt: skip
    yield each("spotd_job_checkpoint_late", "1 where a checkpoint is overdue by what the job states",
               [float(item.freshness is not None and item.freshness.late_at is not None)
                for item, _ in named])  # fmt: skip
    yield each("spotd_job_heartbeat_age_seconds", "Time since the newest sign of life of its machine",
               [max(0.0, (now - (item.heartbeat_seen_at or item.intended_at)).total_seconds())
                for item, _ in named])  # fmt: skip
    yield each("spotd_job_gpu_use_ratio", "Mean use of the GPUs of its machine, from 0 to 1",
               [reading.uses[item.id].gpu for item, _ in named])  # fmt: skip
    yield each("spotd_job_gpu_memory_ratio", "Mean share of their memory in use, from 0 to 1",
               [reading.uses[item.id].memory for item, _ in named])  # fmt: skip
    yield each("spotd_job_spent_usd", "Dollars that its machine of now has cost",
               [as_usd(spent(item, now)) for item, _ in named])  # fmt: skip


def _checkpoint_age(reading: Reading, item: Attempt) -> timedelta:
    """Return the age by our own clock where it is known; a host may date its checkpoints as it likes."""
    job = None if reading.world is None else reading.world.jobs.get(item.id.job)
    saved = [] if job is None else [one.at for one in job.checkpoints[:1]]
    newest = max([item.running_at or item.intended_at, *saved]) if item.freshness is None else item.freshness.since
    return max(timedelta(0), reading.now - newest)


def _plain(name: str) -> str:
    """Return a name that a person chose as the value of a label."""
    return "".join(char if char.isprintable() else "?" for char in name)[:NAME_MAX]


# A reading as the text that Prometheus reads, with the figures of this process.


class _Once(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def text_of(reading: Reading) -> bytes:
    """Return the metrics in the text format, version 0.0.4. To be called in a thread."""
    return _text(families(reading))


def text_while_waiting(version: str) -> bytes:
    """Return the same of a daemon that waits for the lead: it runs, and knows of nothing else."""
    return _text(_process(version, leads=False))


def _text(metrics: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Once(list(metrics)))
    return generate_latest(registry)
