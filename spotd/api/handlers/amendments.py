"""What owners change about jobs and machines that exist: a job's budget, and machines that are given up."""

from __future__ import annotations

from datetime import datetime

from spotd.api.backend import ApiUnavailable, BudgetChange, Invalid, NotFound, StateConflict
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.jobs import Queue
from spotd.api.schemas.jobs import ForgottenResponse, JobResponse
from spotd.core import forget, requests
from spotd.core.model import AttemptId, Intent, Job, Plan, World
from spotd.daemon.crash import CrashPoint
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import ProviderName

_POINTS = (CrashPoint.BEFORE_COMMIT_RETRY, CrashPoint.AFTER_COMMIT_RETRY)
"""As for every other request that changes one row."""
BUDGET_MAX = MicroUsd(10**13)


class Amending:
    """The part of the backend that changes what is there already."""

    def __init__(self, context: HandlerContext, queue: Queue) -> None:
        self._context = context
        self._queue = queue

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        job_id = await self._context.find(ref)
        stored = await self._context.read(lambda reads: reads.job(job_id))
        if stored is None:
            raise ApiUnavailable(f"job {job_id} is not there any more")
        known = stored

        def decide(world: World, now: datetime) -> Plan:
            job = world.jobs.get(job_id, known)
            return requests.set_budget(world, job, _changed(job, change), now)

        await self._queue.commit(decide, _POINTS)
        self._context.log.info("job.budget_changed", job=job_id)
        return await self._queue.line(job_id)

    async def forget(self, machine: str) -> ForgottenResponse:
        context = self._context
        names = set(context.policy.current.providers) & set(context.offer_cache.listings())
        errors: dict[ProviderName, str] = {name: context.offer_cache.machines(name).error for name in names}
        listings = {name: listing for name, listing in context.offer_cache.listings().items() if name in names}
        told: list[ForgottenResponse] = []

        def decide(world: World, now: datetime) -> Plan:
            found = forget.find_machine(world, machine)
            if found is None:
                raise NotFound(f"no machine {machine!r} is known", hint="spotctl show JOB lists the machines of a job")
            problem = forget.refusal(world, found, listings, errors)
            if problem:
                raise StateConflict(problem, hint="spotctl cancel JOB ends the machine of a job")
            told.append(_shape(world, found))
            return forget.forget(world, found, now)

        await self._queue.commit(decide, _POINTS)
        context.log.warning("machine.forgotten", key=told[-1]["key"], provider=told[-1]["provider"])
        return told[-1]


def _changed(job: Job, change: BudgetChange) -> MicroUsd:
    if not change.is_added:
        return MicroUsd(change.amount)
    if job.budget is None:
        raise Invalid(f"{job.name} has no budget to add to", hint=f"spotctl budget {job.name} =140 sets one")
    return min(BUDGET_MAX, MicroUsd(job.budget + change.amount))


def _shape(world: World, found: AttemptId | Intent) -> ForgottenResponse:
    item = found if isinstance(found, Intent) else world.attempts[found]
    return ForgottenResponse(
        provider=item.provider,
        machine=None if item.ref is None else item.ref.instance_id,
        key=item.key,
        job=None if isinstance(found, Intent) else found.job,
        attempt=None if isinstance(found, Intent) else found.number,
    )
