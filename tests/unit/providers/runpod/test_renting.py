"""Life with a RunPod pod: seen, lost, restarted for ever, explained, billed, logged, ended and seen to be ended."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest

from spotd_providers.contract.errors import AuthFailed, RequestRejected, Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceId, InstanceRef, InstanceState, Loss
from spotd_providers.runpod.listing import as_instance
from spotd_providers.runpod.offers import DIRECT_SSH, PROVIDER
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.runpod.wire import PodRow
from spotd_providers.testkit.serve import Call, Canned
from tests.cases import every
from tests.fakes.runpod import Failure, Quirks
from tests.fakes.runpod.pods import PUBLIC_IP
from tests.unit.providers.local.waiting import until
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

KEY = AttemptKey("spotd-lab-7f3a-1")
MANY = 5000


async def rent(
    h: RunpodHarness, provider: RunpodProvider, script: str = "echo up; sleep 600"
) -> tuple[AttemptKey, str]:
    """A pod that is up: its key and id."""
    launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
    await h.settle()
    h.cloud.advance()
    return launched.instance.key, launched.instance.ref.instance_id


@every(
    ("status", "state", "loss"),
    [
        ("PROVISIONING", InstanceState.PENDING, None),
        ("STARTING", InstanceState.PENDING, None),
        ("RUNNING", InstanceState.RUNNING, None),
        ("running", InstanceState.RUNNING, None),
        ("EXITED", InstanceState.PAUSED, Loss.HOST_LOST),
        ("ERROR", InstanceState.PAUSED, Loss.PROVISION_FAILED),
        ("TERMINATED", InstanceState.GONE, None),
        ("MEDITATING", InstanceState.UNKNOWN, None),
        ("", InstanceState.UNKNOWN, None),
        (None, InstanceState.UNKNOWN, None),
    ],
)
def test_every_status_has_its_meaning(status: str | None, state: InstanceState, loss: Loss | None) -> None:
    seen = as_instance(PodRow(id="p", name=KEY, status=status), KEY)
    assert (seen.state, seen.loss) == (state, loss)


def test_a_pod_whose_process_ends_starts_again_on_a_wiped_disk_and_counts_as_running(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        script = "test -e left && echo dirty; echo boot; touch left; test -e wait || exit 0; sleep 600"
        key, pod = await rent(h, provider, script)

        def booted_thrice() -> bool:
            h.fake_clock.advance(timedelta(minutes=1))
            h.cloud.advance()
            return h.cloud.machines.console(pod, lines=50).count("boot") >= 3

        until(booted_thrice)
        assert "dirty" not in h.cloud.machines.console(pod, lines=50)
        (seen,) = await provider.find(key)
        assert seen.state in (InstanceState.RUNNING, InstanceState.PENDING)
        assert seen.loss is None
        await provider.terminate(seen.ref)
        h.fake_clock.advance(timedelta(minutes=5))
        h.cloud.advance()
        assert not h.cloud.machines.alive(pod)

    play(tmp_path, story, Quirks(requests_a_minute=MANY))


def test_a_pod_that_somebody_else_stopped_is_paused_and_its_gpu_bills_no_more(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        key, pod = await rent(h, provider)
        h.cloud.lose_host(pod)
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss, seen.price) == (InstanceState.PAUSED, Loss.HOST_LOST, None)
        assert not h.cloud.machines.alive(pod)
        before = h.billed(pod)
        await h.advance(timedelta(hours=3))
        assert h.billed(pod) == before

    play(tmp_path, story)


def test_an_account_without_money_loses_its_pods_altogether(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        await rent(h, provider)
        h.empty_balance()
        listing = await provider.instances()
        assert listing.complete
        assert not listing.instances

    play(tmp_path, story)


def test_an_image_that_cannot_be_pulled_is_named_by_the_hosts_log_though_the_pod_waits_for_ever(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.cloud.fail_next_start(offer.extra["gpu"], Failure.IMAGE)
        key = (await provider.launch(h.request(offer))).instance.key
        await h.advance(timedelta(minutes=2))
        (early,) = await provider.find(key)
        assert early.state is InstanceState.PENDING
        await h.advance(timedelta(minutes=6))
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.IMAGE_ERROR)
        assert "layer does not exist" in seen.detail
        looks = len([request for request in h.requests() if request.path.endswith("/logs")])
        for _ in range(5):
            await provider.instances()
        assert len([request for request in h.requests() if request.path.endswith("/logs")]) == looks

    play(tmp_path, story)


def test_a_container_that_cannot_run_is_a_failed_provision(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.cloud.fail_next_start(offer.extra["gpu"], Failure.CONTAINER)
        key = (await provider.launch(h.request(offer))).instance.key
        await h.settle()
        # Two timers: the pull, then the start.
        h.cloud.advance()
        await h.settle()
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.PROVISION_FAILED)

    play(tmp_path, story)


def test_a_deletion_that_did_not_take_is_asked_for_again(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        key, pod = await rent(h, provider)
        h.cloud.pods[pod].deaths_left = 1
        (seen,) = await provider.find(key)
        await provider.terminate(seen.ref)
        assert len(h.requests(Call.TERMINATE)) == 2
        assert not h.live(key)

    play(tmp_path, story)


def test_a_pod_that_will_not_die_is_no_success(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        key, pod = await rent(h, provider)
        h.cloud.pods[pod].deaths_left = 2
        (seen,) = await provider.find(key)
        with pytest.raises(Unavailable, match="still shows it"):
            await provider.terminate(seen.ref)
        await provider.terminate(seen.ref)
        assert not h.live(key)

    play(tmp_path, story)


def test_a_strangers_pod_is_not_ended_whoever_asks(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        for pod in h.add_foreign_machines():
            with pytest.raises(RequestRejected):
                await provider.terminate(InstanceRef(provider=PROVIDER, instance_id=InstanceId(pod)))
            assert h.cloud.pods[pod].exists
        for odd in ("", "../../account", "a b", "x" * 200):
            with pytest.raises(RequestRejected):
                await provider.terminate(InstanceRef(provider=PROVIDER, instance_id=InstanceId(odd)))
        assert not h.requests(Call.TERMINATE)

    play(tmp_path, story)


def test_a_listing_of_many_pages_is_complete_and_one_that_loses_its_way_is_not(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        keys = [h.key() for _ in range(60)]
        h.add_machines(keys)
        listing = await provider.instances()
        assert listing.complete
        assert sorted(i.key for i in listing.instances) == sorted(keys)
        h.cloud.quirks.last_page_fails = True
        partial = await provider.instances()
        assert (partial.complete, len(partial.instances)) == (False, 50)
        h.cloud.quirks.last_page_fails = False
        h.cloud.quirks.cursor_missing = True
        lost = await provider.instances()
        assert (lost.complete, len(lost.instances)) == (False, 25)
        with pytest.raises(Unavailable):
            await provider.find(h.key())

    play(tmp_path, story)


def test_a_listing_without_pages_is_complete(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.add_machines([h.key() for _ in range(60)])
        listing = await provider.instances()
        assert (listing.complete, len(listing.instances)) == (True, 60)

    play(tmp_path, story, Quirks(page_rows=None))


@pytest.mark.parametrize("stays_open", [False, True])
def test_a_log_is_read_though_its_stream_never_ends(tmp_path: Path, stays_open: bool) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        key, pod = await rent(h, provider, "echo one; echo two key=abc; echo three; sleep 600")
        until(lambda: len(h.cloud.machines.console(pod, lines=9)) == 3)
        (seen,) = await provider.find(key)
        assert await provider.logs(seen.ref, lines=2) == ("two key=abc", "three")

    play(tmp_path, story, Quirks(log_stays_open=stays_open))


def test_a_list_is_not_held_up_by_the_logs_of_lost_pods_that_never_rest(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        for _ in range(2):
            _, pod = await rent(h, provider)
            h.cloud.lose_host(pod)
        begun = monotonic()
        listing = await provider.instances()
        assert [machine.loss for machine in listing.instances] == [Loss.HOST_LOST] * 2
        assert h.cloud.logs_open_most == 2
        assert monotonic() - begun < 15

    play(tmp_path, story, Quirks(log_stays_open=True, log_never_rests=True))


def test_bills_name_their_attempt_even_when_the_pod_is_long_gone_and_the_daemon_was_restarted(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        since = h.clock.now()
        h.cloud.add_foreign("my notebook")
        key, pod = await rent(h, provider)
        await h.advance(timedelta(hours=2))
        (seen,) = await provider.find(key)
        await provider.terminate(seen.ref)
        async with h.opened() as reopened:
            assert isinstance(reopened, RunpodProvider)
            charges = await reopened.charges(since, h.clock.now())
        assert {(charge.key, charge.instance_id) for charge in charges} == {(key, pod)}
        assert {charge.kind for charge in charges} == {"gpu", "disk"}
        assert sum(charge.amount for charge in charges) == pytest.approx(h.billed(pod), abs=20)

    play(tmp_path, story)


def test_a_key_that_lost_a_scope_is_auth_failed_on_reads(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        body = b'{"title":"Forbidden","status":403,"detail":"access denied"}'
        h.faults.answer(Call.LIST, Canned(status=403, body=body))
        with pytest.raises(AuthFailed):
            await provider.instances()

    play(tmp_path, story)


def test_a_key_has_a_name_of_its_own_that_does_not_show_it(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        name = await provider.account()
        assert name == await provider.account()
        key = provider._services.credential
        assert key is not None
        assert key not in name
        other = RunpodProvider(provider._client, provider._settings, replace(provider._services, credential=key + "x"))
        assert await other.account() != name

    play(tmp_path, story)


def test_a_running_pod_gives_a_shell_by_runpods_own_door(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        with pytest.raises(Unavailable, match="does not run yet"):
            await provider.shell(launched.instance.ref)
        await h.settle()
        h.cloud.advance()
        ref = launched.instance.ref
        found = await provider.shell(ref)
        assert (found.host, found.port) == ("ssh.runpod.io", 22)
        assert found.user.startswith(ref.instance_id)
        direct = {"host": "203.0.113.9", "port": 30_022, "username": "root", "command": "ssh -oProxyCommand=evil"}
        for odd in ({"proxy": {"host": 1, "port": "x"}, "direct": direct}, {"proxy": None, "direct": direct}):
            h.cloud.quirks.edit_pod[ref.instance_id] = {"ssh": odd}
            assert (await provider.shell(ref)).host == "203.0.113.9"
        for none in (None, {}, {"proxy": None, "direct": None}, {"direct": {**direct, "port": 70_000}}, "ssh x", [1]):
            h.cloud.quirks.edit_pod[ref.instance_id] = {"ssh": none}
            with pytest.raises(Unavailable, match="names no shell"):
                await provider.shell(ref)
        h.cloud.quirks.edit_pod[ref.instance_id] = {"name": "somebody-elses"}
        with pytest.raises(Unavailable, match="as ours"):
            await provider.shell(ref)

    play(tmp_path, story)


def test_with_direct_ssh_the_mapped_port_is_named_and_carries_ports(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        ref = launched.instance.ref
        await h.settle()
        h.cloud.advance()
        found = await provider.shell(ref)
        pod = h.cloud.pods[ref.instance_id]
        assert (found.host, found.port, found.user) == (PUBLIC_IP, pod.mapped_ports()[0]["public"], "root")
        assert not found.no_ports
        assert shlex.split(pod.body["args"])[-1].startswith(DIRECT_SSH)
        h.cloud.quirks.edit_pod[ref.instance_id] = {"ssh": {"proxy": pod._proxy(), "direct": None}}
        found = await provider.shell(ref)
        assert found.host == "ssh.runpod.io", "its port is not mapped yet"
        assert "direct_ssh = true" in found.no_ports

    play(tmp_path, story, direct_ssh=True)
