"""What `spotctl doctor` says of RunPod: one line for each thing, with the way out of what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import CheckLine
from spotd_providers.runpod.plugin import NO_BALANCE
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call, Canned
from tests.unit.providers.runpod.harness import RunpodHarness, open_harness

REFUSED = Canned(status=403, body=b'{"title": "Forbidden", "status": 403, "detail": "no permission"}')


def lines_of(folder: Path, prepare: Callable[[RunpodHarness], None], **settings: Any) -> dict[str, CheckLine]:
    async def asked(h: RunpodHarness) -> dict[str, CheckLine]:
        async with h.opened() as provider:
            return {line.name: line for line in await provider.check()}

    with open_harness(folder, **settings) as h:
        prepare(h)
        return asyncio.run(asked(h))


def late(h: RunpodHarness) -> None:
    """This computer's clock is six seconds ahead of theirs."""
    h.clock = FakeClock(h.fake_clock.now() + timedelta(seconds=6))


def test_an_account_where_all_is_well_has_a_good_line_for_each_thing(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, lambda h: None)
    assert {name: line.detail for name, line in lines.items()} == {
        "key": "accepted, can list pods",
        "clock": "0 s from RunPod's",
        "market": "4 kinds of GPU in the catalogue",
        "billing": "can read charges",
        "clusters": "can list clusters, 0 there",
        "balance": NO_BALANCE,
    }
    assert all(line.ok and not line.hint for line in lines.values())


@pytest.mark.parametrize(
    ("prepare", "line", "detail", "hint"),
    [
        pytest.param(lambda h: h.break_auth(), "key", "", "user/settings", id="key"),
        pytest.param(late, "clock", "6 s from", "synchronise", id="clock"),
        pytest.param(lambda h: h.served.stop(), "key", "cannot connect to 127.0.0.1", "base_url", id="unreachable"),
        pytest.param(lambda h: h.faults.answer(Call.OFFERS, REFUSED), "market", "", "read and write", id="permission"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(
    prepare: Callable[[RunpodHarness], None], line: str, detail: str, hint: str, tmp_path: Path
) -> None:
    lines = lines_of(tmp_path, prepare)
    assert [name for name, one in lines.items() if not one.ok] == [line]
    assert detail in lines[line].detail
    assert hint in lines[line].hint


def test_with_direct_ssh_an_account_without_a_public_key_is_named(tmp_path: Path) -> None:
    line = lines_of(tmp_path / "none", lambda h: None, direct_ssh=True)["ssh keys"]
    assert (line.ok, "no public key" in line.detail, "add your public key" in line.hint) == (False, True, True)

    def add(h: RunpodHarness) -> None:
        h.cloud.belongings.ssh_keys.append("ssh-ed25519 AAAA me")

    line = lines_of(tmp_path / "one", add, direct_ssh=True)["ssh keys"]
    assert (line.ok, line.detail) == (True, "one public key for pods")
