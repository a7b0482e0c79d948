"""How a server at an OpenStack cloud ends, and what a launch that is refused leaves in memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.errors import RequestRejected, Unavailable
from spotd_providers.contract.values import Billing, Instance, InstanceState, Loss
from spotd_providers.openstack.plugin import OpenstackProvider
from spotd_providers.testkit.serve import Call
from tests.fakes.openstack import OpenstackQuirks, refusal
from tests.unit.providers.openstack.harness import OpenstackHarness, a_server, an_offer, play


async def _shown(provider: OpenstackProvider) -> Instance:
    (shown,) = (await provider.instances()).instances
    return shown


@pytest.mark.parametrize("force", ["helps", "is forbidden", "is ignored"])
def test_a_deletion_that_hangs_is_forced_after_a_while(force: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        await provider.terminate(made.ref)
        await h.advance(timedelta(minutes=2))
        await provider.terminate(made.ref)
        assert (await _shown(provider)).state is InstanceState.ENDING
        await h.advance(timedelta(minutes=4))
        shown = await _shown(provider)  # which the daemon bills, and ends again
        assert (shown.state, shown.billing, shown.loss) == (InstanceState.UNKNOWN, Billing.FULL, None)
        assert "deletion hangs" in shown.detail
        if force == "is ignored":  # as by Nova, while the host of the server is up
            await provider.terminate(made.ref)
            again = await _shown(provider)
            assert (again.state, again.billing) == (InstanceState.ENDING, Billing.FULL)
            await h.advance(timedelta(minutes=6))
            assert (await _shown(provider)).state is InstanceState.UNKNOWN
        elif force == "is forbidden":
            with pytest.raises(Unavailable, match="still shows it"):
                await provider.terminate(made.ref)
            await h.settle()
            assert (await _shown(provider)).state is InstanceState.UNKNOWN
        else:
            await provider.terminate(made.ref)
            await h.settle()
            assert await provider.find(made.key) == ()

    quirks = OpenstackQuirks(deletes_hang=True, force_helps=force == "helps", forbids_force=force == "is forbidden")
    play(tmp_path, story, quirks)


def test_a_deletion_that_somebody_else_asked_for_hangs_as_well(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        assert (await _shown(provider)).state is InstanceState.RUNNING
        h.cloud.delete(made.ref.instance_id)
        assert (await _shown(provider)).state is InstanceState.ENDING
        await h.advance(timedelta(minutes=6))
        assert (await _shown(provider)).state is InstanceState.UNKNOWN
        await provider.terminate(made.ref)
        await h.settle()
        assert await provider.find(made.key) == ()

    play(tmp_path, story, OpenstackQuirks(deletes_hang=True, force_helps=True))


def test_a_server_that_never_came_up_is_paused_while_its_deletion_hangs(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.fail_next_boot("l4-90", "Build of instance aborted: the image is not acceptable")
        made = await a_server(h, provider)
        assert (await _shown(provider)).state is InstanceState.PAUSED
        h.cloud.delete(made.ref.instance_id)
        assert (await _shown(provider)).state is InstanceState.ENDING
        await h.advance(timedelta(minutes=6))
        shown = await _shown(provider)
        assert (shown.state, shown.loss) == (InstanceState.PAUSED, Loss.PROVISION_FAILED)

    play(tmp_path, story, OpenstackQuirks(deletes_hang=True))


def test_an_image_that_was_replaced_fails_no_job(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        await a_server(h, provider)
        new = h.cloud.replace_image("Ubuntu 24.04", "GRA11")  # as its operator does each night
        offer = await an_offer(h, provider)
        with pytest.raises(Unavailable, match="Can not find requested image"):
            await provider.launch(h.request(offer))
        await provider.launch(h.request(offer))
        assert [one.image_id for one in h.cloud.rented.values()][1:] == [new.image_id]

    play(tmp_path, story)


def test_a_request_that_is_refused_with_new_ids_is_rejected(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        await a_server(h, provider)
        offer = await an_offer(h, provider)
        h.refuse_launches(refusal(400, "Flavor's disk is too small for requested image."))
        with pytest.raises(Unavailable):
            await provider.launch(h.request(offer))
        with pytest.raises(RequestRejected):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


def test_an_image_that_fails_the_build_of_a_server_is_asked_for_again(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = (await provider.launch(h.request(await an_offer(h, provider)))).instance
        h.cloud.fail(made.ref.instance_id, "Image 7 could not be found.")
        new = h.cloud.replace_image("Ubuntu 24.04", "GRA11")  # as its operator does each night
        assert (await _shown(provider)).loss is Loss.PROVISION_FAILED
        await provider.launch(h.request(await an_offer(h, provider)))
        assert [one.image_id for one in h.cloud.rented.values()][1:] == [new.image_id]

    play(tmp_path, story)


def test_a_launch_in_a_version_that_nova_took_back_is_unavailable(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = await an_offer(h, provider)
        h.refuse_launches(refusal(406, "Version 2.74 is not supported by the API."))
        with pytest.raises(Unavailable, match="version"):
            await provider.launch(h.request(offer))
        assert len(h.requests(Call.LAUNCH)) == 1

    play(tmp_path, story)
