"""Ids of jobs can be read aloud, sort by submission and fit into a machine's key."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

from spotd.core.domain.intents import JobId
from spotd.core.domain.policy import attempt_key, key_belongs_to
from spotd.daemon.install import ALPHABET, JobIds
from spotd_providers.contract.values import InstallId
from tests.unit.core.builders import NOW


class Still:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at

    async def sleep(self, duration: timedelta) -> None:
        raise NotImplementedError

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()


def test_an_id_is_ten_unambiguous_lower_case_letters_and_digits() -> None:
    made = JobIds(Still(), Random(1)).new()
    assert len(made) == 10
    assert set(made) <= set(ALPHABET)
    assert not set(ALPHABET) & set("ilou-")


def test_ids_of_one_second_are_different_and_still_sorted() -> None:
    ids = JobIds(Still(), Random(1))
    made = [ids.new() for _ in range(2000)]
    assert made == sorted(set(made))


def test_a_later_id_of_another_process_sorts_behind() -> None:
    clock = Still()
    first = JobIds(clock, Random(1)).new()
    clock.at += timedelta(seconds=1)
    assert JobIds(clock, Random(2)).new() > first


def test_a_clock_before_the_epoch_still_makes_ids() -> None:
    clock = Still()
    clock.at = datetime.fromisoformat("2019-06-01T00:00:00Z")
    ids = JobIds(clock, Random(1))
    assert ids.new() != ids.new()


def test_the_key_of_an_attempt_leads_back_to_its_install() -> None:
    job = JobId(JobIds(Still(), Random(1)).new())
    key = attempt_key(InstallId("lab"), job, 12)
    assert key_belongs_to(InstallId("lab"), key)
    assert not key_belongs_to(InstallId("la"), key)
