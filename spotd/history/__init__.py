"""Every price that was polled, for ninety days: a file of its own, beside the state, that may be lost without harm."""

from __future__ import annotations

from spotd.history.history import History, HistoryUnavailable
from spotd.history.reading import TooManyBuckets
from spotd.history.values import DISK_GB, Bucket, PriceGroup, PriceTerms, Retained, SeriesQuery, SeriesResult

__all__ = [
    "DISK_GB",
    "Bucket",
    "History",
    "HistoryUnavailable",
    "PriceGroup",
    "PriceTerms",
    "Retained",
    "SeriesQuery",
    "SeriesResult",
    "TooManyBuckets",
]
