"""Links to a server in a network of its own, each of which can be cut as a cable is; needs root, as in a container.

Where no network namespace may be made, a proxy on loopback stands for each link, which holds back what is sent over it.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

_NUMBERS: Final = itertools.count(1)
_PAUSE_S: Final = 0.05


def may_make_networks() -> bool:
    """Whether this process may make a network namespace and links into it."""
    name = f"spotd-probe-{os.getpid()}"
    try:
        if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode != 0:
            return False
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except OSError:
        return False
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A pair of interfaces; `host` is the address of the far one."""

    host: str
    _namespace: str
    _far: str

    def cut(self) -> None:
        """Nothing passes any more, and nothing says so."""
        _ip("-n", self._namespace, "link", "set", self._far, "down")

    def heal(self) -> None:
        _ip("-n", self._namespace, "link", "set", self._far, "up")


@dataclass(frozen=True, slots=True)
class Network:
    """A network namespace for a server, and the ways to it."""

    namespace: str
    links: tuple[NetworkLink, ...]


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Make a namespace with so many links to it, of addresses that are kept for tests of networks (RFC 2544)."""
    number = next(_NUMBERS)
    namespace = f"spotd-{os.getpid()}-{number}"
    links = []
    with ExitStack() as stack:
        _ip("netns", "add", namespace)
        stack.callback(_ip, "netns", "del", namespace)  # the links go with it
        _ip("-n", namespace, "link", "set", "lo", "up")
        for place in range(count):
            near, far = (f"sp{side}{os.getpid() % 100_000}{number}{place}" for side in "nf")
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", namespace)
            subnet = f"198.18.{os.getpid() % 256}"
            first = 4 * ((number * count + place) % 64)
            _ip("addr", "add", f"{subnet}.{first + 1}/30", "dev", near)
            _ip("-n", namespace, "addr", "add", f"{subnet}.{first + 2}/30", "dev", far)
            _ip("link", "set", near, "up")
            _ip("-n", namespace, "link", "set", far, "up")
            links.append(NetworkLink(f"{subnet}.{first + 2}", namespace, far))
        yield Network(namespace, tuple(links))


class Proxy:
    """A TCP link to a port of loopback: what is sent over it waits while it is cut.

    A subclass may end a connection at what is sent over it.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._passes = threading.Event()
        self._passes.set()
        self._ends: list[socket.socket] = [self._listener]
        self._over = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Nothing passes any more, and nothing says so."""
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                ways = ((near, far, True), (far, near, False))
                both = [threading.Thread(target=self._pass_on, args=way) for way in ways]
                self._threads += both
                for thread in both:
                    thread.start()

    def is_passed(self, data: bytes, far: socket.socket, *, is_forth: bool) -> bool:
        """Return whether this is still sent to the port, or back; the connection ends where it is not."""
        return True

    def _pass_on(self, source: socket.socket, to: socket.socket, is_forth: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if not self.is_passed(data, to if is_forth else source, is_forth=is_forth):
                    break
                self._passes.wait()
                to.sendall(data)
        self._passes.wait()
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._passes.set()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()


@contextmanager
def proxies(port: int, count: int) -> Iterator[tuple[Proxy, ...]]:
    """Yield so many links to a port."""
    made = tuple(Proxy(port) for _ in range(count))
    try:
        yield made
    finally:
        for proxy in made:
            proxy.close()
