"""What a lost state is rebuilt from, shown first and done on a second request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.render import usd
from spotd.api.responses import ApiUnavailable, Invalid, StateConflict
from spotd.api.schemas.answers import AdoptedJobResponse, AdoptionResponse, UnownedMachineResponse
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import is_own_key, key_parts
from spotd.core.domain.world import World
from spotd.core.recovery import LostJob, adopt
from spotd.daemon.commits import CrashPoint
from spotd.daemon.job_records import Found
from spotd.store import Reads, StateError
from spotd_jobs.objects.api import StoreError
from spotd_providers.contract.values import InstallId, Instance, InstanceState

NAMED_MAX: Final = 5
UNREADABLE_HINT: Final = (
    "a newer spotd may have written them: install that one; or delete them in the store, which forgets their jobs"
)
_OVER: Final = frozenset({InstanceState.GONE, InstanceState.ENDING})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machines:
    """What providers list under keys of this install, by job and number; and who gave no complete list."""

    listed: Mapping[tuple[str, int], Instance]
    unlisted: tuple[str, ...]


class AdoptionHandlers:
    """`spotctl reconcile --adopt`."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def plan(self) -> AdoptionResponse:
        """Return what would be taken back, and what would be ended.

        Raises:
            ApiUnavailable: the store or the state does not answer, or the daemon does not hold its lease.
        """
        return self._answer(await self._read_store(), adopted=False)

    async def adopt(self, secrets: Mapping[str, str]) -> AdoptionResponse:
        """Take back every job of the plan, in one commit; nothing where there is none.

        Raises:
            ApiUnavailable: as `plan`; nothing was written.
            StateConflict: records in the store cannot be understood.
            Invalid: a value of a secret is missing.
        """
        context, found = self._context, await self._read_store()
        if found.unreadable:
            named = "; ".join(f"{key}: {why}" for key, why in found.unreadable[:NAMED_MAX])
            raise StateConflict(
                f"{len(found.unreadable)} job records in the store cannot be understood: {named}", hint=UNREADABLE_HINT
            )
        missing = [name for name in _secrets(found) if not secrets.get(name)]
        if missing:
            raise Invalid(
                f"the values of {', '.join(missing)} are lost with the state",
                hint="export them, or give --secret-file: they are stored nowhere else",
            )
        answer = self._answer(found, adopted=True)
        going_on = [one.record.job for one in found.jobs if not one.record.job.state.is_final]
        values = {job.id: {name: secrets[name] for name in job.spec.secrets} for job in going_on}
        await context.require_secrets_kept({name: secrets[name] for name in _secrets(found)})
        beside = await context.stored(lambda: context.secrets.prepare(values))

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            known = reads.names_of([one.record.job.id for one in found.jobs])
            return adopt(world, found.jobs, known, now)

        if found.jobs:
            await context.commit(decide, (CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT), beside)
            context.log.warning("state.adopted", jobs=len(found.jobs))
        context.surveyor.note_adoption()
        context.wake_event.notify()
        return answer

    async def _read_store(self) -> Found:
        context = self._context
        if not context.surveyor.done and not context.surveyor.lost:
            raise ApiUnavailable(context.policy.why_paused, hint="try again in a minute")
        try:
            return await context.job_records.find_lost()
        except StoreError as exc:
            raise ApiUnavailable(str(exc), hint="spotctl doctor") from exc
        except StateError as exc:
            raise ApiUnavailable(exc.message, hint=exc.hint) from exc

    def _answer(self, found: Found, *, adopted: bool) -> AdoptionResponse:
        machines = self._machines()
        install = self._context.policy.current.install
        searched = {_place(install, one) for one in found.jobs if _newest_number(one)}
        owned = {
            (parts.job, parts.number)
            for item in self._context.world().attempts.values()
            if (parts := key_parts(install, item.carried_key)) is not None
        }
        strays = [one for place, one in sorted(machines.listed.items()) if place not in searched | owned]
        return AdoptionResponse(
            adopted=adopted,
            jobs=[_job(one, machines.listed.get(_place(install, one))) for one in found.jobs],
            strays=[
                UnownedMachineResponse(provider=m.ref.provider, machine=m.ref.instance_id, key=m.key) for m in strays
            ],
            secrets=_secrets(found),
            unreadable=[f"{key}: {why}" for key, why in found.unreadable],
            others=found.others,
            unlisted=list(machines.unlisted),
        )

    def _machines(self) -> _Machines:
        context, policy = self._context, self._context.policy.current
        listed: dict[tuple[str, int], Instance] = {}
        unlisted: list[str] = []
        for name in sorted(context.providers):
            if context.providers[name].poller is None:
                continue
            seen = context.offer_cache.machines(name)
            if seen.listing is None or not seen.listing.complete or seen.error:
                unlisted.append(name)
            for machine in () if seen.listing is None else seen.listing.instances:
                parts = key_parts(policy.install, machine.key)
                if machine.state not in _OVER and parts is not None and is_own_key(policy, machine.key):
                    listed[parts.job, parts.number] = machine
        return _Machines(listed=listed, unlisted=tuple(unlisted))


def _newest_number(one: LostJob) -> int:
    """Return the number of the attempt whose machine is searched for; 0 for none."""
    return 0 if one.survey is None else one.survey.unknown[-1].number


def _secrets(found: Found) -> list[str]:
    going_on = (one.record.job for one in found.jobs if not one.record.job.state.is_final)
    return sorted({name for job in going_on for name in job.spec.secrets})


def _place(install: InstallId, one: LostJob) -> tuple[str, int]:
    """Return the job and the number for which the machine was made that is searched for."""
    record = None if one.survey is None else one.survey.unknown[-1].record
    parts = None if record is None or record.machine_key is None else key_parts(install, record.machine_key)
    return (one.record.job.id, _newest_number(one)) if parts is None else (parts.job, parts.number)


def _job(one: LostJob, machine: Instance | None) -> AdoptedJobResponse:
    job, number = one.record.job, _newest_number(one)
    record = None if one.survey is None else one.survey.unknown[-1].record
    return AdoptedJobResponse(
        id=job.id,
        name=job.name,
        state=job.state.value if job.state.is_final else "CANCELLING" if job.cancel_requested else "",
        attempt=number or None,
        provider="" if record is None else record.quote.offer.provider,
        machine="" if machine is None else machine.ref.instance_id,
        checkpoints=len({c.manifest_key for c in (*job.checkpoints, *(one.survey.checkpoints if one.survey else ()))}),
        spent_usd=usd(job.spent),
    )
