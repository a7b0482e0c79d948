"""Reading and sending over `file://`, `http://` and `https://`, with errors that name the next step.

URLs are secrets here (they are presigned): no message ever holds one. HTTP connections are kept open per thread,
since a restore reads thousands of chunks from one place.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from spotd_jobs.wire.client.sinks import reason_of

if TYPE_CHECKING:
    import http.client


# Time as a rented host may trust it: durations from the kernel, instants from the store's `Date` where it has one.


_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
_SKEW_IGNORED_S = 2.0
_YEAR_2020, _YEAR_2100 = 1_577_836_800, 4_102_444_800
_START_TOOK_MAX_S = 3600.0
"""The start script gives up long before."""


def steady() -> float:
    """Seconds that never go back, and go on while the machine is suspended where the kernel counts that."""
    if _BOOTTIME is None:
        return time.monotonic()
    return time.clock_gettime(_BOOTTIME)


def process_began() -> float:
    """When this process was made, by `steady`; it was the shell of the start script before it became the runner."""
    now = steady()
    try:
        with open("/proc/self/stat", "rb") as file:
            # Behind the name, which may hold anything, the start is the 22nd figure of all, in ticks since the boot.
            ticks = int(file.read(4096).rpartition(b")")[2].split()[19])
        began = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    # Where a container has its own idea of the time since the boot, the two figures cannot be compared.
    return began if _BOOTTIME is not None and now - _START_TOOK_MAX_S <= began <= now else now


class Backoff:
    """Pauses between tries, each twice as long as the one before, up to a limit."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._next_s = first_s
        self._most_s = most_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._most_s)
        return pause_s


class _StoreClock:
    """The wall clock, corrected by the dates of the store's answers. A host's own clock may be hours off."""

    def __init__(self) -> None:
        self._offset_s = 0.0

    def learn(self, date_header: str) -> None:
        """Corrects the offset by one `Date` header; nonsense is ignored, and so is a year that no store can be in."""
        from email.utils import parsedate_to_datetime

        try:
            stated = parsedate_to_datetime(date_header).timestamp()
        except (TypeError, ValueError, OverflowError):
            return
        if not _YEAR_2020 <= stated < _YEAR_2100:
            return
        offset_s = stated - time.time()
        # The header has whole seconds and travelled for a while: small differences are noise.
        self._offset_s = offset_s if abs(offset_s) > _SKEW_IGNORED_S else 0.0

    def now(self) -> float:
        return time.time() + self._offset_s


CLOCK = _StoreClock()


def now_text() -> str:
    """Return the present instant as it is written into documents."""
    return as_text(CLOCK.now())


