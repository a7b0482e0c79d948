"""What a daemon answers while another one leads: what the leader answers, or else what the database holds.

Everything is the leader's to answer and to judge. Where it does not answer, or has not stated where, requests that only
read are answered from the database and the checkpoint store, with a notice beside the answer. What would change
anything is then refused, or its outcome is unknown; it is never sent a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import anyio
import anyio.to_thread
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotd.api.app import api_routes, make_app
from spotd.api.edge import ADOPTION_S, CALLER_KEY, PATIENT_S, Failure
from spotd.api.handlers import HandlerContext, Handlers
from spotd.api.requests import utc_text
from spotd.api.responses import NOTICE_HEADER, ApiUnavailable, dumps, json_response, refusal_body
from spotd.api.schemas import SCHEMA
from spotd.core.domain.policy import OWNER
from spotd.daemon.clock import SystemClock
from spotd.daemon.control_loop import LoopState
from spotd.service.forwarding import AnswerCut, Exchange, NotAnswered, NotDone
from spotd.store import Leader, SecretsKey, SecretsKeys, StateError, StateUnavailable, Store, StoreInUse
from spotd_jobs.objects.api import StoreError
from spotd_providers.contract.provider import Logger

READS: Final = frozenset(
    {
        "checkpoints",
        "cost",
        "datasets",
        "events",
        "file_content",
        "file_contents",
        "files",
        "hosts",
        "job",
        "job_cost",
        "jobs",
        "logs",
        "openapi",
        "status",
        "why",
    }
)
"""Names of routes that database and checkpoint store alone can answer. Offers and verdicts only the leader knows."""
WORLD_KEPT_S: Final = 1.0
"""As at the leader, the world of an answer may be this much older than its rows."""
Make = Callable[[Store], Awaitable[HandlerContext]]


@dataclass(eq=False)
class _Opened:
    """The database as it was opened under one config, until that is read again and the last of its readers has left."""

    store: Store
    context: HandlerContext | None = None
    app: ASGIApp | None = None
    read_s: float = -math.inf
    readers: int = 0
    is_former: bool = False
    closing: anyio.Event = field(default_factory=anyio.Event)

    async def close_unread(self) -> None:
        if self.is_former and not self.readers:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.store.close)


class DatabaseReads:
    """Made when it is first needed, and anew after the config has changed."""

    def __init__(self, url: str, make: Make, *, why: Callable[[], str], on_failure: Failure) -> None:
        """Make it.

        Args:
            url: of the state.
            make: returns the parts of a daemon on this state, none of which runs.
            why: why this process waits.
        """
        self._url, self._make, self._why, self._on_failure = url, make, why, on_failure
        self._turn = anyio.Lock()
        self._opened: _Opened | None = None
        self._is_over = False

    @asynccontextmanager
    async def app(self) -> AsyncIterator[ASGIApp]:
        """Yield what answers, with the world as it is now; what it reads stays open until the block ends.

        Raises:
            StateError, StoreError: database or checkpoint store cannot be read.
        """
        opened: _Opened | None = None
        try:
            async with self._turn:
                if self._is_over:  # what is made anew would be beside a daemon that leads
                    raise StateUnavailable("nothing is read from the database any more", hint="try again in a moment")
                opened = self._opened = self._opened or _Opened(Store.open_to_read(self._url))
                opened.readers += 1
                app = await self._current(opened)
            yield app
        finally:
            if opened is not None:
                opened.readers -= 1
                await opened.close_unread()

    async def _current(self, opened: _Opened) -> ASGIApp:
        """Return what answers, with the newest world."""
        if opened.context is None or opened.app is None:
            opened.context = context = await self._make(opened.store)
            context.policy.gates.clear()
            context.policy.owned = lambda policy: policy
            handlers = Handlers(context)
            opened.app = make_app(handlers, on_failure=self._on_failure, closing=opened.closing, only=READS)
        context = opened.context
        context.policy.paused = f"this spotd waits: {self._why()}"
        if anyio.current_time() - opened.read_s >= WORLD_KEPT_S or context.database.last_error:
            policy, now = context.policy.current, context.clock.now()
            world = await context.database.read(lambda reads: reads.world(policy, now))
            context.control_loop.state = LoopState(world=world, verdicts={}, at=now)
            opened.read_s = anyio.current_time()
        return opened.app

    def end(self) -> None:
        """End what is being followed; nothing more is answered."""
        self._is_over = True
        if self._opened is not None:
            self._opened.closing.set()

    async def close(self) -> None:
        """End what is being followed; who reads still reads on, and the last one gives the database back."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.is_former = True
            opened.closing.set()
            await opened.close_unread()


