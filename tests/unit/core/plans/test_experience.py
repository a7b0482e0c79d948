"""What is learnt from attempts that are over, how it fades, and what hazards and hosts are made of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.bids import keep_outbid
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import (
    KEPT_FOR,
    ONE,
    Experience,
    RecordId,
    RecordKind,
    World,
    added,
    faded,
    is_faded,
    with_records,
)
from spotd.core.experience import (
    HAZARD_PPM_MAX,
    MALUS_PPM_MAX,
    PPM,
    Hazards,
    host_memories,
    malus_ppm,
    records_of_host,
    slot_of,
)
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.starts import PRIOR, START_MAX, is_slow, usual_start
from spotd_providers.contract.values import HostId, Market, PoolId, ProviderName
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, offer, report, world_with
from tests.unit.core.experiences import HOUR, experience, experiences, record

K = RecordKind
DAY = timedelta(days=1)


def ended(
    reason: EndReason, *, hours: float = 5, state: AttemptState = AttemptState.RUNNING, **changes: object
) -> World:
    """A world in which the attempt ends now, so long after its launch."""
    world = world_with(state)
    [item] = world.attempts.values()
    launched = NOW - hours * HOUR
    item = replace(item, launched_at=launched, intended_at=launched, meter=replace(item.meter, since=launched))
    if item.running_at is not None:
        item = replace(item, running_at=launched + MINUTE)
    world = replace(world, attempts={item.id: replace(item, **changes)})  # type: ignore[arg-type]  # fields of Attempt
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(item.id, reason)
    return replace(world, experience=with_records(world.experience, builder.plan().experience))


def counts(known: Experience) -> dict[RecordKind, tuple[float, float]]:
    found: dict[RecordKind, tuple[float, float]] = {}
    for identity, one in known.items():
        before = found.get(identity.kind, (0.0, 0.0))
        found[identity.kind] = (before[0] + one.count / ONE, before[1] + one.span / HOUR)
    return found


# --- fading ----------------------------------------------------------------------------------------------------


def test_a_record_fades_by_half_in_its_half_life() -> None:
    one = record(K.LOSSES_POOL, "spot p", 8, 80, at=NOW - 28 * DAY)
    assert (faded(one, NOW).count, faded(one, NOW).span) == (2 * ONE, 20 * HOUR)
    assert faded(record(K.FAILED_STARTS, "h", 4, at=NOW - 3 * DAY), NOW).count == 2 * ONE


def test_a_record_of_a_clock_that_was_ahead_neither_fades_nor_grows() -> None:
    one = record(K.LOSSES_POOL, "spot p", 8, 80, at=NOW + 365 * DAY)
    assert faded(one, NOW) == one
    assert added(one, one.id, ONE, HOUR, NOW).count == 9 * ONE


def test_what_has_faded_or_is_old_is_forgotten() -> None:
    assert is_faded(record(K.FAILED_STARTS, "h", 1, at=NOW - 20 * DAY), NOW)
    assert is_faded(record(K.LOSSES_POOL, "spot p", 10**5, 10**5, at=NOW - KEPT_FOR - DAY), NOW)
    assert not is_faded(record(K.LOSSES_POOL, "spot p", 1, 1), NOW)


# --- learning --------------------------------------------------------------------------------------------------


@every("reason", [EndReason.PREEMPTED, EndReason.OUTBID, EndReason.HOST_LOST])
def test_a_loss_is_added_to_host_pool_provider_and_time_of_the_week(reason: EndReason) -> None:
    found = counts(ended(reason).experience)
    assert found == {
        K.LOSSES_PROVIDER: (1, 5),
        K.LOSSES_POOL: (1, 5),
        K.LOSSES_HOST: (1, 5),
        K.LOSSES_TIME: (1, 5),
    }


@every(
    "reason", [EndReason.DONE, EndReason.CANCELLED, EndReason.OVER_BUDGET, EndReason.PRICE_ROSE, EndReason.USER_ERROR]
)
def test_an_end_that_is_ours_adds_hours_and_no_loss(reason: EndReason) -> None:
    assert counts(ended(reason).experience)[K.LOSSES_HOST] == (0, 5)


def test_the_hours_are_those_of_the_parts_of_the_week_in_which_they_lay() -> None:
    known = ended(EndReason.PREEMPTED, hours=5).experience
    slots = {i.subject: (r.count, r.span) for i, r in known.items() if i.kind is K.LOSSES_TIME}
    last = slot_of(NOW)
    assert slots == {
        f"spot {last - 2}": (0, 2 * HOUR),
        f"spot {last - 1}": (0, 3 * HOUR),
        f"spot {last}": (ONE, HOUR * 0),
    }


def test_hours_that_nothing_proves_are_not_counted() -> None:
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    known = ended(EndReason.HOST_LOST, meter=replace(item.meter, since=NOW - 5 * HOUR, until=NOW - 4 * HOUR)).experience
    assert counts(known)[K.LOSSES_PROVIDER] == (1, 1)


def test_a_clock_that_leapt_adds_no_year_of_machine_time() -> None:
    assert counts(ended(EndReason.DONE, hours=9_000).experience)[K.LOSSES_PROVIDER] == (0, 30 * 24)


def test_a_machine_that_never_spoke_is_a_failed_start_and_no_preemption() -> None:
    known = ended(EndReason.PROVISION_TIMEOUT, state=AttemptState.STARTING, hours=0.4).experience
    assert counts(known) == {K.FAILED_STARTS: (1, 0), K.START_TIMES: (1, pytest.approx(0.4))}


def test_a_loss_soon_after_the_launch_is_remembered_of_the_host() -> None:
    assert counts(ended(EndReason.OUTBID, hours=0.3).experience)[K.EARLY_LOSSES] == (1, 0)
    assert K.EARLY_LOSSES not in counts(ended(EndReason.OUTBID, hours=0.6).experience)


def test_a_machine_that_is_outbid_and_kept_is_one_loss_and_no_more_hours() -> None:
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    builder = PlanBuilder(world, NOW)
    keep_outbid(builder, item)
    held = builder.attempt(item.id)
    keep_outbid(builder, held)
    assert counts(builder.plan().experience)[K.LOSSES_HOST] == (1, 0)
    bidding = replace(held.bidding, held_since=NOW - HOUR)
    assert counts(ended(EndReason.OUTBID, hours=5, bidding=bidding).experience)[K.LOSSES_HOST] == (0, 4)


def test_a_job_that_failed_to_start_elsewhere_blames_no_host() -> None:
    world = world_with(AttemptState.STARTING)
    [job], [item] = world.jobs.values(), world.attempts.values()
    builder = PlanBuilder(replace(world, jobs={job.id: replace(job, failed_starts=1)}), NOW)
    builder.end_attempt(item.id, EndReason.PROVISION_TIMEOUT)
    assert not builder.plan().experience


def test_where_a_provider_names_no_hosts_none_is_remembered() -> None:
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    quote = replace(item.quote, offer=replace(item.quote.offer, host_id=None))
    assert K.LOSSES_HOST not in counts(ended(EndReason.OUTBID, hours=0.1, quote=quote).experience)


def started(world: World, *, minutes: float) -> World:
    [item] = world.attempts.values()
    item = replace(item, launched_at=NOW - minutes * MINUTE)
    plan = reconcile(replace(world, attempts={item.id: item}), {}, report(phase="run", seq=1), NOW)
    return replace(world, experience=with_records(world.experience, plan.experience))


def test_the_time_from_launch_to_command_is_measured_by_provider_and_image() -> None:
    known = started(world_with(AttemptState.STARTING), minutes=7).experience
    assert {(i.kind, i.subject): (r.count, r.span) for i, r in known.items()} == {
        (K.STARTS, "scratch"): (ONE, 7 * MINUTE),
        (K.STARTS, ""): (ONE, 7 * MINUTE),
        (K.START_TIMES, "spot started 1000"): (ONE, 7 * MINUTE),
    }
    # three starts of the prior weigh as much as three that were seen, and the image's own come on top of all images'
    of_provider = (3 * PRIOR + 7 * MINUTE) / 4
    assert usual_start(known, SHOP, "other") == of_provider
    assert usual_start(known, SHOP, "scratch") == (3 * of_provider + 7 * MINUTE) / 4
    assert usual_start({}, SHOP, "scratch") == PRIOR


def test_a_start_that_takes_much_longer_than_usual_is_remembered_of_the_host() -> None:
    known = experience(record(K.STARTS, "scratch", 30, 1.5), record(K.STARTS, "", 30, 1.5))
    assert is_slow(known, SHOP, "scratch", 15 * MINUTE)
    world = replace(world_with(AttemptState.STARTING), experience=known)
    assert counts(started(world, minutes=15).experience)[K.SLOW_STARTS] == (1, 0)
    assert K.SLOW_STARTS not in counts(started(world, minutes=9).experience)


def test_a_start_of_a_clock_that_leapt_counts_bounded_or_not_at_all() -> None:
    assert counts(started(world_with(AttemptState.STARTING), minutes=-9).experience) == {}
    world = started(world_with(AttemptState.STARTING), minutes=10**6)
    assert counts(world.experience)[K.STARTS] == (2, 2 * START_MAX / HOUR)


# --- hazards ---------------------------------------------------------------------------------------------------


def test_nothing_known_is_what_the_provider_states_else_nothing() -> None:
    none = Hazards({}, NOW)
    assert [none.of(offer()), none.of(offer(hazard_ppm=500)), none.of(offer(hazard_ppm=10**9))] == [0, 500, 100_000]


def test_one_loss_says_little_and_many_say_much() -> None:
    def of_host(losses: float, hours: float) -> float:
        known = experience(record(K.LOSSES_PROVIDER, "spot", losses, hours))
        return Hazards(known, NOW).of(offer()) / PPM

    assert of_host(0, 500) == 0
    assert of_host(1, 1) == pytest.approx(1 / 25, abs=0.0001)
    assert of_host(200, 1000) == pytest.approx(200 / 1024, abs=0.0001)


def test_a_finer_level_is_shrunk_towards_the_coarser() -> None:
    known = experience(
        record(K.LOSSES_PROVIDER, "spot", 50, 500),
        record(K.LOSSES_POOL, "spot pool-bad", 40, 100),
        record(K.LOSSES_HOST, "spot host-bad", 20, 25),
    )
    hazards = Hazards(known, NOW)
    elsewhere = hazards.of(offer("new"))
    in_pool = hazards.of(offer("x", pool=PoolId("pool-bad"), host_id=None))
    on_host = hazards.of(offer("x", host_id=HostId("host-bad")))
    # of the 20 losses in 25 hours of one host two in 2.5 hours count elsewhere
    assert elsewhere / PPM == pytest.approx(32 / (24 + 477.5), abs=0.0001)
    # the provider elsewhere had 10 losses in 400 hours, and this is worth 24 hours beside the pool's own 100
    assert in_pool / PPM == pytest.approx((10 / 424 * 24 + 40) / 124, abs=0.0001)
    assert on_host / PPM == pytest.approx((30 / 499 * 24 + 20) / 49, abs=0.0001)


@every("losses", [3, 10, 100, 10_000])
@every("hours", [0.2, 2, 40])
def test_one_bad_host_adds_to_its_provider_no_more_than_two_losses(losses: int, hours: float) -> None:
    def elsewhere(of_host: float, quiet: float) -> float:
        in_slot = record(K.LOSSES_TIME, f"spot {slot_of(NOW)}", of_host, hours)
        whole = record(K.LOSSES_PROVIDER, "spot", of_host, hours + quiet)
        known = experience(whole, in_slot, record(K.LOSSES_HOST, "spot host-bad", of_host, hours))
        return Hazards(known, NOW).of(offer("other", host_id=HostId("host-other"))) / PPM

    for quiet in (0, 50, 500):
        two = 2 / (24 + quiet)
        assert elsewhere(losses, quiet) <= two * (3 + 2) / 3 + 0.0001
        # and a bad host does not make its provider look better either
        assert elsewhere(losses, quiet) >= elsewhere(0, quiet)


def test_a_bad_host_itself_is_judged_by_all_that_it_lost() -> None:
    def of_host(losses: float) -> int:
        host = record(K.LOSSES_HOST, "spot host-bad", losses, 2)
        known = experience(record(K.LOSSES_PROVIDER, "spot", losses, 102), host)
        return Hazards(known, NOW).of(offer(host_id=HostId("host-bad")))

    assert of_host(10) / PPM == pytest.approx(10 / 26, abs=0.001)
    assert of_host(2) < of_host(5) < of_host(10)


def test_losses_of_many_hosts_count_in_full() -> None:
    hosts = (record(K.LOSSES_HOST, f"spot h{n}", 2, 3) for n in range(20))
    known = experience(record(K.LOSSES_PROVIDER, "spot", 40, 60), *hosts)
    other = offer(host_id=HostId("new"))
    assert Hazards(known, NOW).of(other) / PPM == pytest.approx(40 / 84, abs=0.001)


def test_a_provider_without_records_counts_like_the_others() -> None:
    known = experience(record(K.LOSSES_PROVIDER, "spot", 50, 500))
    other = replace(offer(), provider=ProviderName("pod"))
    assert Hazards(known, NOW).of(other) == pytest.approx(Hazards(known, NOW).of(offer()), rel=0.001)
    assert Hazards(known, NOW).of(offer(market=Market.ON_DEMAND)) == 0


def test_machines_that_run_now_are_evidence_too() -> None:
    known = experience(record(K.LOSSES_PROVIDER, "spot", 5, 50))
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    long_lived: list[Attempt] = [replace(item, launched_at=NOW - 300 * HOUR)]
    assert Hazards(known, NOW, long_lived).of(offer()) < Hazards(known, NOW).of(offer()) / 2


def test_the_hours_of_the_week_raise_or_lower_it_within_bounds() -> None:
    slot = slot_of(NOW)
    base = (record(K.LOSSES_PROVIDER, "spot", 40, 400),)
    plain = Hazards(experience(*base), NOW).of(offer())
    bad = Hazards(experience(*base, record(K.LOSSES_TIME, f"spot {slot}", 30, 10)), NOW).of(offer())
    good = Hazards(experience(*base, record(K.LOSSES_TIME, f"spot {slot}", 0, 60)), NOW).of(offer())
    assert good < plain < bad
    worst = Hazards(experience(*base, record(K.LOSSES_TIME, f"spot {slot}", 30, 10)), NOW)
    assert worst.of(offer(hazard_ppm=10**9)) <= worst.highest
    assert bad <= 3 * plain + 1
    assert good >= plain // 3 - 1


HOSTS, POOLS = ["h0", "h1"], ["p0", "p1"]
POD = ProviderName("pod")


@given(
    known=experiences([SHOP, POD], HOSTS, POOLS),
    provider=st.sampled_from([SHOP, POD]),
    host=st.none() | st.sampled_from(HOSTS),
    pool=st.sampled_from(POOLS),
    market=st.sampled_from(Market),
    stated=st.none() | st.integers(0, 10**9),
    prior=st.sampled_from([0, 166_667]),
)
def test_no_hazard_is_outside_its_bounds(
    known: Experience,
    provider: ProviderName,
    host: str | None,
    pool: str,
    market: Market,
    stated: int | None,
    prior: int,
) -> None:
    one = offer(host_id=None if host is None else HostId(host), pool=PoolId(pool), market=market, hazard_ppm=stated)
    hazards = Hazards(known, NOW, prior_ppm=prior)
    found = hazards.of(replace(one, provider=provider))
    assert 0 <= found <= hazards.highest <= HAZARD_PPM_MAX
    assert 0 <= malus_ppm(known, provider, HostId(host or "h0"), NOW) <= MALUS_PPM_MAX


# --- hosts -----------------------------------------------------------------------------------------------------


def test_hosts_are_listed_worst_first_and_can_be_named() -> None:
    known = experience(
        record(K.FAILED_STARTS, "a", 1),
        record(K.EARLY_LOSSES, "b", 2),
        record(K.LOSSES_HOST, "spot b", 2, 1),
        record(K.LOSSES_HOST, "spot c", 0, 9),
        record(K.LOSSES_POOL, "spot a", 7, 9),
    )
    found = host_memories(known, NOW)
    assert [(one.host, one.malus_ppm) for one in found] == [("b", 110_000), ("a", 55_000), ("c", 0)]
    assert (found[0].losses, found[0].hours) == (2 * ONE, HOUR)
    assert len(records_of_host(known, "b")) == len(records_of_host(known, "shop/b")) == 2
    assert records_of_host(known, "pod/b") == ()
    assert [i.kind for i in records_of_host(known, "a")] == [K.FAILED_STARTS]
    assert RecordId(kind=K.LOSSES_POOL, provider=SHOP, subject="spot a") not in records_of_host(known, "a")


def test_a_machine_that_did_not_start_is_remembered_of_its_host_and_no_other_end_is() -> None:
    """A machine that fell silent while it started may have failed to start; one that was taken or refused has not."""
    remembered = {
        reason
        for reason in EndReason
        if K.FAILED_STARTS in counts(ended(reason, state=AttemptState.STARTING, heartbeat_seen_at=None).experience)
    }
    assert remembered == {EndReason.PROVISION_TIMEOUT, EndReason.HOST_LOST, EndReason.CONTRACT_BROKEN}
