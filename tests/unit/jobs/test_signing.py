"""Forms and URLs are signed by the clock that is given: known answers, boto3's own answers, and a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from spotd_jobs.objects.api import StoreError
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import Keys, S3Place, s3_client, s3_keys
from spotd_jobs.objects.s3_grants import GrantMethod, Signer
from spotd_jobs.wire.client import sinks_s3, web
from spotd_jobs.wire.client.sinks import SinkDenied
from spotd_jobs.wire.client.sinks_s3 import PostSink
from tests.fakes.seaweed import Weed

OWN = "jobs/j1/attempts/2/"
EXAMPLE = Keys(access="AKIAIOSFODNN7EXAMPLE", secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
NAMES = ("plain", "a b/ü+~(x)/c", "=&?#%41", "trailing/")


def signer(place: S3Place, at: datetime, endpoint: str, region: str, keys: Keys = EXAMPLE) -> Signer:
    return Signer(place=place, endpoint=endpoint, region=region, keys=lambda: keys, clock=lambda: at)


# --- known answers ---------------------------------------------------------------------------------------------------


def test_a_url_is_the_one_of_awss_own_example() -> None:
    at = datetime(2013, 5, 24, tzinfo=UTC)
    made = signer(S3Place(bucket="examplebucket"), at, "https://s3.amazonaws.com", "us-east-1")
    assert made.url("test.txt", seconds=86400) == (
        "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )


def test_a_policy_is_signed_as_in_awss_own_example() -> None:
    policy = (
        '{ "expiration": "2015-12-30T12:00:00.000Z",\r\n  "conditions": [\r\n    {"bucket": "sigv4examplebucket"},\r\n'
        '    ["starts-with", "$key", "user/user1/"],\r\n    {"acl": "public-read"},\r\n    {"success_action_redirect": '
        '"http://sigv4examplebucket.s3.amazonaws.com/successful_upload.html"},\r\n'
        '    ["starts-with", "$Content-Type", "image/"],\r\n    {"x-amz-meta-uuid": "14365123651274"},\r\n'
        '    {"x-amz-server-side-encryption": "AES256"},\r\n    ["starts-with", "$x-amz-meta-tag", ""],\r\n\r\n'
        '    {"x-amz-credential": "AKIAIOSFODNN7EXAMPLE/20151229/us-east-1/s3/aws4_request"},\r\n'
        '    {"x-amz-algorithm": "AWS4-HMAC-SHA256"},\r\n    {"x-amz-date": "20151229T000000Z" }\r\n  ]\r\n}'
    )
    made = sinks_s3.signature(
        EXAMPLE.secret, "20151229/us-east-1/s3/aws4_request", base64.b64encode(policy.encode()).decode()
    )
    assert made == "8afdbf4008c03f22c2cd3cdb72e4afbb1f6a588f3255ac628749a66d7f09699e"


def test_a_header_is_signed_as_in_awss_own_example() -> None:
    fields = {"endpoint": "https://s3.amazonaws.com", "bucket": "examplebucket", "region": "us-east-1"}
    held = sinks_s3.Credential(
        {**fields, "path_style": False, "access_key": EXAMPLE.access, "secret_key": EXAMPLE.secret}
    )
    at = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    _, headers = held.request("GET", "test.txt", at, empty, headers={"range": "bytes=0-9"})
    assert headers["authorization"].endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")


# --- as boto3 signs --------------------------------------------------------------------------------------------------

PLACES = {
    "aws": S3Place(bucket="b-kt"),
    "aws elsewhere": S3Place(bucket="b-kt", region="eu-central-1"),
    "aws in china": S3Place(bucket="b-kt", region="cn-north-1"),
    "a name with dots": S3Place(bucket="b.kt", region="eu-central-1"),
    "a store of one's own": S3Place(bucket="b.kt", endpoint_url="http://127.0.0.1:8333/"),
    "below a path": S3Place(bucket="b-kt", endpoint_url="https://store.lan/s3"),
}


@pytest.fixture(params=PLACES)
def beside(request: pytest.FixtureRequest) -> tuple[Any, Callable[[str], Signer]]:
    """boto3's client for a place, and our signer at the instant that boto3 wrote down."""
    place = PLACES[request.param]
    client = s3_client(place, EXAMPLE.access, EXAMPLE.secret)

    def at(stamp: str) -> Signer:
        then = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return signer(place, then, client.meta.endpoint_url, client.meta.region_name)

    return client, at