READ_S: Final = 10.0
"""For the leader to begin such an answer, before the database gives it."""
GRACE_S: Final = 5.0
SILENT_S: Final = 5.0
"""So long after it answered nothing, the leader is not asked for what the database knows."""
FORWARDS_MAX: Final = 64
USER_FORWARDS_MAX: Final = 24
USERS_FORWARDS_MAX: Final = 48
"""Of all users: the rest is the owner's."""
OPENING_MAX: Final = 8
"""Connections to the leader that are opened at a time: it has room for sixteen of one address without a token."""
NOTICE_CHARS_MAX: Final = 400
UNKNOWN: Final = HTTPStatus.SERVICE_UNAVAILABLE
FORWARD_HINT: Final = "ask on the computer of that one; this spotd leads when that one stops"


class WaitingApp:
    """Answers on the socket and by TCP until this process leads."""

    def __init__(
        self, reason: StateError, *, keys: Callable[[], SecretsKeys], reads: DatabaseReads, log: Logger
    ) -> None:
        """Make it.

        Args:
            reason: why this process waits.
            reads: answers from the database.
        """
        self.reason = reason
        self._keys, self._reads, self._log = keys, reads, log
        self._ended = anyio.Event()
        """Set as soon as another leader than the one before is known, and for good where this process waits no more."""
        self._is_over = False
        self._opening = anyio.Semaphore(OPENING_MAX)
        self._under_way: Counter[str] = Counter()
        """By the name of the user, empty for the owner."""
        self._silent = ""
        self._silent_until = 0.0
        self._answered_at = -math.inf
        self._term = "" if self.leader is None else self.leader.term
        self._served = [Route(one.path, _nowhere, methods=[one.method]) for one in api_routes() if one.name in READS]

    @property
    def leader(self) -> Leader | None:
        """The process that leads, as far as the database says so now."""
        return self.reason.leader if isinstance(self.reason, StoreInUse) else None

    def update(self, reason: StateError | None) -> None:
        """Note why this process waits now; `None` where it waits no more, and what is under way ends."""
        if reason is None:
            self._is_over = True
            self._reads.end()
            self._ended.set()
            return
        self.reason = reason
        if self.leader is None or self.leader.term == self._term:
            return
        self._term = self.leader.term
        self._ended.set()
        self._ended, self._silent_until, self._answered_at = anyio.Event(), 0.0, -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = any(route.matches(scope)[0] is Match.FULL for route in self._served)
        why = self._silent
        try:
            if not (is_read and anyio.current_time() < self._silent_until):
                await self._forward(scope, receive, send, is_read=is_read)
                return
        except NotDone as exc:
            why = str(exc)
        except NotAnswered as exc:
            if not is_read:
                await json_response(refusal_body(_unknown(exc)), status=UNKNOWN)(scope, receive, send)
                return
            why = str(exc)
        except AnswerCut as exc:
            self._log.warning("forward.cut", reason=str(exc))
            return
        if is_read:
            await self._read(scope, receive, send, why)
        else:
            await self._refuse(scope, receive, send, why)

    @property
    def _hint(self) -> str:
        return FORWARD_HINT if self.leader is not None else self.reason.hint

    async def _forward(self, scope: Scope, receive: Receive, send: Send, *, is_read: bool) -> None:
        """Let the leader answer.

        Raises:
            NotDone, NotAnswered, AnswerCut
        """
        leader = self.leader
        if leader is None:
            raise NotDone("")
        if not leader.url:
            raise NotDone("that one does not state in [api] where others reach it")
        token, is_own = self._token(scope, leader, self._require_proof(leader))
        name = scope.get(CALLER_KEY, OWNER).name
        self._require_room(name)
        answer_s = ADOPTION_S if scope["path"] == "/v1/adoption" else PATIENT_S
        exchange = Exchange(
            leader=leader,
            token=token,
            is_own=is_own,
            answer_s=READ_S if is_read else answer_s + GRACE_S,
            opening=self._opening,
            scope=scope,
            receive=receive,
            send=send,
        )
        self._under_way[name] += 1
        begun_at = anyio.current_time()
        try:
            await exchange.run(self._ended)
            if leader.term == self._term:
                self._answered_at = anyio.current_time()
        except (NotDone, NotAnswered) as exc:
            # One that answered others meanwhile is slow with this one alone.
            is_silent = not exchange.is_refused and self._answered_at < begun_at
            if is_silent and leader.term == self._term:
                self._silent, self._silent_until = str(exc), anyio.current_time() + SILENT_S
            raise
        except AnswerCut as exc:
            if exchange.is_between_lines:
                line = dumps({"schema": SCHEMA, **refusal_body(ApiUnavailable(str(exc), hint="try again"))})
                await send({"type": "http.response.body", "body": line + b"\n"})
            raise
        finally:
            self._under_way[name] -= 1
            self._under_way += Counter()  # leaves out who has none

    def _require_room(self, name: str) -> None:
        """Check that one more request of this user may be on its way.

        Raises:
            NotDone
        """
        count, of_all = self._under_way[name], self._under_way.total()
        if of_all >= FORWARDS_MAX or (name and of_all - self._under_way[""] >= USERS_FORWARDS_MAX):
            raise NotDone(f"{of_all} requests are on their way to it")
        if name and count >= USER_FORWARDS_MAX:
            raise NotDone(f"{count} requests of {name} are on their way to it")

    def _require_proof(self, leader: Leader) -> SecretsKey | None:
        """Return the key by which it is proved that a daemon stated where the leader is; `None` without one here.

        Raises:
            NotDone: there is a key here, and no such proof: another one may have written it.
        """
        keys = self._keys()
        found = keys.key_of(leader)
        if found is not None or keys == SecretsKeys():
            return found
        if keys.current is None and keys.error:
            raise NotDone(f"secrets_key in [daemon] cannot be used here: {keys.error}")
        none = "has another secrets_key in [daemon] than this spotd, or none"
        raise NotDone(f"{leader.words} {none}, or another one wrote into the database where it is reached")

    def _token(self, scope: Scope, leader: Leader, key: SecretsKey | None) -> tuple[str, bool]:
        """Return by which token the leader knows who asks, and whether it is this daemon's.

        Raises:
            NotDone: there is none.
        """
        if scope.get(CALLER_KEY, OWNER).name:
            stated = next(value for name, value in scope["headers"] if name == b"authorization")
            return stated.decode("latin-1").partition(" ")[2].strip(), False
        if key is None:
            raise NotDone("this spotd has no secrets_key in [daemon], by which that one would know it")
        return key.token_for(leader.term, leader.certificate), True

    async def _read(self, scope: Scope, receive: Receive, send: Send, why: str) -> None:
        """Answer from the database, and say so beside the answer."""
        async with AsyncExitStack() as reading:
            try:
                with anyio.fail_after(PATIENT_S):
                    app = await reading.enter_async_context(self._reads.app())
            except (StateError, StoreError, OSError) as exc:
                await self._refuse(scope, receive, send, f"{why}; {exc}")
                return
            at = utc_text(SystemClock().now())
            text = f"read from the database at {at}: {self.reason.message}{why and f'; {why}'}"
            shown = "".join(one if one.isprintable() else "?" for one in text[:NOTICE_CHARS_MAX])
            notice = (NOTICE_HEADER, shown.encode("ascii", "replace"))

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], notice]}
                await send(message)

            await app(scope, receive, noting)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, why: str) -> None:
        """Say that nothing was done, which lets spotctl ask another one."""
        words, hint = f"this spotd waits: {self.reason.message}{why and f'; {why}'}", self._hint
        if self._is_over:
            words, hint = "this spotd begins to lead or ends", "try again in a moment"
        refusal = ApiUnavailable(words, hint=hint)
        await json_response(refusal_body(refusal), status=HTTPStatus.MISDIRECTED_REQUEST)(scope, receive, send)


def _unknown(exc: NotAnswered) -> ApiUnavailable:
    hint = "spotctl ls and spotctl events show it once a spotd leads; do not repeat it before"
    return ApiUnavailable(f"{exc}; whether it did what was asked is unknown", hint=hint)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError
