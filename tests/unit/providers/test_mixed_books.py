"""Receipts beside the ledgers of three clouds, over losses, hosts out of reach and a daemon that is dead for hours.

Real adapters, the fakes of their clouds and the core's own rules on one virtual clock. A daemon that is dead reads
nothing and decides nothing; its state is what it was. A host writes on meanwhile, until its machine ends or its lease
is over, and what it wrote is read once the daemon is back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import IntentKind, IntentState
from spotd.core.domain.plan import applied
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import after_restart, launched, terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.provider import Provider
from spotd_providers.contract.values import InstanceRef, Market, MicroUsdPerGpuHour, MicroUsdPerHour
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.harness import Harness
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.harness import open_harness as open_aws
from tests.unit.providers.runpod.harness import open_harness as open_runpod
from tests.unit.providers.test_billed_from import DISK_GB, agreed_world, the
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.harness import open_harness as open_vast

SECOND: Final = timedelta(seconds=1)
MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
STARTING: Final = timedelta(seconds=5)
WITHIN: Final = 0.03
"""What all receipts of a cloud may differ from its ledger by."""
UNSEEN: Final = 300
"""Micro-dollars by which each receipt may differ besides: a few seconds in which a machine came up."""


class Course:
    """One machine from its launch to its end, watched by a daemon that may be dead for a while."""

    def __init__(self, h: Harness, provider: Provider, world: World, ref: InstanceRef) -> None:
        self.h = h
        self.provider = provider
        self.world = world
        self.ref = ref
        self.machine = str(ref.instance_id)
        self.key = the(world).key
        self.is_reachable = True
        self._report = HostStatus(attempt=the(world).id, read_at=h.clock.now())
        self._heard = h.clock.now()
        self._polled = h.clock.now()

    @property
    def item(self) -> Attempt:
        return the(self.world)

    @property
    def is_over(self) -> bool:
        return not self.world.attempts or not self.item.state.counts

    async def watched(self, span: timedelta) -> None:
        """Pass so much time under a living daemon: a cycle each minute, or five seconds while a machine starts."""
        until = self.h.clock.now() + span
        while (left := until - self.h.clock.now()) > timedelta(0):
            started = self.is_over or self.item.running_at is not None
            await self._pass(min(left, MINUTE if started else STARTING))
            await self._cycle()

    async def dead(self, span: timedelta) -> None:
        """Pass so much time without a daemon."""
        until = self.h.clock.now() + span
        while (left := until - self.h.clock.now()) > timedelta(0):
            await self._pass(min(left, 5 * MINUTE))

    def saves_and_ends(self, cause: EndReason) -> None:
        """Let the host report that it has saved and computes no more."""
        now = self.h.clock.now()
        report = replace(self._report, seq=self._report.seq + 1, phase="done", exit_at=now, alive_at=now)
        self._report = replace(report, read_at=now, exit_reason=cause)

    async def ended_itself(self) -> None:
        """Let the host save and end its machine without a word from the daemon, as where its lease is over."""
        self.saves_and_ends(EndReason.LEASE_EXPIRED)
        await self.provider.terminate(self.ref)

    async def ended(self) -> None:
        """Let the command end, or the machine be seen to be lost, and wait until nothing of it is left."""
        if not self.is_over and self._lives():
            now = self.h.clock.now()
            report = replace(self._report, read_at=now, seq=self._report.seq + 1, phase="done", exit_at=now)
            self._report = replace(report, exit_reason=EndReason.DONE, exit_code=0)
        for _ in range(90):
            await self._cycle()
            if not self.world.attempts:
                return
            await self._pass(MINUTE)
        raise AssertionError(f"its machine is still there: {self.item}")

    async def _pass(self, span: timedelta) -> None:
        """Let the clock go on; the host writes while it lives and its lease holds."""
        await self.h.advance(span)
        now = self.h.clock.now()
        if self._lives() and now - self._heard <= self.world.policy.lease:
            seq = self._report.seq + 1
            self._report = replace(self._report, seq=seq, phase="run", alive_at=now, script_began_at=None)

    def _lives(self) -> bool:
        own = [one for one in self.h.live(self.key) if one.running]
        return self.is_reachable and bool(own)

    def heard(self) -> None:
        """Read what the host has written, without a list of machines."""
        reports = {a: replace(self._report, read_at=self.h.clock.now()) for a in self.world.attempts}
        self.world = applied(self.world, reconcile(self.world, {}, reports, self.h.clock.now()))

    async def _cycle(self) -> None:
        now = self.h.clock.now()
        self._heard = now
        if now - self._polled >= 5 * MINUTE:
            self._polled = now
            await self.provider.offers(self.h.query())  # machines cost what prices of today say
        listing = await self.provider.instances()
        reports = {a: replace(self._report, read_at=now) for a in self.world.attempts}
        self.world = applied(self.world, reconcile(self.world, {self.provider.name: listing}, reports, now))
        for intent in list(self.world.intents.values()):
            is_due = intent.not_before is None or intent.not_before <= now
            if intent.kind is IntentKind.TERMINATE and intent.state is IntentState.OPEN and is_due:
                assert intent.ref is not None
                await self.provider.terminate(intent.ref)
                self.world = applied(self.world, terminate_accepted(self.world, intent.id, self.h.clock.now()))


Story = Callable[[Course], Awaitable[None]]


async def works_and_ends(run: Course) -> None:
    await run.watched(80 * MINUTE)


async def is_lost_while_watched(run: Course) -> None:
    await run.watched(95 * MINUTE)
    run.h.preempt(run.machine)


async def is_lost_while_the_daemon_is_dead(run: Course) -> None:
    await run.watched(70 * MINUTE)
    await run.dead(22 * MINUTE)
    run.h.preempt(run.machine)
    await run.dead(3 * HOUR)


async def is_lost_in_minutes_without_a_daemon(run: Course) -> None:
    await run.watched(20 * MINUTE)
    await run.dead(20 * SECOND)
    run.h.preempt(run.machine)
    await run.dead(4 * MINUTE)


async def is_lost_in_an_hour_without_a_daemon(run: Course) -> None:
    """Past the first hour, in which EC2 would bill nothing."""
    await run.watched(65 * MINUTE)
    await run.dead(7 * MINUTE)
    run.h.preempt(run.machine)
    await run.dead(50 * MINUTE)


async def ends_itself_in_minutes_without_a_daemon(run: Course) -> None:
    await run.watched(35 * MINUTE)
    await run.dead(50 * SECOND)
    await run.ended_itself()
    await run.dead(3 * MINUTE)


async def ends_itself_while_the_daemon_is_dead(run: Course) -> None:
    await run.watched(70 * MINUTE)
    await run.dead(31 * MINUTE)
    await run.ended_itself()
    await run.dead(2 * HOUR)


async def ended_before_its_launch_was_answered(run: Course) -> None:
    """The daemon died in the call that made it, and is back for the last minutes in which EC2 shows that it ended."""
    await run.dead(25 * MINUTE)
    run.saves_and_ends(EndReason.DONE)
    await run.provider.terminate(run.ref)
    await run.dead(55 * MINUTE)


async def lost_before_its_launch_was_answered(run: Course) -> None:
    await run.dead(25 * MINUTE)
    run.h.preempt(run.machine)
    await run.dead(10 * MINUTE)


async def lives_while_the_daemon_is_dead(run: Course) -> None:
    await run.watched(40 * MINUTE)
    await run.dead(25 * MINUTE)
    await run.watched(20 * MINUTE)


async def is_out_of_reach_and_back(run: Course) -> None:
    await run.watched(40 * MINUTE)
    run.h.lose_contact(run.machine)
    await run.watched(25 * MINUTE)  # its own network is well, so that it is kept
    if isinstance(run.h, VastHarness):
        run.h.cloud.lose_contact(int(run.machine), None)
    await run.watched(30 * MINUTE)


async def is_out_of_reach_for_good(run: Course) -> None:
    await run.watched(40 * MINUTE)
    run.h.lose_contact(run.machine)
    run.is_reachable = False
    await run.watched(60 * MINUTE)


async def is_out_of_reach_while_the_daemon_is_dead(run: Course) -> None:
    await run.watched(40 * MINUTE)
    await run.dead(10 * MINUTE)
    run.h.lose_contact(run.machine)
    run.is_reachable = False
    await run.dead(2 * HOUR)


async def sees_prices_change_by_the_hour(run: Course) -> None:
    assert isinstance(run.h, AwsHarness)
    pool = run.h.cloud.instances[run.machine].pool
    for usd in ("0.21", "0.1587", "0.24", "0.1234"):
        await run.watched(37 * MINUTE)
        run.h.cloud.set_price(pool, usd)
    await run.watched(11 * MINUTE)


async def sees_prices_change_while_the_daemon_is_dead(run: Course) -> None:
    """Up, down and up again, unseen; the last before the daemon is back is that of before."""
    assert isinstance(run.h, AwsHarness)
    pool = run.h.cloud.instances[run.machine].pool
    before = run.h.cloud.prices[pool][-1][1]
    await run.watched(30 * MINUTE)
    for usd in ("0.26", "0.13", before):
        await run.dead(25 * MINUTE)
        run.h.cloud.set_price(pool, usd)
    await run.dead(5 * MINUTE)
    await run.watched(20 * MINUTE)


async def is_lost_after_a_price_that_changed_unseen(run: Course) -> None:
    assert isinstance(run.h, AwsHarness)
    await run.watched(70 * MINUTE)
    run.h.cloud.set_price(run.h.cloud.instances[run.machine].pool, "0.31")
    await run.dead(25 * MINUTE)
    run.h.cloud.set_price(run.h.cloud.instances[run.machine].pool, "0.14")
    await run.dead(5 * MINUTE)
    run.h.preempt(run.machine)
    run.h.cloud.set_price(run.h.cloud.instances[run.machine].pool, "0.11")
    await run.dead(20 * MINUTE)


async def is_over_at_once(run: Course) -> None:
    await run.watched(2 * MINUTE)


async def is_taken_within_its_first_hour(run: Course) -> None:
    await run.watched(25 * MINUTE)
    run.h.give_notice(run.machine)
    await run.watched(3 * MINUTE)


EVERYWHERE: Final = (
    works_and_ends,
    is_lost_while_watched,
    is_lost_while_the_daemon_is_dead,
    ends_itself_while_the_daemon_is_dead,
    lives_while_the_daemon_is_dead,
    is_lost_in_minutes_without_a_daemon,
    is_lost_in_an_hour_without_a_daemon,
    ended_before_its_launch_was_answered,
    lost_before_its_launch_was_answered,
)
OUT_OF_REACH: Final = (
    is_out_of_reach_and_back,
    is_out_of_reach_for_good,
    is_out_of_reach_while_the_daemon_is_dead,
)


async def is_taken_while_the_daemon_is_dead(run: Course) -> None:
    """Within its first hour, after which EC2 shows it for an hour more: it is free once that is seen."""
    await run.watched(20 * MINUTE)
    await run.dead(12 * MINUTE)
    run.h.preempt(run.machine)
    await run.dead(30 * MINUTE)


async def is_taken_before_its_notice_is_seen(run: Course) -> None:
    """The runner saves and ends within the minute of the notice, so that the first that is seen is its end."""
    await run.watched(25 * MINUTE)
    run.h.give_notice(run.machine)
    run.saves_and_ends(EndReason.PREEMPTED)
    run.heard()
    await run.watched(6 * MINUTE)
    assert isinstance(run.h, AwsHarness)
    request = run.h.cloud.instances[run.machine].spot
    assert request is not None
    assert request.code != "instance-terminated-by-user", "EC2 ends it, which is free, and not we, which is billed"


ON_EC2: Final = (
    sees_prices_change_by_the_hour,
    sees_prices_change_while_the_daemon_is_dead,
    is_lost_after_a_price_that_changed_unseen,
    is_over_at_once,
    is_taken_within_its_first_hour,
    is_taken_while_the_daemon_is_dead,
    is_taken_before_its_notice_is_seen,
    ends_itself_in_minutes_without_a_daemon,
)
SHORT: Final = (
    is_over_at_once,
    is_taken_within_its_first_hour,
    is_taken_before_its_notice_is_seen,
    is_lost_in_minutes_without_a_daemon,
    ended_before_its_launch_was_answered,
    lost_before_its_launch_was_answered,
    ends_itself_in_minutes_without_a_daemon,
)
"""The others watch a machine for hours, with hundreds of calls each."""
UNANSWERED: Final = (ended_before_its_launch_was_answered, lost_before_its_launch_was_answered)


async def lived(h: Harness, provider: Provider, story: Story) -> tuple[int, int]:
    """Return what is booked for a machine of this story, and what its cloud bills, in micro-dollars."""
    offers = [one for one in (await provider.offers(h.query())).offers if one.gpu_count == 1]
    spot = [one for one in offers if one.market is Market.SPOT]
    offer = min(spot or offers, key=lambda one: (one.gpu_price, one.offer_id))
    world = agreed_world(h, offer)
    agreed = MicroUsdPerHour(offer.gpu_price * 2)
    item = replace(the(world), ceiling=MicroUsdPerGpuHour(2_000_000), price_max=agreed)
    world = replace(world, attempts={item.id: item})
    limit = agreed if offer.market is Market.SPOT and not offer.pays_bid else offer.gpu_price
    made = await provider.launch(h.request(offer, key=item.key, disk_gb=DISK_GB, price_max=limit))
    if story in UNANSWERED:
        sent = {i: replace(intent, state=IntentState.SENT) for i, intent in world.intents.items()}
        world = replace(world, intents=sent)
    else:
        world = applied(world, launched(world, item.id, made.instance, h.clock.now()))
    run = Course(h, provider, world, made.instance.ref)
    await story(run)
    if story in UNANSWERED:
        run.world = applied(run.world, after_restart(run.world, h.clock.now()))
    await run.ended()
    await h.advance(HOUR)
    return sum(run.world.spent_by_day.values()), h.billed(run.machine)


async def told(h: Harness, story: Story) -> tuple[int, int]:
    async with h.opened() as provider:
        return await lived(h, provider, story)


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(story, id=story.__name__, marks=() if story in SHORT else pytest.mark.lengthy)
        for story in EVERYWHERE + ON_EC2
    ],
)
def test_each_receipt_agrees_with_the_ledger_of_ec2_within_one_percent(story: Story, tmp_path: Path) -> None:
    """EC2 bills by the second, one minute at least, at prices that change, and states for an hour when one ended."""
    with open_aws(tmp_path) as h:
        booked, billed = run_virtually(partial(told, h, story))
    assert abs(booked - billed) <= 0.01 * billed + UNSEEN, (
        f"{booked} booked of {billed} ({booked / max(1, billed):.3f})"
    )


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("opened", "stories"),
    [
        pytest.param(open_vast, EVERYWHERE + OUT_OF_REACH, id="vast"),
        pytest.param(open_runpod, EVERYWHERE, id="runpod"),
    ],
)
def test_receipts_agree_with_the_ledger_of_a_cloud_over_losses_and_a_dead_daemon(
    opened: Callable[[Path], AbstractContextManager[Harness]], stories: tuple[Story, ...], tmp_path: Path
) -> None:
    sums: dict[str, tuple[int, int]] = {}
    for story in stories:
        with opened(tmp_path / story.__name__) as h:
            sums[story.__name__] = run_virtually(partial(told, h, story))
    booked, billed = (sum(pair[n] for pair in sums.values()) for n in (0, 1))
    said = "; ".join(f"{name}: {mine} of {bill} ({mine / max(1, bill):.3f})" for name, (mine, bill) in sums.items())
    assert abs(booked / billed - 1) <= WITHIN, said
