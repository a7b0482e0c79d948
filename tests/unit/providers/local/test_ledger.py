"""The market's own books."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts import Ledger, LedgerError, LedgerEvent, read_ledger, segments
from tests.fakes.ledger_sums import most_at_once, total_by_key, total_by_machine
from tests.unit.providers.local.clocks import START

HOUR = timedelta(hours=1)


def _usd(dollars: float) -> MicroUsdPerHour:
    return MicroUsdPerHour(round(dollars * 1_000_000))


def test_totals_equal_the_sum_worked_out_by_hand(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open("m-1", "key-a", at=START, compute=_usd(2.0), storage=_usd(0.1))
    ledger.price("m-1", at=START + HOUR, compute=_usd(3.0))
    ledger.paused("m-1", at=START + 2 * HOUR, note="outbid")
    ledger.resumed("m-1", at=START + 4 * HOUR, compute=_usd(3.0))
    ledger.open("m-2", "key-a", at=START + 4 * HOUR, compute=_usd(1.0))
    ledger.end("m-1", at=START + 4 * HOUR + timedelta(minutes=30))
    spans = segments(read_ledger(ledger.path))
    ledger.close()
    until = START + 5 * HOUR
    # 2.00 + 3.00 + half an hour at 3.00, and 4.5 hours of disk at 0.10
    assert total_by_machine(spans, until) == {"m-1": 6_950_000, "m-2": 1_000_000}
    assert total_by_key(spans, until) == {"key-a": 7_950_000}
    assert [span.paused for span in spans if span.machine_id == "m-1"] == [False, False, True, False]
    assert most_at_once(spans) == 2
    assert most_at_once(span for span in spans if span.machine_id == "m-1") == 1


def test_each_part_of_a_segment_is_rounded_up_to_a_micro_dollar(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open("m-1", "k", at=START, compute=MicroUsdPerHour(1), storage=MicroUsdPerHour(1))
    ledger.end("m-1", at=START + timedelta(seconds=1))
    assert total_by_machine(segments(read_ledger(ledger.path)), START + HOUR) == {"m-1": 2}
    ledger.close()


def test_a_torn_last_line_neither_breaks_reading_nor_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.open("m-1", "k", at=START, compute=_usd(1.0))
    ledger.end("m-1", at=START + HOUR)
    ledger.close()
    whole = path.read_bytes()
    torn = whole[: whole.rindex(b"end")]
    path.write_bytes(torn)
    assert [line.event for line in read_ledger(path)] == [LedgerEvent.OPEN]
    heir = Ledger(path)
    assert heir.is_open("m-1")
    heir.end("m-1", at=START + 2 * HOUR)
    heir.close()
    assert total_by_machine(segments(read_ledger(path)), START + 9 * HOUR) == {"m-1": 2_000_000}


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"v":1}\nnot json\n')
    with pytest.raises(LedgerError, match=r"ledger\.jsonl, line 1"):
        read_ledger(path)


def test_ending_twice_repeating_a_price_and_pricing_a_paused_machine_write_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open("m-1", "k", at=START, compute=_usd(1.0))
    ledger.price("m-1", at=START + HOUR, compute=_usd(1.0))
    ledger.paused("m-1", at=START + HOUR)
    ledger.price("m-1", at=START + HOUR, compute=_usd(5.0))
    ledger.end("m-1", at=START + HOUR)
    ledger.end("m-1", at=START + 2 * HOUR)
    events = [line.event for line in read_ledger(ledger.path)]
    ledger.close()
    assert events == [LedgerEvent.OPEN, LedgerEvent.PAUSED, LedgerEvent.END]


def test_books_never_run_backwards(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open("m-1", "k", at=START, compute=_usd(1.0))
    ledger.end("m-1", at=START - HOUR)
    assert total_by_machine(segments(read_ledger(ledger.path)), START + HOUR) == {"m-1": 0}
    ledger.close()


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open("m-1", "k", at=START, compute=_usd(1.0))
    whole = os.write
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "write", lambda descriptor, text: whole(descriptor, text[:20]))
        with pytest.raises(OSError, match="No space left"):
            ledger.end("m-1", at=START + HOUR)
    ledger.end("m-1", at=START + 2 * HOUR)
    assert total_by_machine(segments(read_ledger(ledger.path)), START + 9 * HOUR) == {"m-1": 2_000_000}
    ledger.close()
