"""The market as a process of its own, and the provider that starts it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    QuotaExceeded,
    RequestRejected,
)
from spotd_providers.contract.provider import Bills, ChangesBids, KnowsBalance, ReadsLogs
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    LaunchRequest,
    Loss,
    Market,
    MicroUsdPerHour,
    OfferId,
    OfferQuery,
    Power,
)
from spotd_providers.kit.http import open_http
from spotd_providers.local.hosts import Machines, read_ledger, segments
from spotd_providers.local.plugin import PLUGIN
from spotd_providers.local.server.__main__ import stop
from spotd_providers.local.settings import find_endpoint
from tests.fakes.ledger_sums import total_by_key
from tests.unit.providers.local.clocks import START
from tests.unit.providers.local.market_setup import host, steps
from tests.unit.providers.local.provider_setup import (
    desk,
    environment_of,
    eventually,
    is_running,
    kill_server,
    live_clock,
    server_pid,
)
from tests.unit.providers.local.waiting import until

pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A market's folder; whatever runs there ends with the test."""
    made = tmp_path / "market"
    yield made
    pid = server_pid(made)
    assert stop(made) == 0
    assert pid is None or not is_running(pid) or until(lambda: not is_running(pid))


def _machine_pids(folder: Path) -> list[int]:
    engine = Machines(folder / "machines", clock=live_clock())
    statuses = [engine.status(name) for name in engine.ids()]
    return [status.pid for status in statuses if status.pid is not None and is_running(status.pid)]


def test_the_first_call_starts_the_market_and_a_machine_is_bought_found_and_ended(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder, clock=live_clock(60)) as d:
            request = await d.request(start_script="echo hello; exec sleep 1000")
            bought = (await d.provider.launch(request)).instance
            assert bought.key == request.key
            assert bought.state is InstanceState.RUNNING
            assert bought.price == request.price_max
            assert [found.ref for found in await d.provider.find(request.key)] == [bought.ref]
            listing = await d.provider.instances()
            assert listing.complete
            assert [found.ref for found in listing.instances] == [bought.ref]
            assert isinstance(d.provider, ReadsLogs)
            reader = d.provider

            async def has_said_hello() -> bool:
                return await reader.logs(bought.ref, lines=5) == ["hello"]

            await eventually(has_said_hello)
            await d.provider.terminate(bought.ref)
            await d.provider.terminate(bought.ref)
            assert await d.provider.find(request.key) == ()
            assert [found.state for found in (await d.provider.instances()).instances] == [InstanceState.GONE]
            assert isinstance(d.provider, Bills)
            charges = await d.provider.charges(START, START + timedelta(days=1))
            spans = segments(read_ledger(folder / "ledger.jsonl"))
            assert (
                sum(charge.amount for charge in charges) == total_by_key(spans, START + timedelta(days=1))[request.key]
            )
            assert sum(charge.amount for charge in charges) > 0
        assert _machine_pids(folder) == []

    anyio.run(main)


