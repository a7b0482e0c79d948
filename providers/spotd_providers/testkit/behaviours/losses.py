"""Machines that are taken away: the provider says so, and says why as far as it knows."""

from __future__ import annotations

from datetime import timedelta

from spotd_providers.contract.provider import ChangesBids
from spotd_providers.contract.values import Instance, InstanceState, Loss, Market, Power
from spotd_providers.testkit.expect import an_offer, buy_machine, expect, the_machine
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.knobs import NotApplicable, OddState
from spotd_providers.testkit.suite import behaviour


async def _all_reports(h: Harness, instance: Instance) -> list[Instance]:
    listing = await h.provider.instances()
    listed = [i for i in listing.instances if i.key == instance.key]
    return [*await h.provider.find(instance.key), *listed]


@behaviour()
async def a_preempted_machine_is_not_called_running(h: Harness) -> None:
    """A machine the cloud took away is gone, ending or paused, for the reason that it was taken away."""
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.preempt(instance.ref.instance_id)
    for report in await _all_reports(h, instance):
        expect(
            report.state in (InstanceState.PAUSED, InstanceState.ENDING, InstanceState.GONE),
            f"a machine that was taken away is {report.state}",
        )
        expect(report.loss in (Loss.PREEMPTED, Loss.OUTBID), f"a machine that was taken away is lost by {report.loss}")


@behaviour()
async def an_outbid_machine_is_paused(h: Harness) -> None:
    """A machine that is outbid but kept is PAUSED for being outbid: it still exists and may wake up."""
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.pause(instance.ref.instance_id)
    report = await the_machine(h, instance.key)
    expect(report.state is InstanceState.PAUSED, f"a paused machine is {report.state}")
    expect(report.loss in (Loss.OUTBID, Loss.PREEMPTED), f"a paused machine is lost by {report.loss}")
    listing = await h.provider.instances()
    states = [i.state for i in listing.instances if i.key == instance.key]
    expect(states == [InstanceState.PAUSED], f"listed as {states}")


@behaviour()
async def a_notice_is_reported(h: Harness) -> None:
    """An announced loss is reported with its time while the machine still runs."""
    if not h.provider.capabilities[Power.NOTICES].available:
        raise NotApplicable(h.provider.capabilities[Power.NOTICES].reason)
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.give_notice(instance.ref.instance_id)
    report = await the_machine(h, instance.key)
    expect(report.notice_at is not None, "the notice is not reported")
    if report.notice_at is not None:
        expect(report.notice_at.utcoffset() == timedelta(0), "the notice's time is not aware UTC")
        expect(report.notice_at - h.clock.now() < timedelta(hours=1), f"the notice is for {report.notice_at}")
    expect(report.state is not InstanceState.GONE, "a machine with a notice is said to be gone")


@behaviour()
async def a_machine_that_cannot_come_up_says_so(h: Harness) -> None:
    """A machine whose image or container cannot be started is reported as lost for that reason."""
    _, instance = await buy_machine(h)
    h.set_state(instance.ref.instance_id, OddState.PROVISION_FAILED)
    for report in await _all_reports(h, instance):
        expect(report.state is not InstanceState.RUNNING, "a machine that cannot come up is called running")
        expect(
            report.loss in (Loss.PROVISION_FAILED, Loss.IMAGE_ERROR, Loss.HOST_LOST),
            f"a machine that cannot come up is lost by {report.loss}",
        )


@behaviour()
async def a_machine_that_ended_by_itself_is_not_called_running(h: Harness) -> None:
    """A machine that ended by itself is not RUNNING, and was not preempted."""
    _, instance = await buy_machine(h)
    h.set_state(instance.ref.instance_id, OddState.ENDED_BY_ITSELF)
    for report in await _all_reports(h, instance):
        expect(report.state is not InstanceState.RUNNING, "a machine that ended is called running")
        expect(report.loss is not Loss.PREEMPTED, "a machine that ended by itself is called preempted")


@behaviour()
async def raising_the_bid_of_an_absent_power_is_not_offered(h: Harness) -> None:
    """Whether bids can be changed is declared and implemented alike."""
    declared = h.provider.capabilities[Power.BID_CHANGE].available
    expect(not declared or isinstance(h.provider, ChangesBids), "bid changes are declared and not implemented")
