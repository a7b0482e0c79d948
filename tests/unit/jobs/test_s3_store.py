"""The store in a bucket, against a real server; and against one that enforces nothing, which gets no grants."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore.utils import parse_timestamp

from spotd_jobs.objects.api import GrantsRefused, ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place, read_instant
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import SinkDenied
from spotd_jobs.wire.client.sinks_s3 import PostSink
from tests.cases import every
from tests.fakes.seaweed import CANARY, Weed
from tests.unit.jobs.store_contract import MUCH, StoreContract

LIMIT = 4096
OWN = "jobs/j1/attempts/2/"


@pytest.fixture
def store(weed: Weed, findings: Findings) -> S3Store:
    return S3Store(weed.place(f"{uuid.uuid4().hex}/"), findings=findings)


class TestS3StoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self, weed: Weed, findings: Findings) -> ObjectStore:
        return S3Store(weed.place(f"{uuid.uuid4().hex}/"), findings=findings)


def soon(**delta: Any) -> datetime:
    return datetime.now(UTC) + timedelta(**(delta or {"hours": 1}))


def sink(store: S3Store, prefix: str = OWN, **changes: Any) -> PostSink:
    """What a host makes of its grant."""
    grant = store.grant_upload(prefix, expires=changes.pop("expires", soon()), size_max=LIMIT)
    return PostSink({**grant.fields, **changes})


# --- what a grant permits, and what not ------------------------------------------------------------------------------


def test_the_probe_finds_that_this_server_keeps_its_word(findings: Findings) -> None:
    assert findings.refusal == ""
    assert findings.checksums


def test_the_date_of_each_answer_is_shown_also_of_a_refusal(store: S3Store, weed: Weed) -> None:
    shown: list[datetime] = []
    store.date_shown = shown.append
    store.put("a", b"one")
    assert store.get("a", bytes_max=9) == b"one"
    other = S3Store(replace(weed.place("x/"), secret_key="wrong"), findings=Findings())
    other.date_shown = shown.append
    with pytest.raises(StoreError):
        other.put("a", b"one")
    assert len(shown) >= 3
    assert all(abs(datetime.now(UTC) - at) < timedelta(minutes=5) for at in shown)


def test_the_probe_leaves_nothing_behind(weed: Weed, findings: Findings) -> None:
    assert list(S3Store(weed.place("found/"), findings=findings).list("")) == []


def test_a_host_writes_below_its_own_prefix(store: S3Store) -> None:
    content = b"a chunk"
    digest = hashlib.sha256(content).hexdigest()
    sink(store).put(f"data/{digest}", content, digest)
    assert store.get(f"{OWN}data/{digest}", bytes_max=MUCH) == content
    found = store.head(f"{OWN}data/{digest}")
    assert found is not None
    assert found.sha256 == digest, "the daemon can tell a chunk's content without fetching it"


@pytest.mark.parametrize(
    "prefix", ["jobs/j1/attempts/1/", "jobs/j1/attempts/20/", "jobs/j2/attempts/2/", "jobs/j1/", ""]
)
def test_a_host_cannot_write_for_another_attempt_or_job(store: S3Store, prefix: str) -> None:
    before = f"{prefix}data/x"
    store.put(before, b"another's")
    with pytest.raises(SinkDenied):
        sink(store, key_prefix=store.place.prefix + prefix).put("data/x", b"mine now")
    assert store.get(before, bytes_max=MUCH) == b"another's"


def test_a_chunk_above_the_size_is_refused(store: S3Store) -> None:
    sink(store).put("data/a", b"x" * LIMIT)
    with pytest.raises(SinkDenied):
        sink(store).put("data/b", b"x" * (LIMIT + 1))
    assert [info.key for info in store.list(OWN)] == [f"{OWN}data/a"]


def test_a_grant_ends_at_its_instant(store: S3Store) -> None:
    with pytest.raises(SinkDenied):
        sink(store, expires=soon(seconds=-10)).put("data/a", b"late")
    assert list(store.list(OWN)) == []


@pytest.mark.parametrize("field", ["x-amz-signature", "policy", "x-amz-credential"])
def test_a_tampered_form_is_refused(store: S3Store, field: str) -> None:
    grant = store.grant_upload(OWN, expires=soon(), size_max=LIMIT)
    form = dict(grant.fields["form"])
    assert field in form
    form[field] = form[field][:-2] + ("aa" if not form[field].endswith("aa") else "bb")
    with pytest.raises(SinkDenied):
        PostSink({**grant.fields, "form": form}).put("data/a", b"forged")


def test_content_that_is_not_what_its_hash_says_is_refused(store: S3Store) -> None:
    with pytest.raises(SinkDenied):
        sink(store).put("data/a", b"broken on its way", hashlib.sha256(b"sent").hexdigest())


def test_a_grant_holds_no_secret_of_the_account(store: S3Store) -> None:
    grant = store.grant_upload(OWN, expires=soon(), size_max=LIMIT)
    texts = [repr(grant.fields), store.presign_get("jobs/x", expires=soon()), repr(store), repr(store.place)]
    assert all(CANARY not in text for text in texts)


# --- reading by URL --------------------------------------------------------------------------------------------------


def test_a_signed_url_reads_its_object_and_no_other_and_writes_nothing(store: S3Store) -> None:
    store.put("a/1", b"one")
    store.put("a/2", b"two")
    url = store.presign_get("a/1", expires=soon())
    assert web.request("GET", url)[::2] == (200, b"one")
    assert web.request("GET", url.replace("/a/1", "/a/2"))[0] == 403
    assert web.request("PUT", url, body=[b"mine"])[0] == 403
    assert web.request("DELETE", url)[0] == 403
    assert web.request("GET", url.partition("?")[0])[0] == 403
    assert store.get("a/1", bytes_max=MUCH) == b"one"


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_told_without_repeating_it(weed: Weed) -> None:
    with pytest.raises(StoreError, match=r"check the keys and rights in \[store\]") as caught:
        S3Store(weed.place(secret=f"wrong-{CANARY}")).put("a", b"x")
    assert CANARY not in str(caught.value)


def test_a_server_that_is_down_is_unavailable() -> None:
    place = S3Place(bucket="b", endpoint_url="http://127.0.0.1:9", access_key="k", secret_key="s")
    store = S3Store(place, findings=Findings())
    with pytest.raises(StoreUnavailable, match="does not answer"):
        store.get("a", bytes_max=1)
    with pytest.raises(StoreUnavailable):
        S3Store(place).grant_upload(OWN, expires=soon(), size_max=LIMIT)


def test_two_prefixes_of_one_bucket_see_nothing_of_each_other(weed: Weed, findings: Findings) -> None:
    one, two = (S3Store(weed.place(f"{uuid.uuid4().hex}/"), findings=findings) for _ in range(2))
    one.put("k", b"one")
    assert list(two.list("")) == []
    with pytest.raises(ObjectMissing):
        two.get("k", bytes_max=MUCH)


# --- a store that enforces nothing -----------------------------------------------------------------------------------


class Gullible(BaseHTTPRequestHandler):
    """Stores whatever anybody sends, as some S3 look-alikes do."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, bytes]

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _key(self) -> str:
        return self.path.partition("?")[0].split("/", 2)[-1]

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if "?delete" in self.path:
            self._answer(200, b"<DeleteResult/>")
            return
        parts = sent.split(b"\r\n\r\n")
        key = next(parts[n + 1] for n, part in enumerate(parts) if b'name="key"' in part).split(b"\r\n")[0].decode()
        self.objects[key] = parts[-1].rpartition(b"\r\n--")[0]
        self._answer(204)

    def do_PUT(self) -> None:
        self.objects[self._key()] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, ETag='"e"')

    def do_GET(self) -> None:
        if "list-type" in self.path:
            prefix = self.path.partition("prefix=")[2].partition("&")[0].replace("%2F", "/")
            found = "".join(
                f"<Contents><Key>{key}</Key><Size>1</Size><ETag>e</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key in sorted(self.objects)
                if key.startswith(prefix)
            )
            self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())
            return
        content = self.objects.get(self._key())
        if content is None:
            self._answer(404)
        else:
            self._answer(200, content, ETag='"e"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")


@pytest.fixture
def gullible() -> Iterator[str]:
    handler = type("Handler", (Gullible,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    web.drop_connections()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_that_accepts_what_must_be_refused_gets_no_grants(gullible: str) -> None:
    store = S3Store(S3Place(bucket="b", endpoint_url=gullible, access_key="k", secret_key=CANARY))
    with pytest.raises(GrantsRefused, match="accepts an upload outside the prefix") as caught:
        store.grant_upload(OWN, expires=soon(), size_max=LIMIT)
    assert CANARY not in str(caught.value)
    store.put("k", b"the daemon itself may still use it")


@every(
    "text",
    [
        "2026-11-21T19:00:00.000Z",
        "2026-11-21T19:00:00Z",
        "2026-11-21T19:00:00.123456+02:00",
        "Sat, 21 Nov 2026 19:00:00 GMT",
        1_795_287_600,
        "1795287600",
    ],
    ids=str,
)
def test_an_instant_is_read_as_boto3_itself_would(text: str | int) -> None:
    assert read_instant(text) == parse_timestamp(text)  # type: ignore[arg-type]  # botocore reads numbers too
    assert read_instant(text).utcoffset() is not None
