"""What the opened providers bring into the daemon beyond its own modules."""

from __future__ import annotations

import subprocess
import sys


def test_http_brings_no_command_line_and_no_colours_with_it() -> None:
    code = (
        "import sys, spotd_providers.kit.http, spotd_providers.local.plugin, spotd_providers.vastai.plugin\n"
        "print([m for m in ('rich', 'pygments', 'click', 'httpx._main', 'boto3') if m in sys.modules])\n"
        "import httpx; print(httpx.AsyncClient.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "AsyncClient"]


def test_the_daemon_brings_no_optional_library_with_it() -> None:
    code = (
        "import sys, spotd.service.composition, spotd.service.main, spotd.api.app\n"
        "print([m for m in ('prometheus_client', 'apprise', 'nicegui', 'mcp', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
