"""Makes the paid calls that are owed: each launch once, each termination until the provider takes it.

Theory. A launch is made only from an intent that this process committed itself, and the intent's id is struck off
before the call: no path leads to a second call for it. What the provider answers is committed, for as long as that
takes; when the process dies before, the next one finds the intent open and treats its outcome as unknown. Anything
but a clear answer (a time-out, a lost answer, a plugin that fails) is unknown too, and only a search by
the machine's key can settle it then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

import anyio
import anyio.abc

from spotd.core.checkpoints import passed_over
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, launch_intent_id
from spotd.core.domain.jobs import FailedRestore, Job, disk_gb_on
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import World
from spotd.core.handover import is_held_back
from spotd.core.kernel import outcomes
from spotd.core.kernel.launch_calls import LaunchOutcome, end_contained, launch_contained, launch_sent
from spotd.core.kernel.outcomes import LaunchFailure
from spotd.core.kernel.quarantine import in_words
from spotd.core.metering import needs_list
from spotd.daemon.calls import BidChanges, LaunchRefusal, Replacements, refusal_of
from spotd.daemon.commits import Commits, Committed, CrashPoint, CrashPoints, Decide, Points
from spotd.daemon.controllers import WakeEvent, backoff_s
from spotd.daemon.grants.inputs import InputsAway, InputsMissing, SecretsLocked, SecretsMissing
from spotd.daemon.market.guarded import GuardedProvider, guarded
from spotd.store import StateError as StateError
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_jobs.start import ScriptTooLong
from spotd_providers.contract import values
from spotd_providers.contract.errors import OutcomeUnknown, ProviderError, RateLimited
from spotd_providers.contract.provider import Clock, Logger, Provider

LAUNCH_DEADLINE_S: Final = 90.0
TERMINATE_DEADLINE_S: Final = 60.0
CALLS_PER_PROVIDER: Final = 4
END_UNSAVED_EVERY: Final = timedelta(minutes=1)
COMMIT_RETRY_FIRST_S: Final = 0.5
COMMIT_RETRY_MAX_S: Final = 15.0
_CHANGES: Final = frozenset({IntentKind.CHANGE_BID, IntentKind.REPLACE})


def _turns() -> anyio.Semaphore:
    return anyio.Semaphore(CALLS_PER_PROVIDER)


class Preparation(Protocol):
    """What must be in the object store before a machine is bought."""

    async def prepare(self, attempt: Attempt, job: Job) -> str:
        """Write the grant; return the start script that reads it."""
        ...

    async def prepare_another(self, attempt: Attempt, job: Job) -> str:
        """Renew the grant; return the start script of one more machine of several."""
        ...

    def passed_over(self, attempt: AttemptId) -> tuple[FailedRestore, ...]:
        """Return what should have been offered to this attempt and could not be, once."""
        ...


class Executor:
    """Performs intents while `run` runs; `busy` counts the calls whose outcome is not committed yet."""

    def __init__(
        self,
        *,
        providers: Mapping[values.ProviderName, Provider],
        install: values.InstallId,
        commits: Commits,
        grants: Preparation,
        clock: Clock,
        log: Logger,
        loop_wake: WakeEvent,
        list_again: Callable[[values.ProviderName], None],
        ask_again: Callable[[values.ProviderName], None],
        bought: Callable[[values.Offer], None],
        market: Callable[[], MarketSnapshot],
        crash: CrashPoints,
        login: Callable[[values.ProviderName, str], values.RegistryLogin | None] = lambda _provider, _image: None,
    ) -> None:
        self._login = login
        self._providers = providers
        self._install = install
        self._commits = commits
        self._grants = grants
        self._clock = clock
        self._log = log
        self._loop_wake = loop_wake
        self._list_again = list_again
        self._ask_again = ask_again
        self._bought = bought
        self._market = market
        self._crash = crash
        self._group: anyio.abc.TaskGroup | None = None
        self._waiting: list[tuple[Attempt, Job]] = []
        """Launches of a cycle that was faster than the start of `run`."""
        self._over = False
        self._launch_turns: defaultdict[values.ProviderName, anyio.Semaphore] = defaultdict(_turns)
        self._end_turns: defaultdict[values.ProviderName, anyio.Semaphore] = defaultdict(_turns)
        self._launched: set[IntentId] = set()
        self._ending: set[IntentId] = set()
        self._unsaved: dict[IntentId, datetime] = {}
        """When each machine was ended last while nothing could be written."""
        self._unsaved_ends: dict[IntentId, Intent] = {}
        """Which of these ends were accepted, until the state holds it."""
        self._begun_at: datetime | None = None
        self._there_since: dict[values.ProviderName, datetime] = {}
        """Since when the calls of this process reach each provider that the config names."""
        self._changing: set[IntentId] = set()
        """Bids whose change is under way."""
        self._bid_changes = BidChanges(self._provider_if_there, self._commit, market, log)
        self._replacements = Replacements(self._provider_if_there, self._commit, self._request_another, log)
        self._launching = 0
        self._idle = WakeEvent()
        self._retired = False

    @property
    def busy(self) -> int:
        return self._launching + len(self._ending) + len(self._changing)

    async def run(self) -> None:
        """Make calls until this is cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            waiting, self._waiting = self._waiting, []
            for attempt, job in waiting:
                self._start(group, attempt, job)
            try:
                await anyio.sleep_forever()
            finally:
                # A commit that returns during the end of everything owes its calls to the next start.
                self._group, self._over = None, True

    def take(self, plan: Plan, world: World) -> None:
        """Start the launches of a plan that this process has just committed, each exactly once."""
        # What is settled is never open again, so it need not be struck off any longer.
        self._launched.intersection_update(world.intents)
        for intent in plan.intents.values():
            if intent.kind is not IntentKind.LAUNCH or intent.state is not IntentState.OPEN:
                continue
            if intent.id in self._launched or intent.attempt is None or self._over:
                continue
            self._launched.add(intent.id)
            attempt = world.attempts[intent.attempt]
            job = world.jobs[intent.attempt.job]
            if self._group is None:
                self._waiting.append((attempt, job))
            else:
                self._start(self._group, attempt, job)

    def _start_change(self, world: World, intent: Intent) -> None:
        """Start the change of a bid, or of machines; what cannot be started yet stays open for the next cycle."""
        attempt = None if intent.attempt is None else world.attempts.get(intent.attempt)
        if attempt is None or self._group is None or self._retired or intent.id in self._changing:
            return
        self._changing.add(intent.id)
        change = self._bid_changes.change if intent.kind is IntentKind.CHANGE_BID else self._replacements.mend
        self._group.start_soon(self._change, change, attempt, intent.id, name=intent.id)

    async def _change(self, change: Callable[[Attempt], Awaitable[None]], attempt: Attempt, intent: IntentId) -> None:
        try:
            async with self._launch_turns[attempt.provider]:
                await change(attempt)
        finally:
            self._changing.discard(intent)
            self._idle.notify()

    def _start(self, group: anyio.abc.TaskGroup, attempt: Attempt, job: Job) -> None:
        self._launching += 1
        group.start_soon(self._launch, attempt, job, name=f"launch-{attempt.key}")

    def end(self, world: World) -> None:
        """Every machine that is owed its end, and whose time it is, is being ended; changes that are owed are made."""
        now = self._clock.now()
        begun_at = self._begun_at = self._begun_at or now
        self._there_since = {name: self._there_since.get(name, now) for name in self._providers}
        for intent in world.intents.values():
            due = intent.not_before is None or intent.not_before <= now
            if intent.kind in _CHANGES and intent.state is IntentState.OPEN and due:
                self._start_change(world, intent)
            if intent.kind is not IntentKind.TERMINATE or intent.state is not IntentState.OPEN or not due:
                continue
            if intent.id in self._ending or intent.provider not in self._providers or self._group is None:
                continue
            if self._retired or is_held_back(world, intent, begun_at, now):
                continue
            if needs_list(world, intent, self._there_since[intent.provider], now):
                continue
            self._ending.add(intent.id)
            self._group.start_soon(self._terminate, intent, name=f"terminate-{intent.id}")

    def end_unsaved(self, world: World) -> None:
        """Machines that are owed their end are ended although nothing can be written, each once in a while.

        The world is one that no commit has made durable. What the provider accepts is known here alone until the state
        can be written again (`unsaved_ends`); ending a machine twice does no harm. Machines that no
        attempt of ours owns are left alone: whether they are ours was never written down.
        """
        now = self._clock.now()
        begun_at = self._begun_at = self._begun_at or now
        for intent in world.intents.values():
            if intent.kind is not IntentKind.TERMINATE or intent.attempt is None or intent.ref is None:
                continue
            if intent.provider not in self._providers or self._group is None or self._retired:
                continue
            last = self._unsaved.get(intent.id)
            waits = intent.not_before is not None and intent.not_before > now and intent.tries == 0
            waits = waits or is_held_back(world, intent, begun_at, now)
            if waits or (last is not None and now - last < END_UNSAVED_EVERY):
                continue
            self._unsaved[intent.id] = now
            self._group.start_soon(self._terminate_unsaved, intent, intent.ref, name=f"terminate-{intent.id}")
        self._unsaved = {i: at for i, at in self._unsaved.items() if i in world.intents}

    @property
    def unsaved_ends(self) -> tuple[Intent, ...]:
        """Ends that were accepted while nothing could be written, at most one for each machine."""
        return tuple(self._unsaved_ends.values())

    def unsaved_ends_committed(self, ends: Iterable[Intent], before: World) -> None:
        """Forget those that the state holds now; an attempt that lacked its machine before takes it in later."""
        for end in ends:
            item = None if end.attempt is None else before.attempts.get(end.attempt)
            if item is None or item.ref is not None:
                self._unsaved_ends.pop(end.id, None)

    async def _terminate_unsaved(self, intent: Intent, ref: values.InstanceRef) -> None:
        async with self._end_turns[intent.provider]:
            detail, _ = await self._call_terminate(intent, ref)
        fields = {"key": intent.key, "provider": intent.provider, "instance": ref.instance_id}
        if detail:
            self._log.warning("terminate.failed", detail=detail, **fields)
        else:
            # The first one: a provider that forgot it shows the machine in a later list.
            accepted = replace(intent, state=IntentState.ACCEPTED, accepted_at=self._clock.now())
            self._unsaved_ends.setdefault(intent.id, accepted)
            self._list_again(intent.provider)
            self._log.info("terminate.accepted_unsaved", **fields)

    async def drain(self, *, seconds: float) -> bool:
        """No new terminations begin; returns whether every call under way was finished and committed in time."""
        self._retired = True
        with anyio.move_on_after(seconds):
            while self.busy:
                await self._idle.wait(seconds=seconds)
        return self.busy == 0

    # --- launches ---

    async def _launch(self, attempt: Attempt, job: Job) -> None:
        try:
            async with self._launch_turns[attempt.provider]:
                await self._launch_now(attempt, job)
        finally:
            self._launching -= 1
            self._idle.notify()

    async def _launch_now(self, attempt: Attempt, job: Job) -> None:
        answer: values.Instance | LaunchRefusal | str
        try:
            script = await self._grants.prepare(attempt, job)
        except SecretsLocked as exc:
            # The policy names it as locked, so it is not sent and this was no start, unless the key is back by now.
            if await self._sent(attempt) is None:
                return
            answer = LaunchRefusal(failure=LaunchFailure.NOT_PREPARED, detail=str(exc))
        except (SecretsMissing, InputsMissing, ScriptTooLong) as exc:
            answer = LaunchRefusal(failure=LaunchFailure.NOT_PREPARED, detail=str(exc))
        except InputsAway as exc:
            answer = LaunchRefusal(failure=LaunchFailure.INPUT_AWAY, detail=str(exc))
        except ObjectsError as exc:
            answer = LaunchRefusal(failure=LaunchFailure.STORE_AWAY, detail=str(exc))
        except Exception as exc:  # noqa: BLE001 - one job's values must not end the daemon
            self._log.error("launch.not_prepared", key=attempt.key, exc_info=exc)
            why = f"its launch cannot be prepared ({in_words(exc)})"
            await self._commit(
                lambda world, now: launch_contained(world, attempt.id, LaunchOutcome.NOT_MADE, None, why, now),
                (CrashPoint.BEFORE_COMMIT_LAUNCH_REFUSED, CrashPoint.AFTER_COMMIT_LAUNCH_REFUSED),
            )
            return
        else:
            await self._tell_passed_over(attempt)
            sent = await self._sent(attempt)
            if sent is None:
                return
            attempt = sent
            answer = await self._buy(attempt, job, script)
        await self._settle_launch(attempt, answer)

    async def _sent(self, attempt: Attempt) -> Attempt | None:
        """Return the launch as it is to be made at once, by the limits of today; `None` where it is not to be made.

        Its job may have gone, and what it may cost may have changed, while the launch waited for its turn.
        """
        committed = await self._record_sent(attempt)
        if _launch_state(committed.world, attempt) is IntentState.OPEN:
            # The state refused that, and the job is quarantined. What this process struck off is taken up by nothing
            # else, so once more: for an attempt that counts no more, this records that the call is never made.
            committed = await self._record_sent(attempt)
        if _launch_state(committed.world, attempt) is not IntentState.SENT:
            self._log.info("launch.not_sent", key=attempt.key, provider=attempt.provider)
            return None
        return committed.world.attempts.get(attempt.id, attempt)

    async def _record_sent(self, attempt: Attempt) -> Committed:
        market = self._market()
        return await self._commit(
            lambda world, now: launch_sent(world, attempt.id, now, market),
            (CrashPoint.BEFORE_COMMIT_LAUNCH_SENT, CrashPoint.AFTER_COMMIT_LAUNCH_SENT),
            otherwise=self._contained(attempt, LaunchOutcome.NOT_MADE),
        )

    def _contained(self, attempt: Attempt, outcome: LaunchOutcome, made: values.Instance | None = None) -> Decide:
        """Return what is written of a launch if what it means cannot be judged."""
        why = "the outcome of its launch cannot be judged"
        return lambda world, now: launch_contained(world, attempt.id, outcome, made, why, now)

    async def _tell_passed_over(self, attempt: Attempt) -> None:
        fallbacks = self._grants.passed_over(attempt.id)
        if fallbacks:
            await self._commit(
                lambda world, now: passed_over(world, attempt.id, fallbacks, now),
                (CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER),
                otherwise=lambda _world, _now: Plan(),
            )

    async def _buy(self, attempt: Attempt, job: Job, script: str) -> values.Instance | LaunchRefusal | str:
        """Return the machine, why there is certainly none, or in words why that is unknown.

        A machine that carries another key is not taken, and its end is not owed by its reference. With a key of ours
        the next list shows it, and it is ended as a stray. With any other key the answer is the one witness that it is
        ours: lists and `find` show machines of our label alone, so none can show that it was not there before, and a
        plugin that read the wrong row would end the machine of somebody else. Its owner learns which one it is.
        """
        request = self._request(attempt, job, script)
        self._crash(CrashPoint.BEFORE_LAUNCH)
        try:
            with anyio.fail_after(LAUNCH_DEADLINE_S):
                made = await self._provider(attempt.provider).launch(request)
        except OutcomeUnknown as exc:
            return str(exc) or "the answer was lost"
        except ProviderError as exc:
            self._crash(CrashPoint.AFTER_LAUNCH)
            return refusal_of(exc) or str(exc)
        except TimeoutError:
            return f"no answer within {LAUNCH_DEADLINE_S:.0f} s"
        self._crash(CrashPoint.AFTER_LAUNCH)
        if made.instance.key != attempt.key:
            which, got = made.instance.ref.instance_id, made.instance.key
            self._log.error("provider.wrong_key", provider=attempt.provider, key=attempt.key, got=got, instance=which)
            return f"the provider answered with machine {which}, which carries another key: {got!r}"
        return made.instance

    async def _request_another(self, attempt: Attempt, job: Job) -> values.LaunchRequest:
        return self._request(attempt, job, await self._grants.prepare_another(attempt, job))

    def _request(self, attempt: Attempt, job: Job, script: str) -> values.LaunchRequest:
        return values.LaunchRequest(
            key=attempt.carried_key,
            install=self._install,
            offer=attempt.quote.offer,
            price_max=attempt.price_max,
            image=job.spec.image,
            disk_gb=disk_gb_on(job, attempt.quote.offer),
            start_script=script,
            login=self._login(attempt.provider, job.spec.image),
        )

    async def _settle_launch(self, attempt: Attempt, answer: values.Instance | LaunchRefusal | str) -> None:
        fields: dict[str, Any] = {
            "key": attempt.key,
            "provider": attempt.provider,
            "offer": attempt.quote.offer.offer_id,
            "effective_microusd_h": attempt.quote.price.total,
        }
        match answer:
            case values.Instance() as machine:
                # First, because the commit wakes the loop, and the cache still offers what has just been sold.
                self._bought(attempt.quote.offer)
                await self._commit(
                    lambda world, now: outcomes.launched(world, attempt.id, machine, now),
                    (CrashPoint.BEFORE_COMMIT_LAUNCHED, CrashPoint.AFTER_COMMIT_LAUNCHED),
                    otherwise=self._contained(attempt, LaunchOutcome.MADE, machine),
                )
                self._log.info("launch.done", instance=machine.ref.instance_id, **fields)
            case LaunchRefusal() as no:
                await self._commit(
                    lambda world, now: outcomes.launch_refused(
                        world, attempt.id, no.failure, no.detail, now, no.retry_after, no.quota
                    ),
                    (CrashPoint.BEFORE_COMMIT_LAUNCH_REFUSED, CrashPoint.AFTER_COMMIT_LAUNCH_REFUSED),
                    otherwise=self._contained(attempt, LaunchOutcome.NOT_MADE),
                )
                match no.failure.traits.read_again:
                    case outcomes.ReadAgain.INSTANCES:
                        self._list_again(attempt.provider)
                    case outcomes.ReadAgain.OFFERS:
                        self._ask_again(attempt.provider)
                    case outcomes.ReadAgain.NOTHING:
                        pass
                self._log.warning("launch.refused", failure=no.failure.value, detail=no.detail, **fields)
            case str() as detail:
                await self._commit(
                    lambda world, now: outcomes.launch_unknown(world, attempt.id, detail, now),
                    (CrashPoint.BEFORE_COMMIT_LAUNCH_UNKNOWN, CrashPoint.AFTER_COMMIT_LAUNCH_UNKNOWN),
                    otherwise=self._contained(attempt, LaunchOutcome.UNKNOWN),
                )
                self._log.warning("launch.unknown", detail=detail, **fields)

    # --- terminations ---

    async def _terminate(self, intent: Intent) -> None:
        try:
            async with self._end_turns[intent.provider]:
                await self._terminate_now(intent)
        finally:
            self._ending.discard(intent.id)
            self._idle.notify()
            self._loop_wake.notify()

    async def _terminate_now(self, intent: Intent) -> None:
        if (ref := intent.ref) is None:
            return
        detail, wait = await self._call_terminate(intent, ref)
        if detail:
            await self._terminate_failed(intent, detail, wait)
            return
        await self._commit(
            lambda world, now: outcomes.terminate_accepted(world, intent.id, now),
            (CrashPoint.BEFORE_COMMIT_TERMINATE_ACCEPTED, CrashPoint.AFTER_COMMIT_TERMINATE_ACCEPTED),
            otherwise=lambda world, now: end_contained(world, intent.id, now),
        )
        self._log.info("terminate.accepted", key=intent.key, provider=intent.provider, instance=ref.instance_id)

    async def _call_terminate(self, intent: Intent, ref: values.InstanceRef) -> tuple[str, timedelta | None]:
        """Why the provider did not accept the end, and how long it asks to wait; empty when it did."""
        rules = self._commits.policy.providers.get(intent.provider)
        if rules is not None and rules.is_other_account(intent.account):
            # Asked with this key the provider would answer that there is no such machine, and mean its own.
            why = f"the machine belongs to the account {intent.account}, the key in use to {rules.account}"
            return f"{why}: put a key of the former account back into [providers.{intent.provider}]", None
        self._crash(CrashPoint.BEFORE_TERMINATE)
        detail, wait = "", None
        try:
            with anyio.fail_after(TERMINATE_DEADLINE_S):
                await self._provider(intent.provider).terminate(ref)
        except TimeoutError:
            detail = f"no answer within {TERMINATE_DEADLINE_S:.0f} s"
        except ProviderError as exc:
            detail = str(exc) or type(exc).__name__
            wait = exc.retry_after if isinstance(exc, RateLimited) else None
        self._crash(CrashPoint.AFTER_TERMINATE)
        return detail, wait

    async def _terminate_failed(self, intent: Intent, detail: str, wait: timedelta | None) -> None:
        await self._commit(
            lambda world, now: outcomes.terminate_failed(world, intent.id, detail, now, wait),
            (CrashPoint.BEFORE_COMMIT_TERMINATE_FAILED, CrashPoint.AFTER_COMMIT_TERMINATE_FAILED),
        )
        if intent.tries == 0:
            self._log.warning("terminate.failed", key=intent.key, provider=intent.provider, detail=detail)

    def _provider(self, name: values.ProviderName) -> GuardedProvider:
        return guarded(self._providers[name], clock=self._clock, log=self._log)

    def _provider_if_there(self, name: values.ProviderName) -> GuardedProvider | None:
        """Return the provider, unless the config has lost it since the call was owed."""
        return self._provider(name) if name in self._providers else None

    # --- outcomes ---

    async def _commit(self, decide: Decide, points: Points, *, otherwise: Decide | None = None) -> Committed:
        """Make the outcome durable. A state that cannot be written is waited for: the answer exists only here.

        Args:
            otherwise: what is written instead if the outcome cannot be judged.
        """
        failures = 0
        committed: Committed | None = None
        while committed is None:
            try:
                committed = await self._commits.commit(decide, points, contain=True)
            except StateError as exc:
                if not failures:
                    self._log.error("state.cannot_write_outcome", error=exc.message, hint=exc.hint)
            except Exception as exc:  # noqa: BLE001 - one outcome must not end the daemon while machines bill
                if not failures or otherwise is not None:
                    self._log.error("outcome.not_judged", exc_info=exc)
                if otherwise is not None:
                    decide, otherwise = otherwise, None
                    continue
            if committed is None:
                failures += 1
                await anyio.sleep(backoff_s(COMMIT_RETRY_FIRST_S, failures, max_s=COMMIT_RETRY_MAX_S))
        for provider in committed.plan.list_again:
            self._list_again(provider)
        self._loop_wake.notify()
        return committed


def _launch_state(world: World, attempt: Attempt) -> IntentState | None:
    intent = world.intents.get(launch_intent_id(attempt.key))
    return None if intent is None else intent.state
