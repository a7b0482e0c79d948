"""A host that asks a higher price for a machine of ours ends its contract, since spotd never consents."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import Instance, InstanceState, Loss
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import GATEWAY_ERROR, Call, Canned
from spotd_providers.vastai.listing import ASKED_EVERY
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai.app import INCREASES
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play

LAST = timedelta(minutes=8)
"""From the announcement to the end: the list after it sees the last minutes."""


def increase(h: VastHarness, contract: str, **changes: Any) -> dict[str, Any]:
    """A row as the official client documents it."""
    return {
        "pending_price_increase_id": 999,
        "contract_id": int(contract),
        "host_id": 7,
        "new_gpu_costpersec": 0.0002,
        "old_gpu_costpersec": 0.0001,
        "new_disk_ram_costpersec": None,
        "old_disk_ram_costpersec": None,
        "new_bwu_cost": 0.02,
        "old_bwu_cost": 0.01,
        "new_platform_fee": 0.15,
        "old_platform_fee": 0.10,
        "contract_end_date": (h.clock.now() + LAST).timestamp(),
        "ask_end_date": None,
        "created_at": START.timestamp(),
        **changes,
    }


async def launched(h: VastHarness, provider: VastProvider) -> str:
    machine = await provider.launch(h.request(await cheapest(h, provider)))
    return str(machine.instance.ref.instance_id)


async def listed(h: VastHarness, provider: VastProvider) -> Instance:
    h.later(ASKED_EVERY)
    [found] = (await provider.instances()).instances
    return found


def test_the_end_of_a_contract_that_is_not_extended_is_a_notice(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        contract = await launched(h, provider)
        before = await listed(h, provider)
        assert (before.state, before.notice_at) == (InstanceState.RUNNING, None)
        end = h.clock.now() + LAST + ASKED_EVERY
        h.cloud.price_increases.append(increase(h, contract, contract_end_date=end.timestamp()))
        early = await listed(h, provider)
        assert (early.notice_at, early.detail[:8]) == (None, "its host"), "what it does after its last save is lost"
        h.later(timedelta(seconds=1))
        found = await listed(h, provider)
        assert (found.state, found.notice_at, found.price) == (InstanceState.RUNNING, end, before.price)
        assert found.detail == (
            "its host asks $0.7200/h in place of $0.3600/h; spotd does not consent, so its contract ends"
            f" {end:%Y-%m-%d %H:%M} UTC"
        )
        h.cloud.price_increases.clear()  # its owner consented, or the host took it back
        assert (await listed(h, provider)).notice_at is None

    play(tmp_path, story)


@pytest.mark.parametrize(
    "changes",
    [
        {"contract_id": 1},
        {"contract_id": "x"},
        {"contract_end_date": None},
        {"contract_end_date": -1},
        {"contract_end_date": (START - timedelta(days=1)).timestamp()},
        {"contract_end_date": "soon"},
    ],
    ids=str,
)
def test_a_row_that_names_no_coming_end_of_a_machine_of_ours_changes_nothing(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        contract = await launched(h, provider)
        h.cloud.price_increases += [7, None, {}, increase(h, contract, **changes)]
        assert (await listed(h, provider)).notice_at is None

    play(tmp_path, story)


@pytest.mark.parametrize("changes", [{"new_gpu_costpersec": None}, {"old_gpu_costpersec": 1e9}], ids=str)
def test_an_increase_without_a_price_that_can_be_meant_is_a_notice_all_the_same(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.price_increases.append(increase(h, await launched(h, provider), **changes))
        found = await listed(h, provider)
        assert found.notice_at is not None
        assert found.detail.startswith("its host asks for a higher price; spotd")

    play(tmp_path, story)


def test_it_is_asked_rarely_and_only_where_there_are_machines(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        def asked() -> int:
            return len([one for one in h.requests(Call.OTHER) if one.path == INCREASES])

        await provider.instances()
        assert asked() == 0
        await launched(h, provider)
        for _ in range(5):
            await provider.instances()
        assert asked() == 1

    play(tmp_path, story)


@pytest.mark.parametrize(
    "canned",
    [GATEWAY_ERROR, Canned(status=404, body=b'{"success":false}'), Canned(status=200, body=b"[]"),
     Canned(status=200, body=b"{}"),
     Canned(status=403, body=b'{"success":false,"error":"auth_error"}')],
    ids=["gateway", "unknown to this vast.ai", "not an envelope", "an empty one", "no right"],
)  # fmt: skip
def test_without_an_answer_the_list_is_whole_and_what_was_known_holds(canned: Canned, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        contract = await launched(h, provider)
        end = h.clock.now() + LAST + ASKED_EVERY
        h.cloud.price_increases.append(increase(h, contract, contract_end_date=end.timestamp()))
        await listed(h, provider)
        h.faults.answer(Call.OTHER, canned, times=9)
        h.later(ASKED_EVERY)
        found = await provider.instances()
        assert found.complete
        assert found.instances[0].notice_at is not None

    play(tmp_path, story)


def test_a_list_waits_for_it_for_seconds_only(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        await launched(h, provider)
        h.faults.hang(Call.OTHER, times=9)
        h.later(ASKED_EVERY)
        before = h.clock.now()
        assert (await provider.instances()).complete
        assert h.clock.now() - before < timedelta(seconds=20)

    play(tmp_path, story)


def test_of_two_increases_of_one_contract_the_earlier_end_counts(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        contract = await launched(h, provider)
        end = h.clock.now() + LAST
        late = increase(h, contract, contract_end_date=(end + timedelta(days=9)).timestamp())
        h.cloud.price_increases += [increase(h, contract), late]
        assert (await listed(h, provider)).notice_at == end

    play(tmp_path, story)


def test_the_stop_at_the_announced_end_is_a_preemption_and_no_fault_of_the_host(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        contract = await launched(h, provider)
        row = increase(h, contract)
        h.cloud.price_increases.append(row)
        await listed(h, provider)
        h.cloud.quirks.edit_instance[int(contract)] = {
            "actual_status": "stopped", "cur_state": "stopped", "next_state": "stopped", "intended_status": "stopped",
            "end_date": row["contract_end_date"],
        }  # fmt: skip
        h.cloud.price_increases.clear()
        found = await listed(h, provider)
        assert (found.state, found.loss) == (InstanceState.PAUSED, Loss.PREEMPTED)
        assert found.detail.startswith("its host asks")

    play(tmp_path, story)
