"""What the HTTP answers of a REST provider mean: one dialect in a table, one client for reads and purchases.

Theory. A read may be repeated, so a lost answer is the same as none. A purchase is sent once; between "it certainly did
not happen" and "it may have" lies the line that costs money. It did not happen if the request never left, if the
provider refuses it in its own words, or if an edge in front of the provider refuses it in no words of the provider's.
Everything else (a lost answer, an error of the server, an answer that names no machine) is an unknown outcome.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from random import Random
from typing import Any, Final, Unpack

import anyio
from pydantic import Field

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Unavailable,
)
from spotd_providers.contract.provider import Clock, Provider, Services
from spotd_providers.contract.values import AttemptKey, ProviderName
from spotd_providers.kit.boundary import ApiSettings
from spotd_providers.kit.calls import DefiniteRefusal, RequestPace, raise_for_status, rejected, retry_read, too_often
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions, open_http
from spotd_providers.kit.shapes import Row, decode_or_none, row_or_none
from spotd_providers.kit.text import quote_safely

READ_TIMEOUT_S: Final = 30.0
READS: Final = 3
"""How often a request that may be repeated is sent."""
PENALTY: Final = timedelta(seconds=12)
BUY_WAIT_MAX: Final = timedelta(seconds=15)
"""A purchase whose turn comes later than this is refused as too early: the daemon gives a launch 90 seconds."""
_ANY: Final = "any call"
PURCHASE: Final = "a purchase"


class Meaning(Enum):
    """What a refusal of the provider's means, whatever was asked."""

    ABSENT = "what was named does not exist"
    NO_CAPACITY = "nothing of this kind can be had now"
    OFFER_GONE = "this is not sold any more"
    PRICE_MOVED = "it costs more than was offered"
    QUOTA = "a limit of the account is used up"
    NO_BALANCE = "the account has no money left"
    AUTH = "the key is not accepted, or may not do this"
    TOO_OFTEN = "too many requests"
    UNAVAILABLE = "the provider failed; a purchase may have happened"
    REJECTED = "the request is wrong"


