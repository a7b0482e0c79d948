"""`spotctl providers --hosts` and `--forget`."""

from __future__ import annotations

import json

import pytest

from spotd.core.domain.plan import Plan
from spotd.core.domain.world import RecordKind
from tests.unit.cli.conftest import Ctl
from tests.unit.core.experiences import experience, record


@pytest.fixture
def used(ctl: Ctl) -> Ctl:
    now = ctl.rig.clock.now()
    known = experience(
        record(RecordKind.FAILED_STARTS, "m-17", 2, at=now),
        record(RecordKind.LOSSES_HOST, "spot m-17", 1, 3.5, at=now),
        record(RecordKind.LOSSES_HOST, "spot m-18", 0, 40, at=now),
    )
    ctl.place.write(Plan(experience=known))
    return ctl


def test_hosts_are_shown_with_what_is_remembered_of_them(used: Ctl) -> None:
    result = used("providers", "--hosts")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0][:7] == ["HOST", "BEHIND", "FAILED", "SLOW", "EARLY", "LOST", "HOURS"]
    assert lines[1][:7] == ["shop/m-17", "11.0%", "2.0", "-", "-", "1.0", "3.5"]
    assert lines[2][:7] == ["shop/m-18", "0.0%", "-", "-", "-", "-", "40.0"]
    assert "fade by half in 3 days" in result.err
    [worst, _] = json.loads(used("providers", "--hosts", "-o", "json").out)["hosts"]
    assert (worst["ranks_behind"], worst["cools_until"]) == (0.11, None)
    assert used("providers", "--hosts", "-o", "id").out == "shop/m-17\nshop/m-18\n"


@pytest.mark.parametrize("name", ["m-17", "shop/m-17"])
def test_a_host_can_be_forgotten(used: Ctl, name: str) -> None:
    result = used("providers", "--forget", name)
    assert result.out == "shop/m-17 is forgotten: it ranks by its price again\n"
    assert used("providers", "--hosts", "-o", "id").out == "shop/m-18\n"


def test_a_host_of_which_nothing_is_remembered_cannot_be_forgotten(used: Ctl) -> None:
    result = used("providers", "--forget", "m-99")
    assert result.code == 6
    assert result.err == "error: nothing is remembered of a host 'm-99'\nhint: spotctl providers --hosts\n"


@pytest.mark.parametrize("address", ["", "a b", "user@gpu1:99999", "-oProxyCommand=x", "x\x1b[31m"])
def test_an_address_that_is_none_is_refused_with_the_way_to_write_it(ctl: Ctl, address: str) -> None:
    result = ctl("hosts", "add", "--", address)
    assert result.code == 2
    assert "hint: spotctl hosts add gpu1.example.org" in result.err
    assert "\x1b" not in result.err
    assert "error: :" not in result.err


def test_before_any_host_was_used_there_is_a_word_on_that(ctl: Ctl) -> None:
    result = ctl("providers", "--hosts")
    assert (result.code, result.out) == (0, "")
    assert "no host is remembered" in result.err
