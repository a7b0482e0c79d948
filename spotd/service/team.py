"""The API by TCP for users with tokens, without ever being in the way of the daemon or of its socket.

Theory. Before a token is known a peer may cost little: so many connections of one peer and of all, a few seconds for
the handshake and the request, a head of bounded size, so many handshakes in a second, and one refusal for each
connection. At a bound the oldest that is unproven makes room, else the new one is closed unread. After that a user has
a share of connections, which leaves the others theirs. Requests go to the application of the socket, with the caller
beside them.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotd.api.edge import CALLER_KEY
from spotd.api.handlers.doctor import row_of
from spotd.api.responses import ApiUnavailable, Unauthorized, json_response, refusal_body
from spotd.api.schemas.answers import CheckResponse
from spotd.certificates import certificate_hash, expiry_words
from spotd.config.peers import RENEW_HINT, key_problem
from spotd.core.domain.policy import Caller, Right
from spotd.daemon.clock import SystemClock
from spotd.daemon.commits import Database
from spotd.daemon.controllers import Outage
from spotd.daemon.policy import Settings, User
from spotd.service.forwarding import TERM_HEADER
from spotd.service.http_server import GRACE_S, import_uvicorn
from spotd.tokens import WrongTokens, digest_of, peer_of
from spotd_providers.contract.provider import Logger
from spotd_providers.kit.boundary import install_command

CONNECTIONS_MAX: Final = 256
UNPROVEN_MAX: Final = 64
"""Connections whose token is not known yet."""
UNPROVEN_PER_PEER_MAX: Final = 16
PER_USER_MAX: Final = 48
HANDSHAKE_S: Final = 5.0
REQUEST_S: Final = 10.0
HEAD_BYTES_MAX: Final = 16 * 1024
HANDSHAKES_PER_S: Final = 30
"""A processor of a small computer takes ten milliseconds for each."""
BURST: Final = 60
REFUSAL_PAUSE_S: Final = 0.002
SILENT_READER_S: Final = 900
"""After so long without taking what was sent a reader is gone."""
BIND_AGAIN_S: Final = 30.0
BACKLOG: Final = 128
_SAFE: Final = frozenset({"GET", "HEAD"})
_PATH_SHOWN: Final = 200
_DAEMON: Final = Caller(right=Right.OPERATE)
"""Another daemon, for the owner of both; what lies on this computer is not reached from there."""
_DAEMON_NAME: Final = "another spotd"
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared only
MetricsText = Callable[[], Awaitable[bytes | None]]


class _Connection:
    """One connection, from before its handshake on; `user` is empty while no token has come by it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.user = ""
        self.lost = anyio.Event()
        self.transport: asyncio.Transport | None = None
        self._opening = anyio.CancelScope()

    async def open(self, connect: Callable[[_Connection], Awaitable[None]]) -> None:
        with self._opening:
            await connect(self)

    def end(self) -> None:
        self._opening.cancel()
        self.lost.set()
        if self.transport is not None:
            self.transport.abort()


