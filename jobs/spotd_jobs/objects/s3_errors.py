"""Failures of a bucket's service as the store's own, with the place and a way out, and never with a URL or a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from spotd_jobs.objects.api import Conflict, ObjectMissing, StoreError, StoreUnavailable
from spotd_jobs.objects.s3_client import S3Place

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
