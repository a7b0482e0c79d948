"""HTTP over the daemon's unix socket with the standard library, and its failures in words."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from spotd import paths

if TYPE_CHECKING:
    from spotd.client.remote import Address, Remote

# The two ways a call to the daemon fails.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProblem:
    """One thing wrong in what the user wrote; `key` is dotted, empty for the whole."""

    key: str
    message: str
    hint: str


class ClientError(Exception):
    """A request that was not fulfilled. The message ends without a full stop; `hint` is a way out or empty.

    As text it is all three on lines of their own, so that a notebook's traceback says what to change.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rows: Sequence[tuple[str, str]] = ()
        """What is wrong in what the user wrote, a sentence and its way out each."""

    def __str__(self) -> str:
        rows = [f"  {sentence}{f' ({way_out})' if way_out else ''}" for sentence, way_out in self.rows]
        return "\n".join([self.message, *rows, *([f"hint: {self.hint}"] if self.hint else [])])


class DaemonUnreachable(ClientError):
    """No answer, or none that can be understood. Whether the request arrived is unknown."""


class DaemonRefused(ClientError):
    """A refusal of the daemon; `code` is one of the API's closed set."""

    def __init__(self, message: str, *, code: str, hint: str = "", problems: Sequence[ClientProblem] = ()) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.problems = tuple(problems)
        self.rows = [(f"{one.key}: {one.message}" if one.key else one.message, one.hint) for one in problems]


class DaemonNotice(UserWarning):
    """What a person should know about an answer: above all that it is not from the daemon that leads."""


UNKNOWN_KEY = "holds the unknown key"
OLDER = "the daemon is older than this client: restart it, and it is the version that is installed now"


def refused(error: Mapping[str, Any]) -> DaemonRefused:
    """Return the refusal in an answer's `error` object, however incomplete that object is."""
    rows = error.get("problems")
    problems = [
        ClientProblem(key=str(row.get("key", "")), message=str(row.get("message", "")), hint=str(row.get("hint", "")))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]
    message = str(error.get("message") or "the daemon refused without saying why")
    return DaemonRefused(
        message,
        code=str(error.get("code", "internal")),
        hint=OLDER if UNKNOWN_KEY in message else str(error.get("hint", "")),
        problems=problems,
    )


CONNECT_S: Final = 5.0
START_S: Final = 30.0
"""The longest wait for a daemon that is starting."""
NOTICE_S: Final = 0.4
"""The longest wait for its notice that it does."""
ANSWER_S: Final = 40.0
"""Above the longest that the daemon lets a query of rows take, so that its own message arrives."""
PATIENT_S: Final = 180.0
"""For what asks providers or the object store."""
ADOPTION_S: Final = 660.0
"""Of the one question for which the daemon may read the files of ten thousand jobs."""
STREAM_S: Final = 45.0
"""A followed stream sends an empty line every 10 s; several missing mean that the daemon is gone."""
SCHEMA: Final = 1
MISDIRECTED: Final = 421
"""The status by which a daemon that waits says that it did nothing."""
NOTICE: Final = "spotd-notice"
"""The header with a sentence about an answer that is not the leader's."""
_LINE_BYTES_MAX: Final = 16 * 2**20
_ANSWER_BYTES_MAX: Final = 512 * 2**20
_EMPTY_LINES_MAX: Final = 1_000_000
"""In a row: a stream in which nothing happens for a hundred days has fewer."""
_CHUNK: Final = 1 << 18

Query = Mapping[str, str | int | list[str] | None]
Json = Any
"""An object of `spotd.api.schemas`, with `schema` and `now`."""


