"""What spotd booked beside what the markets billed, machine by machine, over their own ledgers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.values import MICRO, cost
from spotd_providers.local.hosts import Segment

ROUNDED_USD: Final = 0.0001
"""Each part of a price is rounded up, and each change of it once more."""

BILLED_BY: Final = {
    "aws": (timedelta(minutes=1), False),
    "gcp": (timedelta(minutes=1), False),
    "verda": (timedelta(minutes=10), True),
}
"""The unit of a bill, and whether it is only the first one that is billed whole."""


def bill_usd(spans: Iterable[Segment]) -> float:
    return sum(span.amount(span.end or span.start) for span in spans) / MICRO


def beyond_usd(provider: str, spans: Iterable[Segment]) -> float:
    """What a bill has beyond its ledger, at the first price of a machine that ran.

    EC2 and Google bill a minute of each at least, Verda each of ten minutes that has begun.
    """
    ran = [span for span in spans if span.compute and not span.paused]
    if provider not in BILLED_BY or not ran:
        return 0.0
    unit, is_repeated = BILLED_BY[provider]
    time = sum(((span.end or span.start) - span.start for span in ran), timedelta())
    units = -(-time // unit) if is_repeated else 1
    return cost(ran[0].compute, max(timedelta(0), units * unit - time)) / MICRO


def by_attempt(spans: Iterable[Segment]) -> dict[str, list[Segment]]:
    """The spans of each attempt, by `JOB-NUMBER`, the end of its key."""
    found: defaultdict[str, list[Segment]] = defaultdict(list)
    for span in spans:
        found["-".join(span.key.split("-")[-2:])].append(span)
    return found


def disagreements(
    receipts: Iterable[Mapping[str, Any]], spans: Iterable[Segment], *, unseen_s: float
) -> tuple[list[str], list[float]]:
    """Every machine whose receipt is not its bill, in words, and for how long the others differ at their price.

    A machine whose bill was read is to agree to the micro-dollar, any other one within what it costs for so long:
    from its end to the list that first shows it, and as much at its beginning. What is free since the provider took the
    machine so soon is no part of a ledger, which is written forward only.
    """
    billed = by_attempt(spans)
    wrong, apart = [], []
    for receipt in receipts:
        for line in receipt["attempts"]:
            own = billed.pop(f"{receipt['id']}-{line['attempt']}", [])
            if line["ended_at"] is None or any(span.end is None for span in own):
                continue
            # What the owner of a bucket asks is on no bill of a provider.
            spent = line["spent_usd"] - line.get("egress_usd", 0)
            differs = spent + line["free_usd"] - bill_usd(own) - beyond_usd(line.get("provider", ""), own)
            paid = (span.compute + span.storage for span in own)
            rate = max([line["effective_usd_h"], *(price / MICRO for price in paid)])
            bound = ROUNDED_USD + (0 if line["billed_usd"] is not None else rate * unseen_s / 3600)
            apart.append(max(0.0, abs(differs) - ROUNDED_USD) / rate * 3600)
            if abs(differs) > bound:
                wrong.append(
                    f"{receipt['name']}: booked ${differs:+.6f} against the bill, at most ${bound:.6f}: {line}, {own}"
                )
    return wrong + [f"no receipt knows {key}: {own}" for key, own in billed.items() if bill_usd(own)], apart


def disagreements_of_all(
    receipts: Iterable[Mapping[str, Any]], spans: Iterable[Segment], *, unseen_s: float
) -> tuple[list[str], list[float]]:
    """The same of all machines together, where one may be on the receipts of several jobs."""
    lines, own = [line for receipt in receipts for line in receipt["attempts"]], list(spans)
    if any(line["ended_at"] is None for line in lines) or any(span.end is None for span in own):
        return [], []
    booked, billed = sum(line["spent_usd"] + line["free_usd"] for line in lines), bill_usd(own)
    rate = max((line["effective_usd_h"] for line in lines), default=0.0)
    unread = sum(line["billed_usd"] is None for line in lines)
    bound = ROUNDED_USD * max(1, len(lines)) + unread * rate * unseen_s / 3600
    wrong = [f"booked ${booked:.6f}, billed ${billed:.6f}, at most ${bound:.6f} apart"]
    return (wrong if abs(booked - billed) > bound else []), [abs(booked - billed) / max(rate, ROUNDED_USD) * 3600]
