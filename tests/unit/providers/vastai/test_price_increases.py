"""A host that asks a higher price for a machine of ours ends its contract, since spotd never consents."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import Instance, InstanceState
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import GATEWAY_ERROR, Call, Canned
from spotd_providers.vastai.plugin import VastProvider
from spotd_providers.vastai.price_increases import ASKED_EVERY
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play

END = START + timedelta(hours=2)


def increase(contract: str, **changes: Any) -> dict[str, Any]:
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
        "contract_end_date": END.timestamp(),
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
        h.cloud.price_increases.append(increase(contract))
        found = await listed(h, provider)
        assert (found.state, found.notice_at, found.price) == (InstanceState.RUNNING, END, before.price)
        assert found.detail == (
            "its host asks $0.7200/h in place of $0.3600/h; spotd does not consent, so its contract ends"
            f" {END:%Y-%m-%d %H:%M} UTC"
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
        h.cloud.price_increases += [7, None, {}, increase(contract, **changes)]
        assert (await listed(h, provider)).notice_at is None

    play(tmp_path, story)


@pytest.mark.parametrize("changes", [{"new_gpu_costpersec": None}, {"old_gpu_costpersec": 1e9}], ids=str)
def test_an_increase_without_a_price_that_can_be_meant_is_a_notice_all_the_same(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.price_increases.append(increase(await launched(h, provider), **changes))
        found = await listed(h, provider)
        assert found.notice_at == END
        assert found.detail.startswith("its host asks for a higher price; spotd")

    play(tmp_path, story)


def test_it_is_asked_rarely_and_only_where_there_are_machines(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        await provider.instances()
        assert h.requests(Call.OTHER) == []
        await launched(h, provider)
        for _ in range(5):
            await provider.instances()
        assert len(h.requests(Call.OTHER)) == 1

    play(tmp_path, story)


@pytest.mark.parametrize(
    "canned",
    [GATEWAY_ERROR, Canned(status=404, body=b'{"success":false}'), Canned(status=200, body=b"[]"),
     Canned(status=403, body=b'{"success":false,"error":"auth_error"}')],
    ids=["gateway", "unknown to this vast.ai", "not an envelope", "no right"],
)  # fmt: skip
def test_without_an_answer_the_list_is_whole_and_what_was_known_holds(canned: Canned, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.price_increases.append(increase(await launched(h, provider)))
        await listed(h, provider)
        h.faults.answer(Call.OTHER, canned, times=9)
        h.later(ASKED_EVERY)
        found = await provider.instances()
        assert found.complete
        assert found.instances[0].notice_at == END

    play(tmp_path, story)