class TokenGate:
    """Passes requests with the token of a user on to the application, and what each may do with them.

    Attributes:
        app: what answers; before there is one, and after it has ended, a sentence is the answer.
        metrics: the text of the metrics, where they can be made.
    """

    def __init__(self, users: tuple[User, ...], log: Logger) -> None:
        self.app: ASGIApp = _starting
        self.metrics: MetricsText | None = None
        self._users = users
        self._daemons: tuple[bytes, ...] = ()
        self._term = ""
        self._log = log
        self._wrong = WrongTokens()
        self._proven: dict[str, set[_Connection]] = {}

    def reset(self) -> None:
        """Answer with a sentence until there is an application."""
        self.app, self.metrics, self._term, self._daemons = _starting, None, "", ()

    def lead(self, term: str, daemons: tuple[bytes, ...]) -> None:
        """Take from other daemons what they pass on in this term; they are known by these hashes of their tokens."""
        self._term, self._daemons = term, daemons

    def set_users(self, users: tuple[User, ...]) -> None:
        """Let these users in from now on; connections of one who was removed or changed end."""
        kept = {user.caller.name for user in users if user in self._users}
        self._users = users
        for name in self._proven.keys() - kept:
            for connection in tuple(self._proven[name]):
                connection.end()

    def forget(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        if mine := self._proven.get(connection.user):
            mine.discard(connection)
            if not mine:
                del self._proven[connection.user]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"]["connection"]
        term = next((value for name, value in scope["headers"] if name == TERM_HEADER), None)
        found = _not_here() if term not in {None, self._term.encode()} else self._admit(scope, connection)
        if isinstance(found, Response):
            found.headers["connection"] = "close"
            await found(scope, receive, send)
            return
        if scope["path"] == "/metrics":
            await (await self._metrics())(scope, receive, send)
            return
        scope[CALLER_KEY] = found

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["method"] not in _SAFE:
                path = scope["path"][:_PATH_SHOWN]
                self._log.info("api.act", user=found.name, method=scope["method"], path=path, status=message["status"])
            await send(message)

        await self.app(scope, receive, noting)

    def _admit(self, scope: Scope, connection: _Connection) -> Caller | Response:
        """Return who asks, or what is answered in place of what was asked."""
        headers: dict[str, str] = {}
        tokens: list[str] = []
        for name, value in scope["headers"]:
            headers[name.decode("latin-1")] = value.decode("latin-1")
            if name == b"authorization":
                tokens.append(value.decode("latin-1"))
        scheme, _, token = (tokens[0] if len(tokens) == 1 else "").partition(" ")
        is_stated = scheme.lower() == "bearer" and bool(token.strip())
        found = self._user_with(digest_of(token.strip())) if is_stated else None
        # No proxy that speaks TLS to a user is before a listener that does so itself.
        peer = peer_of(scope.get("client"), {} if scope["scheme"] == "https" else headers)
        if found is None and (wait_s := math.ceil(self._wrong.wait_s(peer))):
            return _too_many("too many wrong tokens came from this address", wait_s)
        if not is_stated:
            refusal = Unauthorized("a token is needed here", hint="spotctl --token-file FILE, or SPOTCTL_TOKEN_FILE")
            return _no_token(refusal)
        if found is None:
            self._wrong.note(peer)
            self._log.warning("api.wrong_token", peer=peer)
            return _no_token(Unauthorized("the token is none of a user here", hint="ask for one: spotd user add"))
        name = found.caller.name or _DAEMON_NAME
        mine = self._proven.setdefault(name, set())
        if connection.user != name:
            if len(mine) >= PER_USER_MAX:
                return _too_many(f"{name} has {PER_USER_MAX} connections already", 1)
            self.forget(connection)
            connection.user = name
            self._proven.setdefault(name, mine).add(connection)
        return found.caller

    def _user_with(self, digest: bytes) -> User | None:
        found = None
        for user in (*self._users, *(User(caller=_DAEMON, digest=one) for one in self._daemons)):
            if hmac.compare_digest(user.digest, digest):  # of all of them, so that the time says nothing
                found = user
        return found

    async def _metrics(self) -> Response:
        if self.metrics is None:
            hint = "the daemon waits for the lead" if find_spec("prometheus_client") else install_command("metrics")
            return PlainTextResponse(f"there are no metrics here: {hint}\n", status_code=404)
        text = await self.metrics()
        if text is None:
            return PlainTextResponse("the figures cannot be read now\n", status_code=503)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _not_here() -> Response:
    refusal = ApiUnavailable("this spotd does not lead in the term that the request names", hint="ask the leader")
    return json_response(refusal_body(refusal), status=HTTPStatus.MISDIRECTED_REQUEST)


def _no_token(refusal: Unauthorized) -> Response:
    response = json_response(refusal_body(refusal), status=HTTPStatus.UNAUTHORIZED)
    response.headers["www-authenticate"] = "Bearer"
    return response


def _too_many(sentence: str, wait_s: int) -> Response:
    refusal = ApiUnavailable(sentence, hint=f"try again in {wait_s} s")
    response = json_response(refusal_body(refusal), status=HTTPStatus.TOO_MANY_REQUESTS)
    response.headers["retry-after"] = str(wait_s)
    return response


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = ApiUnavailable("spotd is starting or ends here", hint="try again in a moment")
    await json_response(refusal_body(refusal), status=HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)


class TeamListener:
    """Takes connections. `last_error`: why it takes none, empty while it does."""

    def __init__(self, settings: Settings, address: tuple[str, int], *, log: Logger) -> None:
        self._host, self._port = address
        self._log = log
        self._outage = Outage(log, "api.not_served", "api.served")
        self._tls: ssl.SSLContext | None = None
        self._is_encrypted = settings.api_files is not None
        self._tls_error = self._certificate = ""
        self._database: Database | None = None
        self._settings = settings
        self._open: dict[_Connection, None] = {}
        self._burst, self._burst_at = float(BURST), 0.0
        self._requests: set[asyncio.Task[None]] = set()
        self.gate = TokenGate(settings.users, log)
        self._read_files(settings)

    @property
    def last_error(self) -> str:
        return self._outage.error or self._tls_error

    @property
    def where(self) -> str:
        return self._url(self._host)

    def _url(self, host: str) -> str:
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self._is_encrypted else 'http'}://{shown}:{self._port}"

    def findings(self) -> list[CheckResponse]:
        """Return the line of `doctor`."""
        error = self.last_error
        hint = "see [api] in the config; the daemon's socket answers all the same" if error else ""
        rows = [row_of("daemon", "api", error or f"at {self.where}", ok=not error, hint=hint)]
        files = self._settings.api_files
        if files is not None and (words := expiry_words(files[0].expanduser(), SystemClock().now())):
            rows.append(row_of("daemon", "certificate", f"{files[0]} {words}", ok=False, hint=RENEW_HINT))
        return rows

    def reload(self, settings: Settings) -> None:
        """Put users, certificate and keys of a reloaded config in force."""
        self._settings = settings
        self.gate.set_users(settings.users)
        self._read_files(settings)
        self._introduce()

    def lead(self, database: Database) -> None:
        """State to daemons that wait where this one is reached, and let those in that have its key."""
        self._database = database
        self._introduce()

    def _introduce(self) -> None:
        if self._database is None or not (term := self._database.term):
            return
        keys = self._settings.secrets_keys
        tokens = (key.token_for(term, self._certificate) for key in (keys.current, keys.former) if key is not None)
        self.gate.lead(term, tuple(map(digest_of, tokens)))
        host = socket.gethostname() if self._host in _EVERYWHERE else self._host
        url = self._settings.api_url or self._url(host)
        proofs = keys.proofs_of(term, url, self._certificate)
        self._database.state_api(url if self._certificate else "", self._certificate, proofs)

    def _read_files(self, settings: Settings) -> None:
        """Read certificate and key; where they cannot be used, those that were read before stay."""
        if settings.api_files is None or not self._is_encrypted:
            return
        certificate, key = (path.expanduser() for path in settings.api_files)
        try:
            self._tls, self._tls_error = tls_context(certificate, key), ""
            self._certificate = certificate_hash(certificate)
        except (OSError, ValueError) as exc:
            self._tls_error = str(exc)
            self._log.error("api.certificate_refused", error=str(exc))

    async def run(self) -> None:
        """Serve until this is cancelled; an address in use is tried again and again."""
        import_uvicorn()
        while True:
            try:
                listener = await anyio.to_thread.run_sync(self._bind)
            except OSError as exc:
                self._outage.update(f"cannot listen at {self._host}:{self._port}: {exc.strerror}")
                await anyio.sleep(BIND_AGAIN_S)
                continue
            self._outage.update("")
            with listener:
                await self._serve(listener)

    def _bind(self) -> socket.socket:
        is_all = self._host == "::" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        found = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG, dualstack_ipv6=is_all)
        found.settimeout(0)
        return found

    async def _serve(self, listener: socket.socket) -> None:
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        config = Config(
            self.gate,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        config.load()
        state = ServerState()
        self._requests = state.tasks
        async with anyio.create_task_group() as group:
            try:
                while True:
                    await self._take(listener, group, partial(self._connect, config, state))
            finally:
                with anyio.CancelScope(shield=True):
                    await self.end_requests()

    async def _take(
        self,
        listener: socket.socket,
        group: anyio.abc.TaskGroup,
        connect: Callable[[socket.socket, _Connection], Awaitable[None]],
    ) -> None:
        """Take one connection, or close it unread."""
        try:
            taken, address = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as exc:
            self._outage.update(f"no connection can be taken at {self.where}: {exc.strerror}")
            await anyio.sleep(1.0)
            return
        self._outage.update("")
        connection = _Connection(peer_of(address, {}))
        if not self._make_room(connection.peer) or (self._is_encrypted and self._tls is None):
            taken.close()
            await anyio.sleep(REFUSAL_PAUSE_S)
            return
        self._open[connection] = None
        group.start_soon(connection.open, partial(connect, taken), name="team-connection")
        await self._pace()

    def _make_room(self, peer: str) -> bool:
        """Return whether one more may be open; the oldest unproven one ends for it, of the same peer if it has many.

        Without TLS all come by the proxy, and share its address.
        """
        unproven = [one for one in self._open if not one.user]
        same = [one for one in unproven if one.peer == peer]
        if self._is_encrypted and len(same) >= UNPROVEN_PER_PEER_MAX:
            self._drop(same[0])
        elif len(unproven) >= UNPROVEN_MAX or (unproven and len(self._open) >= CONNECTIONS_MAX):
            self._drop(unproven[0])
        return len(self._open) < CONNECTIONS_MAX

    def _drop(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        connection.end()

    async def _pace(self) -> None:
        """Wait until the next handshake may begin; also gives way to everything else."""
        now = anyio.current_time()
        self._burst = min(float(BURST), self._burst + (now - self._burst_at) * HANDSHAKES_PER_S) - 1
        self._burst_at = now
        await anyio.sleep(max(0.0, -self._burst / HANDSHAKES_PER_S))

    async def _connect(self, config: object, state: object, taken: socket.socket, connection: _Connection) -> None:
        """Shake hands, and stay until the connection is lost."""
        from spotd.service.team_protocol import TeamProtocol

        try:
            _set_limits(taken)
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: TeamProtocol(config, state, connection, REQUEST_S),
                taken,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
                ssl_shutdown_timeout=GRACE_S if self._tls else None,
            )
            connection.transport = transport
            await connection.lost.wait()
        except OSError:
            pass  # of its handshake or of its socket, which is its own affair
        finally:
            if connection.transport is not None:
                connection.transport.abort()
            self._open.pop(connection, None)
            self.gate.forget(connection)

    async def end_requests(self) -> None:
        """Let requests under way end for a moment, then end them and every connection; others get a sentence."""
        self.gate.reset()
        self._database = None
        with anyio.move_on_after(GRACE_S):
            while self._requests:  # noqa: ASYNC110 - uvicorn has a set and no event
                await anyio.sleep(0.02)
        for connection in tuple(self._open):
            self._drop(connection)
        left = tuple(self._requests)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _set_limits(taken: socket.socket) -> None:
    with suppress(OSError):
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_READER_S * 1000)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return what serves TLS with this certificate.

    Raises:
        OSError, ValueError: it cannot; the message says what is wrong with which file.
    """
    if why := key_problem(key):
        raise ValueError(f"the key {key} {why}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as exc:
        raise ValueError(f"{certificate} and {key} are no certificate and its key without a password") from exc
    except OSError as exc:
        raise ValueError(f"the certificate {certificate} cannot be read: {exc.strerror}") from exc
    return context
