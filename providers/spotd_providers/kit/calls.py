"""How a provider is called: its pace, pages, what answers hold, what is tried again, threads for blocking clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from random import Random
from typing import Any, Final, Generic, TypeGuard, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, RequestRejected, Unavailable
from spotd_providers.contract.provider import Clock, OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.http import HttpAnswer

T = TypeVar("T")

# Refusals and statuses that mean the same at every provider.


class DefiniteRefusal(Exception):
    """A definite "no" whose meaning depends on what was asked.

    Attributes:
        code: the provider's error word, or an empty string.
        detail: its sentence, clean enough to show.
    """

    who: str

    def __init__(self, *, status: int, code: str = "", detail: str = "") -> None:
        super().__init__(f"{self.who} answered {status}: {detail or code or 'no reason given'}")
        self.status = status
        self.code = code
        self.detail = detail


def raise_for_status(answer: HttpAnswer, *, who: str, what: str) -> None:
    """Raise for a redirect and for an error of the server.

    Raises:
        Unavailable: the answer is one of these.
    """
    if 300 <= answer.status < 400:
        host = urlsplit(answer.headers.get("location", "")).hostname or "elsewhere"
        raise Unavailable(f"{who} redirects {what} to {host}: check base_url")
    if answer.status >= 500 or answer.status == 408:
        raise Unavailable(f"{who} answered {answer.status} to {what}")


def rejected(who: str, field: str, reason: str) -> RequestRejected:
    """Build the error of a request that cannot be made."""
    return RequestRejected(f"{who}: {field}: {reason}", field=field, reason=reason)


# Lines of a provider's check that are the same for every provider.


SKEW_MAX: Final = timedelta(seconds=5)
CLOCK_HINT: Final = "synchronise this computer's clock"


def clock_line(skew: timedelta, *, who: str, hint: str = CLOCK_HINT) -> CheckLine:
    """Compare this computer's clock with the provider's; `skew` is the difference."""
    is_near = skew <= SKEW_MAX
    detail = f"{skew.total_seconds():.0f} s from {who}'s"
    return CheckLine(name="clock", ok=is_near, detail=detail, hint="" if is_near else hint)


async def check_line(
    name: str, ask: Callable[[], Awaitable[str]], *, hint: str, refused: str = "", unanswered: str = ""
) -> CheckLine:
    """Run one check. `refused` and `unanswered` are the hints where the key is refused or nothing was found out."""
    try:
        return CheckLine(name=name, ok=True, detail=await ask())
    except AuthFailed as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=refused or hint)
    except (RateLimited, Unavailable) as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=unanswered or hint)
    except (ProviderError, DefiniteRefusal) as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=hint)


# Minimum intervals between calls of one kind, so that a provider's rate limit is never met by accident.


RETRY_AFTER_MAX: Final = timedelta(days=1)


def too_often(who: str, what: str, wait: timedelta, rng: Random) -> RateLimited:
    """Build the error of a 429 with its wait, bounded and with some jitter."""
    jitter = timedelta(seconds=0.1 + 0.4 * rng.random())
    return RateLimited(f"{who} is asked too often ({what})", retry_after=min(wait, RETRY_AFTER_MAX) + jitter)


class Rest:
    """A pause in which nothing is sent. A clock that is set back does not make it longer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted_at: datetime | None = None
        self._until: datetime | None = None

    def take(self, span: timedelta) -> None:
        """Start the pause now, or lengthen it to `span` from now."""
        now = self._clock.now()
        if self._until is None or self.left() < span:
            self._noted_at, self._until = now, now + span

    def left(self) -> timedelta:
        now = self._clock.now()
        if self._until is None or self._noted_at is None:
            return timedelta(0)
        if now < self._noted_at:
            self._until -= self._noted_at - now
            self._noted_at = now
        return max(timedelta(0), self._until - now)