def test_urls_are_boto3s_own(beside: tuple[Any, Callable[[str], Signer]]) -> None:
    client, at = beside
    for name in NAMES:
        for version in (None, "v/1="):
            params = {"Bucket": "b.kt", "Key": name, **({} if version is None else {"VersionId": version})}
            made = at("20200101T000000Z")
            params["Bucket"] = made.place.bucket
            theirs = urlsplit(client.generate_presigned_url("get_object", Params=params, ExpiresIn=60))
            asked = dict(parse_qsl(theirs.query))
            ours = urlsplit(at(asked["X-Amz-Date"]).url(name, seconds=60, version=version))
            assert ours[:3] == theirs[:3]
            assert dict(parse_qsl(ours.query)) == asked


def test_forms_are_boto3s_own(beside: tuple[Any, Callable[[str], Signer]]) -> None:
    client, at = beside
    bucket = at("20200101T000000Z").place.bucket
    limits = [["content-length-range", 0, 5]]
    theirs = client.generate_presigned_post(bucket, "jobs/${filename}", Conditions=list(limits), ExpiresIn=60)
    ends = json.loads(base64.b64decode(theirs["fields"]["policy"]))["expiration"]
    expires = datetime.fromisoformat(ends)
    url, fields = at(theirs["fields"]["x-amz-date"]).form("jobs/", expires=expires, conditions=limits)
    assert (url, fields) == (theirs["url"], theirs["fields"])


def test_a_session_token_is_signed_with_the_rest() -> None:
    place, at = S3Place(bucket="b"), datetime(2026, 11, 21, tzinfo=UTC)
    keys = Keys(access="ASIA", secret="s", token="to/ken==")
    made = signer(place, at, "https://s3.amazonaws.com", "us-east-1", keys)
    url = made.url("k", seconds=60)
    assert f"X-Amz-Security-Token={quote('to/ken==', safe='')}" in url
    assert url != signer(place, at, "https://s3.amazonaws.com", "us-east-1", Keys(access="ASIA", secret="s")).url(
        "k", seconds=60
    )
    _, fields = made.form("jobs/", expires=at)
    assert fields["x-amz-security-token"] == "to/ken=="
    assert {"x-amz-security-token": "to/ken=="} in json.loads(base64.b64decode(fields["policy"]))["conditions"]
    assert "to/ken" not in repr(made)
    assert "to/ken" not in repr(keys)


# --- where the keys come from ----------------------------------------------------------------------------------------


def test_keys_that_are_not_in_the_config_are_found_as_boto3_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    assert s3_keys(S3Place(bucket="b"), None, None)() == Keys(access="ASIAENV", secret="env-secret", token="env-token")


def test_a_store_without_any_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = S3Store(S3Place(bucket="b"), findings=Findings(method=GrantMethod.FORM))
    with pytest.raises(StoreError, match=r"write access_key and secret_key in \[store\]"):
        store.presign_get("k", expires=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(StoreError, match="no key for"):
        store.grant_upload(OWN, expires=datetime.now(UTC) + timedelta(hours=1), size_max=10)


# --- a real server, and clocks that are wrong ------------------------------------------------------------------------


def test_what_is_signed_is_dated_by_the_given_clock_and_a_server_judges_it_by_its_own(
    weed: Weed, findings: Findings
) -> None:
    now = datetime.now(UTC)
    right = S3Store(weed.place("clock/"), findings=findings)
    right.put("k", b"one")

    def urls(clock: datetime, **life: float) -> tuple[str, int]:
        store = S3Store(weed.place("clock/"), clock=lambda: clock, findings=findings)
        url = store.presign_get("k", expires=clock + timedelta(**life))
        return dict(parse_qsl(urlsplit(url).query))["X-Amz-Date"], web.request("GET", url)[0]

    slow = now - timedelta(hours=1)
    assert urls(now, minutes=30) == (f"{now:%Y%m%dT%H%M%SZ}", 200)
    assert urls(slow, minutes=30) == (f"{slow:%Y%m%dT%H%M%SZ}", 403), "it ended half an hour ago"
    assert urls(slow, minutes=90) == (f"{slow:%Y%m%dT%H%M%SZ}", 200)


def test_a_form_ends_at_the_instant_it_was_made_for_whatever_clock_dated_it(weed: Weed, findings: Findings) -> None:
    now = datetime.now(UTC)

    def put(clock: datetime, expires: datetime) -> None:
        store = S3Store(weed.place("forms/"), clock=lambda: clock, findings=findings)
        grant = store.grant_upload(OWN, expires=expires, size_max=100)
        assert grant.fields["form"]["x-amz-date"] == f"{clock:%Y%m%dT%H%M%SZ}"
        PostSink(dict(grant.fields)).put("data/a", b"x")

    put(now, now + timedelta(minutes=5))
    put(now - timedelta(hours=1), now + timedelta(minutes=5))
    for clock in (now - timedelta(hours=1), now, now + timedelta(hours=1)):
        with pytest.raises(SinkDenied):
            put(clock, now - timedelta(minutes=5))
