"""Who is asking, and whether they ask too often."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Final

from tests.fakes.vastai.quirks import Quirks
from tests.fakes.vastai.refusal import Refusal, said

_TOLERANCE: Final = timedelta(milliseconds=50)
SEARCHES_PER_MINUTE: Final = 10


class Route(Enum):
    """The routes with their thresholds, the least seconds between two calls of one key."""

    SEARCH = ("search", 0.0)
    CREATE = ("create", 4.5)
    BID = ("bid", 5.5)
    DESTROY = ("destroy", 3.0)
    SHOW = ("show", 2.0)
    LIST = ("list", 1.0)
    MANAGE = ("manage", 1.0)
    LOGS = ("logs", 1.0)
    CHARGES = ("charges", 1.0)
    USER = ("user", 1.0)
    CATALOG = ("catalogue", 0.0)
    METRICS = ("metrics", 3.0)
    INCREASES = ("price increases", 2.0)
    BENCHMARKS = ("benchmarks", 3.0)

    def __init__(self, title: str, threshold_s: float) -> None:
        self.title = title
        self.threshold_s = threshold_s


class Limits:
    """Remembers who called what and when."""

    def __init__(self, quirks: Quirks) -> None:
        self._quirks = quirks
        self._latest: dict[tuple[Route, str], datetime] = {}
        self._searches: list[datetime] = []
        self._searched: dict[date, int] = {}

    def admit(self, route: Route, who: str, now: datetime) -> None:
        """The call is counted.

        Raises:
            Refusal: 429, in plain text without advice as the service does, or the daily quota's own words.
        """
        if route is Route.SEARCH and self._quirks.search_quota is not None:
            used = self._searched.get(now.date(), 0)
            if used >= self._quirks.search_quota:
                raise said(429, "search_quota_exceeded", "Daily search quota exceeded, resets at midnight UTC.")
            self._searched[now.date()] = used + 1
        if not self._quirks.rate_limits:
            return
        if route is Route.SEARCH:
            self._searches = [at for at in self._searches if now - at < timedelta(minutes=1)]
            if len(self._searches) >= SEARCHES_PER_MINUTE:
                raise self._too_often(6.0)
            self._searches.append(now)
            return
        latest = self._latest.get((route, who))
        if latest is not None and now - latest < timedelta(seconds=route.threshold_s) - _TOLERANCE:
            raise self._too_often(route.threshold_s)
        self._latest[(route, who)] = now

    def _too_often(self, threshold_s: float) -> Refusal:
        headers = {"retry-after": str(int(threshold_s) + 1)} if self._quirks.retry_after else {}
        return Refusal(
            429, f"API requests too frequent: endpoint threshold={threshold_s:.1f}. Please slow down.", headers=headers
        )


def key_of(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The key a request carries, in its header or (as old clients do) in its URL."""
    found = re.fullmatch(r"Bearer\s+(\S+)", headers.get("authorization", ""))
    return found[1] if found else query.get("api_key")
