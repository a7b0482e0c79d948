from __future__ import annotations

from pathlib import Path

from spotd.cli.client import COMMANDS
from spotd.cli.daemon import COMMANDS as DAEMON_COMMANDS
from spotd.cli.entry import ExitCode
from tests.cases import every

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()


@every("command", [*(f"spotctl {name}" for name in COMMANDS), *(f"spotd {n}" for n in DAEMON_COMMANDS)])
def test_the_page_tells_of_every_command(command: str) -> None:
    assert f"| `{command}" in PAGE


@every("code", ExitCode)
def test_the_page_tells_of_every_exit_code(code: ExitCode) -> None:
    assert f"| {int(code)} |" in PAGE
