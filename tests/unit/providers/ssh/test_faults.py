"""What goes wrong on own hosts: reboots, cut launches, full disks, hanging GPUs, two daemons, owners who come back."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import anyio
import asyncssh
import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    InstallId,
    InstanceState,
    Interruption,
    Launched,
    Loss,
    Offer,
)
from spotd_providers.kit.ssh import _frame
from spotd_providers.local.hosts.processes import find_process
from spotd_providers.ssh.plugin import PLUGIN, SshProvider, script_for
from spotd_providers.ssh.settings import SshHost
from spotd_providers.testkit.harness import START_SCRIPT
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.ssh.host import BOOT, FakeHost
from tests.fakes.ssh.server import pin
from tests.unit.providers.ssh.harness import TITAN, SshHarness, play, wait_for


async def offer_of(provider: SshProvider, h: SshHarness, name: str) -> Offer:
    page = await provider.offers(h.query())
    return next(one for one in page.offers if one.offer_id == name)


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_jobs_share_a_host_by_gpu_and_know_only_their_own(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        h.hosts["titan"].profile = "echo Welcome; echo noise >&2; export LOGIN=secret"
        one = await offer_of(provider, h, "titan:RTX_4090:1")
        keys = [h.key(), h.key()]
        for key in keys:
            await provider.launch(h.request(one, key))
        with pytest.raises(OfferGone, match="no longer free"):
            await provider.launch(h.request(one))
        seen = set()
        for key in keys:
            found = [environment_of(pid) for pid in h.hosts["titan"].members(key)]
            assert found
            seen |= {env["CUDA_VISIBLE_DEVICES"] for env in found}
            for env in found:
                assert {"LOGIN", "LOGIN_SHELL_SECRET", "SPOTD_DIR"}.isdisjoint(env)
                assert env["PATH"] == h.hosts["titan"].path
                assert env["HOME"] == str(h.hosts["titan"].folder(key) / "job")
        assert seen == {gpu.uuid for gpu in TITAN}
        page = await provider.offers(h.query())
        assert {offer.offer_id for offer in page.offers} == {"atlas:T4:1"}
        await provider.terminate((await provider.find(keys[0]))[0].ref)
        page = await provider.offers(h.query())
        assert {offer.offer_id for offer in page.offers} == {"atlas:T4:1", "titan:RTX_4090:1"}

    play(tmp_path, story)


def test_the_same_key_twice_is_one_machine(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = h.request(await offer_of(provider, h, "titan:RTX_4090:1"))
        first = await provider.launch(request)
        again = await provider.launch(request)
        assert again.instance.ref == first.instance.ref
        assert len(h.live()) == 1
        assert len(list((h.hosts["titan"].state / "devices").iterdir())) == 1
        await provider.terminate(first.instance.ref)
        with pytest.raises(RequestRejected, match="before"):
            await provider.launch(request)
        assert not h.live()

    play(tmp_path, story)


def test_two_daemons_on_one_host_never_share_a_gpu(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        h.hosts["titan"].show(TITAN[0])
        offer = await offer_of(provider, h, "titan:RTX_4090:1")
        folder = tmp_path / "other"
        folder.mkdir()
        services = Services(install=InstallId("other"), clock=h.clock, rng=Random(1), log=h.log, state_dir=folder)
        outcomes: list[object] = []

        async def launch(one: SshProvider, key: str) -> None:
            try:
                outcomes.append(await one.launch(replace(h.request(offer), key=AttemptKey(key))))
            except ProviderError as exc:
                outcomes.append(exc)

        async with PLUGIN.open(h.settings(), services) as other, anyio.create_task_group() as group:
            assert isinstance(other, SshProvider)
            for number in range(4):
                group.start_soon(launch, provider, f"spotd-lab-j{number}-1")
                group.start_soon(launch, other, f"spotd-other-j{number}-1")
        won = [one for one in outcomes if isinstance(one, Launched)]
        assert len(won) == 1
        assert all(isinstance(one, OfferGone) for one in outcomes if one is not won[0])
        assert sum(machine.running for machine in h.machines()) == 1

    play(tmp_path, story)


def test_a_launch_that_was_cut_before_its_start_is_found_and_ended(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        host, key = h.hosts["titan"], h.key()
        await provider.offers(h.query())
        host.folder(key).mkdir(parents=True)
        (host.folder(key) / "meta").write_text(f"200000 {TITAN[0].uuid}\n")
        (host.state / "devices" / TITAN[0].uuid).write_text(f"{key}\n")
        (found,) = await provider.find(key)
        assert (found.state, found.loss) == (InstanceState.PAUSED, Loss.PROVISION_FAILED)
        # It holds nothing that others could not have.
        assert (await offer_of(provider, h, "titan:RTX_4090:2")).gpu_count == 2
        again = await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1"), key))
        assert again.instance.loss is Loss.PROVISION_FAILED
        await provider.terminate(found.ref)
        assert not await provider.find(key)
        assert not h.live()
        assert not list((host.state / "devices").iterdir())

    play(tmp_path, story)


def test_a_reboot_during_a_launch_starts_nothing(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = h.request(await offer_of(provider, h, "titan:RTX_4090:1"))
        boot = BOOT.read_text().strip()

        def before_it(true: Canned) -> Canned:
            return Canned(status=200, body=true.body.replace(boot.encode(), b"0" * 8 + boot[8:].encode()))

        h.faults.edit(Call.OTHER, before_it)
        with pytest.raises(OfferGone, match="too late"):
            await provider.launch(request)
        assert not h.live()

        def long_ago(true: Canned) -> Canned:
            content = json.loads(true.body)
            content["lines"] = [line.replace(boot, boot + "\t5\t", 1) for line in content["lines"]]
            return Canned(status=200, body=json.dumps(content).encode())

        h.faults.edit(Call.OTHER, long_ago)  # what was sent before the host slept
        with pytest.raises(OfferGone, match="too late"):
            await provider.launch(request)
        assert not h.live()

    play(tmp_path, story)


def test_a_machine_of_another_boot_is_lost_and_can_be_ended(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        host, key = h.hosts["titan"], h.key()
        await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1"), key))
        host.kill(key)
        for name in ("started", "child"):
            path = host.folder(key) / name
            path.write_text(path.read_text().replace(BOOT.read_text().strip(), "0" * 36))
        (found,) = await provider.find(key)
        assert (found.state, found.loss, found.billing) == (InstanceState.PAUSED, Loss.HOST_LOST, Billing.NOTHING)
        assert found.ended_at is not None
        assert found.ended_at <= h.clock.now()
        await provider.terminate(found.ref)
        assert not await provider.find(key)

    play(tmp_path, story)


def test_a_pid_that_was_given_away_is_not_the_machine(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        host = h.hosts["titan"]
        host.plant(["spotd-lab-j1-1"])
        started = host.folder("spotd-lab-j1-1") / "started"
        pid, since, *rest = started.read_text().split()
        started.write_text(" ".join([pid, str(int(since) - 1), *rest]) + "\n")
        (found,) = await provider.find(AttemptKey("spotd-lab-j1-1"))
        assert found.loss is Loss.HOST_LOST
        await provider.terminate(found.ref)
        assert find_process(int(pid)) is not None, "a stranger's process was killed"

    play(tmp_path, story)


def test_the_end_takes_the_whole_tree(tmp_path: Path) -> None:
    script = "#!/bin/sh\n(setsid sh -c 'sleep 600 & exec sleep 600' &)\nnohup sleep 600 &\ntrap '' TERM\nsleep 600\n"

    async def story(h: SshHarness, provider: SshProvider) -> None:
        host, key = h.hosts["titan"], h.key()
        offer = await offer_of(provider, h, "titan:RTX_4090:1")
        made = await provider.launch(h.request(offer, key, start_script=script))
        wait_for(lambda: len(host.members(key)) >= 5)
        await provider.terminate(made.instance.ref)
        assert host.leader(key) is None
        assert not host.members(key)
        assert not (host.folder(key) / "job").exists()
        assert not (host.folder(key) / "boot.sh").exists(), "it holds a signed URL"
        await provider.terminate(made.instance.ref)

    play(tmp_path, story)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        host = h.hosts["titan"]
        request = h.request(await offer_of(provider, h, "titan:RTX_4090:1"))
        host.profile = "trap '' XFSZ; ulimit -f 1"
        with pytest.raises(NoCapacity, match=r"titan.*cannot be written"):
            await provider.launch(request)
        assert not list((host.state / "machines").iterdir())
        assert not list((host.state / "devices").iterdir())
        host.profile = ""
        await provider.launch(request)
        assert len(h.live()) == 1

    play(tmp_path, story)


def test_a_gpu_tool_that_hangs_takes_the_hosts_offers_away_and_no_others(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        host = h.hosts["titan"]
        host.program("timeout", '#!/bin/sh\nshift 3\nexec /usr/bin/timeout -k 1 0.5 "$@"\n')
        request = h.request(await offer_of(provider, h, "titan:RTX_4090:1"))
        (host.smi / "hang").touch()
        page = await provider.offers(h.query())
        assert {one.offer_id for one in page.offers} == {"atlas:T4:1"}
        assert [one.reason for one in page.rejected] == ["nvidia-smi hangs"]
        with pytest.raises(OfferGone):
            await provider.launch(request)
        assert not h.live()
        assert any("hangs" in line.detail and not line.ok for line in await provider.check())

    play(tmp_path, story)


def test_a_lost_card_is_not_offered_and_not_given(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        both = h.request(await offer_of(provider, h, "titan:RTX_4090:2"))
        h.hosts["titan"].show(TITAN[1])
        with pytest.raises(OfferGone):
            await provider.launch(both)
        page = await provider.offers(h.query())
        assert {one.offer_id for one in page.offers} == {"atlas:T4:1", "titan:RTX_4090:1"}
        one = h.request(both.offer, price_max=both.offer.gpu_price)
        one = replace(one, offer=replace(one.offer, extra={**one.offer.extra, "count": "1"}))
        await provider.launch(one)
        assert (h.hosts["titan"].state / "devices" / TITAN[1].uuid).exists()

    play(tmp_path, story)


def test_a_card_that_its_owner_uses_is_not_taken(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        request = h.request(await offer_of(provider, h, "titan:RTX_4090:2"))
        h.hosts["titan"].use(TITAN[0].uuid)
        with pytest.raises(OfferGone):
            await provider.launch(request)
        h.hosts["titan"].use()
        h.hosts["titan"].show(replace(TITAN[0], used_mb="9000"), TITAN[1])
        page = await provider.offers(h.query())
        assert "titan:RTX_4090:2" not in {one.offer_id for one in page.offers}
        assert any("9000 MB" in one.reason for one in page.rejected)

    play(tmp_path, story)


@pytest.mark.parametrize("off", [timedelta(hours=-5), timedelta(days=9000)])
def test_a_wrong_clock_of_a_host_changes_no_age(off: timedelta, tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        h.faults._now = lambda: (h.clock.now() + off).timestamp()  # type: ignore[attr-defined]  # the harness's own clock
        made = await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))
        (found,) = await provider.find(made.instance.key)
        assert found.created_at is not None
        assert abs(found.created_at - h.clock.now()) < timedelta(minutes=1)
        bad = [line for line in await provider.check() if not line.ok]
        assert {line.name for line in bad} == {"clock"}

    play(tmp_path, story)


def test_an_owner_who_comes_back_is_announced_and_gets_the_host(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        h.host_more = {"owner_hours": ["Mon 13:00-18:00"]}
        async with h.opened() as opened:
            assert isinstance(opened, SshProvider)
            provider = opened
            host, key = h.hosts["titan"], h.key()
            offer = await offer_of(provider, h, "titan:RTX_4090:1")
            assert (offer.interruption, offer.duration_max) == (Interruption.NOTICE, timedelta(hours=1))
            await provider.launch(h.request(offer, key))
            assert (await provider.find(key))[0].notice_at is None
            await h.advance(timedelta(minutes=45))
            page = await provider.offers(h.query())
            assert not page.offers
            assert {one.reason for one in page.rejected} == {"its owner's hours begin at 13:00 UTC"}
            await h.advance(timedelta(minutes=14, seconds=59))
            (found,) = await provider.find(key)
            assert found.state is InstanceState.RUNNING
            assert found.notice_at is not None
            assert found.notice_at.hour == 13
            notice = host.folder(key) / "job" / "work" / "notice"
            wait_for(notice.exists)
            said = json.loads(notice.read_text())
            assert (said["at"], said["reason"]) == ("2026-03-02T13:00:00Z", "its owner's hours begin")
            wait_for(lambda: host.leader(key) is None and not host.members(key))
            (found,) = await provider.find(key)
            assert (found.state, found.loss) == (InstanceState.PAUSED, Loss.PREEMPTED)

    play(tmp_path, story, grace=timedelta(seconds=1))


def test_a_silent_host_makes_the_list_incomplete_and_nothing_absent(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        on_titan = await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))
        on_atlas = await provider.launch(h.request(await offer_of(provider, h, "atlas:T4:1")))
        h.hosts["titan"].profile = "exit 3"
        listing = await provider.instances()
        assert not listing.complete
        assert [one.key for one in listing.instances] == [on_atlas.instance.key]
        assert [one.offer_id for one in listing.rejected] == ["titan"]
        with pytest.raises(Unavailable):
            await provider.find(on_titan.instance.key)
        with pytest.raises(Unavailable):
            await provider.terminate(on_titan.instance.ref)
        # What ended on another host is still shown as gone, or its end could not be proved without this one.
        await provider.terminate(on_atlas.instance.ref)
        listing = await provider.instances()
        assert [one.state for one in listing.instances] == [InstanceState.GONE]

    play(tmp_path, story)


def test_a_read_whose_connection_breaks_is_asked_once_more(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        del h.hosts["atlas"]
        async with h.opened() as one:
            h.faults.lose_answer(Call.LIST)
            assert (await one.instances()).complete
            assert len(h.requests(Call.LIST)) == 2
            h.faults.lose_answer(Call.LIST, times=9)
            with pytest.raises(Unavailable, match="was lost"):
                await one.instances()
            assert len(h.requests(Call.LIST)) == 4, "a connection that breaks is tried twice and not for ever"

    play(tmp_path, story)


@pytest.mark.parametrize("ends", [True, False])
def test_a_refused_session_of_a_connection_that_ends_is_no_lack_of_sessions(ends: bool, tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        await provider.instances()
        connection = provider._links["titan"]._connection
        assert connection is not None

        async def refuse(*_: object, **__: object) -> None:
            if ends:
                asyncio.get_running_loop().call_later(0.05, connection.abort)
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "open failed")

        connection.create_process = refuse  # type: ignore[assignment, method-assign]  # a server does it too late
        listing = await provider.instances()
        assert listing.complete is ends
        assert [one.reason for one in listing.rejected] == ([] if ends else ["titan takes no more sessions now"])

    play(tmp_path, story)


def test_a_slow_host_holds_its_lock_by_the_clock_and_not_by_tries(tmp_path: Path) -> None:
    host = FakeHost("titan", tmp_path, *TITAN)
    host.program("setsid", "#!/bin/sh\n")  # so that no first process names itself
    host.program("sleep", f"#!/bin/sh\necho >>{tmp_path}/slept\n")
    (tmp_path / "up").write_text("100\n")
    clock = f'up() {{ read -r n <{tmp_path}/up; echo $((n + 3)) >{tmp_path}/up; echo "$n"; }}\n'
    words = (
        "spotd-lab-j1-1",
        BOOT.read_text().strip(),
        10**9,
        0,
        1,
        "none",
        "CUDA_VISIBLE_DEVICES",
        "never",
        "-",
        300,
        "titan",
        0,
        0,
        "-",
        "-",
    )
    own = SshHost(name="titan", address="127.0.0.1", user="u", path=host.path)
    functions, _, call = script_for(own, "launch", *words, TITAN[0].uuid, boot=START_SCRIPT).rstrip().rpartition("\n")
    done = subprocess.run(
        ["/bin/sh", "-s"], input=f"{functions}\n{clock}{call}\n", env={"HOME": str(host.home)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "refused\tdisk\tits first process does not start" in done.stdout, done
    assert 1 <= (tmp_path / "slept").read_text().count("\n") <= 3
    assert not list((host.state / "devices").iterdir())


def test_a_host_that_is_no_longer_in_the_config_ends_nothing(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        made = await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))
        before = await provider.account()
        del h.hosts["titan"]
        async with h.opened() as fewer:
            assert isinstance(fewer, SshProvider)
            assert await fewer.account() != before
            with pytest.raises(Unavailable, match="not in the config"):
                await fewer.terminate(made.instance.ref)

    with_titan = tmp_path / "all"
    with_titan.mkdir()
    play(with_titan, story)


def test_a_machine_keeps_its_name_when_its_host_gets_another(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        made = (await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))).instance
        h.names = {"titan": "ceos"}
        async with h.opened() as renamed:
            listing = await renamed.instances()
            assert listing.complete
            assert [one.ref for one in listing.instances] == [made.ref], "another name would be a second machine"
            assert [one.ref for one in await renamed.find(made.key)] == [made.ref]
            assert {one.region for one in (await renamed.offers(h.query())).offers} == {"ceos", "atlas"}
        async with h.opened() as renamed:
            await renamed.terminate(made.ref)  # before any list
            assert [one.state for one in (await renamed.instances()).instances] == [InstanceState.GONE]
        assert not any(one.running for one in h.hosts["titan"].machines())

    play(tmp_path, story)


def test_a_machine_keeps_its_name_while_the_first_name_of_its_host_is_silent(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        made = (await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))).instance
        h.aliases = {"z-titan": "titan"}
        async with h.opened() as aliased:
            assert isinstance(aliased, SshProvider)
            aliased._links["titan"]._target = replace(aliased._links["titan"]._target, user="nobody")
            listing = await aliased.instances()
            assert not listing.complete
            assert [one.ref for one in listing.instances] == [made.ref]

    play(tmp_path, story)


def test_a_host_that_the_config_names_twice_is_one(tmp_path: Path) -> None:
    async def story(h: SshHarness, _: SshProvider) -> None:
        h.aliases = {"a-titan": "titan"}
        async with h.opened() as provider:
            assert isinstance(provider, SshProvider)
            page = await provider.offers(h.query())
            assert {one.region for one in page.offers} == {"titan", "atlas"}
            assert [one.reason for one in page.rejected if one.offer_id.startswith("a-titan:")] == [
                "it is a GPU of titan, so this is the same host under another name"
            ] * len(TITAN)
            made = (await provider.launch(h.request(await offer_of(provider, h, "titan:RTX_4090:1")))).instance
            listing = await provider.instances()
            assert listing.complete
            assert [one.ref for one in listing.instances] == [made.ref], (
                "an end of the second would be that of the first"
            )
            assert [one.ref for one in await provider.find(made.key)] == [made.ref]

    play(tmp_path, story)


def test_a_key_that_is_not_pinned_or_changed_is_refused(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        path = h.folder / "known_hosts"
        pin(path, h.served.port, asyncssh.generate_private_key("ssh-ed25519"))
        with pytest.raises(AuthFailed, match="another host key"):
            await provider.instances()
        path.write_text("")
        h.fake_clock.advance(timedelta(minutes=5))
        with pytest.raises(AuthFailed, match=r"spotctl hosts add 127\.0\.0\.1 --port"):
            await provider.instances()
        assert not h.served.requests
        pin(path, h.served.port, h.server.key)
        h.fake_clock.advance(timedelta(minutes=5))
        assert (await provider.instances()).complete

    play(tmp_path, story)


def test_one_host_that_is_off_is_no_outage_of_the_others(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        offer = await offer_of(provider, h, "titan:RTX_4090:1")
        await provider._links["titan"].aclose()
        h.server.users = frozenset({"atlas"})
        with pytest.raises(OfferGone, match="refuses spotd's key"):
            await provider.launch(h.request(offer))
        page = await provider.offers(h.query())
        assert {one.offer_id for one in page.offers} == {"atlas:T4:1"}
        assert [one.offer_id for one in page.rejected] == ["titan"]

    play(tmp_path, story)


def test_no_part_of_a_launch_runs_if_the_rest_does_not_arrive(tmp_path: Path) -> None:
    host = FakeHost("titan", tmp_path, *TITAN)
    key, boot = "spotd-lab-j1-1", BOOT.read_text().strip()
    words = (
        key,
        boot,
        10**9,
        0,
        1,
        "none",
        "CUDA_VISIBLE_DEVICES",
        "never",
        "-",
        300,
        "titan",
        0,
        0,
        "-",
        "-",
        TITAN[0].uuid,
    )
    own = SshHost(name="titan", address="127.0.0.1", user="u", path=host.path)
    text = _frame(script_for(own, "launch", *words, boot=START_SCRIPT), "f" * 32)
    cuts = [*range(1, len(text) - 600, 1501), *range(len(text) - 600, len(text) - 1, 7)]
    for cut in cuts:
        subprocess.run(
            ["/bin/sh", "-s"], input=text[:cut].encode(), env={"HOME": str(host.home)}, capture_output=True, check=False
        )
        assert not host.folder(key).exists(), f"cut at {cut} of {len(text)}"
    assert not host.state.exists()
    done = subprocess.run(
        ["/bin/sh", "-s"], input=text.encode(), env={"HOME": str(host.home)}, capture_output=True, check=False
    )
    assert b"machine\tspotd-lab-j1-1\t1\t1" in done.stdout, done
    host.shut_down()
