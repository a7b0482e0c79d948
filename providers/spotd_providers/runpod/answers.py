"""The meaning of RunPod's answers: status first, then the words, since only words report a lack of capacity.

Theory. REST v2 follows RFC 9457: the status says whose fault it is. One status is ambiguous: a 400 on create is a
broken rule *or* a lack of capacity, and no code distinguishes them, so known sentences are kept here, in one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from random import Random
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, NoBalance, RateLimited, Unavailable
from spotd_providers.kit.answers import DefiniteRefusal, raise_for_status
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.pace import too_often
from spotd_providers.kit.shapes import decode_or_none
from spotd_providers.kit.text import TEXT_CHARS_MAX, quote_safely
from spotd_providers.runpod.wire import WHO, problem_of

PENALTY: Final = timedelta(seconds=12)
_WINDOW: Final = re.compile(r'"?([a-z]+)"?\s*;\s*r=(\d{1,9})\s*;\s*t=(\d{1,6})')
_POLICY: Final = re.compile(r'"?([a-z]+)"?\s*;\s*q=(\d{1,9})')
KEPT_SHARE: Final = 4

NO_CAPACITY_WORDS: Final = (
    "no longer any instances available",
    "no instances available",
    "no instances currently available",
    "not enough free gpus",
    "no resources",
    "does not have the resources",
    "could not find any pods with required specifications",
    "capacity",
    "out of stock",
    "no available datacenter",
    "no machine",
)
NOTHING_MADE_WORDS: Final = NO_CAPACITY_WORDS[:3]
"""Whole sentences about a lack of capacity: they also come with a 5xx, and then still mean that no pod was made."""
BALANCE_WORDS: Final = ("balance", "insufficient funds", "insufficient credit", "not enough credit")
QUOTA_WORDS: Final = ("spend limit", "spending limit", "pod limit", "quota", "maximum number of pods", "limit reached")
SCOPE_WORDS: Final = ("scope", "permission", "read-only", "read only", "api key")


class RunpodRefused(DefiniteRefusal):
    """A definite "no" of RunPod's."""

    who = WHO


def says(text: str, words: tuple[str, ...]) -> bool:
    """Whether the text holds one of these phrases."""
    text = text.lower()
    return any(word in text for word in words)


def body_of(answer: HttpAnswer) -> Any:
    """Decode the body; `None` if it is not JSON."""
    return decode_or_none(answer.body, who=WHO)


def raise_for(answer: HttpAnswer, body: Any, *, what: str, rng: Random, create: bool = False) -> None:
    """Raise the error that an answer stands for; return only if it is a success.

    On a create, 403 may mean that this account may not rent that kind of GPU; elsewhere it is the key.

    Raises:
        AuthFailed, RateLimited, Unavailable, NoBalance: whatever was asked, this is what it means.
        Refused: a definite no.
    """
    status = answer.status
    if 200 <= status < 300:
        return
    detail = quote_safely(problem_of(body) if isinstance(body, dict) else answer.text[:TEXT_CHARS_MAX])
    if status == 429:
        raise too_many(answer, what=what, rng=rng)
    if status == 401:
        raise AuthFailed(f"RunPod refused the API key: {detail or status}")
    if status == 403 and not isinstance(body, dict):
        # The API explains itself in JSON; this is the edge in front of it, which says nothing about the key.
        raise Unavailable(f"RunPod's edge refused {what}")
    if status == 403 and not create:
        raise AuthFailed(f"the RunPod API key may not do this ({what}): {detail or status}")
    if status == 402:
        raise NoBalance(f"the RunPod account's balance is too low: {detail or status}")
    raise_for_status(answer, who=WHO, what=what)
    raise RunpodRefused(status=status, detail=detail)


def too_many(answer: HttpAnswer, *, what: str, rng: Random) -> RateLimited:
    """Build the error of a 429: its wait is `Retry-After`, else the reset of the window that is used up."""
    wait = answer.retry_after
    return too_often("RunPod", what, (used_up(answer) or PENALTY) if wait is None else wait, rng)


def used_up(answer: HttpAnswer) -> timedelta | None:
    """Return the time to the reset of a window of the `RateLimit` header that is used up; `None` if none is."""
    return max((reset for _, left, reset in _windows(answer) if left == 0), default=None)


def running_low(answer: HttpAnswer) -> timedelta | None:
    """Return the time to the reset of a short window with less than a quarter left, which is kept for urgent calls."""
    sizes = {name: int(size) for name, size in _POLICY.findall(answer.headers.get("ratelimit-policy", "")[:1024])}
    low = (
        reset
        for name, left, reset in _windows(answer)
        if left < sizes.get(name, 0) // KEPT_SHARE and reset <= timedelta(minutes=1, seconds=1)
    )
    return max(low, default=None)


def _windows(answer: HttpAnswer) -> Iterator[tuple[str, int, timedelta]]:
    """Yield name, requests left and time to reset of each window: `"minute";r=0;t=12, "hour";r=2800;t=1812`."""
    for name, left, reset in _WINDOW.findall(answer.headers.get("ratelimit", "")[:1024]):
        yield name, int(left), timedelta(seconds=int(reset))
