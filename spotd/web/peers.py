"""Who is at the other end of a connection: an address, and on loopback the user, where Linux states it."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_OWN: Final = frozenset({0})
GONE: Final = -1


def peer_of(client: Sequence[Any] | None, headers: Mapping[str, str]) -> str:
    """Return by what a peer is counted: its address, and of IPv6 its network, all addresses of which one host may have.

    On loopback a proxy may say for whom it asks. A program of this computer can claim any address there, and so be
    counted anew: what it gains is bounded by what holds for all together.
    """
    text = "" if client is None else str(client[0])
    address = _address(text)
    if address is not None and address.is_loopback:
        address = _address(headers.get("x-forwarded-for", "").rpartition(",")[2].strip()) or address
    if address is None or address.is_loopback or address.version == 4:
        return str(address or text)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if address.version == 6 else None) or address


def is_other_user(client: Sequence[Any] | None, server: Sequence[Any] | None) -> bool:
    """Whether the peer is a user other than this process's and root, or has gone; false where nothing is known."""
    if client is None or server is None:
        return False
    uid = peer_uid(str(client[0]), int(client[1]), int(server[1] or 0))
    return uid is not None and uid not in _OWN | {os.geteuid()}


def peer_uid(address: str, port: int, to_port: int) -> int | None:
    """Return the owner of the socket with this end and that other end; `None` where the system does not say.

    One that its process has closed is `GONE`: such a socket is listed as root's, whosever it was.
    """
    ends = {f"{text}:{port:04X}" for text in _as_in_table(address)}
    for table in _TABLES:
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if len(columns) > 9 and columns[1] in ends and columns[2].endswith(f":{to_port:04X}"):
                return GONE if columns[9] == "0" else int(columns[7])
    return None


def _as_in_table(address: str) -> list[str]:
    """Return an address as the tables write it: words of four bytes in the byte order of the processor."""
    try:
        packed = ipaddress.ip_address(address).packed
    except ValueError:
        return []
    if len(packed) == 4:
        return [_words(packed), _words(b"\0" * 10 + b"\xff\xff" + packed)]
    return [_words(packed)]


def _words(packed: bytes) -> str:
    import sys

    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words)
