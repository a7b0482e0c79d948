"""What forks the daemons of these tests."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux lets one wait for a process of others"),
]
_FORKS_SLEEPERS = """
import sys, time
from tests.e2e import preloaded
preloaded._MODULES = ()
preloaded._become = lambda *_: time.sleep(600)
sys.exit(preloaded.main())
"""


def test_no_daemon_outlives_the_run_that_asked_for_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report, given = socket.socketpair()
    with theirs, given:
        process = subprocess.Popen(
            [sys.executable, "-c", _FORKS_SLEEPERS, str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            pass_fds=[theirs.fileno()],
        )
        socket.send_fds(ours, [json.dumps({}).encode()], [1, given.fileno()])
    pid = int.from_bytes(report.recv(8), "big")
    watched = os.pidfd_open(pid)
    ours.close()
    try:
        assert process.wait(10) == 0
        assert select.select([watched], [], [], 10)[0], "the daemon outlives it"
    finally:
        os.close(watched)
        report.close()
