"""What owners change about jobs and machines that exist: budgets, ceilings, and machines that are given up."""

from __future__ import annotations

from datetime import datetime

from spotd.api.errors import Invalid, NotFound, StateConflict
from spotd.api.handlers.context import ContextHandlers, HandlerContext, get_job
from spotd.api.handlers.jobs import JobHandlers
from spotd.api.requests import BudgetChange
from spotd.api.schemas.jobs import ForgottenResponse, JobResponse
from spotd.core import requests
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.intents import Intent
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.machines import forget
from spotd.core.plans.plan import Plan
from spotd.daemon.hosts.reader import with_job
from spotd.store import Reads
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import ProviderName

BUDGET_MAX = MicroUsd(10**13)


class AmendmentHandlers(ContextHandlers):
    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        """Set what all attempts of the job together may cost; it may have ended, and go on after a retry.

        Raises:
            Invalid: there is no budget to add to.
        """
        job_id = await self._context.find(ref)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            return requests.set_budget(world, job, _changed(job, change), now)

        await self._context.commit(decide)
        self._context.log.info("job.budget_changed", job=job_id)
        return await self._jobs.line(job_id)

    async def set_ceiling(self, ref: str, limit: PriceLimit | None) -> JobResponse:
        """Set what a machine of the job may cost; `None` is what the config says."""
        job_id = await self._context.find(ref)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            return requests.set_ceiling(world.with_job(job), [job], limit, now)

        await self._context.commit(decide)
        self._context.log.info("job.ceiling_changed", job=job_id)
        return await self._jobs.line(job_id)

    async def forget(self, machine: str) -> ForgottenResponse:
        """Give up a machine, named by its id, its key or `JOB-NUMBER`, although its end was not seen.

        Raises:
            NotFound: no such machine is known.
            StateConflict: it can be seen, and therefore ended.
            ApiUnavailable: what its host saved last cannot be read now.
        """
        context = self._context
        report = await self._last_report(machine)
        names = set(context.policy.current.providers) & set(context.offer_cache.listings())
        errors: dict[ProviderName, str] = {name: context.offer_cache.machines(name).error for name in names}
        listings = {name: listing for name, listing in context.offer_cache.listings().items() if name in names}
        forgotten: list[ForgottenResponse] = []

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            found = forget.find_machine(world, machine)
            if found is None:
                raise NotFound(f"no machine {machine!r} is known", hint="spotctl show JOB lists the machines of a job")
            problem = forget.refusal(world, found, listings, errors)
            if problem:
                raise StateConflict(problem, hint="spotctl cancel JOB ends the machine of a job")
            forgotten.append(_response(world, found))
            last = None if report is None or report.attempt != found else with_job(report, world.jobs[found.job])
            return forget.forget(world, found, now, last)

        await self._context.commit(decide)
        context.log.warning("machine.forgotten", key=forgotten[-1]["key"], provider=forgotten[-1]["provider"])
        return forgotten[-1]

    async def _last_report(self, machine: str) -> HostStatus | None:
        """Return all that the host of this machine wrote until now; `None` where nothing more of it counts."""
        world = self._context.world()
        found = forget.find_machine(world, machine)
        item = None if found is None or isinstance(found, Intent) else world.attempts[found]
        if item is None or not item.state.counts:
            return None
        job, monitor = world.jobs[item.id.job], self._context.host_monitor
        return await self._context.stored(lambda: monitor.read_alone(item, job))


def _changed(job: Job, change: BudgetChange) -> MicroUsd:
    if not change.is_added:
        return MicroUsd(change.amount)
    if job.budget is None:
        raise Invalid(f"{job.name} has no budget to add to", hint=f"spotctl budget {job.name} =140 sets one")
    return min(BUDGET_MAX, MicroUsd(job.budget + change.amount))


def _response(world: World, found: AttemptId | Intent) -> ForgottenResponse:
    item = found if isinstance(found, Intent) else world.attempts[found]
    return ForgottenResponse(
        provider=item.provider,
        machine=None if item.ref is None else item.ref.instance_id,
        key=item.key,
        job=None if isinstance(found, Intent) else found.job,
        attempt=None if isinstance(found, Intent) else found.number,
    )
