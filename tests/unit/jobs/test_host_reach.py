"""What a host can do with everything it was given, by every verb, against a real server: its own prefix and no more.

And a look-alike that would let it do anything gets no grants at all.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from spotd_jobs.objects.api import GrantsRefused, UploadGrant
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place, s3_client
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.client.sinks import Sink, SinkDenied
from spotd_jobs.wire.client.sinks_s3 import Credential
from spotd_jobs.wire.client.web import CLOCK
from tests.fakes.seaweed import BUCKET, CANARY, ROLE, Weed

OWN = "jobs/j1/attempts/2/"
BEAT = "jobs/_liveness/j1.2"
LIMIT = 4096
MUCH = 1_000_000
ELSEWHERE = (
    "jobs/j1/attempts/1/data/x",
    "jobs/j1/attempts/20/data/x",
    "jobs/j1/attempts/2",
    "jobs/j2/attempts/2/data/x",
    "jobs/j1/spec.json",
    "jobs/_liveness/j1.1",
    "jobs/_liveness/j1.20",
    "jobs/_liveness/j1.2/x",
    "jobs/_liveness/j2.2",
    "code/x.tar.gz",
    "x",
)
"""Another attempt's, one whose number begins with ours, the prefix itself without its end, another job's, ours; the
same for the beats."""
VERBS = ("GET", "HEAD", "PUT", "DELETE", "POST", "PATCH", "OPTIONS")


@pytest.fixture(scope="module", params=["form", "sts"])
def store(request: pytest.FixtureRequest, weed: Weed, findings: Findings) -> S3Store:
    """One for all tests of a method: none of them may change what the others look at."""
    prefix = f"{uuid.uuid4().hex}/"
    if request.param == "form":
        return S3Store(weed.place(prefix), findings=findings)
    return S3Store(weed.place(prefix, role=ROLE))


class Held:
    """All that a host holds: its grant, and the URLs in it."""

    def __init__(self, store: S3Store) -> None:
        self.store = store
        store.put(f"{OWN}grant.json", b"the grant itself")
        store.put("code/ours.tar.gz", b"the code")
        for key in ELSEWHERE:
            store.put(key, b"another's")
        self.before = self.everything()
        until = datetime.now(UTC) + timedelta(hours=1)
        self.grant: UploadGrant = store.grant_upload(OWN, expires=until, size_max=LIMIT, marker_key=BEAT)
        self.urls = [store.presign_get(key, expires=until) for key in (f"{OWN}grant.json", "code/ours.tar.gz")]

    def everything(self) -> dict[str, bytes]:
        """What there is, apart from what a host may write."""
        found = [info.key for info in self.store.list("")]
        keys = [key for key in found if not key.startswith((OWN, ".probe/")) and key != BEAT]
        return {key: self.store.get(key, bytes_max=MUCH) for key in keys}

    def sink(self, **changes: Any) -> Sink:
        return sink_of({"method": self.grant.method, "fields": {**self.grant.fields, **changes}})

    def beat(self, **changes: Any) -> Sink:
        """What its leave for the one object beside its prefix makes possible."""
        return sink_of({"method": self.grant.method, "fields": {**(self.grant.liveness_marker or {}), **changes}})

    @property
    def signs(self) -> bool:
        """Whether it can sign any request it likes."""
        return self.grant.method == "sigv4"

    def full(self, key: str) -> str:
        return self.store.place.prefix + key


@pytest.fixture(scope="module")
def held(store: S3Store) -> Held:
    return Held(store)


def ask(method: str, url: str, headers: dict[str, str] | None = None) -> int:
    body: list[bytes | memoryview] | None = [b"mine"] if method in ("PUT", "POST", "PATCH") else None
    return web.request(method, url, headers, body)[0]


def signed(held: Held, method: str, key: str, query: dict[str, str] | None = None, **headers: str) -> int:
    """What the server answers a request that the host signed with its credential."""
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    url, all_headers = Credential(dict(held.grant.fields)).request(method, key, CLOCK.now(), query=query, headers=more)
    return ask(method, url, all_headers)


def test_the_grant_itself_works(held: Held) -> None:
    held.sink().put("data/x", b"mine")
    assert held.store.get(f"{OWN}data/x", bytes_max=MUCH) == b"mine"
    assert held.everything() == held.before
    assert [web.request("GET", url)[2] for url in held.urls] == [b"the grant itself", b"the code"]


def test_nothing_is_uploaded_elsewhere(held: Held) -> None:
    for key in ELSEWHERE:
        folder, _, name = key.rpartition("/")
        with pytest.raises(SinkDenied):
            held.sink(key_prefix=held.full(f"{folder}/" if folder else "")).put(name, b"mine")
    assert held.everything() == held.before


def test_the_leave_for_its_own_beat_is_good_for_no_other_key(held: Held) -> None:
    held.beat().put("j1.2", b"+++")
    (info,) = [info for info in held.store.list("jobs/_liveness/") if info.key == BEAT]
    assert info.size == 3
    for key in ELSEWHERE:
        folder, _, name = key.rpartition("/")
        with pytest.raises(SinkDenied):
            held.beat(key_prefix=held.full(f"{folder}/" if folder else "")).put(name, b"mine")
    if not held.signs:
        with pytest.raises(SinkDenied):
            held.beat(key_prefix=held.full(OWN)).put("data/y", b"by the form of the beat")
        with pytest.raises(SinkDenied):
            held.beat().put("j1.2", b"+" * (LIMIT + 1))
    assert held.everything() == held.before


def test_a_host_cannot_read_list_or_delete_beats(held: Held) -> None:
    held.beat().put("j1.2", b"+++")
    base = f"{held.store.place.endpoint_url}/{BUCKET}/"
    for key in (BEAT, "jobs/_liveness/j2.2"):
        for verb in ("GET", "HEAD", "DELETE"):
            assert ask(verb, base + held.full(key)) >= 400, (verb, key)
            if held.signs:
                assert signed(held, verb, held.full(key)) == 403, (verb, key)
    if held.signs:
        assert signed(held, "GET", "", {"list-type": "2", "prefix": held.full("jobs/_liveness/")}) == 403
    assert held.store.head(BEAT) is not None
    assert held.everything() == held.before


def test_no_name_climbs_out_of_the_prefix(held: Held) -> None:
    for name in ("../1/data/x", "..%2f1/data/x", "data/../../1/data/x", "./../1/x", "//x"):
        with pytest.raises(ValueError, match="below the prefix") if "%" not in name else suppress(Exception):
            held.sink().put(name, b"mine")
    # What the runner would never send, a stranger does: the names go out as they are.
    for name in ("../1/data/x", "data/../../1/data/x"):
        with suppress(Exception):
            held.sink(key_prefix=held.full(f"{OWN}{name.rpartition('/')[0]}/")).put("x", b"mine")
    assert held.everything() == held.before


def test_a_url_that_reads_one_object_does_nothing_else(held: Held) -> None:
    for url, verb in product(held.urls, VERBS):
        path, _, query = url.partition("?")
        if verb not in ("GET", "HEAD", "OPTIONS"):
            assert ask(verb, url) >= 400
        for key in (*ELSEWHERE, f"{OWN}data/x", ""):
            other = f"{path.partition(BUCKET)[0]}{BUCKET}/{held.full(key) if key else ''}"
            if verb != "OPTIONS":
                assert ask(verb, f"{other}?{query}") >= 400, (verb, key)
                assert ask(verb, other) >= 400, (verb, key)
        assert ask("GET", f"{path.partition(BUCKET)[0]}{BUCKET}?list-type=2&{query}") >= 400
    assert held.everything() == held.before


def test_a_credential_does_nothing_elsewhere_by_any_verb(held: Held) -> None:
    if not held.signs:
        assert held.grant.method == "post", "a form signs nothing but itself"
        return
    for key, verb in product(ELSEWHERE, VERBS[:4]):
        assert signed(held, verb, held.full(key)) == 403, (verb, key)
    assert held.everything() == held.before


def test_a_credential_lists_copies_and_assembles_nothing(held: Held) -> None:
    if not held.signs:
        form = dict(held.grant.fields["form"])
        assert "key" in form
        assert CANARY not in json.dumps(form)
        return
    for prefix in ("", held.store.place.prefix, held.full("jobs/"), held.full("jobs/j2/")):
        assert signed(held, "GET", "", {"list-type": "2", "prefix": prefix}) == 403, prefix
        assert signed(held, "GET", "", {"versions": "", "prefix": prefix}) == 403, prefix
        assert signed(held, "GET", "", {"uploads": "", "prefix": prefix}) == 403, prefix
    for what in ("policy", "lifecycle", "acl", "cors", "versioning"):
        assert signed(held, "PUT", "", {what: ""}) >= 400, what
        assert signed(held, "DELETE", "", {what: ""}) >= 400, what
    assert signed(held, "DELETE", "") >= 400, "the bucket stays"
    theirs = f"/{BUCKET}/{held.full('jobs/j2/attempts/2/data/x')}"
    assert signed(held, "PUT", held.full(f"{OWN}data/copy"), x_amz_copy_source=theirs) == 403
    assert signed(held, "POST", held.full("jobs/j2/attempts/2/data/x"), {"uploads": ""}) == 403
    with suppress(web.WebError):
        signed(held, "POST", "", {"delete": ""})
    assert held.everything() == held.before


def test_a_stranger_without_anything_does_nothing(held: Held) -> None:
    base = f"{held.store.place.endpoint_url}/{BUCKET}/"
    for verb in VERBS[:4]:
        for key in (*ELSEWHERE, f"{OWN}data/x"):
            assert ask(verb, base + held.full(key)) >= 400, (verb, key)
    assert ask("GET", f"{base}?list-type=2") >= 400
    assert held.everything() == held.before


def test_nothing_that_a_host_holds_is_a_key_of_the_store(held: Held) -> None:
    everything = json.dumps([dict(held.grant.fields), held.urls])
    assert CANARY not in everything
    if held.signs:
        assert held.grant.fields["access_key"] not in ("spotd", "signer")


# --- a look-alike ----------------------------------------------------------------------------------------------------


@contextmanager
def moto() -> Iterator[str]:
    """moto's server, in a process of its own: it takes a few hundred megabytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([sys.executable, "-c", code], stdout=quiet, stderr=quiet, stdin=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while not _answers(f"{url}/moto-api/"):
            assert server.poll() is None, "moto's server ended"
            assert time.monotonic() < until, "moto's server does not come up"
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _answers(url: str) -> bool:
    try:
        return web.request("GET", url, timeout_s=5)[0] < 500
    except web.WebError:
        return False


@pytest.mark.process
def test_moto_is_refused_grants_by_every_method() -> None:
    pytest.importorskip("moto", reason="moto is not installed: pip install -e '.[dev]'")
    until = datetime.now(UTC) + timedelta(hours=1)
    with moto() as url:
        place = S3Place(bucket="ckpt", endpoint_url=url, region="us-east-1", access_key="k", secret_key=CANARY)
        s3_client(place, "k", CANARY).create_bucket(Bucket="ckpt")
        by_role, by_user = replace(place, grants="sts", role_arn=ROLE), replace(place, grants="sts")
        for one in (place, by_role, by_user):
            with pytest.raises(GrantsRefused, match="outside the prefix") as caught:
                S3Store(one).grant_upload(OWN, expires=until, size_max=LIMIT)
            assert CANARY not in str(caught.value)
        web.drop_connections()
