"""Own hosts of which one is lost while the others keep their part of an attempt: another one gets its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotd_providers.contract.errors import NoCapacity, ProviderError, Unavailable
from spotd_providers.contract.values import Instance, InstanceState, LaunchRequest, Offer, Power
from spotd_providers.ssh.answers import Places, key_in
from spotd_providers.ssh.plugin import SshProvider
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.clock import run_virtually
from tests.fakes.ssh.host import FakeHost
from tests.unit.providers.ssh.harness import SshHarness, open_harness, wait_for

Story = Callable[[SshHarness, SshProvider, LaunchRequest, Instance], Awaitable[None]]
OFF = "exec 2>/dev/null; exit 3"
NO_FOLDER = "#!/bin/sh\ncase $* in *machines/spotd*) exit 1 ;; esac\nexec /bin/mkdir $*\n"
NUMBER = 3


def play(folder: Path, story: Story, *, spare: bool = True) -> None:
    """Play the story over a gang on titan and twin, with a third host that is like them, or without."""
    with open_harness(folder, pool=True, spare=spare) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                page = await provider.offers(h.query())
                one: Offer = next(one for one in page.offers if one.offer_id == "titan:RTX_4090:2")
                h.hosts["twin"].show(*h.hosts["twin"].gpus)
                request = h.request(gang_of(one, 2), start_script="#!/bin/sh\nexec sleep 600\n")
                if spare:
                    h.hosts["spare"].use(*(gpu.uuid for gpu in h.hosts["spare"].gpus))
                made = (await provider.launch(request)).instance
                if spare:
                    h.hosts["spare"].use()
                assert _round_on(h.hosts["twin"], request.key) == ""
                await story(h, provider, request, made)

        run_virtually(main)


def _is_alive(host: FakeHost, folder: str) -> bool:
    return host.leader(folder) is not None or bool(host.members(folder))


def _round_on(host: FakeHost, folder: str) -> str | None:
    """Return the round that a machine of a host was given, empty for none; `None` where it does not live."""
    for pid in host.members(folder):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found = {name: value for name, _, value in (word.partition(b"=") for word in words)}
        assert found[b"SPOTD_NODE_RANK"] == b"1"
        return found.get(b"SPOTD_NODE_ROUND", b"").decode()
    return None


def _kill(host: FakeHost, folder: str) -> None:
    host.kill(folder)
    wait_for(lambda: not _is_alive(host, folder))


async def _row(provider: SshProvider, request: LaunchRequest) -> Instance:
    (found,) = [one for one in (await provider.instances()).instances if one.key == request.key]
    return found


def test_a_lost_one_is_replaced_on_another_host_of_the_pool_once_for_each_number(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        for _ in range(2):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        fresh = f"{request.key}.{NUMBER}"
        assert _round_on(h.hosts["spare"], fresh) == str(NUMBER)
        assert _is_alive(h.hosts["titan"], request.key)
        assert not _is_alive(h.hosts["twin"], fresh)
        found = await _row(provider, request)
        assert (found.ref, found.state, found.price, found.detail) == (made.ref, InstanceState.RUNNING, 800_000, "")
        assert [one.ref for one in await provider.find(request.key)] == [made.ref]
        _kill(h.hosts["spare"], fresh)
        assert (await _row(provider, request)).detail == "machine 2 of 2 on spare is lost"
        await provider.replace_members(request, made.ref, [1], NUMBER + 1)
        assert _round_on(h.hosts["twin"], f"{request.key}.{NUMBER + 1}") == str(NUMBER + 1)
        await provider.terminate(made.ref)
        assert not any(one.running for one in h.machines())
        assert (await _row(provider, request)).state is InstanceState.GONE
        with pytest.raises(ProviderError):
            await provider.replace_members(request, made.ref, [1], NUMBER + 2)

    play(tmp_path, story)


def test_without_another_host_the_own_one_of_a_lost_machine_has_it_again(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        await provider.replace_members(request, made.ref, [1], NUMBER)
        assert _round_on(h.hosts["twin"], f"{request.key}.{NUMBER}") == str(NUMBER)
        assert (await _row(provider, request)).detail == ""
        await provider.terminate(made.ref)
        assert not any(one.running for one in h.machines())

    play(tmp_path, story, spare=False)


def test_a_silent_host_loses_its_place_and_what_it_still_runs_is_ended_once_it_answers(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        h.hosts["twin"].profile = OFF
        await provider.replace_members(request, made.ref, [1], NUMBER)
        assert _round_on(h.hosts["spare"], f"{request.key}.{NUMBER}") == str(NUMBER)
        listing = await provider.instances()
        assert not listing.complete
        assert [one.state for one in listing.instances if one.key == request.key] == [InstanceState.RUNNING]
        assert _is_alive(h.hosts["twin"], request.key)
        h.hosts["twin"].profile = ""
        assert (await _row(provider, request)).state is InstanceState.RUNNING
        assert not _is_alive(h.hosts["twin"], request.key)
        assert _is_alive(h.hosts["titan"], request.key)
        assert _is_alive(h.hosts["spare"], f"{request.key}.{NUMBER}")

    play(tmp_path, story)


def test_a_list_that_read_the_first_host_before_a_new_one_came_ends_nothing_of_it(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        await provider.replace_members(request, made.ref, [1], NUMBER)
        meta = h.hosts["titan"].folder(request.key) / "meta"
        before = meta.read_text()
        await provider.replace_members(request, made.ref, [1], NUMBER + 1)
        after = meta.read_text()
        meta.write_text(before)
        assert (await _row(provider, request)).state is InstanceState.RUNNING
        assert _is_alive(h.hosts["twin"], f"{request.key}.{NUMBER + 1}")
        meta.write_text(after)
        assert (await _row(provider, request)).detail == ""
        await provider.terminate(made.ref)
        assert not any(one.running for one in h.machines())

    play(tmp_path, story)


def test_all_are_gone_only_once_the_silent_host_of_a_former_one_has_answered(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        h.hosts["twin"].profile = OFF
        await provider.replace_members(request, made.ref, [1], NUMBER)
        with pytest.raises(Unavailable, match="twin"):
            await provider.terminate(made.ref)
        assert not _is_alive(h.hosts["titan"], request.key)
        assert not _is_alive(h.hosts["spare"], f"{request.key}.{NUMBER}")
        found = await _row(provider, request)
        assert (found.state, found.detail) == (InstanceState.UNKNOWN, "its machine on twin is not shown now")
        h.hosts["twin"].profile = ""
        await provider.terminate(made.ref)
        assert not any(one.running for one in h.machines())
        assert (await _row(provider, request)).state is InstanceState.GONE

    play(tmp_path, story)


def test_a_host_that_refuses_leaves_the_others_and_begins_by_the_next_same_call(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        h.hosts["spare"].program("mkdir", NO_FOLDER)
        h.hosts["twin"].use(*(gpu.uuid for gpu in h.hosts["twin"].gpus))
        with pytest.raises(NoCapacity, match="spare"):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        found = await _row(provider, request)
        assert (found.state, found.notice_at) == (InstanceState.RUNNING, None)
        assert found.detail == "machine 2 of 2 on spare has not begun"
        (h.hosts["spare"].bin / "mkdir").unlink()
        await provider.replace_members(request, made.ref, [1], NUMBER)
        assert _round_on(h.hosts["spare"], f"{request.key}.{NUMBER}") == str(NUMBER)
        assert _is_alive(h.hosts["titan"], request.key)

    play(tmp_path, story)


def test_no_room_in_the_pool_is_a_refusal_that_ends_none_of_the_others(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        h.hosts["twin"].profile = OFF
        with pytest.raises(NoCapacity, match="0 hosts of pool rack have RTX_4090 free at that price, not 1"):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        assert _is_alive(h.hosts["titan"], request.key)
        assert (await _row(provider, request)).state is InstanceState.RUNNING

    play(tmp_path, story, spare=False)


def test_a_start_that_broke_off_is_ended_and_another_host_has_the_place(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        # Its shell dies in the middle of the start.
        h.hosts["spare"].program("sync", "#!/bin/sh\nkill -9 $PPID\n")
        with pytest.raises(Unavailable, match="spare"):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        h.hosts["spare"].profile = OFF
        with pytest.raises(Unavailable, match="spare does not answer, so what was started there may run"):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        h.hosts["spare"].profile = ""
        await provider.replace_members(request, made.ref, [1], NUMBER)
        assert _round_on(h.hosts["twin"], f"{request.key}.{NUMBER}") == str(NUMBER)
        assert not _is_alive(h.hosts["spare"], f"{request.key}.{NUMBER}")
        assert (await _row(provider, request)).detail == ""

    play(tmp_path, story)


def test_a_start_that_arrives_after_the_end_of_all_starts_nothing(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        _kill(h.hosts["twin"], request.key)
        h.hosts["spare"].program("mkdir", NO_FOLDER)
        h.hosts["twin"].use(*(gpu.uuid for gpu in h.hosts["twin"].gpus))
        with pytest.raises(NoCapacity):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        (h.hosts["spare"].bin / "mkdir").unlink()
        await provider.terminate(made.ref)
        spare = next(one for one in provider._settings.hosts if one.name == "spare")
        page = await provider.offers(h.query())
        own = next(one for one in page.offers if one.offer_id == "spare:RTX_4090:2")
        places = Places(parts=(("titan", 0), ("spare", NUMBER)), origin="titan")
        await provider.begin(request, spare, own, (1, places, "127.0.0.1"))
        assert not any(one.running for one in h.machines())
        assert (await _row(provider, request)).state is InstanceState.GONE

    play(tmp_path, story)


def test_what_the_first_host_keeps_is_changed_only_while_it_runs_and_by_who_knows_what_it_was(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        titan = next(one for one in provider._settings.hosts if one.name == "titan")
        meta = h.hosts["titan"].folder(request.key) / "meta"
        before = meta.read_text().strip()
        after = f"{before} 1,twin"
        for _ in range(2):
            await provider.record(titan, request.key, before, after)
        with pytest.raises(Unavailable, match="another call has changed which hosts take part"):
            await provider.record(titan, request.key, before, f"{before} 1,spare")
        assert meta.read_text().strip() == after
        await provider.terminate(made.ref)
        with pytest.raises(Unavailable, match="it does not run"):
            await provider.record(titan, request.key, after, f"{before} 2,spare")

    play(tmp_path, story)


def test_one_that_is_left_out_ends_and_the_rest_cost_their_part(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        h.hosts["twin"].profile = OFF
        for _ in range(2):
            await provider.drop_members(made.ref, [1])
        found = await _listed_part(provider, request)
        assert (found.state, found.price, found.notice_at) == (InstanceState.RUNNING, 400_000, None)
        assert _is_alive(h.hosts["twin"], request.key)
        h.hosts["twin"].profile = ""
        assert (await _row(provider, request)).state is InstanceState.RUNNING
        assert not _is_alive(h.hosts["twin"], request.key)
        with pytest.raises(ProviderError, match="left out"):
            await provider.replace_members(request, made.ref, [1], NUMBER)
        await provider.terminate(made.ref)
        assert (await _row(provider, request)).state is InstanceState.GONE

    play(tmp_path, story)


async def _listed_part(provider: SshProvider, request: LaunchRequest) -> Instance:
    return next(one for one in (await provider.instances()).instances if one.key == request.key)


def test_without_a_pool_none_is_replaced(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:

        async def main() -> None:
            async with h.opened() as provider:
                capability = provider.capabilities[Power.REPLACE]
                assert not capability.available
                assert "pool" in capability.reason

        run_virtually(main)


@pytest.mark.parametrize(
    ("folder", "key"),
    [
        ("spotd-lab-j0b1-1", "spotd-lab-j0b1-1"),
        ("spotd-lab-j0b1-1.12", "spotd-lab-j0b1-1"),
        ("spotd-lab.3-j0b1-12", "spotd-lab.3-j0b1-12"),
        ("my notebook", "my notebook"),
    ],
)
def test_the_name_of_a_folder_holds_its_key(folder: str, key: str) -> None:
    assert key_in(folder) == key
