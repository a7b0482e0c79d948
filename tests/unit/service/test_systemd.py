"""The service manager is told what happens, and being unheard breaks nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd.service.lifecycle import SystemdNotifier

pytestmark = pytest.mark.enable_socket


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_each_message_arrives_in_systemds_words(manager: socket.socket) -> None:
    notify = SystemdNotifier({"NOTIFY_SOCKET": manager.getsockname()})
    notify.ready()
    notify.alive()
    notify.reloading()
    notify.stopping()
    heard = [manager.recv(1024).decode() for _ in range(4)]
    assert heard[0] == "READY=1\nSTATUS=running"
    assert heard[1] == "WATCHDOG=1"
    assert heard[2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert heard[3] == "STOPPING=1\nSTATUS=finishing calls under way"


def test_without_a_manager_or_with_a_dead_one_nothing_happens(tmp_path: Path) -> None:
    SystemdNotifier({}).ready()
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).alive()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
    ids=["given", "for us", "for another", "nonsense", "absent"],
)
def test_the_watchdog_is_ours_only_when_it_names_us(environ: dict[str, str], seconds: float | None) -> None:
    assert SystemdNotifier(environ).watchdog_s == seconds
