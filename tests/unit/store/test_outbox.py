"""The queue of a channel that is full: what counts more displaces what counts less, and no severity starves."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from random import Random

import pytest

from spotd.core.notifications import Notification, Severity, Topic
from spotd.store import Store, Tx
from tests.unit.store.values import NOW

MOST = 100
KEPT = MOST // 10
CHANNEL = "phone"


def said(name: str, severity: Severity) -> tuple[str, Notification]:
    at, topic = NOW, Topic.FAILED
    return CHANNEL, Notification(
        key=name, topic=topic, severity=severity, at=at, title=name, text="", job=None, repeat_after=timedelta(days=1)
    )


def add(store: Store, severity: Severity, *names: str) -> int:
    made = [said(name, severity) for name in names]
    return store.tx(lambda tx: tx.outbox().add(made, waiting_max=MOST)).get(CHANNEL, 0)


def queue(batch: list[tuple[str, Notification]], tx: Tx) -> dict[str, int]:
    return tx.outbox().add(batch, waiting_max=MOST)


def waiting(store: Store) -> list[Notification]:
    return [one.notification for one in store.read(lambda reads: reads.outbox().queued([CHANNEL]))]


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{number}" for number in range(count)]


def test_what_is_urgent_takes_the_place_of_the_oldest_information(store: Store) -> None:
    assert add(store, Severity.INFO, *names("i", MOST)) == 0
    assert add(store, Severity.URGENT, "budget") == 1
    found = [one.key for one in waiting(store)]
    assert found == [*names("i", MOST)[1:], "budget"]


def test_the_same_within_one_batch(store: Store) -> None:
    batch = [said(name, Severity.INFO) for name in names("i", MOST + 3)] + [said("budget", Severity.URGENT)]
    assert store.tx(lambda tx: tx.outbox().add(batch, waiting_max=MOST)) == {CHANNEL: 4}
    assert [one.key for one in waiting(store)] == [*names("i", MOST)[1:], "budget"]


def test_urgent_ones_in_thousands_leave_a_share_to_each_lower_severity(store: Store) -> None:
    add(store, Severity.INFO, *names("i", MOST // 2))
    add(store, Severity.WARNING, *names("w", MOST // 2))
    assert add(store, Severity.URGENT, *names("u", 5_000)) == 5_000
    counts = Counter(one.severity for one in waiting(store))
    assert counts == {Severity.INFO: KEPT, Severity.WARNING: KEPT, Severity.URGENT: MOST - 2 * KEPT}


@pytest.mark.parametrize("severity", [Severity.INFO, Severity.WARNING])
def test_what_counts_less_displaces_nothing(store: Store, severity: Severity) -> None:
    add(store, Severity.URGENT, *names("u", MOST))
    assert add(store, severity, "late") == 1
    assert {one.severity for one in waiting(store)} == {Severity.URGENT}


def test_whatever_comes_in_whatever_order_no_queue_is_longer_and_none_is_lost_uncounted(store: Store) -> None:
    rng, left_out, sent = Random(18), 0, 0
    for turn in range(60):
        kinds = rng.choices(list(Severity), weights=rng.choice([(8, 1, 1), (1, 1, 8), (1, 8, 1)]), k=rng.randrange(20))
        batch = [said(f"{turn}-{number}", kind) for number, kind in enumerate(kinds)]
        sent += len(batch)
        left_out += store.tx(partial(queue, batch)).get(CHANNEL, 0)
        found = waiting(store)
        assert len(found) == min(MOST, sent - left_out)
        assert len(found) + left_out == sent
