"""What `spotctl doctor` says of vast.ai: one line for each thing, with the way out of what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.values import CheckLine
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call, Canned
from tests.unit.providers.vastai.harness import VastHarness, open_harness

REFUSED = Canned(status=403, body=b'{"success": false, "error": "auth_error", "msg": "no permission"}')

BUSY = Canned(
    status=429, body=b"API requests too frequent: endpoint threshold=1.0", headers={"content-type": "text/plain"}
)


def lines_of(folder: Path, prepare: Callable[[VastHarness], None]) -> dict[str, CheckLine]:
    async def asked(h: VastHarness) -> dict[str, CheckLine]:
        async with h.opened() as provider:
            return {line.name: line for line in await provider.check()}

    with open_harness(folder) as h:
        prepare(h)
        return asyncio.run(asked(h))


def late(h: VastHarness) -> None:
    """This computer's clock is six seconds ahead of theirs."""
    h.clock = FakeClock(h.fake_clock.now() + timedelta(seconds=6))


def unverified(h: VastHarness) -> None:
    h.cloud.quirks.email_verified = 0


def test_an_account_where_all_is_well_has_a_good_line_for_each_thing(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, lambda h: None)
    assert {name: line.detail for name, line in lines.items()} == {
        "key": "accepted",
        "balance": "$100.00 left",
        "quota": "vast.ai states none; it may refuse purchases of a new account that spends fast",
        "clock": "0 s from vast.ai's",
        "instances": "can list instances",
        "billing": "can read charges",
        "market": "10 interruptible offers under your filters",
    }
    assert all(line.ok and not line.hint for line in lines.values())


@pytest.mark.parametrize(
    ("prepare", "line", "detail", "hint"),
    [
        pytest.param(lambda h: h.break_auth(), "key", "", "manage-keys", id="key"),
        pytest.param(lambda h: h.empty_balance(), "balance", "$0.00 left", "add credit", id="balance"),
        pytest.param(lambda h: h.faults.answer(Call.ACCOUNT, BUSY, times=9), "key", "", "try again", id="busy"),
        pytest.param(late, "clock", "6 s from", "synchronise", id="clock"),
        pytest.param(lambda h: h.faults.answer(Call.LIST, REFUSED), "instances", "", "instance_read", id="permission"),
        pytest.param(lambda h: h.faults.answer(Call.OFFERS, REFUSED), "market", "", "misc", id="search"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(
    prepare: Callable[[VastHarness], None], line: str, detail: str, hint: str, tmp_path: Path
) -> None:
    lines = lines_of(tmp_path, prepare)
    assert [name for name, one in lines.items() if not one.ok] == [line]
    assert detail in lines[line].detail
    assert hint in lines[line].hint


def test_an_account_without_a_verified_address_is_warned_of_how_little_it_may_spend(tmp_path: Path) -> None:
    quota = lines_of(tmp_path, unverified)["quota"]
    assert quota.ok
    assert "e-mail address is not verified" in quota.detail
    assert "console.vast.ai" in quota.hint