def as_text(epoch_s: float) -> str:
    """Return an instant in UTC, ISO 8601 with `Z`."""
    moment = datetime.fromtimestamp(epoch_s, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


def as_epoch(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 instant; one without an offset is taken as UTC.

    Raises:
        ValueError: it is none.
    """
    if text.endswith(("Z", "z")):
        text = text[:-1] + "+00:00"
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()


TIMEOUT_S = 30.0
_BLOCK = 1 << 20
_REDIRECTS_MAX = 5
_local = threading.local()


class WebError(Exception):
    """It did not work now and may work later."""


class Missing(WebError):
    """There is certainly nothing at this URL."""


class Denied(WebError):
    """The place refused: the permission is wrong, or has run out."""


class Changed(WebError):
    """What is at the URL is not what was there when it was measured."""


class Span(NamedTuple):
    """So many bytes of an object of `total` bytes, from `first` on; with an `etag` only while the object has that."""

    first: int
    size: int
    total: int
    etag: str = ""


class TooLarge(WebError):
    """More bytes came than were allowed."""


def read(url: str, size_max: int) -> bytes:
    """Return the bytes at the URL.

    Raises:
        WebError
    """
    parts: list[bytes] = []

    def collect(source: Any) -> None:
        left = size_max
        while left >= 0:
            data = source.read(min(_BLOCK, left + 1))
            if not data:
                return
            parts.append(data)
            left -= len(data)
        raise TooLarge("larger than %d bytes" % size_max)

    _with_source(url, collect)
    return b"".join(parts)


def read_blocks(
    url: str, size_max: int, block: memoryview, take: Callable[[memoryview], Any], span: Span | None = None
) -> None:
    """Every byte of the object went through `block` to `take`, in order; `take` may keep nothing of it.

    Args:
        span: only these bytes, of a server that is not the store.

    Raises:
        Changed: the object is not as large as the span says.
        TooLarge: the object is larger than allowed. What was taken is its beginning, no more than allowed.
        WebError: also after some was taken.
    """

    def pump(source: Any) -> None:
        left = size_max
        while left:
            count = _fill(source, block[: min(left, len(block))])
            if not count:
                return
            take(block[:count])
            left -= count
        if source.read(1):
            raise TooLarge("larger than %d bytes" % size_max)

    _with_source(url, pump, span)


def _fill(source: Any, place: memoryview) -> int:
    count = 0
    while count < len(place):
        more = source.readinto(place[count:])
        if not more:
            break
        count += int(more)
    return count


def _with_source(url: str, use: Callable[[Any], None], span: Span | None = None) -> None:
    """`use` has read the object, and it was not cut short on its way."""
    if url.startswith("file://"):
        try:
            with open(path_of(url), "rb", buffering=0) as source:
                use(source)
        except FileNotFoundError:
            raise Missing("the file is not there") from None
        except PermissionError:
            raise Denied("the file may not be read") from None
        except OSError as error:
            raise WebError(reason_of(error)) from None
        return
    answer = _open_following("GET", url, span)
    try:
        if span is not None:
            _require_span(answer, span)
        elif answer.status != 200:
            answer.read(4096)
            raise error_of(answer.status)
        use(answer)
        if answer.length:
            raise WebError("the answer was cut short")  # http.client itself reports nothing when blocks are read
    except OSError as error:
        drop_connections()
        raise WebError(reason_of(error)) from None
    except WebError:
        drop_connections()
        raise
    except Exception as error:
        drop_connections()
        if _is_http_error(error):
            raise WebError("the answer was cut short") from None
        raise


def _require_span(answer: http.client.HTTPResponse, span: Span) -> None:
    if answer.status == 206:
        stated = "bytes %d-%d/%d" % (span.first, span.first + span.size - 1, span.total)
        if answer.getheader("content-range") != stated:
            raise Changed("its size is not what it was")
    elif answer.status == 412:
        raise Changed("it is not what it was when it was listed")
    elif answer.status == 200 and span.size == span.total and answer.length == span.total:
        return  # a server that sends a small file whole was asked for all of it
    elif answer.status in (200, 416):
        raise Changed("its server does not send these bytes of it")
    else:
        raise error_of(answer.status)


def path_of(url: str) -> str:
    """Return the path a `file://` URL names."""
    from urllib.parse import unquote

    rest = url[len("file://") :]
    return unquote(rest[len("localhost") :] if rest.startswith("localhost/") else rest)


def error_of(status: int) -> WebError:
    """Return what an HTTP status means here."""
    if status in (404, 410):
        return Missing("HTTP %d" % status)
    if status in (400, 401, 403):
        return Denied("HTTP %d" % status)
    return WebError("HTTP %d" % status)


def request(
    method: str,
    url: str,
    headers: dict[str, str] | None = None,
    body: list[bytes | memoryview] | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    foreign: bool = False,
    size_max: int = 65536,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and the first `size_max` bytes of the answer.

    Args:
        foreign: the server is not the store: its date is not believed.

    Raises:
        WebError: there was no answer.
    """
    answer = _open(method, url, headers or {}, body, timeout_s, foreign=foreign)
    try:
        content = answer.read(size_max)
        if not answer.isclosed():
            drop_connections()
    except Exception as error:
        drop_connections()
        if isinstance(error, OSError) or _is_http_error(error):
            raise WebError("the answer was cut short") from None
        raise
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def drop_connections() -> None:
    """Close this thread's open connections, whose state may be unknown."""
    for connection in getattr(_local, "connections", {}).values():
        connection.close()
    _local.connections = {}


def _open_following(method: str, url: str, span: Span | None) -> http.client.HTTPResponse:
    headers = {} if span is None else {"Range": "bytes=%d-%d" % (span.first, span.first + span.size - 1)}
    if span is not None and span.etag:
        headers["If-Match"] = '"%s"' % span.etag
    for _ in range(_REDIRECTS_MAX):
        answer = _open(method, url, headers, None, TIMEOUT_S, foreign=span is not None)
        place = answer.getheader("location")
        if answer.status not in (301, 302, 303, 307, 308) or not place:
            return answer
        from urllib.parse import urljoin

        answer.read()
        following = urljoin(url, place)
        if url.startswith("https:") and not following.startswith("https:"):
            raise WebError("it redirects to another protocol than https")
        url = following
    raise WebError("too many redirects")


def _open(
    method: str,
    url: str,
    headers: dict[str, str],
    body: list[bytes | memoryview] | None,
    timeout_s: float,
    *,
    foreign: bool,
) -> http.client.HTTPResponse:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WebError("no http, https or file URL")
    target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    place = (parts.scheme, parts.hostname, parts.port)
    length = {"Content-Length": str(sum(len(piece) for piece in body))} if body is not None else {}
    for attempt in (0, 1):
        kept = _kept(place)
        connection = kept or _connect(parts.scheme, parts.hostname, parts.port, timeout_s)
        try:
            connection.timeout = timeout_s
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in dict({"User-Agent": "spotd-runner"}, **headers, **length).items():
                connection.putheader(name, value)
            connection.endheaders()
            reusable = _send_body(connection, body or [])
            answer = connection.getresponse()
        except Exception as error:
            connection.close()
            if not (isinstance(error, OSError) or _is_http_error(error)):
                raise
            if kept is not None and attempt == 0:
                continue  # a kept connection may have been closed by the other side meanwhile
            raise WebError(reason_of(error)) from None
        if reusable:
            _local.connections[place] = connection
        date = answer.getheader("date")
        if date and not foreign:
            CLOCK.learn(date)
        return answer
    raise WebError("no connection")


def _send_body(connection: http.client.HTTPConnection, body: list[bytes | memoryview]) -> bool:
    """Whether all of it was sent. A store that refuses may answer and hang up first; its answer can still be read."""
    try:
        for piece in body:
            connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _kept(place: tuple[str, str, int | None]) -> http.client.HTTPConnection | None:
    if not hasattr(_local, "connections"):
        _local.connections = {}
    found: http.client.HTTPConnection | None = _local.connections.pop(place, None)
    return found


def _connect(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    import http.client

    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    import ssl

    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls(ssl.create_default_context()))


def _tls(context: Any) -> Any:
    """Images without a certificate bundle often still hold the one that came with pip's or conda's certifi."""
    if not context.get_ca_certs():
        try:
            import certifi  # type: ignore[import-not-found,unused-ignore]  # only where the image happens to have it

            context.load_verify_locations(certifi.where())
        except Exception:  # noqa: BLE001 - a broken certifi of an image must not stop what may work without
            return context
    return context


def _is_http_error(error: BaseException) -> bool:
    import http.client

    return isinstance(error, http.client.HTTPException)
