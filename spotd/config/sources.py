"""Where the data of jobs may lie beside the checkpoint store: buckets that this computer may read, and a hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from spotd.config.credentials import CredentialRef, resolve_credential
from spotd.config.values import EgressPrice, Section, hinted, named_tables
from spotd_jobs.objects.s3_client import is_private
from spotd_jobs.spec.problems import BadValue, Problem, key_path
from spotd_providers.kit.boundary import install_command

BUCKETS: Final = "buckets"
HUB_URL: Final = "https://huggingface.co"
_EXAMPLE: Final = "[buckets.corpus]"
_URL: Final = re.compile(r"s3://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?")


def require_endpoint(value: str | None, key: str, carried: str) -> str | None:
    """Return the address, if what is sent there cannot be read on the way.

    Raises:
        PydanticCustomError
    """
    way_out = f'write {key} = "https://..."'
    if value is None:
        return value
    if urlsplit(value).scheme not in {"http", "https"} or not urlsplit(value).hostname:
        raise hinted("is no URL", way_out)
    if not is_private(value):
        raise hinted(f"is plain http, by which {carried} would travel", way_out)
    return value


class BucketSection(Section):
    """A bucket with data of jobs, which machines read by signed URLs; docs/how-to/data.md."""

    url: Annotated[str, Field(examples=["s3://corpus/v1"])]
    """What jobs may name as a source: "s3://bucket", or a place in it, and all that is below."""

    endpoint_url: Annotated[str | None, Field(examples=["https://ACCOUNT.r2.cloudflarestorage.com"])] = None
    """Where a bucket that is not AWS's is reached, by this computer and by every host."""

    region: Annotated[str | None, Field(examples=["us-east-1"])] = None
    """Region of the bucket."""

    access_key: Annotated[CredentialRef | None, Field(examples=[{"env": "CORPUS_ACCESS_KEY"}])] = None
    """Where a key id is kept that may list and read the place. Absent, with secret_key: boto3's own search."""

    secret_key: Annotated[CredentialRef | None, Field(examples=[{"env": "CORPUS_SECRET_KEY"}])] = None
    """Where its secret is kept. It never leaves this computer."""

    egress_per_gb: Annotated[EgressPrice | None, Field(examples=[0.09])] = None
    """What its owner asks for each GB that a host reads, in dollars. Absent: the list price, as for the store."""

    @field_validator("url")
    @classmethod
    def _url_is_a_place(cls, value: str) -> str:
        if not _URL.fullmatch(value) or {".", ".."} & set(value.split("/")):
            raise hinted("names no place in a bucket", 'write url = "s3://bucket/prefix"')
        return value.rstrip("/")

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        return require_endpoint(value, "endpoint_url", "the data")

    @model_validator(mode="after")
    def _keys_belong_together(self) -> BucketSection:
        if (self.access_key is None) != (self.secret_key is None):
            raise hinted("access_key and secret_key need each other", "write both, or neither")
        return self

    @property
    def is_bucket(self) -> bool:
        return True


class HubSection(Section):
    """The hub that hf:// sources of data are read from."""

    url: str = HUB_URL
    """Where it is; every host reads there, too."""

    token: Annotated[CredentialRef | None, Field(examples=[{"env": "HF_TOKEN"}])] = None
    """Where a token is kept that may read private or gated repositories. No host gets it: hosts read by the signed URLs
    that the hub gives for it."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        return (require_endpoint(value, "url", "the token") or "").rstrip("/")


def read_buckets(tables: Any, store_url: str, problems: list[Problem]) -> dict[str, BucketSection]:
    """Return every `[buckets.NAME]`, understood; what is wrong is added to the problems.

    A place that holds the checkpoint store, or lies in it, is refused: the grants of all jobs are there, and a job
    could read them.
    """
    found: dict[str, BucketSection] = {}
    for name, one in named_tables(BUCKETS, tables, BucketSection, _EXAMPLE, problems).items():
        place = key_path((BUCKETS, name, "url"))
        twin = next((other for other, known in found.items() if known.url == one.url), None)
        if twin is not None:
            message = f"is the place of [{BUCKETS}.{twin}], too"
            problems.append(Problem(key=place, message=message, hint="a place has one table: remove one"))
        # Whatever the endpoints say: one service has many addresses.
        if _overlap(store_url, one.url):
            message = "overlaps with the checkpoint store, where the secrets of jobs are"
            problems.append(Problem(key=place, message=message, hint="name a place beside the store's prefix"))
        found[name] = one
    return found


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)


def source_warnings(
    buckets: Mapping[str, BucketSection], hub: HubSection, environ: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Yield what keeps the data of these places from being read."""
    if buckets and find_spec("boto3") is None:
        message = "need boto3, which is not installed"
        yield Problem(key=BUCKETS, message=message, hint=install_command("s3"))
    refs = [((BUCKETS, name, key), getattr(one, key)) for name, one in buckets.items() for key in _KEYS]
    for where, ref in [*refs, (("hub", "token"), hub.token)]:
        try:
            if ref is not None:
                resolve_credential(ref, environ=environ)
        except BadValue as exc:
            yield Problem(key=key_path(where), message=str(exc), hint=exc.hint)


_KEYS: Final = ("access_key", "secret_key")
