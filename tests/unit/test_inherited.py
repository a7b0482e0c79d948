"""What tests inherit from their caller is the same for all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import inherited

ROOT = Path(__file__).parents[2]
SHOWN = (
    "import json, os, signal; "
    "mask = os.umask(0); "
    "print(json.dumps([mask, int(signal.getsignal(signal.SIGINT) == signal.SIG_IGN), dict(os.environ)]))"
)
STARTS_ANOTHER = (
    "import subprocess, sys; from tests import inherited; inherited.settle(); "
    "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
)
ODD = {
    "SPOTD_SOCKET": "/nowhere",
    "SPOTD_SHARED_DATA": "/data",
    "XDG_CONFIG_HOME": "/nowhere",
    "AWS_PROFILE": "somebody",
    "NO_COLOR": "1",
    "COLUMNS": "20",
    "TERM": "xterm",
    "TZ": "Asia/Kolkata",
    "LC_ALL": "tr_TR.UTF-8",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


@pytest.mark.process
def test_a_process_of_a_test_inherits_nothing_of_a_background_script() -> None:
    """Such a script ignores SIGINT, and what is ignored stays so in every process below it."""
    script = 'trap "" INT HUP; umask 077; exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", sys.executable, "-c", STARTS_ANOTHER, SHOWN],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **ODD},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    umask, ignores, environment = json.loads(done.stdout)
    assert (umask, ignores) == (0o022, 0)
    assert environment["SPOTD_SHARED_DATA"] == "/data"
    assert {name: environment.get(name) for name in ODD if name != "SPOTD_SHARED_DATA"} == {
        **dict.fromkeys(ODD.keys() - {"SPOTD_SHARED_DATA"}), "TZ": "UTC"
    }  # fmt: skip


def test_this_process_is_settled() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert not [name for name in os.environ if inherited.is_forgotten(name)]
    assert {name: os.environ.get(name) for name in inherited.SET} == inherited.SET