class RequestPace:
    """At most one call per `interval` and endpoint; callers queue in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rests: dict[str, Rest] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def turn(self, endpoint: str, interval: timedelta) -> None:
        """Wait until a call to this endpoint is due."""
        async with self._locks[endpoint]:
            rest = self._rests.setdefault(endpoint, Rest(self._clock))
            if (left := rest.left()) > timedelta(0):
                await self._clock.sleep(left)
            rest.take(interval)

    def wait(self, endpoint: str, interval: timedelta) -> timedelta:
        """Return how long a call to this endpoint would wait, behind those that wait already."""
        rest = self._rests.get(endpoint)
        ahead = self._locks[endpoint].statistics()
        return (ahead.tasks_waiting + ahead.locked) * interval + (timedelta(0) if rest is None else rest.left())

    def penalise(self, endpoint: str, wait: timedelta) -> None:
        """Delay the next call to this endpoint by at least `wait`."""
        self._rests.setdefault(endpoint, Rest(self._clock)).take(wait)


# What changes rarely, read now and then.


class Kept(Generic[T]):
    """What one read found, for a while."""

    def __init__(self, clock: Clock, span: timedelta, read: Callable[[], Awaitable[T]]) -> None:
        self._clock, self._span, self._read = clock, span, read
        self._one = anyio.Lock()
        self._found: list[T] = []
        self._fresh = Rest(clock)

    async def get(self, *, within: timedelta | None = None) -> T:
        """Return what the last read found, or read anew where that is old, or older than `within`."""
        async with self._one:
            old = timedelta(0) if within is None else self._span - within
            if not self._found or self._fresh.left() <= old:
                self._found = [await self._read()]
                self._fresh = Rest(self._clock)
                self._fresh.take(self._span)
            return self._found[0]

    def forget(self) -> None:
        """Let the next question be asked anew."""
        self._found = []


class KeptToken(ABC):
    """The bearer token of now (`kit.http.TokenSource`): fetched anew when its time is over, or when it was refused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._token = ""
        self._left = Rest(clock)
        self._one = anyio.Lock()

    @abstractmethod
    async def _fetch(self) -> tuple[str, timedelta]:
        """Return a token, and for how long it is used.

        Raises:
            AuthFailed, Unavailable: none is given.
        """

    def _keep(self, token: str, span: timedelta) -> None:
        self._token, self._left = token, Rest(self._clock)
        self._left.take(span)

    async def __call__(self, *, refused: bool) -> str:
        before = self._token
        async with self._one:
            if self._left.left() <= timedelta(0) or (refused and self._token == before):
                self._keep(*await self._fetch())
            return self._token


def is_token(value: Any) -> TypeGuard[str]:
    """Whether a value can be sent as a token."""
    return isinstance(value, str) and bool(value) and value.isascii() and value.isprintable()


# A list that a provider answers page by page, read to its end or to where it breaks off.


PAGES_MAX: Final = 400
PAGED_ROWS_MAX: Final = 10_000
"""Twice as many machines as the daemon keeps of one provider."""
Page = tuple[Sequence[Any], str | None]


async def all_pages(
    read: Callable[[str | None], Awaitable[Page]], *, rows_max: int = PAGED_ROWS_MAX
) -> tuple[list[Any], bool]:
    """Return the rows of all pages, and whether these are the whole list.

    `read` returns the rows of the page behind a token and the token of the next one: `None` at the end, empty for a
    page that is promised without a token. Of more rows than `rows_max` the first are returned, as not the whole.

    Raises:
        ProviderError: the first page could not be read, or the key was refused at any.
    """
    rows: list[Any] = []
    token: str | None = None
    tokens: set[str] = set()
    while True:
        try:
            page, following = await read(token)
        except AuthFailed:
            raise
        except ProviderError:
            if token is None:
                raise
            return rows, False
        rows.extend(islice(page, rows_max - len(rows)))
        if len(rows) >= rows_max:
            return rows, False
        if following is None:
            return rows, True
        if not following or following in tokens or len(tokens) >= PAGES_MAX:
            return rows, False
        tokens.add(following)
        token = following


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPage:
    """What one page of past prices is asked for.

    Attributes:
        names: of what is priced; empty where nothing is sold.
        next: the cursor of the page behind it, empty for the last one.
        left: how many pages are behind it.
    """

    names: Sequence[str]
    since: datetime
    until: datetime
    next: str
    left: int

    def answer(self, offers: Iterable[OfferPriceHistory] = (), rejected: int = 0) -> PriceHistoryPage:
        """Return the page with what was found."""
        return PriceHistoryPage(
            offers=tuple(offers),
            since=self.since,
            until=self.until,
            next=self.next,
            rejected=rejected,
            left=self.left,
        )


