"""What the client imports, counted and not timed: every command pays for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl

FORBIDDEN = {
    "alembic", "anyio", "boto3", "botocore", "httpx", "numpy", "platformdirs", "pydantic", "pydantic_core",
    "pydantic_settings", "rich", "sqlalchemy", "sqlmodel", "starlette", "structlog", "tenacity", "uvicorn", "asyncio",
}  # fmt: skip
HELP_MODULES = {
    "spotd",
    "spotd.cli",
    "spotd.cli.client",
    "spotd.cli.entry",
    "spotd.cli.stderr",
    "spotd.cli.stdout",
    "spotd.words",
}
LS_MODULES = HELP_MODULES | {
    "spotd.cli.inputs",
    "spotd.cli.views",
    "spotd.cli.commands",
    "spotd.cli.commands.jobs",
    "spotd.cli.inputs.options",
    "spotd.cli.views.table",
    "spotd.client",
    "spotd.client.daemon",
    "spotd.client.transport",
    "spotd.paths",
}
_LINE = re.compile(r"(?:import time:\s*\d+ \|\s*\d+ \|\s*|loaded )(\S+)")


def imported(*arguments: str, program: str = "spotd.cli.client") -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Every module that a command line imports."""
    # A module that is imported by name at run time is in no line of importtime; what it imports is.
    script = f"import sys; from {program} import main; code = main(); sys.stderr.write(_TELL); sys.exit(code)"
    script = script.replace("_TELL", "'\\n'.join(f'loaded {name}' for name in sys.modules) + '\\n'")
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )
    return {match[1] for match in map(_LINE.match, result.stderr.splitlines()) if match}, result


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0].startswith("spotd")}


@pytest.mark.process
def test_help_imports_click_and_nine_small_modules_of_ours() -> None:
    modules, result = imported("--help")
    assert result.returncode == 0
    assert ours(modules) - {"spotd.cli.client"} == HELP_MODULES - {"spotd.cli.client"}
    assert {name.split(".")[0] for name in modules} & FORBIDDEN == set()
    assert "http.client" not in modules


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("ls", "-o", "json"), ("ls",), ("ls", "-o", "id")], ids=" ".join)
def test_ls_that_is_piped_imports_nothing_heavy(ctl: Ctl, arguments: tuple[str, ...]) -> None:
    ctl.place.write(worlds.running())
    modules, result = imported(*arguments)
    assert result.returncode == 0
    assert ours(modules) == LS_MODULES
    assert {name.split(".")[0] for name in modules} & FORBIDDEN == set()


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [("show", "llama-lora"), ("why", "llama-lora"), ("logs", "llama-lora"), ("events",), ("cost",), ("prices",),
     ("history",),     ("checkpoints", "llama-lora"), ("providers",), ("doctor",), ("submit", "--help"),
     ("backtest", "--help"), ("size", "--params", "7B"),
     ("breakeven", "--price", "1900", "--hours", "40", "--gpu", "4090", "--rent", "0.3")],
    ids=" ".join,
)  # fmt: skip
def test_no_command_imports_the_daemons_libraries(ctl: Ctl, arguments: tuple[str, ...]) -> None:
    ctl.place.write(worlds.running())
    modules, result = imported(*arguments)
    assert result.returncode == 0
    assert {name.split(".")[0] for name in modules} & FORBIDDEN == set()


@pytest.mark.process
def test_the_help_of_a_back_test_imports_nothing_of_the_core() -> None:
    modules, result = imported("backtest", "--help")
    assert result.returncode == 0
    assert not [name for name in modules if name.startswith(("spotd.core", "spotd.backtest", "spotd.history"))]
    assert "matplotlib" not in {name.split(".")[0] for name in modules}


@pytest.mark.process
def test_submit_parses_a_job_file_without_pydantic(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('name = "a"\nrun = "b"\nimage = "c"\n[resources]\ngpu = "H100"\n')
    modules, result = imported("submit", str(file), "-y")
    assert result.returncode == 0, result.stderr
    assert {name.split(".")[0] for name in modules} & FORBIDDEN == set()


@pytest.mark.process
def test_the_daemons_own_help_imports_nothing_of_the_daemon() -> None:
    modules, result = imported("--help", program="spotd.cli.daemon")
    assert result.returncode == 0
    assert {name.split(".")[0] for name in modules} & FORBIDDEN == set()
    assert not [name for name in modules if name.startswith("spotd.daemon")]
