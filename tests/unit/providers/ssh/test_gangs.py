"""Several own hosts that carry one attempt: what fails on one of them, and what the whole is then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown, Unavailable
from spotd_providers.contract.values import Capability, Instance, InstanceState, LaunchRequest, Loss, Offer, Power
from spotd_providers.ssh.plugin import SshProvider
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.clock import run_virtually
from tests.unit.providers.ssh.harness import SshHarness, open_harness, wait_for

Story = Callable[[SshHarness, SshProvider], Awaitable[None]]
OFF = "exec 2>/dev/null; exit 3"


def play(folder: Path, story: Story) -> None:
    """Play the story over three hosts of one pool, of which two are alike."""
    with open_harness(folder, pool=True) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                await story(h, provider)

        run_virtually(main)


async def of_two(h: SshHarness, provider: SshProvider, host: str = "titan") -> LaunchRequest:
    page = await provider.offers(h.query())
    one: Offer = next(one for one in page.offers if one.offer_id == f"{host}:RTX_4090:2")
    return h.request(gang_of(one, 2), start_script="#!/bin/sh\nexec sleep 600\n")


async def row_of(provider: SshProvider, request: LaunchRequest) -> Instance:
    listing = await provider.instances()
    (found,) = [one for one in listing.instances if one.key == request.key]
    return found


def is_gone(h: SshHarness, name: str, key: str) -> bool:
    host = h.hosts[name]
    return host.leader(key) is None and not host.members(key)


def test_a_host_that_refuses_undoes_what_the_first_one_began(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = await of_two(h, provider)
        h.hosts["twin"].program("mkdir", "#!/bin/sh\ncase $* in *machines/spotd*) exit 1 ;; esac\nexec /bin/mkdir $*\n")
        with pytest.raises(NoCapacity, match="twin"):
            await provider.launch(request)
        assert is_gone(h, "titan", request.key)
        assert await provider.find(request.key) == ()
        (h.hosts["twin"].bin / "mkdir").unlink()
        again = await of_two(h, provider)  # its GPUs are free again
        assert (await provider.launch(again)).instance.state is InstanceState.RUNNING

    play(tmp_path, story)


def test_a_part_whose_answer_is_lost_is_unknown_and_found_by_its_key(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = await of_two(h, provider)
        # Its shell dies in the middle of the launch.
        h.hosts["twin"].program("sync", "#!/bin/sh\nkill -9 $PPID\n")
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (h.hosts["twin"].bin / "sync").unlink()
        assert is_gone(h, "titan", request.key), "what had begun was undone"
        for one in await provider.find(request.key):
            await provider.terminate(one.ref)
        assert await provider.find(request.key) == ()
        assert is_gone(h, "twin", request.key)

    play(tmp_path, story)


def test_the_loss_of_one_is_shown_and_that_of_all_is_the_end(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = await of_two(h, provider)
        made = (await provider.launch(request)).instance
        h.hosts["twin"].kill(request.key)
        wait_for(lambda: is_gone(h, "twin", request.key))
        found = await row_of(provider, request)
        assert (found.ref, found.state) == (made.ref, InstanceState.RUNNING)
        assert (found.notice_at, found.detail) == (None, "machine 2 of 2 on twin is lost")
        h.hosts["titan"].kill(request.key)
        wait_for(lambda: is_gone(h, "titan", request.key))
        found = await row_of(provider, request)
        assert (found.state, found.loss) == (InstanceState.PAUSED, Loss.HOST_LOST)
        await provider.terminate(made.ref)
        assert (await row_of(provider, request)).state is InstanceState.GONE

    play(tmp_path, story)


@pytest.mark.parametrize("off", ["titan", "twin"])
def test_a_silent_host_is_never_taken_for_ended_and_holds_up_no_other(tmp_path: Path, off: str) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = await of_two(h, provider)
        made = (await provider.launch(request)).instance
        other = "twin" if off == "titan" else "titan"
        h.hosts[off].profile = OFF
        listing = await provider.instances()
        assert not listing.complete
        assert [one.state for one in listing.instances if one.key == request.key] == [InstanceState.RUNNING]
        with pytest.raises(Unavailable):
            await provider.terminate(made.ref)
        assert is_gone(h, other, request.key)
        assert not is_gone(h, off, request.key)
        assert (await row_of(provider, request)).state is InstanceState.UNKNOWN
        h.hosts[off].profile = ""
        await provider.terminate(made.ref)
        assert is_gone(h, off, request.key)
        assert (await row_of(provider, request)).state is InstanceState.GONE

    play(tmp_path, story)


def test_a_machine_alone_is_ended_while_another_host_of_its_pool_is_off(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        page = await provider.offers(h.query())
        one = next(one for one in page.offers if one.offer_id == "titan:RTX_4090:1")
        request = h.request(one, start_script="#!/bin/sh\nexec sleep 600\n")
        made = (await provider.launch(request)).instance
        h.hosts["twin"].profile = OFF
        await provider.terminate(made.ref)
        assert is_gone(h, "titan", request.key)

    play(tmp_path, story)


def test_no_host_takes_part_that_costs_more_than_was_agreed(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        with pytest.raises(NoCapacity, match="1 hosts of pool rack have RTX_4090 free at that price, not 2"):
            await provider.launch(await of_two(h, provider))
        assert (await provider.launch(await of_two(h, provider, "twin"))).instance.price == 2 * 500_000

    with open_harness(tmp_path, pool=True) as h:
        h.prices["twin"] = 0.5

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                await story(h, provider)

        run_virtually(main)


def test_the_doctor_says_whether_the_hosts_of_a_pool_reach_each_other(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        lines = {one.name: one for one in await provider.check()}
        assert lines["pool rack"].ok, lines
        assert lines["pool rack"].detail == "titan, atlas, twin reach each other"
        h.hosts["twin"].program("python3", "#!/bin/sh\necho ENETUNREACH\n")
        line = {one.name: one for one in await provider.check()}["pool rack"]
        assert not line.ok
        assert "twin does not reach" in line.detail
        assert "ENETUNREACH" in line.detail
        assert "pool_address" in line.hint

    play(tmp_path, story)


def test_hosts_without_a_pool_start_no_several_machines(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        capability: Capability = provider.capabilities[Power.GANG]
        assert (capability.available, provider.nodes_max) == (False, 1)
        assert "pool" in capability.reason
        with pytest.raises(NoCapacity, match="titan, which has no pool"):
            await provider.launch(await of_two(h, provider))

    with open_harness(tmp_path) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                await story(h, provider)

        run_virtually(main)