def past_page(
    names: Sequence[str], since: datetime, now: datetime, *, after: str, kept: timedelta, who: str, size: int = 1
) -> PastPage:
    """Return the page of past prices whose cursor is `after`: the first name on it, or nothing for the first page.

    Args:
        kept: how far back the provider knows prices.
        size: how many names one question asks for.

    Raises:
        RequestRejected: no page begins so.
    """
    first = names[::size]
    if after and after not in first:
        raise RequestRejected(f"{who} has no page {after} of past prices", field="after", reason="unknown page")
    place = first.index(after) if after else 0
    return PastPage(
        names=names[place * size : (place + 1) * size],
        since=max(since, now - kept),
        until=now,
        next=first[place + 1] if place + 1 < len(first) else "",
        left=max(0, len(first) - place - 1),
    )


def own_path(link: Any, base_url: str) -> str:
    """Return path and query of a link to this very server; empty for one to elsewhere, which must get no key."""
    parts, own = urlsplit(link if isinstance(link, str) else ""), urlsplit(base_url)
    is_own = (parts.scheme, parts.netloc.lower()) == (own.scheme, own.netloc.lower())
    return f"{parts.path}?{parts.query}" if is_own and parts.path.startswith("/") else ""


# Several places that are asked at once, of which some may be silent.


Place = TypeVar("Place")


async def ask_each(
    places: Iterable[Place], name: Callable[[Place], str], read: Callable[[Place], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, ProviderError]]:
    """Ask all places at once; return what each says, and the errors of the others, by their names.

    Raises:
        RateLimited, AuthFailed, Unavailable: none of them answers; the key counts as refused only if all refuse it.
    """
    answers: dict[str, T] = {}
    errors: dict[str, ProviderError] = {}

    async def one(place: Place) -> None:
        try:
            answers[name(place)] = await read(place)
        except ProviderError as exc:
            errors[name(place)] = exc

    async with anyio.create_task_group() as group:
        for place in places:
            group.start_soon(one, place)
    if errors and not answers:
        limits = [exc for exc in errors.values() if isinstance(exc, RateLimited)]
        others = [exc for exc in errors.values() if not isinstance(exc, AuthFailed)]
        worst = max(limits, key=lambda exc: exc.retry_after) if limits else next(iter(others or errors.values()))
        raise worst
    return answers, errors


# Retries for calls without side effects; the only module that imports tenacity. `launch` must never come here.


async def retry_read(
    call: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    rng: Random,
    attempts: int = 3,
    first_wait: timedelta = timedelta(seconds=0.5),
    wait_max: timedelta = timedelta(seconds=15),
) -> T:
    """Await the call, again on `Unavailable` and `RateLimited`, with jittered exponential waits.

    A `RateLimited` that asks for longer than `wait_max` is raised at once: the poller's own pace deals with it.
    """

    def wait_s(state: RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, RateLimited):
            return failure.retry_after.total_seconds()
        ceiling = min(wait_max.total_seconds(), first_wait.total_seconds() * 2 ** (state.attempt_number - 1))
        return float(ceiling * (0.5 + rng.random() / 2))

    async def sleep(seconds: float) -> None:
        await clock.sleep(timedelta(seconds=seconds))

    def worth_waiting(failure: BaseException) -> bool:
        if isinstance(failure, RateLimited):
            return failure.retry_after <= wait_max
        return isinstance(failure, Unavailable)

    retrying = AsyncRetrying(
        sleep=sleep,
        wait=wait_s,
        stop=stop_after_attempt(attempts),
        retry=retry_if_exception(worth_waiting),
        reraise=True,
    )
    return await retrying(call)


# The one door for blocking SDKs: bounded threads with a deadline.


APART_ROWS: Final = 2_000
APART_BYTES: Final = 1024 * 1024


async def judge_apart(judge: Callable[[], T], *, rows: int = 0, size: int = 0) -> T:
    """Return what the judgement of an answer finds; that of a large answer is made in a thread, beside the event loop.

    A market of five thousand offers takes a second, in which the daemon would answer no other request.
    """
    if rows <= APART_ROWS and size <= APART_BYTES:
        return judge()
    return await anyio.to_thread.run_sync(judge)


class BlockingCalls:
    """At most `count` blocking calls of one adapter at a time."""

    def __init__(self, count: int = 4) -> None:
        self._limiter = anyio.CapacityLimiter(count)

    async def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Run a blocking call in a thread.

        The thread cannot be stopped: after a time-out its outcome is unknown, so give the SDK a shorter one.

        Raises:
            TimeoutError: nothing within `timeout_s`.
        """
        with anyio.fail_after(timeout_s):
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
