"""The whole shell over a marketplace in this process: what happens to jobs and machines, whatever goes wrong."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import anyio
import pytest

from spotd.core.domain.states import EndReason, JobState
from spotd.daemon.commits import CrashPoint
from spotd_jobs.objects.api import StoreUnavailable
from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RateLimited,
    Unavailable,
)
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss, Market
from tests.unit.core.builders import job, offer
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Garbage, Hang

pytestmark = pytest.mark.anyio

KEY = "spotd-lab-j1-{}".format


async def test_a_job_is_launched_runs_and_its_machine_is_gone_when_it_succeeds(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.checkpoint("step-1")
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: not rig.shop.not_gone())
    assert [c.name for c in rig.job(name).checkpoints] == ["step-1"]
    assert rig.attempts(name)[0].end_reason is EndReason.DONE


async def test_a_job_without_a_market_pays_on_demand_where_the_provider_has_no_spot_market(rig: Rig) -> None:
    rig.shop.offer_index = [offer("fixed", market=Market.ON_DEMAND)]
    rig.shop.sells_spot = False
    async with rig.running():
        await rig.until_running(await rig.submit(), 1)


async def test_a_job_without_a_market_waits_for_a_spot_market_that_is_sold_out(rig: Rig) -> None:
    rig.shop.offer_index = [offer("fixed", market=Market.ON_DEMAND)]
    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: rig.shop.counts["offers"] >= 3)
        rig.shop.offer_index.append(offer("bid"))
        await rig.until_running(name, 1)
    assert [request.offer.offer_id for request in rig.shop.requests] == ["bid"]


async def test_an_outbid_machine_is_destroyed_and_the_job_goes_on_elsewhere(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.checkpoint("step-1")
        rig.shop.set_state(AttemptKey(KEY(1)), InstanceState.PAUSED, Loss.OUTBID)
        await rig.until_running(name, 2)
    first, second = rig.attempts(name)
    assert first.end_reason is EndReason.OUTBID
    assert second.quote.offer.offer_id != first.quote.offer.offer_id
    assert rig.shop.machine_of(AttemptKey(KEY(1))).state is InstanceState.GONE
    assert [c.name for c in rig.job(name).checkpoints] == ["step-1"]


async def test_what_a_host_published_right_before_it_was_taken_is_not_lost(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        rig.shop.set_state(AttemptKey(KEY(1)), InstanceState.PAUSED, Loss.OUTBID)
        host.checkpoint("last-words")
        await rig.until(lambda: len(rig.attempts(name)) == 2)
    assert [c.name for c in rig.job(name).checkpoints] == ["last-words"]


async def test_a_lost_answer_is_settled_by_the_machine_that_carries_the_key(rig: Rig) -> None:
    rig.shop.faults["launch"].append(OutcomeUnknown("the line broke", key=KEY(1)))
    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: rig.attempts(name)[-1].ref is not None if rig.attempts(name) else False)
    assert len(rig.shop.machines) == 1
    assert len(rig.attempts(name)) == 1
    assert {"launch.unknown", "machine.adopted"} <= set(rig.kinds(name))


async def test_a_search_by_key_that_fails_hides_no_machine_of_the_list(rig: Rig) -> None:
    async with rig.running():
        first = await rig.submit(job(1))
        await rig.until_running(first, 1)
        rig.shop.always["find"] = Unavailable("the search is broken")
        rig.shop.faults["launch"].append(Hang())
        second = await rig.submit(job(2))
        await rig.until(lambda: any(item.outcome_unknown for item in rig.attempts(second)))
        rig.shop.set_state(rig.attempts(first)[0].key, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: rig.attempts(first)[0].end_reason is EndReason.OUTBID, within=timedelta(minutes=2))


async def test_a_launch_that_never_answers_is_not_repeated_before_the_window_has_passed(rig: Rig) -> None:
    rig.shop.faults["launch"].append(Hang())
    async with rig.running():
        name = await rig.submit()
        asked_at = rig.clock.now()
        await rig.until(lambda: len(rig.shop.requests) == 2)
        waited = rig.clock.now() - asked_at
    assert waited >= rig.policy.current.providers[rig.shop.name].reconcile_window
    assert rig.attempts(name)[0].end_reason is EndReason.NEVER_LAUNCHED


async def test_a_plugin_that_breaks_in_the_middle_of_a_launch_is_treated_as_unknown(rig: Rig) -> None:
    rig.shop.faults["launch"].append(Garbage("a bug of the plugin"))
    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: "launch.unknown" in rig.kinds(name))
        assert len(rig.shop.requests) == 1
        await rig.until(lambda: len(rig.shop.requests) == 2)
    assert "provider.broke_contract" in rig.log.events()


def _sold(rig: Rig, machines: int) -> bool:
    return len(rig.shop.machines) == machines


async def test_a_queue_of_jobs_is_not_refused_what_its_own_jobs_bought(rig: Rig) -> None:
    rig.shop.offer_index = [offer(f"o{number}", price=400_000 + number) for number in range(4)]
    rig.shop.sells_once = True
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.snapshot().by_provider[rig.shop.name].offer_index.size == 4)
        for number in range(1, 4):
            await rig.submit(job(number))
            await rig.until(partial(_sold, rig, number))
    assert rig.shop.counts["launch"] == 3


@pytest.mark.parametrize("refusal", [PriceMoved("it is dearer now"), OfferGone("it was sold")], ids=["price", "offer"])
async def test_an_old_board_is_asked_for_again_at_once(refusal: ProviderError, rig: Rig) -> None:
    async with rig.running():
        await rig.until(lambda: rig.shop.counts["offers"] == 1)
        rig.shop.faults["launch"].append(refusal)
        asked_at = rig.clock.now()
        await rig.submit()
        await rig.until(lambda: rig.shop.counts["offers"] == 2)
        assert rig.clock.now() - asked_at < timedelta(seconds=10), "the next poll is due in half a minute"


async def test_a_refusal_moves_on_to_the_next_quote_at_once(rig: Rig) -> None:
    rig.shop.faults["launch"].append(NoCapacity("sold out"))
    async with rig.running():
        name = await rig.submit()
        asked_at = rig.clock.now()
        await rig.until(lambda: bool(rig.shop.alive()))
        assert rig.clock.now() - asked_at < timedelta(seconds=60)
    assert [r.offer.offer_id for r in rig.shop.requests] == ["o1", "o2"]
    assert rig.attempts(name)[0].end_reason is EndReason.LAUNCH_FAILED


async def test_a_machine_sold_against_the_rules_is_ended_as_a_stray(rig: Rig) -> None:
    rig.shop.faults["launch"].append(ContractViolation("sold on-demand"))
    async with rig.running():
        await rig.submit()
        await rig.until(lambda: "attempt.contract_broken" in rig.kinds())
        rig.shop.put_machine(AttemptKey(KEY(1)))
        await rig.until(lambda: rig.shop.machine_of(AttemptKey(KEY(1))).state is InstanceState.GONE)


async def test_ending_a_machine_is_tried_until_the_provider_takes_it(rig: Rig) -> None:
    rig.shop.faults["terminate"].extend([Unavailable("down"), Hang(), Garbage("bug"), Unavailable("down")])
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.exit("succeeded")
        await rig.until(lambda: not rig.shop.not_gone())
    assert rig.shop.counts["terminate"] >= 5
    assert rig.kinds(name).count("machine.ending_failed") == 1


async def test_a_stray_under_our_label_is_destroyed_and_a_foreign_machine_is_not_touched(rig: Rig) -> None:
    stray = AttemptKey("spotd-lab-forgotten-3")
    foreign = AttemptKey("spotd-other-j1-1")
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.machines(rig.shop.name).listing is not None)
        rig.shop.put_machine(stray)
        rig.shop.put_machine(foreign)
        await rig.until(lambda: rig.shop.machine_of(stray).state is InstanceState.GONE, within=timedelta(minutes=12))
        await rig.clock.sleep(timedelta(minutes=30))
    assert rig.shop.machine_of(foreign).state is InstanceState.RUNNING


async def test_a_woken_zombie_is_ended_within_one_poll(rig: Rig) -> None:
    rig.shop.faults["terminate"].append(Hang())
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        rig.shop.set_state(AttemptKey(KEY(1)), InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: len(rig.attempts(name)) == 2)
        rig.shop.set_state(AttemptKey(KEY(1)), InstanceState.RUNNING)
        await rig.until(
            lambda: rig.shop.machine_of(AttemptKey(KEY(1))).state is InstanceState.GONE, within=timedelta(minutes=2)
        )


async def test_a_silent_store_of_checkpoints_ends_no_attempt(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(key: str, *, bytes_max: int) -> bytes:
        raise StoreUnavailable("no answer")

    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        with monkeypatch.context() as patched:
            patched.setattr(rig.objects, "get", down)
            await rig.clock.sleep(timedelta(hours=1))
            assert rig.job(name).state is JobState.RUNNING
        await rig.until(lambda: rig.attempts(name)[0].end_reason is EndReason.HOST_LOST)
    assert rig.log.events().count("checkpoint_store.away") == 1
    assert rig.log.events().count("checkpoint_store.back") == 1


@pytest.mark.lengthy
async def test_a_store_that_goes_away_during_a_stop_delays_no_end_and_costs_no_cycles(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_args: object, **_kwargs: object) -> bytes:
        raise StoreUnavailable("no answer")

    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        for call in ("get", "list", "head", "put"):
            monkeypatch.setattr(rig.objects, call, down)
        await rig.cancel(name)
        since, before = rig.clock.now(), rig.control_loop.cycles
        await rig.until(lambda: not rig.shop.not_gone())
        assert rig.clock.now() - since <= timedelta(minutes=4), "stop_grace, the time for saving and one pause"
        await rig.clock.sleep(timedelta(minutes=30))
        took_s = (rig.clock.now() - since).total_seconds()
        assert rig.control_loop.cycles - before <= took_s, "never more than a cycle a second where nothing happens"


async def test_a_state_that_cannot_be_written_holds_everything_and_is_told_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotd.store import StateUnavailable

    def full(_work: object) -> None:
        raise StateUnavailable("the disk is full", hint="free some space")

    async with rig.running():
        name = await rig.submit(job(ceiling=1))
        await rig.until_state(name, JobState.WAITING_PRICE)
        with monkeypatch.context() as patched:
            patched.setattr(rig.store, "tx", full)
            await rig.clock.sleep(timedelta(minutes=10))
            assert rig.database.last_error == "the disk is full"
            assert not rig.shop.requests
        await rig.until(lambda: rig.database.last_error == "")
    assert rig.log.events().count("state.held") == 1
    assert rig.log.events().count("state.back") == 1


async def test_an_outcome_is_kept_until_it_can_be_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from spotd.store import StateUnavailable

    real = rig.store.tx
    broken = [False]

    def sometimes(work: object) -> object:
        if broken[0]:
            raise StateUnavailable("the disk is full", hint="free some space")
        return real(work)  # type: ignore[arg-type]  # handed through unchanged

    monkeypatch.setattr(rig.store, "tx", sometimes)

    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: bool(rig.shop.requests))
        broken[0] = True
        await rig.clock.sleep(timedelta(minutes=5))
        broken[0] = False
        await rig.until(lambda: rig.attempts(name)[0].ref is not None)
    assert len(rig.shop.requests) == 1


async def test_a_cancelled_job_is_told_to_save_and_its_machine_ends(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        await rig.cancel(name)
        await rig.until(lambda: rig.grant(name, 1).orders.stop is not None)
        host.checkpoint("saved")
        host.exit("stopped", code=143)
        await rig.until_state(name, JobState.CANCELLED)
        await rig.until(lambda: not rig.shop.not_gone())
    assert [c.name for c in rig.job(name).checkpoints] == ["saved"]


async def test_a_machine_whose_command_was_seen_running_is_told_at_once_not_to_begin_anew(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: any(item.ref is not None for item in rig.attempts(name)))
        assert not rig.grant(name, 1).seen_running
        await rig.until_running(name, 1)
        since = rig.clock.now()
        await rig.until(lambda: rig.grant(name, 1).seen_running)
        assert rig.clock.now() - since < timedelta(seconds=30)


async def test_one_provider_that_hangs_delays_nobody_else(tmp_path: object) -> None:
    from pathlib import Path

    from spotd_providers.contract.values import ProviderName
    from tests.unit.daemon.clocks import VirtualClock
    from tests.unit.daemon.rig import two_shops

    clock = VirtualClock()
    rig = two_shops(Path(str(tmp_path)), clock)
    dead = rig.shops[1]
    for method in ("offers", "instances"):
        dead.always[method] = Hang()
    async with rig.running():
        await rig.submit()
        asked_at = rig.clock.now()
        await rig.until(lambda: bool(rig.shop.alive()))
        assert rig.clock.now() - asked_at <= timedelta(seconds=2)
        await rig.clock.sleep(timedelta(minutes=3))
        provider_offers = rig.offer_cache.snapshot().by_provider[ProviderName("second")]
    assert "no answer within" in provider_offers.error
    assert rig.kinds().count("provider.away") == 1


async def test_an_outage_is_noted_once_when_it_begins_and_once_when_it_ends(rig: Rig) -> None:
    rig.shop.faults["offers"].extend([Unavailable("down")] * 4)
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=40))
    assert rig.kinds().count("provider.away") == 1
    assert rig.kinds().count("provider.back") == 1
    assert [line["event"] for line in rig.log.lines if line["event"].startswith("provider.")] == [
        "provider.away",
        "provider.back",
    ]


async def test_a_rate_limit_is_waited_out(rig: Rig) -> None:
    rig.shop.faults["offers"].append(RateLimited("slow down", retry_after=timedelta(minutes=7)))
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=6))
        assert rig.shop.counts["offers"] == 1
        await rig.clock.sleep(timedelta(minutes=3))
        assert rig.shop.counts["offers"] > 1


async def test_a_refused_key_is_asked_about_once_a_minute_and_not_more_often(rig: Rig) -> None:
    rig.shop.always["offers"] = AuthFailed("the key is wrong")
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=30))
    assert 30 <= rig.shop.counts["offers"] <= 30 * 60 / 50


async def test_the_watchdog_is_fed_by_completed_cycles(rig: Rig) -> None:
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=10))
    assert rig.alive >= rig.control_loop.cycles > 5


async def test_an_idle_daemon_lists_machines_seldom_and_an_inhabited_one_at_every_poll(rig: Rig) -> None:
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=30))
        idle = rig.shop.counts["instances"]
        name = await rig.submit()
        await rig.until_running(name, 1)
        before = rig.shop.counts["instances"]
        await rig.clock.sleep(timedelta(seconds=40))
        assert rig.shop.counts["instances"] > before
    assert idle <= 4


async def test_intents_of_a_former_process_are_never_launched_again(rig: Rig) -> None:
    rig.crash_at = CrashPoint.BEFORE_LAUNCH
    with anyio.move_on_after(60):
        await _live_until_killed(rig)
    assert rig.dead
    reborn = rig.reborn()
    async with reborn.running():
        await reborn.clock.sleep(timedelta(minutes=2))
        assert not reborn.shop.requests
        await reborn.until(lambda: bool(reborn.shop.requests))
    assert [r.key for r in reborn.shop.requests] == [KEY(2)]


async def test_a_launch_that_is_owed_before_the_executor_runs_is_made_when_it_does(rig: Rig) -> None:
    await rig.control_loop.adopt()
    await rig.pollers[rig.shop.name].poll_offers()
    name = await rig.submit()
    await rig.control_loop.reconcile_once()
    assert not rig.shop.requests
    async with anyio.create_task_group() as group:
        group.start_soon(rig.executor.run)
        await rig.until(lambda: rig.attempts(name)[0].ref is not None)
        group.cancel_scope.cancel()


async def _live_until_killed(rig: Rig) -> None:
    from tests.unit.daemon.rig import Killed

    try:
        async with rig.running():
            await rig.submit()
            await anyio.sleep_forever()
    except BaseExceptionGroup as group:
        killed, rest = group.split(Killed)
        if killed is None or rest is not None:
            raise
