"""The field types that every document between daemon and hosts is made of, and the one error they fail with.

What a host wrote is untrusted text. Each type here is bounded, so that a model built from them bounds the document.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from spotd_jobs.wire.client.names import is_printable
from spotd_jobs.wire.client.paths import is_plain

KEY_BYTES_MAX: Final = 1024
NAME_BYTES_MAX: Final = 255
PATH_BYTES_MAX: Final = 4096
OBJECT_BYTES_MAX: Final = 5 * 1000**3
"""The largest single object that every S3-compatible store takes in one request."""
BYTES_MAX: Final = 10**15
"""No sum of bytes that a host states is larger: a thousand times the largest disk that is rented out."""
INSTANT_MIN: Final = datetime(2000, 1, 1, tzinfo=UTC)
INSTANT_MAX: Final = datetime(2200, 1, 1, tzinfo=UTC)
_MILLISECONDS: Final = 3

_JOB_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")
_DRIVE: Final = re.compile(r"[A-Za-z]:")


class WireError(ValueError):
    """A document that does not hold what its kind must. The message holds no content that could be a secret."""


class WireModel(BaseModel):
    """Strict, frozen, and closed: an unknown key, a number as text, NaN or infinity is refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )


def _printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError("holds a control or invisible character")
    return text


def _job_id(text: str) -> str:
    if _JOB_ID.fullmatch(text) is None or ".." in text:
        raise ValueError("is no job id: letters, digits, '.', '_' and '-', at most 64")
    return text


def _instant(instant: datetime) -> datetime:
    """Return the instant, held to a range in which sums of instants and spans cannot overflow.

    It is moved and not refused: the clock of a healthy host may be centuries off, and its reports still count.
    """
    if instant.utcoffset() != timedelta(0):
        raise ValueError("must be in UTC")
    return min(max(instant, INSTANT_MIN), INSTANT_MAX)


def _whole_milliseconds(seconds: float) -> float:
    """Differences of two spans are zero or at least a millisecond, so that a rate over them stays finite."""
    return round(seconds, _MILLISECONDS)


def relative_path(text: str) -> str:
    """Return the text itself, if it names something below a folder on every system.

    Raises:
        ValueError: it is empty, absolute, climbs, or holds a backslash, NUL or control character.
    """
    if not text or len(text.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        raise ValueError(f"must be 1 to {PATH_BYTES_MAX} bytes")
    if text.startswith("/") or "\\" in text or _DRIVE.match(text):
        raise ValueError("must be relative, with '/' between its parts")
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in text.split("/"))
    if not is_plain(text) or longest > NAME_BYTES_MAX:
        raise ValueError("must have no empty, '.' or '..' part, and none longer than 255 bytes")
    return _printable(text)


def _key(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise ValueError(f"must be at most {KEY_BYTES_MAX} bytes")
    return relative_path(text)


def _prefix(text: str) -> str:
    if not text.endswith("/"):
        raise ValueError("must end in '/'")
    _key(text[:-1])
    return text


def _entry_name(text: str) -> str:
    if "/" in text:
        raise ValueError("must be one name, not a path")
    return relative_path(text)


def _not_blank(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


JobId = Annotated[str, AfterValidator(_job_id)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, AfterValidator(relative_path)]
StoreKey = Annotated[str, AfterValidator(_key)]
StorePrefix = Annotated[str, AfterValidator(_prefix)]
EntryName = Annotated[str, AfterValidator(_entry_name)]
Instant = Annotated[datetime, AfterValidator(_instant)]
Size = Annotated[int, Field(ge=0, le=BYTES_MAX)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=10 * 366 * 86400), AfterValidator(_whole_milliseconds)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=8192), AfterValidator(_printable)]
Line = Annotated[str, StringConstraints(max_length=500), AfterValidator(_printable)]
"""One line for a person, safe to print on any terminal."""
Text = Annotated[str, AfterValidator(_not_blank)]
"""Text of the job's owner (commands, values); never from a host."""


def attempt_prefix(job_id: str, attempt: int) -> str:
    """Return the only place of the store where an attempt may write, apart from its liveness marker."""
    return f"jobs/{job_id}/attempts/{attempt}/"


LIVENESS_PREFIX: Final = "jobs/_liveness/"
"""Below `jobs/`, where the key that signs for hosts may write; no job's id begins so."""
MARKER_BYTES_MAX: Final = 4096


def liveness_marker_name(job_id: str, attempt: int) -> str:
    """Return the name of the attempt's liveness marker below `LIVENESS_PREFIX`: all of them are names in one folder."""
    return f"{job_id}.{attempt}"


def attempt_of_marker(key: str) -> tuple[str, int] | None:
    """Whose liveness marker this is; `None` for any other object."""
    job, _, number = key.removeprefix(LIVENESS_PREFIX).rpartition(".")
    if not key.startswith(LIVENESS_PREFIX) or _JOB_ID.fullmatch(job) is None or _NUMBER.fullmatch(number) is None:
        return None
    return job, int(number)
