"""Where a bucket is, and the boto3 client that talks to it. boto3 is imported when a client is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from spotd_jobs.objects.api import Advice, Conflict, ObjectMissing, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sts import STSClient


CONNECT_TIMEOUT_S: Final = 5
READ_TIMEOUT_S: Final = 30
ATTEMPTS_MAX: Final = 3
CONNECTIONS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """Which bucket, and by which keys. Without keys boto3's own search applies (environment, role).

    Attributes:
        prefix: everything is below it; empty, or ending in `/`.
        signer_key, signer_secret: sign grants in place of the store's own; they need only to put below the prefix.
        grants: by which method hosts get write permission; `auto` is what the probe finds.
        role_arn: the role that STS narrows for each host; without it the signer's user is narrowed.
        account: the id of an R2 account whose endpoint does not begin with it.
        grants_endpoint_url: where temporary credentials are made, if not at the store's own or its maker's address.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    signer_key: str | None = field(default=None, repr=False)
    signer_secret: str | None = field(default=None, repr=False)
    grants: str = "auto"
    role_arn: str | None = None
    account: str | None = None
    grants_endpoint_url: str | None = None

    @property
    def signing_keys(self) -> tuple[str | None, str | None]:
        """The key that grants are made from."""
        return (self.access_key, self.secret_key) if self.signer_key is None else (self.signer_key, self.signer_secret)

    def __str__(self) -> str:
        where = f" at {self.endpoint_url}" if self.endpoint_url else ""
        return f"the bucket s3://{self.bucket}/{self.prefix}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What a signature is made with."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def s3_keys(place: S3Place, access_key: str | None, secret_key: str | None) -> Callable[[], Keys]:
    """Return what gives the keys that a client made of these would sign with, as they are at each moment."""
    if access_key is not None and secret_key is not None:
        given = Keys(access=access_key, secret=secret_key)
        return lambda: given
    search = cache(lambda: _session(place, None, None).get_credentials())

    def found() -> Keys:
        credentials = search()
        if credentials is None:
            raise StoreError(f"no key for {place} was found; write access_key and secret_key in [store]")
        now = credentials.get_frozen_credentials()  # a role's are renewed by this
        return Keys(access=now.access_key, secret=now.secret_key, token=now.token or "")

    return found


def s3_client(place: S3Place, access_key: str | None, secret_key: str | None) -> S3Client:
    """Return a client that behaves the same in front of every maker's store.

    Raises:
        StoreError: boto3 is not installed, or what is sent could be read on the way.
    """
    client: S3Client = _session(place, access_key, secret_key).client(
        "s3", region_name=_region(place), endpoint_url=place.endpoint_url, config=_config(place)
    )
    # Not only from the config: boto3 takes an address from its environment, too.
    if not is_private(client.meta.endpoint_url):
        raise StoreError(
            f"{place} is reached by plain http, by which the secrets of every job would travel; use an https:// address"
        )
    return client


def sts_client(place: S3Place) -> STSClient:
    """Return a client of the service that narrows the signer's rights for each host.

    Raises:
        StoreError: boto3 is not installed.
    """
    endpoint = place.grants_endpoint_url or place.endpoint_url
    client: STSClient = _session(place, *place.signing_keys).client(
        "sts", region_name=_region(place), endpoint_url=endpoint, config=_config(place)
    )
    return client


def is_private(url: str) -> bool:
    """Whether what is sent there cannot be read on the way, by TLS or since it does not leave this computer.

    Grants hold the secrets of jobs.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _region(place: S3Place) -> str:
    return place.region or _session(place, None, None).region_name or "us-east-1"


def _session(place: S3Place, access_key: str | None, secret_key: str | None) -> Any:
    try:
        import boto3
        import botocore.session
    except ImportError as exc:
        raise StoreError("a store in a bucket needs boto3, which is not installed") from exc
    core = botocore.session.Session()
    core.register_component("data_loader", _models())
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=read_instant)
    return boto3.session.Session(
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=place.region,
        botocore_session=core,
    )


def read_instant(value: Any) -> datetime:
    """As boto3 reads instants, in a hundredth of the time for the form that listings have: a thousand to a page."""
    from botocore.utils import parse_timestamp

    found: datetime | None = None
    with suppress(TypeError, ValueError):
        found = datetime.fromisoformat(value)
    if found is not None and found.tzinfo is not None:
        return found
    read: datetime = parse_timestamp(value)
    return read


@cache
def _models() -> Any:
    """boto3's descriptions of services, read once: each client of its own would read and keep them again."""
    from botocore.loaders import create_loader

    return create_loader()


def _config(place: S3Place) -> Any:
    from botocore.config import Config

    return Config(
        signature_version="s3v4",  # boto3 still presigns with version 2 in some regions, which most stores refuse
        s3={"addressing_style": "path" if place.endpoint_url else "virtual"},
        request_checksum_calculation="when_required",  # its newer default breaks stores that are not AWS
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": ATTEMPTS_MAX, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
    )


# Failures of a bucket's service as the store's own, with the place and a way out, and never with a URL or a key.


GONE: Final = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchVersion"})
_LOST: Final = frozenset({"412", "PreconditionFailed"})
_BUSY: Final = frozenset({"409", "ConditionalRequestConflict", "OperationAborted"})
_PASSING: Final = frozenset({"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503", "500", "502"})


class Busy(StoreUnavailable):
    """A concurrent conditional write; the same call may work at once."""


class Empty(StoreError):
    """A range was asked of an object that holds no byte."""


