"""Messages to systemd about this process: a dozen lines, because the packages for it are no longer kept."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class SystemdNotifier:
    """Messages to the service manager; silent where there is none. Never raises: delivery is best effort."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        own = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(usec) / 1_000_000 if own and usec.isdecimal() and int(usec) > 0 else None
        """Within how many seconds the service manager wants a sign of life, `None` when it does not."""

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=running")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=finishing calls under way")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # A leading @ is how systemd writes Linux's abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(0)
                sock.sendto(message.encode(), address)
        except OSError:
            return