class _UnixConnection(http.client.HTTPConnection):
    """A connection whose host is a socket of the file system."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("spotd", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        # Secrets travel here: a socket that another user put in this place is not ours to speak to.
        owner = self._path.stat().st_uid
        if owner not in {os.geteuid(), 0} and os.geteuid() != 0:
            raise PermissionError(errno.EPERM, "belongs to another user")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect(os.fspath(self._path))
        self.sock.settimeout(self._timeout_s)


def _wait_for_start(path: Path) -> None:
    """Wait while a daemon that is starting does not listen yet: `spotd run &` and a command come in one breath."""
    begin = time.monotonic()
    while not _exists(path):
        passed = time.monotonic() - begin
        if passed > (START_S if paths.is_starting(path) else NOTICE_S):
            return
        time.sleep(0.05)


class Transport:
    """Requests to one daemon, a connection each: a command makes one or two."""

    def __init__(self, path: Path, remote: Remote | None = None) -> None:
        self.path = path
        self.remote = remote
        self._last: Address | None = None
        """Which of several led when it was asked last."""
        self.is_closing = False
        """Set by another thread: a stream ends at the next sign of the daemon."""

    @property
    def place(self) -> str:
        """Where the daemon is, for messages."""
        if self.remote is None:
            return str(self.path)
        return (self._last or self.remote.addresses[0]).url

    def json_bytes(
        self,
        method: str,
        target: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> bytes:
        """Return the bytes of a successful answer, unparsed.

        Raises:
            DaemonUnreachable, DaemonRefused
        """
        data = None if body is None else json.dumps(body).encode()
        with self._exchange(method, target, query=query, body=data, timeout_s=timeout_s) as response:
            return self._whole(response)

    def json(
        self,
        method: str,
        target: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Json:
        """Return the answer.

        Raises:
            DaemonUnreachable, DaemonRefused
        """
        return self._parse(self.json_bytes(method, target, query=query, body=body, timeout_s=timeout_s))

    def upload(self, target: str, content: IO[bytes], size: int) -> Json:
        """Return the answer to a PUT of so many bytes from the file.

        Raises:
            DaemonUnreachable, DaemonRefused
        """
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        with self._exchange("PUT", target, body=content, headers=headers, timeout_s=PATIENT_S) as response:
            return self._parse(self._whole(response))

    def lines(self, target: str, *, query: Query | None = None) -> Iterator[Json]:
        """Yield the records of a stream as they come, without the empty lines that keep it alive.

        Raises:
            DaemonUnreachable, DaemonRefused: also in the middle.
        """
        with self._exchange("GET", target, query=query, timeout_s=STREAM_S) as response:
            empty = 0
            while (line := response.readline(_LINE_BYTES_MAX)) and not self.is_closing:
                empty = 0 if line.strip() else empty + 1
                if not line.endswith(b"\n") or empty > _EMPTY_LINES_MAX:
                    raise self._foreign_answer()
                if not empty:
                    yield self._parse(line)

    def chunks(self, target: str, *, query: Query | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file as they come.

        Raises:
            DaemonUnreachable: also where the file ends before its end.
            DaemonRefused
        """
        with self._exchange("GET", target, query=query, timeout_s=PATIENT_S) as response:
            while chunk := response.read(_CHUNK):
                yield chunk

    @contextmanager
    def _exchange(
        self,
        method: str,
        target: str,
        *,
        query: Query | None = None,
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        sent = _Sent(method, f"{target}?{text}" if (text := _query_text(query)) else target, body, dict(headers or {}))
        if self.remote is not None:
            with self._leader(self.remote, sent, timeout_s) as response:
                yield response
            return
        _wait_for_start(self.path)
        connection = _UnixConnection(self.path, timeout_s=timeout_s)
        try:
            yield self._require_success(sent.by(connection))
        except ClientError:
            raise
        except (OSError, http.client.HTTPException) as exc:
            raise self._unreachable(exc) from exc
        finally:
            connection.close()

    @contextmanager
    def _leader(self, remote: Remote, sent: _Sent, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer of the daemon that leads.

        Only where nothing can have been done, because no connection came about or one that waits said so, is the next
        one asked: no request is made twice. An answer that is not the leader's, to a request that changes nothing, is
        taken where no other gives a better one.
        """
        from spotd.client.remote import RemoteRefused  # only for those who reach another computer

        failures: list[ClientError] = []
        order = sorted(remote.addresses, key=lambda one: one is not self._last)
        second_best: list[Address] = []
        for address in chain(order, second_best):
            try:
                headers = {"Authorization": f"Bearer {remote.token()}"}
                connection = remote.connection(address, timeout_s=CONNECT_S)
            except RemoteRefused as exc:
                raise DaemonUnreachable(exc.message, hint=exc.hint) from exc
            try:
                try:
                    connection.connect()
                except (OSError, http.client.HTTPException) as exc:
                    failures.append(_failure_at(exc, address))
                    continue
                connection.sock.settimeout(timeout_s)
                response = sent.by(connection, headers)
                if response.status == MISDIRECTED and sent.can_repeat():
                    failures.append(self._refusal(response))
                    continue
                if response.headers[NOTICE] and len(order) > 1 and address not in second_best:
                    second_best.append(address)
                    continue
                self._last = address
                yield self._require_success(response)
                return
            except ClientError:
                raise
            except (OSError, http.client.HTTPException) as exc:
                raise _failure_at(exc, address) from exc
            finally:
                connection.close()
        if len(failures) == 1:
            raise failures[0]
        words = "; ".join(one.message for one in failures)
        raise DaemonUnreachable(f"none of {len(failures)} daemons leads: {words}", hint=failures[0].hint)

    def _require_success(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if response.status >= 300:
            raise self._refusal(response)
        if notice := response.headers[NOTICE]:
            warnings.warn(notice, DaemonNotice, stacklevel=1)
        return response

    def _refusal(self, response: http.client.HTTPResponse) -> ClientError:
        if response.status < 400:
            where = (response.headers["location"] or "nowhere")[:200]
            sentence = f"what answers at {self.place} redirects to {where!r}, which spotctl does not follow"
            return DaemonUnreachable(sentence, hint="state the daemon's own address in --url")
        body = self._parse(self._whole(response), check_error=False)
        error = body.get("error")
        return refused(error) if isinstance(error, dict) else self._foreign_answer()

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        body = response.read(_ANSWER_BYTES_MAX + 1)
        if len(body) > _ANSWER_BYTES_MAX:
            raise self._foreign_answer()
        if response.length:
            raise http.client.IncompleteRead(body, response.length)  # which a bounded read does not raise
        return body

    def _parse(self, raw: bytes, *, check_error: bool = True) -> Json:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            raise self._foreign_answer() from exc
        if not isinstance(body, dict):
            raise self._foreign_answer()
        if body.get("schema") != SCHEMA:
            raise DaemonUnreachable(
                f"the daemon at {self.place} speaks another version of the API",
                hint="install the same version of spotd for both and restart the daemon",
            )
        if check_error and isinstance(body.get("error"), dict):
            raise refused(body["error"])
        return body

    def _foreign_answer(self) -> DaemonUnreachable:
        hint = "set SPOTD_SOCKET to the daemon's socket" if self.remote is None else "check host and port of --url"
        return DaemonUnreachable(f"what answers at {self.place} is not spotd", hint=hint)

    def _unreachable(self, exc: Exception) -> DaemonUnreachable:
        place = str(self.path)
        start = "spotd run"
        if self.path != paths.SYSTEM_SOCKET and _exists(paths.SYSTEM_SOCKET):
            start = f"export SPOTD_SOCKET={paths.SYSTEM_SOCKET} to use the system's daemon, or start one: spotd run"
        match exc:
            case FileNotFoundError() | NotADirectoryError():
                return DaemonUnreachable(f"the daemon is not running: there is no socket {place}", hint=start)
            case ConnectionRefusedError():
                return DaemonUnreachable(f"the daemon is not running: nobody listens at {place}", hint=start)
            case PermissionError(errno=errno.EPERM):
                return DaemonUnreachable(
                    f"the socket {place} belongs to another user", hint="set SPOTD_SOCKET to your own daemon's socket"
                )
            case PermissionError():
                return DaemonUnreachable(
                    f"no permission to use the daemon's socket {place}", hint="run spotctl as the user that runs spotd"
                )
            case TimeoutError():
                return DaemonUnreachable(
                    f"the daemon at {place} does not answer", hint="see its log, or restart it: running machines go on"
                )
            case http.client.RemoteDisconnected():
                return DaemonUnreachable("the daemon went away before it answered", hint="start it again: spotd run")
            case http.client.IncompleteRead() | ConnectionResetError() | BrokenPipeError():
                return DaemonUnreachable(
                    "the daemon went away in the middle of its answer", hint="start it again: spotd run"
                )
            case http.client.HTTPException():
                return self._foreign_answer()
            case OSError() if len(os.fsencode(place)) > paths.SOCKET_PATH_BYTES_MAX:
                return DaemonUnreachable(
                    f"the path of the socket is longer than {paths.SOCKET_PATH_BYTES_MAX} bytes: {place}",
                    hint="set SPOTD_SOCKET to a shorter path",
                )
            case _:
                return DaemonUnreachable(f"cannot talk to the daemon at {place}: {exc}", hint=start)


class _Sent:
    """A request, which is made once; again only of a daemon that did nothing."""

    def __init__(self, method: str, url: str, body: bytes | IO[bytes] | None, headers: dict[str, str]) -> None:
        self._method, self._url, self._body, self._headers = method, url, body, headers

    def by(
        self, connection: http.client.HTTPConnection, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Make the request; return the answer."""
        # A server that refuses an upload early answers and closes: that answer is worth more than the broken pipe.
        try:
            connection.request(self._method, self._url, body=self._body, headers={**self._headers, **(headers or {})})
        except (BrokenPipeError, ConnectionResetError):
            if connection.sock is None:
                raise
        return connection.getresponse()

    def can_repeat(self) -> bool:
        """Begin the body anew; return whether that is possible."""
        if self._body is None or isinstance(self._body, bytes):
            return True
        if not self._body.seekable():
            return False
        self._body.seek(0)
        return True


def _failure_at(exc: Exception, address: Address) -> DaemonUnreachable:
    from spotd.client.remote import failure

    message, hint = failure(exc, address)
    return DaemonUnreachable(message, hint=hint)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _query_text(query: Query | None) -> str:
    pairs: list[tuple[str, str]] = []
    for name, value in (query or {}).items():
        if isinstance(value, list):
            pairs += [(name, item) for item in value]
        elif value is not None:
            pairs.append((name, str(value)))
    return urlencode(pairs)
