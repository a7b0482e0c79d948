"""The comparison of receipts with ledgers finds what differs, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts import Segment
from tests.cases import every
from tests.e2e.receipts import disagreements

BEGAN = datetime(2026, 3, 2, 12, tzinfo=UTC)


def span(minutes: float, *, key: str = "spotd-lab.abc-j1-1", open_end: bool = False) -> Segment:
    """Time of a machine at $0.60 an hour: a cent a minute."""
    return Segment(
        machine_id="m1",
        key=key,
        start=BEGAN,
        end=None if open_end else BEGAN + timedelta(minutes=minutes),
        compute=MicroUsdPerHour(600_000),
        storage=MicroUsdPerHour(0),
        paused=False,
    )


def receipt(spent: float, **changes: Any) -> dict[str, Any]:
    line = {
        "attempt": 1, "spent_usd": spent, "free_usd": 0.0, "billed_usd": None, "effective_usd_h": 0.6,
        "ended_at": "2026-03-02T12:10:00.000Z", **changes,
    }  # fmt: skip
    return {"id": "j1", "name": "train", "attempts": [line]}


@every(
    ("found", "spans", "differs"),
    [
        pytest.param(receipt(0.10), [span(10)], False, id="the same"),
        pytest.param(receipt(0.109), [span(10)], False, id="within a minute that was not seen"),
        pytest.param(receipt(0.112), [span(10)], True, id="too much"),
        pytest.param(receipt(0.088), [span(10)], True, id="too little"),
        pytest.param(receipt(0.101, billed_usd=0.101), [span(10)], True, id="its bill was read"),
        pytest.param(receipt(0.06, free_usd=0.04), [span(10)], False, id="a part was free"),
        pytest.param(receipt(0.0), [span(10), span(10, key="spotd-lab.abc-j2-1")], True, id="an unknown machine"),
        pytest.param(receipt(0.5), [span(0, open_end=True)], False, id="a machine that is not ended yet"),
        pytest.param(receipt(0.5, ended_at=None), [span(10)], False, id="an attempt that is not over"),
        pytest.param(receipt(0.1), [], True, id="no machine at all"),
        pytest.param(receipt(0.01, provider="aws", billed_usd=0.01), [span(0.15)], False, id="a minute at least"),
        pytest.param(receipt(0.01, billed_usd=0.01), [span(0.15)], True, id="a minute elsewhere"),
    ],
)
def test_what_differs_is_found(found: dict[str, Any], spans: list[Segment], *, differs: bool) -> None:
    wrong, _ = disagreements([found], spans, unseen_s=60)
    assert bool(wrong) is differs, wrong