def test_offers_carry_what_the_core_needs(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            page = await d.provider.offers(OfferQuery())
            assert page.complete
            assert not page.rejected
            assert len({offer.offer_id for offer in page.offers}) == len(page.offers) > 12
            for offer in page.offers:
                assert offer.gpu_price > 0
                assert offer.host_id
                assert (offer.market is Market.ON_DEMAND) == (offer.interruption is Interruption.NEVER)
                assert offer.pays_bid == (offer.interruption is Interruption.SUDDEN)
            # So many machines at once as its host has places for, so that a job of more waits with that reason.
            most = {str(offer.host_id): offer.nodes_max for offer in page.offers}
            assert (most["kyiv-4090"], most["us-east-1a-l4"]) == (1, 4)
            kinds = {offer.interruption for offer in page.offers}
            assert kinds == {Interruption.NEVER, Interruption.NOTICE, Interruption.SUDDEN}
            only = await d.provider.offers(OfferQuery(markets=(Market.ON_DEMAND,)))
            assert {offer.market for offer in only.offers} == {Market.ON_DEMAND}

    anyio.run(main)


def test_machines_and_books_live_on_when_the_daemon_is_killed(folder: Path) -> None:
    program = textwrap.dedent(f"""\
        import anyio, os, signal
        from pathlib import Path
        from tests.unit.providers.local.provider_setup import desk
        async def main():
            async with desk(Path({str(folder)!r})) as d:
                await d.provider.launch(await d.request())
                os.kill(os.getpid(), signal.SIGKILL)
        anyio.run(main)
    """)
    root = Path(__file__).parents[4]
    killed = subprocess.run([sys.executable, "-c", program], check=False, cwd=root)
    assert killed.returncode == -9

    async def main() -> None:
        async with desk(folder) as d:
            (machine,) = (await d.provider.instances()).instances
            assert machine.state is InstanceState.RUNNING
            assert len(_machine_pids(folder)) == 1

    anyio.run(main)


def test_a_killed_server_is_replaced_by_the_next_call_and_its_machines_are_adopted(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            bought = (await d.provider.launch(await d.request())).instance
            pids = _machine_pids(folder)
            dead = kill_server(folder)
            (machine,) = await d.provider.find(bought.key)
            assert machine.state is InstanceState.RUNNING
            assert machine.ref == bought.ref
            assert server_pid(folder) != dead
            assert _machine_pids(folder) == pids
            await d.provider.terminate(bought.ref)
        assert _machine_pids(folder) == []

    anyio.run(main)


def test_a_server_killed_around_a_launch_forgets_no_machine_and_doubles_none(folder: Path) -> None:
    async def main() -> None:
        rng = Random(2026)
        async with desk(folder, hosts=[host("kyiv", slots=50)]) as d:
            outcomes: list[tuple[AttemptKey, InstanceRef | None]] = []
            for number in range(6):
                request = await d.request(f"spotd-lab-job{number}-1")

                async def buy(request: LaunchRequest = request) -> None:
                    try:
                        outcomes.append((request.key, (await d.provider.launch(request)).instance.ref))
                    except OutcomeUnknown as unknown:
                        outcomes.append((AttemptKey(unknown.key), None))

                async with anyio.create_task_group() as group:
                    group.start_soon(buy, name="customer")
                    await anyio.sleep(rng.uniform(0, 0.015))
                    kill_server(folder)
            listing = await d.provider.instances()
            assert listing.complete
            assert {found.state for found in listing.instances} <= {InstanceState.RUNNING}
            keys = [found.key for found in listing.instances]
            assert len(keys) == len(set(keys))
            for key, ref in outcomes:
                found = await d.provider.find(key)
                assert len(found) <= 1
                assert ref is None or [machine.ref for machine in found] == [ref]
            assert len(_machine_pids(folder)) == len(keys)
            spending = segments(read_ledger(folder / "ledger.jsonl"))
            assert {span.key for span in spending if span.end is None} == set(keys)

    anyio.run(main)


def test_many_customers_at_once_share_one_server(folder: Path) -> None:
    async def main() -> None:
        pids: list[int | None] = []

        async def customer() -> None:
            async with desk(folder) as d:
                await d.provider.offers(OfferQuery())
                pids.append(server_pid(folder))

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(customer, name=f"customer {number}")
        assert len(set(pids)) == 1

    anyio.run(main)


def test_shutting_down_leaves_no_process(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            await d.provider.launch(await d.request())

    anyio.run(main)
    pid, machines = server_pid(folder), _machine_pids(folder)
    assert pid is not None
    assert len(machines) == 1
    assert stop(folder) == 0
    assert not is_running(pid)
    assert not any(is_running(machine) for machine in machines)
    assert all(span.end is not None for span in segments(read_ledger(folder / "ledger.jsonl")))


def test_stopping_ends_the_machines_of_a_server_that_was_killed(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            await d.provider.launch(await d.request())

    anyio.run(main)
    machines = _machine_pids(folder)
    kill_server(folder)
    assert stop(folder) == 0
    assert not any(is_running(machine) for machine in machines)


def test_a_server_that_nobody_needs_ends_itself(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder, idle_exit="0.3s") as d:
            bought = (await d.provider.launch(await d.request())).instance
            await d.provider.terminate(bought.ref)

    anyio.run(main)
    until(lambda: server_pid(folder) is None, what="the server to end")


def test_a_server_whose_market_was_removed_ends_its_machines_and_leaves_the_next_one_alone(folder: Path) -> None:
    async def buy() -> None:
        async with desk(folder) as d:
            await d.provider.launch(await d.request())

    anyio.run(buy)
    orphan, machines = server_pid(folder), _machine_pids(folder)
    shutil.rmtree(folder)
    anyio.run(buy)
    assert orphan is not None
    until(lambda: not is_running(orphan), what="the server of the removed market to end")
    assert not any(is_running(machine) for machine in machines)
    assert len(_machine_pids(folder)) == 1
    assert find_endpoint(folder) is not None


def test_other_settings_replace_a_server_without_machines_and_wait_for_one_that_has_some(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder, hosts=[host("kyiv")]) as d:
            assert (await d.offer()).host_id == "kyiv"
        async with desk(folder, hosts=[host("oslo")]) as d:
            assert (await d.offer()).host_id == "oslo"
            bought = (await d.provider.launch(await d.request())).instance
        async with desk(folder, hosts=[host("lima")]) as d:
            assert [found.ref for found in (await d.provider.instances()).instances] == [bought.ref]
            assert "local.settings_wait" in [line.event for line in d.log.lines]

    anyio.run(main)


def test_no_secret_of_ours_reaches_the_server_or_its_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAST_API_KEY", "canary-3f9a")

    async def main() -> None:
        async with desk(folder) as d:
            await d.provider.launch(await d.request())
            machines, server = _machine_pids(folder), server_pid(folder)
            assert machines
            assert server
            assert not any(b"canary" in environment_of(pid) for pid in [*machines, server])
            endpoint = find_endpoint(folder)
            assert endpoint is not None
            assert endpoint.token not in repr(endpoint)
            assert not any(endpoint.token.encode() in environment_of(pid) for pid in machines)

    anyio.run(main)
    for file in folder.rglob("*"):
        if file.is_file():
            assert b"canary" not in file.read_bytes()
    assert stat.S_IMODE((folder / "server.json").stat().st_mode) == 0o600


def test_nobody_gets_in_without_the_token(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            await d.offer()
            endpoint = find_endpoint(folder)
            assert endpoint is not None
            for headers in ({}, {"authorization": "Bearer wrong"}):
                async with open_http(endpoint.url, headers=headers) as http:
                    for method, path in (("GET", "/v1/offers"), ("POST", "/shutdown"), ("POST", "/control/price")):
                        assert (await http.send(method, path)).status == 401
        wrong = live_clock()
        services_settings = {"base_url": endpoint.url}
        async with desk(folder.parent / "other", clock=wrong, **services_settings) as d:
            with pytest.raises(AuthFailed):
                await d.offer()

    anyio.run(main)


def test_each_refusal_has_its_own_error(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder, hosts=[host("kyiv"), host("oslo", slots=2)], machines_max=2) as d:
            offer = await d.offer("kyiv:spot")
            gone = replace(offer, offer_id=OfferId("lima:spot"))
            with pytest.raises(OfferGone):
                await d.provider.launch(await d.request(offer=gone))
            with pytest.raises(PriceMoved):
                await d.provider.launch(await d.request(offer=offer, price_max=MicroUsdPerHour(10)))
            with pytest.raises(RequestRejected) as rejected:
                await d.provider.launch(await d.request(offer=offer, disk_gb=10**6))
            assert rejected.value.field == "disk_gb"
            await d.provider.launch(await d.request(offer=offer))
            with pytest.raises(NoCapacity):
                await d.provider.launch(await d.request(offer=offer))
            await d.provider.launch(await d.request("spotd-lab-p-1", "oslo:spot"))
            with pytest.raises(QuotaExceeded):
                await d.provider.launch(await d.request(offer=offer))
            long = await d.request(offer_id="oslo:spot", key="spotd-lab-o-1", start_script="#" * 5000)
            with pytest.raises(RequestRejected) as rejected:
                await d.provider.launch(long)
            assert rejected.value.field == "start_script"
            ref = InstanceRef(provider=PLUGIN.name, instance_id=InstanceId("m-000001"))
            assert isinstance(d.provider, ChangesBids)
            with pytest.raises(RequestRejected):
                await d.provider.change_bid(ref, MicroUsdPerHour(0))

    anyio.run(main)


def test_a_preemption_on_request_is_seen_by_the_customer(folder: Path) -> None:
    async def main() -> None:
        settings = {"hosts": [host("kyiv"), host("zone", flavour="notice")]}
        async with desk(folder, clock=live_clock(60), **settings) as d:
            bid = (await d.provider.launch(await d.request("spotd-lab-a-1", "kyiv:spot"))).instance
            agreed = (await d.provider.launch(await d.request("spotd-lab-b-1", "zone:spot"))).instance
            await d.control("/control/preempt", {"machine": bid.ref.instance_id})
            await d.control("/control/preempt", {"host": "zone"})
            (paused,) = await d.provider.find(bid.key)
            assert (paused.state, paused.loss) == (InstanceState.PAUSED, Loss.OUTBID)
            (noticed,) = await d.provider.find(agreed.key)
            assert noticed.state is InstanceState.RUNNING
            assert noticed.notice_at is not None
            notice = folder / "machines" / "hosts" / agreed.ref.instance_id / "spotd" / "notice"
            assert notice.exists()

            async def is_gone() -> bool:
                return not await d.provider.find(agreed.key)

            await eventually(is_gone)
            gone = [found for found in (await d.provider.instances()).instances if found.key == agreed.key]
            assert [found.loss for found in gone] == [Loss.PREEMPTED]

    anyio.run(main)


def test_a_notice_runs_out_in_time_though_nobody_asks(folder: Path, tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 9.0))

    async def main() -> None:
        # A virtual hour is 0.6 s: an outbid machine must be stopped by the server itself, not by the next question.
        settings = {"hosts": [host("kyiv", spot=prices)]}
        async with desk(folder, clock=live_clock(6000), **settings) as d:
            await d.provider.launch(await d.request())

    anyio.run(main)
    until(lambda: not _machine_pids(folder), what="the outbid machine to be stopped")


def test_the_doctor_says_what_is_wrong(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            assert {line.name: line.ok for line in await d.provider.check()} == dict.fromkeys(
                ("market", "account", "clock"), True
            )
        late = live_clock()
        skewed = type(late)(real0=late.real0, virtual0=late.virtual0 + timedelta(hours=1), scale=1.0)
        async with desk(folder, clock=skewed) as d:
            (clock,) = [line for line in await d.provider.check() if line.name == "clock"]
            assert not clock.ok
            assert re.search(r"3[56]\d\d s away", clock.detail)
            assert clock.hint
        broken = host(spot={"kind": "csv", "path": str(folder / "none.csv")})
        async with desk(folder.parent / "broken", hosts=[broken]) as d:
            (market,) = await d.provider.check()
            assert not market.ok
            assert "none.csv" in market.detail

    anyio.run(main)


def test_missing_powers_have_their_sentence_and_present_ones_their_protocol(folder: Path) -> None:
    async def main() -> None:
        async with desk(folder) as d:
            powers = d.provider.capabilities
            assert set(powers) == set(Power)
            assert all(capability.available or capability.reason for capability in powers.values())
            assert not powers[Power.BALANCE].available
            assert not isinstance(d.provider, KnowsBalance)
            for power, protocol in (
                (Power.BID_CHANGE, ChangesBids), (Power.LOGS, ReadsLogs), (Power.BILLING, Bills),
            ):  # fmt: skip
                assert powers[power].available
                assert isinstance(d.provider, protocol)

    anyio.run(main)


def test_the_traits_follow_the_settings() -> None:
    traits = PLUGIN.traits(PLUGIN.settings_model.model_validate({"list_lag": "45s"}))
    assert traits.hosts_share_filesystem
    assert traits.start_script_bytes_max == 4096
    assert timedelta(seconds=45) <= traits.reconcile_window <= timedelta(seconds=60)


def test_the_command_refuses_a_market_that_cannot_open_with_one_clear_line(folder: Path) -> None:
    folder.mkdir()
    (folder / "clock.json").write_text("{}")
    command = [sys.executable, "-m", "spotd_providers.local.server", "--dir", str(folder)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ))
    assert answer.returncode == 1
    assert "clock.json is no clock file" in answer.stderr
    assert "Traceback" not in answer.stderr
    (folder / "clock.json").unlink()
