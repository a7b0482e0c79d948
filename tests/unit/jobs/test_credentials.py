"""Temporary credentials in place of forms: made, limited, renewed, taken back, and refused where nothing holds them.

The services that make them are small servers which verify every signature themselves (`tests/fakes/honest_s3.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd_jobs.objects.api import GrantsRefused, StoreError, UploadGrant
from spotd_jobs.objects.credentials import StsMinter
from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.objects.s3_grants import GrantMethod, methods_for
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import SinkDenied
from spotd_jobs.wire.client.sinks_s3 import Credential, SigV4Sink
from spotd_jobs.wire.client.web import CLOCK
from tests.fakes import honest_s3
from tests.fakes.honest_s3 import ACCOUNT, BUCKET, KEY, SECRET, Honest

pytestmark = pytest.mark.long

OWN = "jobs/j1/attempts/2/"
LIMIT = 4096
ROLE = "arn:aws:iam::123456789012:role/spotd-hosts"
MAKERS = {
    "r2": {"grants": "r2", "account": ACCOUNT},
    "b2": {"grants": "b2"},
    "sts role": {"grants": "sts", "role_arn": ROLE},
    "sts user": {"grants": "sts"},
}


@pytest.fixture
def server() -> Iterator[Honest]:
    with honest_s3.running() as honest:
        yield honest
        web.drop_connections()


def place(server: Honest, maker: str, **changes: Any) -> S3Place:
    fields: dict[str, Any] = {
        "bucket": BUCKET,
        "prefix": "lab/",
        "endpoint_url": server.url,
        "region": "auto",
        "access_key": KEY,
        "secret_key": SECRET,
        "grants_endpoint_url": server.url,
        **MAKERS[maker],
    }
    return S3Place(**{**fields, **changes})


def soon(**delta: Any) -> datetime:
    return datetime.now(UTC) + timedelta(**(delta or {"hours": 6}))


def granted(store: S3Store, prefix: str = OWN) -> UploadGrant:
    return store.grant_upload(prefix, expires=soon(), size_max=LIMIT)


def status(grant: UploadGrant, method: str, key: str, *, query: dict[str, str] | None = None) -> int:
    """What the server answers the holder of the grant, whatever the runner itself would ever ask."""
    url, headers = Credential(dict(grant.fields)).request(method, key, CLOCK.now(), query=query)
    return web.request(method, url, headers, [b"mine"] if method in ("PUT", "POST") else None)[0]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_host_writes_below_its_own_prefix_and_does_nothing_else(server: Honest, maker: str) -> None:
    store = S3Store(place(server, maker))
    grant = granted(store)
    assert (grant.method, store.findings().refusal, store.findings().checksums) == ("sigv4", "", True)
    content = b"a chunk"
    digest = hashlib.sha256(content).hexdigest()
    SigV4Sink(dict(grant.fields)).put(f"data/{digest}", content, digest)
    found = store.head(f"{OWN}data/{digest}")
    assert found is not None
    assert (found.size, found.sha256) == (len(content), digest)
    others = ["lab/jobs/j1/attempts/1/x", "lab/jobs/j1/attempts/20/x", "lab/jobs/j2/attempts/2/x", "lab/jobs/x", "x"]
    for key in others:
        server.objects[key] = b"another's"
        for method in ("PUT", "GET", "HEAD", "DELETE"):
            assert status(grant, method, key) == 403, (method, key)
        assert server.objects[key] == b"another's"
    for prefix in ("", "lab/", "lab/jobs/", f"lab/{OWN}"):
        assert status(grant, "GET", "", query={"list-type": "2", "prefix": prefix}) == 403, prefix
    assert status(grant, "POST", "", query={"delete": ""}) in (200, 403)
    assert set(others) <= set(server.objects)
    assert SECRET not in repr(grant.fields), "the account's secret is not in a grant"
    assert [key for key in server.objects if ".probe/" in key] == []


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("prefix", "outside the prefix"),
        ("signature", "forged signature"),
        ("expiry", "signed an hour ago"),
    ],
)
def test_a_store_that_does_not_hold_a_credential_to_its_word_gets_no_grants(
    server: Honest, maker: str, lie: str, words: str
) -> None:
    server.lies = {lie}
    with pytest.raises(GrantsRefused, match=words) as caught:
        granted(S3Store(place(server, maker)))
    assert SECRET not in str(caught.value)


def test_content_that_is_not_what_its_hash_says_is_refused(server: Honest) -> None:
    sink = SigV4Sink(dict(granted(S3Store(place(server, "r2"))).fields))
    with pytest.raises(SinkDenied, match="HTTP 400"):
        sink.put("data/a", b"broken on its way", hashlib.sha256(b"sent").hexdigest())


# --- time, and what a renewal costs ----------------------------------------------------------------------------------


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.at


@pytest.mark.parametrize(
    ("maker", "life"),
    [
        ("r2", timedelta(hours=6)),
        ("b2", timedelta(hours=6)),
        ("sts role", timedelta(hours=1)),
        ("sts user", timedelta(hours=1)),
    ],
)
def test_a_credential_is_used_again_while_it_is_fresh_and_never_outlives_what_was_asked(
    server: Honest, maker: str, life: timedelta
) -> None:
    clock = Hands()
    store = S3Store(place(server, maker), clock=clock)

    def ask() -> UploadGrant:
        return store.grant_upload(OWN, expires=clock() + timedelta(hours=6), size_max=LIMIT)

    first = ask()
    assert first.expires - clock() == life
    clock.at += life * 0.2
    assert ask().fields == first.fields
    clock.at += life * 0.1
    renewed = ask()
    assert renewed.fields != first.fields
    assert renewed.expires - clock() == life


def test_an_expired_credential_is_refused_by_the_store(server: Honest) -> None:
    clock = Hands()
    store = S3Store(place(server, "r2"), clock=clock)
    store.findings()
    clock.at -= timedelta(hours=7)
    late = store.grant_upload(OWN, expires=clock() + timedelta(hours=6), size_max=LIMIT)
    with pytest.raises(SinkDenied, match="ExpiredToken"):
        SigV4Sink(dict(late.fields)).put("data/a", b"late")


def test_each_attempt_has_a_credential_of_its_own(server: Honest) -> None:
    store = S3Store(place(server, "b2"))
    one, two = granted(store), granted(store, "jobs/j1/attempts/3/")
    assert one.fields["access_key"] != two.fields["access_key"]
    assert status(one, "PUT", "lab/jobs/j1/attempts/3/x") == 403


def test_a_key_of_b2_that_is_taken_back_is_worth_nothing(server: Honest) -> None:
    store = S3Store(place(server, "b2"))
    grant = granted(store)
    store.revoke_upload(OWN)
    with pytest.raises(SinkDenied):
        SigV4Sink(dict(grant.fields)).put("data/a", b"too late")
    store.revoke_upload(OWN)
    assert granted(store).fields["access_key"] != grant.fields["access_key"]


def test_what_is_asked_of_sts_is_one_prefix_and_one_verb(server: Honest) -> None:
    granted(S3Store(place(server, "sts role")))
    asked = server.made[-1]
    assert asked["RoleArn"] == ROLE
    assert asked["Policy"] == (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:PutObject"],'
        f'"Resource":"arn:aws:s3:::{BUCKET}/lab/{OWN}*"}}]}}'
    )
    assert len(asked["Policy"]) < 2048, "STS takes no longer ones"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_credential_reaches_the_one_beat_that_was_asked_for_where_its_maker_can_say_so(
    server: Honest, maker: str
) -> None:
    store = S3Store(place(server, maker))
    grant = store.grant_upload(OWN, expires=soon(), size_max=LIMIT, marker_key="jobs/_liveness/j1.2")
    if maker == "b2":
        assert grant.liveness_marker is None, "a key of B2 has one name prefix"
        assert status(grant, "PUT", "lab/jobs/_liveness/j1.2") == 403
        return
    assert grant.liveness_marker is not None
    SigV4Sink(dict(grant.liveness_marker)).put("j1.2", b"+++")
    assert server.objects["lab/jobs/_liveness/j1.2"] == b"+++"
    for key in (
        "lab/jobs/_liveness/j1.20",
        "lab/jobs/_liveness/j1.1",
        "lab/jobs/_liveness/j1.2/x",
        "jobs/_liveness/j1.2",
    ):
        assert status(grant, "PUT", key) == 403, key
    for verb in ("GET", "HEAD", "DELETE"):
        assert status(grant, verb, "lab/jobs/_liveness/j1.2") == 403, verb


# --- refusals of those who make them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", MAKERS)
def test_a_wrong_secret_is_told_without_repeating_it(server: Honest, maker: str) -> None:
    wrong = place(server, maker, signer_key=KEY, signer_secret=f"wrong-{SECRET}")
    with pytest.raises(StoreError) as caught:
        granted(S3Store(wrong))
    assert SECRET not in str(caught.value)
    assert "docs/stores.md" in str(caught.value)


def test_an_sts_that_is_away_is_no_verdict_about_the_store(server: Honest) -> None:
    away = place(server, "sts role", grants_endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StoreError, match="does not answer"):
        StsMinter(away).mint("lab/x/", now=soon(hours=0), expires=soon())


@pytest.mark.parametrize(
    ("changes", "methods"),
    [
        ({}, (GrantMethod.FORM, GrantMethod.STS)),
        ({"endpoint_url": "https://minio.lan"}, (GrantMethod.FORM,)),
        ({"endpoint_url": "https://minio.lan", "role_arn": ROLE}, (GrantMethod.FORM, GrantMethod.STS)),
        ({"endpoint_url": "https://abc.r2.cloudflarestorage.com"}, (GrantMethod.R2,)),
        ({"endpoint_url": "https://s3.eu-central-003.backblazeb2.com"}, (GrantMethod.B2,)),
        ({"endpoint_url": "https://minio.lan", "grants": "b2"}, (GrantMethod.B2,)),
    ],
    ids=["aws", "a store of one's own", "with a role", "r2", "b2", "by hand"],
)
def test_what_is_tried_follows_from_the_place(changes: dict[str, Any], methods: tuple[GrantMethod, ...]) -> None:
    assert methods_for(S3Place(bucket="b", **changes)) == methods


def test_a_virtual_hosted_bucket_is_signed_for_its_own_host() -> None:
    fields = {"endpoint": "https://s3.us-east-1.amazonaws.com", "bucket": "b", "region": "us-east-1"}
    credential = Credential({**fields, "path_style": False, "access_key": "a", "secret_key": "hidden"})
    url, headers = credential.request("PUT", "a b/c", 0.0)
    assert url == "https://b.s3.us-east-1.amazonaws.com/a%20b/c"
    assert headers["x-amz-date"] == "19700101T000000Z"
    assert "hidden" not in repr(credential)


def test_a_listing_begins_behind_a_key_though_the_server_takes_no_notice_of_it(server: Honest) -> None:
    store = S3Store(place(server, "sts user"))
    assert store.findings().ordered
    for name in ("a", "b", "c"):
        store.put(f"jobs/1/{name}", b"x")
    assert [info.key for info in store.list_after("jobs/1/", "jobs/1/b")] == ["jobs/1/c"]
