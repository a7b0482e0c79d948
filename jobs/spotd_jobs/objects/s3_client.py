"""Where a bucket is, and the boto3 client that talks to it. boto3 is imported when a client is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spotd_jobs.objects.api import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

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
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    signer_key: str | None = field(default=None, repr=False)
    signer_secret: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        where = f" at {self.endpoint_url}" if self.endpoint_url else ""
        return f"the bucket s3://{self.bucket}/{self.prefix}{where}"


def s3_client(place: S3Place, access_key: str | None, secret_key: str | None) -> S3Client:
    """A client that behaves the same in front of every maker's store.

    Raises:
        StoreError: boto3 is not installed.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError as exc:
        raise StoreError("a store in a bucket needs boto3; install spotd[s3]") from exc
    config = Config(
        signature_version="s3v4",  # boto3 still presigns with version 2 in some regions, which most stores refuse
        s3={"addressing_style": "path" if place.endpoint_url else "virtual"},
        request_checksum_calculation="when_required",  # its newer default breaks stores that are not AWS
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": ATTEMPTS_MAX, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
    )
    session = boto3.session.Session(
        aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name=place.region
    )
    region = session.region_name or "us-east-1"
    return session.client("s3", region_name=region, endpoint_url=place.endpoint_url, config=config)
