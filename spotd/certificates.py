"""The certificate that a file in PEM begins with: by what it is known, and until when it is valid.

Python's ssl shows these of a peer only. The few fields before the end of its validity are read here (RFC 5280, 4.1).
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

_BLOCK: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_LONG_FORM: Final = 0x80


def certificate_in(path: Path) -> bytes:
    """Return the first certificate of a file, in DER; empty where there is none.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    found = _BLOCK.search(path.read_bytes())
    return b"" if found is None else ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))


def certificate_hash(path: Path) -> str:
    """Return the SHA-256 by which its peer knows the certificate of a file; empty where there is none.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    found = certificate_in(path)
    return hashlib.sha256(found).hexdigest() if found else ""


def valid_until(certificate: bytes) -> datetime:
    """Return the end of its validity.

    Raises:
        ValueError: these bytes are no certificate.
    """
    try:
        _, whole = next(_values(certificate))
        _, signed = next(_values(whole))
        fields = [content for tag, content in islice(_values(signed), 5) if tag != _VERSION]
        tag, end = list(_values(fields[3]))[1]  # after serial number, algorithm and issuer
        text = end.decode("ascii")
        if tag == _UTC_TIME:
            text = f"{'19' if text[:2] >= '50' else '20'}{text}"
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except (IndexError, StopIteration, UnicodeDecodeError) as exc:
        raise ValueError("these bytes are no certificate") from exc


def _values(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each value in DER."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & _LONG_FORM:
            size = length & ~_LONG_FORM
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        yield tag, data[at : at + length]
        at += length


EXPIRES_SOON_DAYS: Final = 30


def expiry_words(path: Path, now: datetime) -> str:
    """Return that the certificate of a file has expired or soon will; empty where it has not, or cannot be read."""
    try:
        until = valid_until(certificate_in(path))
    except (OSError, ValueError):
        return ""
    if until <= now:
        return f"has expired at {until:%Y-%m-%d %H:%M} UTC, and clients refuse it"
    days = (until - now).days
    return f"expires in {days} days, at {until:%Y-%m-%d %H:%M} UTC" if days < EXPIRES_SOON_DAYS else ""