_OF_PURCHASE: Final[Mapping[Meaning, type[ProviderError]]] = {
    Meaning.NO_CAPACITY: NoCapacity,
    Meaning.OFFER_GONE: OfferGone,
    Meaning.QUOTA: QuotaExceeded,
    Meaning.NO_BALANCE: NoBalance,
    Meaning.PRICE_MOVED: PriceMoved,
    # These, and too many requests, only of a purchase that was accepted and failed later: nothing of it is wrong.
    Meaning.AUTH: AuthFailed,
    Meaning.UNAVAILABLE: Unavailable,
}
_BY_STATUS: Final = {401: Meaning.AUTH, 402: Meaning.NO_BALANCE, 429: Meaning.TOO_OFTEN}
"""Statuses that mean the same whatever the body says."""
_BY_OWN_STATUS: Final = {403: Meaning.AUTH, 404: Meaning.ABSENT, 410: Meaning.ABSENT}
"""Statuses that an edge in front of the provider gives as well, so that they count in the provider's own words only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalWords:
    """The provider's own words about a refusal.

    Attributes:
        code: its error word, or an empty string.
    """

    code: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often one kind of request may be sent.

    Attributes:
        interval: least time between two.
        penalty: wait after a 429 that names none.
        rest_max: longest pause that is kept after a 429, whatever it asks for: a machine bills while its end waits.
    """

    interval: timedelta
    penalty: timedelta
    rest_max: timedelta = timedelta(minutes=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one provider says what is wrong, and how often it may be asked. A subclass judges what no table can.

    Attributes:
        problem_of: the words in the body of a refusal; `None` for a body that is not the provider's own.
        text_of: the same of a body that is no JSON object.
        is_refusal: whether the body of a success says that it is none.
        object_of: the JSON object of a success whose body is none, as a list or a bare text; anything else refuses it.
        codes: meaning by error word; a key that ends in `/` stands for every word that begins so.
        interval: least time between two requests.
        buy_interval: least time between two purchases.
        penalty: wait after a 429 that names none.
        paces: of the kinds of request, as `what` names them, that the provider counts apart from all others.
        buy_timeout_s: how long the answer to a purchase may take.
    """

    who: str
    problem_of: Callable[[Any], RefusalWords | None]
    codes: Mapping[str, Meaning] = field(default_factory=dict)
    interval: timedelta = timedelta(0)
    buy_interval: timedelta = timedelta(0)
    penalty: timedelta = PENALTY
    text_of: Callable[[str], RefusalWords | None] = lambda _: None
    is_refusal: Callable[[Mapping[str, Any]], bool] = lambda _: False
    object_of: Callable[[HttpAnswer, Any], Any] = lambda _, body: body
    paces: Mapping[str, Pace] = field(default_factory=dict)
    buy_timeout_s: float = 45.0

    def words_of(self, answer: HttpAnswer, body: Any) -> RefusalWords | None:
        """Return the provider's own words in an answer, whose decoded body is given; `None` where it has none."""
        said = self.problem_of(body)
        return self.text_of(answer.text) if said is None and not isinstance(body, dict) else said

    def throttle(
        self, answer: HttpAnswer, what: str, rng: Random, _problem: RefusalWords | None, _now: datetime, /
    ) -> RateLimited:
        """Build the error of a 429: its wait is the one that the answer names, else the penalty."""
        wait = answer.retry_after
        return too_often(self.who, what, self.penalty_of(what) if wait is None else wait, rng)

    def penalty_of(self, what: str) -> timedelta:
        pace = self.paces.get(what)
        return self.penalty if pace is None else pace.penalty

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:  # noqa: ARG002 - for subclasses
        """Return what an answer that is no success means; redirects are not asked about."""
        if problem is not None:
            known = self.codes.get(problem.code) or next(
                (found for code, found in self.codes.items() if code.endswith("/") and problem.code.startswith(code)),
                None,
            )
            if known is not None:
                return known
        if status in _BY_STATUS:
            return _BY_STATUS[status]
        if status >= 500 or status == 408:
            return Meaning.UNAVAILABLE
        if problem is not None and status in _BY_OWN_STATUS:
            return _BY_OWN_STATUS[status]
        return Meaning.REJECTED


class _Fault(Row):
    loc: list[str | int] = Field(default_factory=list)
    msg: str


def fastapi_problem(body: Any) -> RefusalWords | None:
    """Return the words of `{"detail": "..."}` or `{"detail": [{"loc": [...], "msg": "..."}]}`, as FastAPI refuses."""
    said = body.get("detail", body.get("message", body.get("error"))) if isinstance(body, dict) else None
    if isinstance(said, list):
        faults = [row_or_none(_Fault, one) for one in said[:20]]
        said = "; ".join(f"{'.'.join(map(str, one.loc))}: {one.msg}" for one in faults if one is not None)
    return RefusalWords(text=said) if isinstance(said, str) and said else None


def error_problem(body: Any) -> RefusalWords | None:
    """Return the words of `{"error": {"code", "message", "suggestion"}}`; a code is a word, and the others may lack."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return None
    said = [text for text in (error.get("message"), error.get("suggestion")) if isinstance(text, str) and text]
    return RefusalWords(code=error["code"], text=" ".join(said))


def meaning_in(text: str, table: Mapping[tuple[str, ...], Meaning]) -> Meaning | None:
    """Return what a sentence means by the first words of a table that it holds; `None` for one that holds none."""
    said = text.lower()
    return next((found for words, found in table.items() if any(word in said for word in words)), None)


class RestRefused(DefiniteRefusal):
    """A definite "no" in the provider's own words: nothing happened.

    Attributes:
        meaning: what it says.
    """

    def __init__(self, who: str, *, status: int, meaning: Meaning, problem: RefusalWords) -> None:
        code, detail = quote_safely(problem.code), quote_safely(problem.text)
        self.who = who
        super().__init__(status=status, code=code, detail=detail)
        self.meaning = meaning

    def of_purchase(self) -> ProviderError:
        """Return the leaf of the contract for a purchase that was refused so."""
        if self.meaning is Meaning.TOO_OFTEN:
            return RateLimited(str(self), retry_after=PENALTY)
        leaf = _OF_PURCHASE.get(self.meaning)
        if leaf is None:
            return rejected(self.who, "request", self.detail or self.code or f"HTTP {self.status}")
        return leaf(str(self))


class RestClient:
    """Paced calls over one HTTP client that carries the key."""

    def __init__(self, http: Http, dialect: Dialect, *, clock: Clock, rng: Random) -> None:
        self._http = http
        self._dialect = dialect
        self._clock = clock
        self._rng = rng
        self._pace = RequestPace(clock)
        self._one_purchase = anyio.Lock()
        self._is_buying = False

    @property
    def requests_sent(self) -> int:
        return self._http.requests_sent

    async def answer(
        self, method: str, path: str, *, what: str, attempts: int = READS, **options: Unpack[RequestOptions]
    ) -> tuple[HttpAnswer, Mapping[str, Any]]:
        """Send a request that may be repeated; return its answer, and the JSON object in it.

        Raises:
            AuthFailed, RateLimited, Unavailable: nothing was found out.
        """
        try:
            return await self._repeat(method, path, what, attempts, options)
        except RestRefused as exc:
            raise Unavailable(str(exc)) from exc  # a read that is refused proves nothing

    async def ask(
        self, method: str, path: str, *, what: str, attempts: int = READS, **options: Unpack[RequestOptions]
    ) -> Mapping[str, Any]:
        """Send a request that may be repeated; return the JSON object of its answer, raising as `answer` does."""
        return (await self.answer(method, path, what=what, attempts=attempts, **options))[1]

    async def ask_or_absent(
        self, method: str, path: str, *, what: str, attempts: int = READS, **options: Unpack[RequestOptions]
    ) -> Mapping[str, Any] | None:
        """Return the JSON object of an answer, `None` where the provider says that what is named does not exist."""
        try:
            return (await self._repeat(method, path, what, attempts, options))[1]
        except RestRefused as exc:
            if exc.meaning is Meaning.ABSENT:
                return None
            raise Unavailable(str(exc)) from exc

    async def change(
        self, method: str, path: str, *, what: str, attempts: int = READS, **options: Unpack[RequestOptions]
    ) -> Mapping[str, Any]:
        """Send a change that may be repeated, since it sets the same again; return the JSON object of its answer.

        Raises:
            RestRefused: the provider refused it in its own words.
            AuthFailed, RateLimited, Unavailable: nothing was found out.
        """
        return (await self._repeat(method, path, what, attempts, options))[1]

    async def buy(self, method: str, path: str, body: Mapping[str, Any], *, key: AttemptKey) -> Mapping[str, Any]:
        """Send one purchase, once; return the JSON object of its answer.

        Raises:
            OutcomeUnknown: the machine may exist.
            RestRefused, AuthFailed, RateLimited, Unavailable: it certainly does not.
        """
        return self.judge_purchase(await self.send_purchase(method, path, body, key=key), key=key)

    async def send_purchase(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        *,
        key: AttemptKey,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Send one purchase, once, and after the one before where these are paced; `judge_purchase` judges its answer.

        Raises:
            OutcomeUnknown: the machine may exist.
            RateLimited, Unavailable: it certainly does not.
        """
        who, interval = self._dialect.who, self._dialect.buy_interval
        line = self._one_purchase.statistics()
        ahead = line.tasks_waiting + (line.locked and not self._is_buying)
        if (wait := ahead * interval + self._pace.wait(PURCHASE, interval)) > BUY_WAIT_MAX:
            raise RateLimited(f"{who} takes a launch every {interval.total_seconds():.0f} s", retry_after=wait)
        async with self._one_purchase if interval else nullcontext():
            await self._pace.turn(PURCHASE, interval)
            await self._turn(PURCHASE)
            self._is_buying = True
            try:
                timeout_s = self._dialect.buy_timeout_s
                return await self._http.send(method, path, json_body=dict(body), headers=headers, timeout_s=timeout_s)
            except AnswerLost as exc:
                raise OutcomeUnknown(f"{who}'s answer to a purchase was lost", key=key) from exc
            finally:
                self._is_buying = False
                self._pace.penalise(PURCHASE, interval)  # counted from its end, too: it may have waited for its turn

    def judge_purchase(self, answer: HttpAnswer, *, key: AttemptKey) -> Mapping[str, Any]:
        """Return the JSON object of a purchase's answer, raising as `buy` does."""
        try:
            return self.judge(answer, PURCHASE)
        except Unavailable as exc:
            if 300 <= answer.status < 500 and answer.status != 408 and not self._is_own(answer):
                raise  # a redirect, or the edge in front of the provider: no purchase arrived
            raise OutcomeUnknown(f"{exc}, so whether it happened is unknown", key=key) from exc

    async def send(self, method: str, path: str, *, what: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        """Send one request without side effects, once and in its turn; `judge` says what its answer means."""
        await self._turn(what)
        return await self._http.read(method, path, **options)

    def judge(self, answer: HttpAnswer, what: str) -> Mapping[str, Any]:
        """Return the object of a success, an empty one where it has no content.

        Raises:
            AuthFailed, RateLimited, Unavailable: whatever was asked, this is what any other answer means.
            RestRefused: a definite no.
        """
        who = self._dialect.who
        body = decode_or_none(answer.body, who=who)
        if 200 <= answer.status < 300:
            if answer.status == 204 and not answer.body:
                return {}
            body = self._dialect.object_of(answer, body)
            if not isinstance(body, dict):
                raise Unavailable(f"{who}'s answer to {what} is not a JSON object")
            if not self._dialect.is_refusal(body):
                return body
        elif answer.status < 400:
            raise_for_status(answer, who=who, what=what)
        problem = self._dialect.words_of(answer, body)
        meaning = self._dialect.meaning(answer.status, problem, is_purchase=what == PURCHASE)
        said = quote_safely(problem.text or problem.code) if problem is not None else ""
        match meaning:
            case Meaning.TOO_OFTEN:
                raise self._throttle(answer, problem, what)
            case Meaning.AUTH:
                raise AuthFailed(f"{who} refused the API key ({what}): {said or answer.status}")
            case Meaning.UNAVAILABLE:
                raise Unavailable(f"{who} answered {answer.status} to {what}: {said or 'no reason given'}")
            case _:
                pass
        if problem is None and meaning is Meaning.REJECTED:
            raise Unavailable(f"{who} answered {answer.status} to {what}, in no words of its own")
        raise RestRefused(who, status=answer.status, meaning=meaning, problem=problem or RefusalWords())

    async def _repeat(
        self, method: str, path: str, what: str, attempts: int, options: RequestOptions
    ) -> tuple[HttpAnswer, Mapping[str, Any]]:
        async def once() -> tuple[HttpAnswer, Mapping[str, Any]]:
            answer = await self.send(method, path, what=what, **options)
            return answer, self.judge(answer, what)

        return await retry_read(once, clock=self._clock, rng=self._rng, attempts=attempts)

    async def _turn(self, what: str) -> None:
        """Wait until a request of this kind is due."""
        pace = self._dialect.paces.get(what)
        if pace is None:
            await self._pace.turn(_ANY, self._dialect.interval)
        else:
            await self._pace.turn(what, pace.interval)

    def _throttle(self, answer: HttpAnswer, problem: RefusalWords | None, what: str) -> RateLimited:
        error = self._dialect.throttle(answer, what, self._rng, problem, self._clock.now())
        pace = self._dialect.paces.get(what)
        if pace is not None:
            # The caller learns the whole wait. Kept here, it would hold back an end, or the list that proves one.
            self._pace.penalise(what, min(error.retry_after, pace.rest_max))
        return error

    def _is_own(self, answer: HttpAnswer) -> bool:
        body = decode_or_none(answer.body, who=self._dialect.who)
        return self._dialect.words_of(answer, body) is not None


def key_setting(name: ProviderName) -> str:
    """Return the lines of the config that name a provider's key."""
    return f'api_key = {{ env = "{name.upper()}_API_KEY" }} under [providers.{name}]'


@asynccontextmanager
async def open_keyed_http(
    base_url: str, *, who: str, services: Services, key_hint: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Http]:
    """Open the HTTP client of one account, whose key travels as a bearer token.

    Raises:
        AuthFailed: there is no key; `key_hint` is the setting that names one.
    """
    if not services.credential:
        raise AuthFailed(f"{who} needs an API key: {key_hint}")
    own = {"authorization": f"Bearer {services.credential}", "accept": "application/json", **(headers or {})}
    shown = services.date_shown
    async with open_http(base_url, headers=own, timeout_s=READ_TIMEOUT_S, date_shown=shown) as http:
        yield http


@asynccontextmanager
async def open_rest(
    base_url: str, dialect: Dialect, services: Services, *, key_hint: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[RestClient]:
    """Open the client of one account, as `open_keyed_http` does."""
    async with open_keyed_http(
        base_url, who=dialect.who, services=services, key_hint=key_hint, headers=headers
    ) as http:
        yield RestClient(http, dialect, clock=services.clock, rng=services.rng)


def rest_opener(
    kind: Callable[[RestClient, Any, Services], Provider], dialect: Dialect, name: ProviderName
) -> Callable[[ApiSettings, Services], AbstractAsyncContextManager[Provider]]:
    """Return what opens a provider that consists of the client of one account."""

    @asynccontextmanager
    async def enter(settings: ApiSettings, services: Services) -> AsyncIterator[Provider]:
        async with open_rest(settings.base_url, dialect, services, key_hint=key_setting(name)) as client:
            yield kind(client, settings, services)

    return enter
