"""The market: offers of now, and which GPU and which ceilings a picture of prices is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotd.web.markup import Node, el, table
from spotd.web.views.parts import gpus, holds
from spotd.words import FINAL_STATES, NOTHING, WITHOUT_CEILING, clean, count, price

CEILINGS_MAX: Final = 8
_SEARCHED: Final = ("provider", "host", "region", "gpu", "market", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFilter:
    """Which offers are shown; empty for all."""

    gpu: str = ""
    provider: str = ""
    market: str = ""
    text: str = ""
    fits_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingLine:
    """A ceiling, in dollars per GPU-hour, and the jobs that have it."""

    usd_gpu_h: float
    name: str


def matching(quotes: Sequence[Mapping[str, Any]], chosen: OfferFilter) -> list[Mapping[str, Any]]:
    """Return the offers that were asked for, in the order of the answer."""
    return [
        one
        for one in quotes
        if (not chosen.gpu or one["gpu"] == chosen.gpu)
        and (not chosen.provider or one["provider"] == chosen.provider)
        and (not chosen.market or one["market"] == chosen.market)
        and (not chosen.fits_only or one["fits"])
        and holds(chosen.text, *(one[key] for key in _SEARCHED))
    ]


def gpu_names(quotes: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the GPUs that can be chosen: those that open jobs ask for first, then by the number of offers."""
    asked = Counter(job["gpu"] for job in jobs if job["gpu"] and job["state"] not in FINAL_STATES)
    offered = Counter(one["gpu"] for one in quotes)
    names = [*asked, *(name for name in offered if name not in asked)]
    return sorted(names, key=lambda name: (-asked[name], -offered[name], name))


def ceilings(jobs: Sequence[Mapping[str, Any]], gpu: str) -> list[CeilingLine]:
    """Return the ceilings of open jobs that ask for this GPU; those of several jobs are one line."""
    names: dict[float, list[str]] = {}
    for job in jobs:
        limit = job["ceiling_usd_gpu_h"]
        if job["state"] not in FINAL_STATES and limit is not None and _is_same_gpu(job["gpu"], gpu):
            names.setdefault(round(limit, 4), []).append(clean(job["name"]))
    busiest = sorted(names.items(), key=lambda row: -len(row[1]))[:CEILINGS_MAX]
    return [
        CeilingLine(usd_gpu_h=limit, name=of[0][:30] if len(of) == 1 else count(len(of), "job"))
        for limit, of in sorted(busiest)
    ]


def _is_same_gpu(asked: str | None, gpu: str) -> bool:
    """Whether a job that asks for one name may get the other: a job may ask for `H100`, which is `H100_SXM` too."""
    return bool(asked) and (asked == gpu or gpu.startswith((f"{asked}_", f"{asked}-")))


def offers(quotes: Sequence[Mapping[str, Any]]) -> Node:
    columns = "GPU | Where | Region | Market | $/GPU-hour:n | $/h:n | On-demand $/h:n | Ceiling:n | Verdict"
    rows: list[list[Node]] = [
        [
            gpus(one),
            clean(f"{one['provider']}/{one['host']}"),
            clean(one["region"]) or NOTHING,
            one["market"],
            el("span", price(one["effective_usd_gpu_h"]), title=breakdown(one)),
            price(one["effective_usd_h"]),
            price(one["on_demand_usd_h"]),
            price(one["ceiling_usd_gpu_h"]),
            el("span", "fits", cls="state good") if one["fits"] else _verdict(one),
        ]
        for one in quotes
    ]
    none = "The configuration has no ceiling for some of these GPUs; a job's own max_price counts for it."
    note = el("p", none, cls="muted") if any(_verdict(one) == NOTHING for one in quotes) else None
    return el("section", table("Offers of now, by effective price", columns, rows, empty="No offer matches."), note)


def _verdict(one: Mapping[str, Any]) -> str:
    return NOTHING if one["verdict"] == WITHOUT_CEILING else clean(one["verdict"])


def breakdown(one: Mapping[str, Any]) -> str:
    """Return the terms of an effective price in one line."""
    terms = one["breakdown"]
    names = (
        ("gpu_usd_h", "GPU"),
        ("storage_usd_h", "disk"),
        ("fee_usd_h", "fee"),
        ("upload_usd_h", "upload"),
        ("restore_usd_h", "restore"),
    )
    parts = [f"{name} {price(terms[key])}" for key, name in names if terms[key]]
    return f"per hour: {' + '.join(parts)} = {price(terms['total_usd_h'])}"
