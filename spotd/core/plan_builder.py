"""A plan in the making: a working copy of the world, with what each of several rules does to an attempt and its job."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Final

from spotd.core.domain import lineage
from spotd.core.domain.attempts import NO_TIME, Attempt, MachineState, Watch
from spotd.core.domain.cooldowns import (
    ECHO_LASTS,
    ECHOES_MAX,
    REFUSED_FIRST,
    REFUSED_IN_A_ROW,
    REFUSED_MAX,
    UNABLE_AT_ONCE,
    UNABLE_FIRST,
    UNABLE_MAX,
    Cooldown,
    CooldownEnd,
    CooldownScope,
    bid_subject,
    bids_by_host,
    did_start,
    doubled,
    has_saved,
    pacing_after,
    pool_subject,
    setback,
    unable_subject,
    wait_for_cause,
    words_of_giving_up,
    words_of_setback,
)
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import (
    AttemptId,
    Charge,
    Intent,
    IntentKind,
    IntentState,
    bid_intent_id,
    terminate_intent_id,
)
from spotd.core.domain.jobs import COOLDOWN_MAX, Checkpoint, Job, disk_gb_after, span_within
from spotd.core.domain.lineage import repeated_time
from spotd.core.domain.states import AttemptState, Blame, Counted, EndKind, EndReason, JobState
from spotd.core.metering import (
    booked_back,
    settled,
    spent,
    taken_by_provider_until,
    with_correction,
    with_estimates,
    with_least_time,
    with_limit,
    with_paid,
    with_run,
)
from spotd.core.pricing import halted_rate, metered_rate, span_words
from spotd.core.working_copy import WorkingCopy, learn_from_end
from spotd_jobs.spec.model import StallAction, WatchdogPolicy
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    InstanceRef,
    MicroUsd,
    MicroUsdPerHour,
    ProviderName,
    as_usd,
)

# Whether a job has stalled, in words, and what becomes of it: it moves to another machine, a few times at most.
#
# Theory. A hung machine and a hung job show the same. So a job that stalls goes to another machine, unless its owner
# wants it to stop; one that stalls on `STALLS_MAX` machines in a row has itself to blame and has failed. The row ends
# with a machine on which the job got on for many times longer than it took to see that it stalled: then what stalls
# cost stays a small share of what the job gets done, however often they come.


PREPARATION: Final = 3
"""A job that has not begun its own work yet has so many times as long: it may download, unpack and convert data."""
STALLS_MAX: Final = 3
WORTH: Final = 10
"""A machine on which the job got on for so many times its limit ends a row of stalls."""


def stall_words(item: Attempt, job: Job) -> str:
    """Return how long and by which limit the attempt has got nowhere; empty while it gets on, saves or is stopped."""
    watch, rules = item.watch, job.spec.watchdog
    if watch is None or item.stop is not None or item.notice_at is not None or not rules.is_on:
        return ""
    if item.state not in {AttemptState.STARTING, AttemptState.RUNNING}:
        return ""
    factor = 1 if watch.has_begun else PREPARATION
    patient = "" if watch.has_begun else f", {PREPARATION} times as long before its own work begins"
    if rules.min_gpu_util is not None and watch.idle >= rules.window * factor:
        used = 100 * (watch.idle_busy / watch.idle) if watch.idle else 0.0
        return (
            f"its busiest GPU was used {used:.1f} % for {span_words(watch.idle)},"
            f" [watchdog] asks for {rules.min_gpu_util} % over {span_words(rules.window)}{patient}"
        )
    if rules.no_progress is not None and watch.quiet >= rules.no_progress * factor:
        return (
            f"no new output, step or checkpoint for {span_words(watch.quiet)},"
            f" [watchdog] no_progress is {span_words(rules.no_progress)}{patient}"
        )
    return ""


def stalls_after(job: Job, item: Attempt) -> int:
    """Return how many machines in a row the job has stalled on, with this one."""
    return 1 if _was_worth_it(item.watch, job.spec.watchdog) else job.stalls + 1


def _was_worth_it(watch: Watch | None, rules: WatchdogPolicy) -> bool:
    limits = [rules.no_progress] if rules.no_progress is not None else []
    limits += [rules.window] if rules.min_gpu_util is not None else []
    worth = WORTH * max(limits, default=NO_TIME)
    return watch is not None and watch.has_begun and watch.active >= worth > NO_TIME


def words_after(job: Job, stalls: int) -> tuple[bool, str]:
    """Whether the job is over, and what is added to the sentence of the stall."""
    goes_on = f"; spotctl retry {job.name} goes on from its newest checkpoint"
    if job.spec.watchdog.action is StallAction.STOP:
        return True, f'; [watchdog] action is "stop"{goes_on}'
    if stalls >= STALLS_MAX:
        return True, f"; it stalled on {stalls} machines in a row{goes_on}"
    return False, f"; it moves to another machine, after {stalls} of {STALLS_MAX} stalls in a row"


def watch_every(rules: WatchdogPolicy) -> timedelta | None:
    """Return how often figures of progress are worth reading; `None` where nothing is watched."""
    limits = [span for span in (rules.min_gpu_util and rules.window, rules.no_progress) if span]
    return min(READ_MAX, max(READ_MIN, min(limits) / READS)) if limits else None


READS: Final = 10
READ_MIN: Final = timedelta(seconds=1)
READ_MAX: Final = timedelta(minutes=5)


GONE_WORDS: Final = "machine ended, confirmed by the provider"
POOL_COOLDOWNS_MAX: Final = 4
"""A pool that refuses or loses machines again and again cools down for so many times its usual span at most."""


IN_A_ROW: Final = timedelta(minutes=2)
"""A refusal may take so long to be answered, and is one of the same row all the same."""


def _in_a_row(before: Cooldown, now: datetime, memory: timedelta) -> bool:
    """Whether a new refusal belongs to this one: it came while it lasted, or soon after it had."""
    if before.since is None or before.since > now:
        return False
    return now - before.until <= max(memory, before.until - before.since)


class PlanBuilder(WorkingCopy):
    """The changes of one decision or reconciliation, and the rules that make more than one of them at a time."""

    def cool(
        self,
        provider: ProviderName,
        scope: CooldownScope,
        subject: str,
        span: timedelta,
        why: str,
        *,
        longest: timedelta | None = None,
        ends: CooldownEnd = CooldownEnd.TIME,
        most: timedelta = COOLDOWN_MAX,
        asked_at: datetime | None = None,
        at_once: int = 0,
        memory: timedelta = IN_A_ROW,
    ) -> None:
        """Nothing of this is bought for a while, and for twice as long each time in a row, up to `longest`.

        A row is of one kind of refusal: what ends the one does not end the other.

        Args:
            asked_at: when the call was decided; one that was decided before the last refusal met the same cause.
            at_once: so many in a row are followed by no pause.
            memory: one that comes so soon after the end of a pause, or as soon as that was long, is another in a row.
        """
        known = self.cooldowns()
        same = [c for c in known if c.subject == subject and c.scope is scope and c.provider == provider]
        before = same[-1] if same else None
        strikes = 0
        if before is not None and before.ends is ends and _in_a_row(before, self.now, memory):
            is_same = asked_at is not None and before.since is not None and asked_at < before.since
            strikes = before.strikes if is_same else before.strikes + 1
        span = span_within(span, most)
        pause = doubled(span, strikes - at_once, span_within(max(span, longest or span), most))
        until = self.now + pause if strikes >= at_once else self.now
        if before is not None:
            until = max(until, before.until)  # it may be prolonged, never cut short
        self._cooldowns.append(
            Cooldown(
                provider=provider,
                scope=scope,
                subject=subject,
                until=until,
                reason=why,
                since=self.now,
                strikes=strikes,
                ends=ends,
            )
        )

    def cool_unable(self, item: Attempt, why: str) -> None:
        """Let its job leave alone an offer that cannot do what it asks, and after some in a row their whole market."""
        offer, job = item.quote.offer, item.id.job
        cool = partial(self.cool, offer.provider, CooldownScope.JOB, why=why)
        # Longer than its market, which is free again for the offers that were not asked.
        own = unable_subject(job, offer.market, offer.offer_id)
        cool(own, asked_at=item.intended_at, span=UNABLE_FIRST, longest=UNABLE_MAX, memory=REFUSED_IN_A_ROW)
        if self._cooldowns[-1].strikes == 0:
            at_once = UNABLE_AT_ONCE - 1
            subject = unable_subject(job, offer.market)
            cool(subject, at_once=at_once, span=REFUSED_FIRST, longest=REFUSED_MAX, memory=REFUSED_IN_A_ROW)

    def forgive(self, provider: ProviderName, scope: CooldownScope, subject: str) -> None:
        """End a row of refusals, since it was sold after all."""
        same = [c for c in self.cooldowns() if (c.provider, c.scope, c.subject) == (provider, scope, subject)]
        if same and same[-1].since is not None:
            self._cooldowns.append(replace(same[-1], until=min(same[-1].until, self.now), since=None, strikes=0))

    def shorten(self, cooldown: Cooldown) -> None:
        """Let a cool-down of the same refusal end sooner, since its cause was another one."""
        self._cooldowns.append(cooldown)

    def set_rate(
        self,
        attempt: AttemptId,
        rate: MicroUsdPerHour,
        on_demand_rate: MicroUsdPerHour | None,
        *,
        at: datetime | None = None,
    ) -> None:
        """Charge what the attempt cost up to `at`, by default now; from there on it costs this per hour."""
        if rate <= halted_rate(self.attempt(attempt).quote):
            self._bill_unanswered_raise(attempt, at or self.now)
        item = self.attempt(attempt)
        item = with_limit(item, self.job(attempt.job), self.policy)
        after, charges = settled(item, at or self.now, rate, on_demand_rate)
        after, more = with_least_time(item, after, self.policy, at or self.now)
        self._charges.extend((*charges, *more))
        self.put_attempt(with_limit(after, self.job(attempt.job), self.policy))

    def _bill_unanswered_raise(self, attempt: AttemptId, until: datetime) -> None:
        """Bill the higher bid from when it was decided: no list will show any more whether it was taken."""
        item = self.attempt(attempt)
        change, since, meter = self.intent(bid_intent_id(item.key)), item.bidding.changed_at, item.meter
        if change is None or change.state not in {IntentState.SENT, IntentState.UNKNOWN} or since is None:
            return
        full, halted = metered_rate(item.quote), halted_rate(item.quote)
        if item.bidding.before is None or meter.since is None or not halted < meter.rate < full:
            return
        if max(since, meter.since) < until:
            self.set_rate(attempt, full, meter.on_demand_rate, at=max(since, meter.since))

    def add_charge(self, charge: Charge) -> None:
        """Add the charge; the attempt's meter is the caller's to set."""
        self._charges.append(charge)

    def credit(self, attempt: AttemptId, amount: MicroUsd, why: str, *, ended_at: datetime | None = None) -> None:
        """So much of what is booked for the attempt, up to its machine's end or now, is not billed after all."""
        item = self.attempt(attempt)
        self._charges.extend(booked_back(item, amount, min(ended_at or self.now, self.now)))
        self.put_attempt(with_correction(item, -amount))
        self.event("attempt.credited", why, attempt=attempt, amount_microusd=amount)

    def owe_end(self, item: Attempt, why: str, not_before: datetime | None = None) -> None:
        """Owe the end of the attempt's machine, where it has one, by the key that this carries."""
        if item.ref is not None:
            self.owe_termination(item.ref, item.carried_key, item.id, why=why, not_before=not_before)

    def owe_termination(
        self,
        ref: InstanceRef,
        key: AttemptKey,
        attempt: AttemptId | None,
        *,
        why: str,
        not_before: datetime | None = None,
    ) -> None:
        """Owe the machine's destruction, from `not_before` on, until the provider reports that it is gone."""
        intent = terminate_intent_id(ref)
        known = self.intent(intent)
        if known is not None and known.is_open:
            return
        rules = self.policy.providers.get(ref.provider)
        owner = None if attempt is None else self.attempt(attempt).account
        self.put_intent(
            Intent(
                id=intent,
                account=owner or ("" if rules is None else rules.account),
                kind=IntentKind.TERMINATE,
                provider=ref.provider,
                key=key,
                state=IntentState.OPEN,
                created_at=self.now,
                attempt=attempt,
                ref=ref,
                not_before=not_before,
            )
        )
        if not_before is not None:
            self.wake(not_before)
        self.event("machine.ending", why, attempt=attempt, provider=ref.provider, instance=ref.instance_id, key=key)

    def machine_gone(self, attempt: AttemptId, seen: str = GONE_WORDS) -> None:
        """Nothing exists under the attempt's key, or is to be counted any more: its costs are final."""
        self.set_rate(attempt, MicroUsdPerHour(0), None)
        item = replace(self.attempt(attempt), machine=MachineState.GONE)
        self.put_attempt(item)
        for intent in self.intents():
            if intent.attempt == attempt:
                self.put_intent(replace(intent, state=IntentState.DONE))
        if item.state is AttemptState.ENDING:
            self._close(item, seen)

    def _close(self, item: Attempt, seen: str = GONE_WORDS) -> None:
        """Close the attempt, whose machine is gone: its costs become the job's."""
        self.put_attempt(replace(item, state=AttemptState.ENDED))
        self._remember_bids(item)
        cost = f"it cost ${as_usd(item.meter.settled):.4f}"
        self.event(
            "machine.gone",
            f"{seen}; {cost}"
            if item.ref is not None or item.meter.settled
            else "no machine was made for this attempt; it cost nothing",
            attempt=item.id,
            cost_microusd=item.meter.settled,
        )
        job = self.job(item.id.job)
        paid = item.meter.settled
        self.put_job(
            replace(
                job,
                spent=MicroUsd(job.spent + paid),
                on_demand=MicroUsd(job.on_demand + item.on_demand_settled),
                totals=with_estimates(
                    with_paid(job.totals, item, paid, item.on_demand_settled),
                    1 if paid and item.bill.believed is None else 0,
                ),
            )
        )
        self.close_job(job.id)

    def _remember_bids(self, item: Attempt) -> None:
        offer = item.quote.offer
        if not offer.pays_bid or offer.host_id is None or item.ref is None:
            return
        for bid in (item.bidding.placed or (item.quote.price.gpu,))[-ECHOES_MAX:]:
            subject = bid_subject(offer.host_id, offer.gpu_count, bid)
            self.cool(offer.provider, CooldownScope.BID, subject, ECHO_LASTS, "our own bid for a machine that is gone")

    def cooldowns(self) -> tuple[Cooldown, ...]:
        """Return those that were known before, and those of this plan."""
        return (*self._world.cooldowns, *self._cooldowns)

    def former_bids(self, provider: ProviderName, host: HostId) -> list[tuple[int, int]]:
        """Return our bids for machines of this host that are gone and may still be stated, with the number of GPUs."""
        if self._former_bids is None:
            self._former_bids = bids_by_host(self._world.cooldowns, self.now)
        known, new = self._former_bids.get((provider, host), []), self._cooldowns
        return known + bids_by_host(new, self.now).get((provider, host), []) if new else known

    def end_attempt(
        self, attempt: AttemptId, reason: EndReason, detail: str = "", *, waits_until: datetime | None = None
    ) -> None:
        """End the attempt: it counts no more, its machine is destroyed if it may exist, and the job moves on.

        Args:
            waits_until: its machine waits for another job until then, and is ended if none takes it over.
        """
        item = self.attempt(attempt)
        if not item.state.counts:
            return
        if item.speaks_at_once and reason.traits.is_recovery:
            reason, detail = EndReason.NOT_HANDED_OVER, reason.sentence(detail)
        traits = reason.traits
        if reason is EndReason.IMAGE_ERROR:
            way_out = self.policy.words_of_login(self.job(attempt.job).spec.image, detail)
            detail = f"{detail}; {way_out}" if way_out else detail
        sentence = reason.sentence(detail)
        repeated = repeated_time(self.job(attempt.job), item, self.now, self.policy.silence_max)
        members = (
            None if item.members is None else item.members.going_on(spent(item, self.now), self.now, item.intended_at)
        )
        item = replace(
            item,
            members=members,
            state=AttemptState.ENDING,
            ended_at=self.now,
            end_reason=reason,
            end_detail=detail,
            stop=item.stop,
        )
        self.put_attempt(item)
        self.event(f"attempt.{reason.value}", sentence, attempt=attempt, reason=reason.value)
        learn_from_end(self, item, reason, suspects_job=self._suspects_job(item))
        self._blame(item, traits.blame, sentence)
        source = lineage.source_of(self.job(attempt.job), item)
        self._move_job_on(item, reason, sentence, repeated)
        self._doubt(source, item, reason)
        if item.machine is MachineState.GONE:
            self._close(item)
        elif item.ref is not None:
            left_until = taken_by_provider_until(item, self.policy, self.now)
            left = "" if left_until is None else f"; {item.provider} takes it itself, which costs less than ending it"
            if left_until is None and waits_until is not None:
                left_until = waits_until
                left = f"; it waits for another job for {span_words(waits_until - self.now)}, [reuse] wait"
            self.owe_end(item, f"its attempt ended: {sentence}{left}", left_until)

    def _blame(self, item: Attempt, blame: Blame, why: str) -> None:
        offer = item.quote.offer
        if blame is Blame.NONE or blame is Blame.USER:
            return
        if offer.host_id is None or blame is Blame.POOL:
            if item.end_reason is EndReason.HOST_LOST and has_saved(item, self.job(item.id.job)):
                return  # one host of many without a name: what else the pool has is as good as it was
            # One that is less than was sold says nothing of the other offers of its pool.
            is_unfit = item.end_reason is EndReason.CONTRACT_BROKEN
            pool = pool_subject(offer) if item.end_reason is EndReason.NO_CAPACITY else str(offer.pool)
            self.cool(
                offer.provider,
                CooldownScope.OFFER if is_unfit else CooldownScope.POOL,
                offer.offer_id if is_unfit else pool,
                self.policy.pool_cooldown,
                why,
                longest=POOL_COOLDOWNS_MAX * self.policy.pool_cooldown,
            )
            return
        briefly = blame is not Blame.HOST or self._suspects_job(item)
        span = self.policy.pool_cooldown if briefly else self.policy.host_cooldown
        again = blame is Blame.HOST_BRIEFLY and not has_saved(item, self.job(item.id.job))
        longest = POOL_COOLDOWNS_MAX * span if again else None
        # A host that was lost may be as good as ever; one that broke its contract, or never came up, is not.
        ends = CooldownEnd.DEADLINE if item.end_reason is EndReason.HOST_LOST else CooldownEnd.TIME
        self.cool(offer.provider, CooldownScope.HOST, offer.host_id, span, why, longest=longest, ends=ends)

    def _suspects_job(self, item: Attempt) -> bool:
        """Whether the job failed to start on another machine just before: a bad job must not use up the good hosts."""
        job = self.job(item.id.job)
        return job.failed_starts > 0 and not did_start(item, job, self.now)

    def _move_job_on(self, item: Attempt, reason: EndReason, sentence: str, repeated: timedelta) -> None:
        job = self.job(item.id.job)
        traits = reason.traits
        errors = job.errors + (1 if traits.counted is Counted.ERROR else 0)
        image_errors = job.image_errors + 1 if reason is EndReason.IMAGE_ERROR else 0
        back = setback(job, item, reason, self.now)
        stalls = stalls_after(job, item) if reason is EndReason.STALLED else job.stalls
        state = traits.next_state
        if job.cancel_requested and state is not JobState.SUCCEEDED:
            state, sentence = JobState.CANCELLED, EndReason.CANCELLED.traits.sentence
        elif traits.counted is Counted.ERROR:
            left = job.spec.retry_errors - errors + 1
            state = JobState.RECOVERING if left > 0 else JobState.FAILED
            sentence += f"; {left} of {job.spec.retry_errors} retries left" if left > 0 else "; no retry is left"
        elif reason is EndReason.STALLED:
            is_over, words = words_after(job, stalls)
            state = JobState.FAILED if is_over else JobState.RECOVERING
            sentence += words
        elif image_errors >= self.policy.image_errors_max:
            state = JobState.FAILED
            sentence += f"; it failed on {image_errors} machines in a row"
        elif back.gives_up:
            sentence += words_of_giving_up(job, back)
            if waits := wait_for_cause(job, item, reason, back, self.policy.providers.get(item.provider)):
                back = replace(back, not_before=max(self.now + waits, back.not_before or self.now))
                sentence += f"; {item.provider} may state within {span_words(waits)} that it took this one back"
            else:
                state = JobState.FAILED
        elif traits.kind is EndKind.UNBOUGHT and job.started_at is None:
            state = JobState.QUEUED
        if state is JobState.RECOVERING:
            sentence += words_of_setback(back)
        self.move_job(
            job.id,
            state or JobState.RECOVERING,
            sentence,
            errors=errors,
            image_errors=image_errors,
            stalls=stalls,
            idle_launches=back.idle_launches,
            failed_starts=back.failed_starts,
            mute_starts=back.mute_starts or None,
            not_before=back.not_before,
            pacing=pacing_after(job, item, self.now),
            disk_gb_seen=disk_gb_after(job, reason),
            recoveries=job.recoveries + (1 if traits.is_recovery and item.launched_at is not None else 0),
            lost=job.lost + (repeated if traits.is_recovery else timedelta(0)),
            exit_code=item.exit_code if traits.kind is EndKind.COMMAND else job.exit_code,
            totals=with_run(job.totals, item, reason, self.now),
        )

    def _doubt(self, source: Checkpoint | None, item: Attempt, reason: EndReason) -> None:
        """Doubt what the attempt resumed from, which may be why it failed: the next one begins with what is older."""
        before = self.job(item.id.job)
        after = lineage.with_doubt(before, source, item, reason, self.now)
        if after is before:
            return
        self.put_job(after)
        turned = lineage.setback(after)
        if turned is None or after.state.is_final:
            return
        newest, older = turned
        why = (
            f"attempts that resumed from the checkpoints of attempt {newest.attempt} failed before they had saved "
            f"anything newer: the next one begins with {older.name} of attempt {older.attempt}"
        )
        self.event(
            "checkpoint.doubted", why, job=after.id, name=newest.name, of_attempt=newest.attempt, next=older.name
        )
        self.put_job(replace(after, reason=f"{after.reason}; {why}"))