@contextmanager
def store_errors(place: S3Place, key: str) -> Iterator[None]:
    """Failures of the service become the store's own, with the place and a way out."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as exc:
        raise _of_answer(place, key, exc.response) from exc
    except (HTTPClientError, NoConnection) as exc:
        raise StoreUnavailable(f"{place} does not answer ({type(exc).__name__}); check the network") from exc
    except ResponseParserError as exc:
        raise StoreError(f"{place} gave an answer about {key[:100]!r} that cannot be read") from exc
    except (BotoCoreError, Boto3Error) as exc:
        cause = exc.__cause__ or exc.__context__
        if isinstance(cause, ClientError):
            raise _of_answer(place, key, cause.response) from exc
        raise StoreError(f"{place} cannot be used: {type(exc).__name__}; check [store] in the config") from exc


def _of_answer(place: S3Place, key: str, response: Any) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        return StoreError(f"there is no bucket {place.bucket}; create it, or mend url in [store]")
    if code in GONE:
        return ObjectMissing(f"there is no object {key} in {place}")
    if code == "InvalidRange" or status == 416:
        return Empty(f"the object {key} in {place} is empty")
    if code in _LOST:
        return Conflict(f"the object {key} exists already in {place}")
    if code in _BUSY:
        return Busy(f"the object {key} is being written by others in {place}")
    if code in _PASSING or status >= 500 or status == 429:
        return StoreUnavailable(f"{place} cannot serve now: HTTP {status} {code}")
    return StoreError(f"{place} refuses: HTTP {status} {code}; check the keys and rights in [store]")


# What of a bucket's own settings costs money or checkpoints, found by reading them. Nothing is ever changed.


_ABORT = "add a lifecycle rule that aborts incomplete multipart uploads after a day or two"
_EXPIRE_OLD = (
    "add a lifecycle rule with NoncurrentVersionExpiration of NoncurrentDays = 7"
    " and Expiration of ExpiredObjectDeleteMarker = true; docs/stores.md has it whole"
)


def advice(client: S3Client, place: S3Place) -> list[Advice]:
    """Return what is right or wrong with unfinished uploads, with expiry and with versions, as far as the key may read.

    Raises:
        StoreUnavailable
    """
    try:
        rules = _rules(client, place)
    except StoreUnavailable:
        raise
    except StoreError:
        unread = "this key may not read the bucket's lifecycle rules"
        return [
            Advice(name="lifecycle", detail=unread, hint="allow s3:GetLifecycleConfiguration, or read them yourself")
        ]
    found = [_of_parts(rules, place.prefix), *_of_ends(rules, place.prefix)]
    return [*found, _of_versions(rules, place.prefix)] if keeps_versions(client, place) else found


def keeps_versions(client: S3Client, place: S3Place) -> bool:
    """Whether what is deleted or overwritten stays; `False` where that may not be asked."""
    try:
        with store_errors(place, ""):
            return client.get_bucket_versioning(Bucket=place.bucket).get("Status") == "Enabled"
    except StoreUnavailable:
        raise
    except StoreError:
        return False


def _rules(client: S3Client, place: S3Place) -> list[Any]:
    from botocore.exceptions import ClientError

    try:
        with store_errors(place, ""):
            answer = client.get_bucket_lifecycle_configuration(Bucket=place.bucket)
    except ObjectMissing:
        return []
    except StoreError as exc:
        cause = exc.__cause__
        code = cause.response.get("Error", {}).get("Code") if isinstance(cause, ClientError) else ""
        if code == "NoSuchLifecycleConfiguration":
            return []
        raise
    return [rule for rule in answer.get("Rules", ()) if rule.get("Status") == "Enabled"]


def _of_parts(rules: list[Any], prefix: str) -> Advice:
    if any("AbortIncompleteMultipartUpload" in rule and _is_for_all(rule, prefix) for rule in rules):
        return Advice(name="unfinished uploads", detail="a lifecycle rule aborts them")
    detail = "no lifecycle rule aborts them: parts that a power cut left behind are invisible and billed"
    return Advice(name="unfinished uploads", detail=detail, hint=_ABORT)


def _of_versions(rules: list[Any], prefix: str) -> Advice:
    for rule in rules:
        days = (rule.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays")
        if days is not None and _is_for_all(rule, prefix):
            return Advice(name="old versions", detail=f"a lifecycle rule deletes them after {days} days")
    detail = "the bucket keeps every version and no lifecycle rule ends them: what spotd deletes stays and is billed"
    return Advice(name="old versions", detail=detail, hint=_EXPIRE_OLD)


def _of_ends(rules: list[Any], prefix: str) -> list[Advice]:
    """Warn of a rule that deletes by age: it deletes what a checkpoint on the list still refers to."""
    found = []
    for rule in rules:
        begin = _prefix_of(rule)
        if "Expiration" in rule and (begin.startswith(prefix) or prefix.startswith(begin)):
            days = rule["Expiration"].get("Days")
            if days is None and "Date" not in rule["Expiration"]:
                continue  # it only takes away what is left of deleted objects
            when = f"after {days} days" if days is not None else "on a date"
            detail = f"a lifecycle rule deletes objects below {begin or 'everything'!r} {when}, needed or not"
            found.append(
                Advice(
                    name="expiry",
                    detail=detail,
                    ok=False,
                    hint="remove it: spotd deletes what is not needed",
                )
            )
    return found


def _is_for_all(rule: Any, prefix: str) -> bool:
    """Whether the rule concerns everything below the prefix, whatever its size and tags."""
    where = rule.get("Filter") or {}
    narrower = {*where, *(where.get("And") or {})} - {"Prefix", "And"}
    return prefix.startswith(_prefix_of(rule)) and not narrower


def _prefix_of(rule: Any) -> str:
    where = rule.get("Filter") or {}
    return str(rule.get("Prefix") or where.get("Prefix") or (where.get("And") or {}).get("Prefix") or "")
