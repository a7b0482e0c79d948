"""Where a shell is reached, as ssh may be given it: addresses come from marketplaces and their hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

_LABEL: Final = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
PORT_MAX: Final = 65_535


_WORD: Final = re.compile(r"[A-Za-z0-9_.,:=/@%+-]{1,512}")
_PROGRAM: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
WORDS_MAX: Final = 32
LOCAL_PROGRAMS: Final = frozenset({"kubectl", "srun"})
"""What may be run on the user's own computer, where no host is named."""


def fault_of(host: object, port: object, user: object, command: Sequence[object] = ()) -> str:
    """Return what is wrong with an address, empty where ssh can take nothing in it for an option.

    Args:
        command: what is run there; where no host is named, on this computer.
    """
    words = [word for word in command if isinstance(word, str) and _WORD.fullmatch(word)]
    if len(words) != len(command) or len(words) > WORDS_MAX or (words and not _PROGRAM.fullmatch(words[0])):
        return "its command has words that no provider needs"
    if host == "":
        return "" if words and words[0] in LOCAL_PROGRAMS else "it names neither a host nor a program of this computer"
    if not isinstance(host, str) or not (_HOST.fullmatch(host) or _is_ip(host)):
        return "its host is neither a name nor an IP address"
    if type(port) is not int or not 1 <= port <= PORT_MAX:
        return f"its port is none from 1 to {PORT_MAX}"
    if not isinstance(user, str) or not _USER.fullmatch(user):
        return "its user is no user name"
    return ""


def _is_ip(text: str) -> bool:
    try:
        # A zone (fe80::1%eth0) would be a token of ssh.
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
