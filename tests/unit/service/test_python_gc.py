"""A start is not searched for garbage, and the daemon that comes of it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from spotd.service import memory


class Knot:
    """Refers to itself, so that only a collection can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    gc.unfreeze()  # of a test before in this process that ran a daemon
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_the_start_left_behind_is_freed_and_what_stays_is_never_looked_at_again() -> None:
    memory.postpone_gc()
    garbage = weakref.ref(Knot())
    assert garbage() is not None
    memory.begin_gc()
    assert gc.isenabled()
    assert garbage() is None
    assert gc.get_freeze_count() > 0


def test_old_garbage_waits_for_the_search_however_much_is_new() -> None:
    gc.set_threshold(700, 10, 10)  # Python's own
    memory.postpone_gc()
    memory.begin_gc()
    knot = Knot()
    gc.collect(0)
    gc.collect(1)  # it is old now
    garbage = weakref.ref(knot)
    del knot
    searches = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(2 * gc.get_freeze_count())]  # Python would search at a quarter
    assert gc.get_stats()[2]["collections"] == searches
    assert garbage() is not None
    memory.search()
    assert garbage() is None
    assert kept


def test_a_process_that_postponed_nothing_keeps_its_collector_as_it_is() -> None:
    memory.begin_gc()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
