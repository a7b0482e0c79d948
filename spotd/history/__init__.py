"""Every price that was polled, for ninety days: a file of its own, beside the state, that may be lost without harm."""

from __future__ import annotations

from spotd.history.book import History, HistoryUnavailable
from spotd.history.reading import TooManyBuckets
from spotd.history.values import DISK_GB, Answer, Bucket, Group, Question, Retained, Terms

__all__ = [
    "DISK_GB",
    "Answer",
    "Bucket",
    "Group",
    "History",
    "HistoryUnavailable",
    "Question",
    "Retained",
    "Terms",
    "TooManyBuckets",
]
