"""Records of what was seen survive a restart, are replaced by their successors, and go when they have faded."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.plan import Plan
from spotd.core.domain.world import RECORDS_MAX, Experience, RecordKind, nothing
from spotd.store import Store
from spotd.store.store import Folding
from tests.unit.core.builders import NOW, shop_policy
from tests.unit.core.experiences import experience, record

FAULT = record(RecordKind.FAILED_STARTS, "h1", 2)
HOURS = record(RecordKind.LOSSES_POOL, "spot p %_' 1", 1, 7.5)


def stored(store: Store) -> Experience:
    return store.tx(lambda tx: tx.world(shop_policy(), NOW)).experience


def test_records_survive_a_restart(tmp_path: Path) -> None:
    known = experience(FAULT, HOURS)
    with Store.open(tmp_path / "state.db") as store:
        assert stored(store) == {}
        store.tx(lambda tx: tx.commit(Plan(experience=known)))
        assert stored(store) == known
    with Store.open(tmp_path / "state.db") as store:
        assert stored(store) == known


def test_a_record_replaces_its_former_one_and_one_of_nothing_forgets_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.db") as store:
        store.tx(lambda tx: tx.commit(Plan(experience=experience(FAULT, HOURS))))
        more = record(RecordKind.FAILED_STARTS, "h1", 3)
        store.tx(lambda tx: tx.commit(Plan(experience={more.id: more, HOURS.id: nothing(HOURS.id, NOW)})))
        assert stored(store) == experience(more)


def test_a_transaction_that_fails_leaves_no_record_behind(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.db") as store:
        assert stored(store) == {}

        def fails(tx: object) -> None:
            tx.commit(Plan(experience=experience(FAULT)))  # type: ignore[attr-defined]  # a transaction
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.tx(fails)
        assert stored(store) == {}


def test_what_has_faded_and_what_is_too_much_is_deleted(tmp_path: Path) -> None:
    old = record(RecordKind.EARLY_LOSSES, "old", 1, at=NOW - timedelta(days=60))
    many = [record(RecordKind.SLOW_STARTS, f"h{n}", 1, at=NOW - timedelta(seconds=n)) for n in range(RECORDS_MAX + 3)]
    with Store.open(tmp_path / "state.db") as store:
        store.tx(lambda tx: tx.commit(Plan(experience=experience(old, FAULT, *many))))
        assert len(stored(store)) == len(many) + 2
        gone = store.tx(lambda tx: tx.fold(NOW, Folding()))
        assert gone == 4
        assert stored(store) == experience(FAULT, *many[:RECORDS_MAX])
