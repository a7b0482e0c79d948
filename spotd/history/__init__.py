"""Every price that was polled, for ninety days: a file of its own, beside the state, that may be lost without harm."""

from __future__ import annotations

from spotd.history.file import DISK_GB, Bucket, PriceGroup, PriceTerms, Retained, SeriesQuery, SeriesResult
from spotd.history.history import History, HistoryUnavailable
from spotd.history.reading import TooManyBuckets

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
