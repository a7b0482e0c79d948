"""The Dockerfile, read and not run: what it copies is there, and it ends as no more than it needs to be."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pathspec

from spotd.cli.client import COMMANDS
from spotd.cli.daemon import COMMANDS as DAEMON_COMMANDS

REPO = Path(__file__).parents[3]
TEXT = re.sub(r"\\\n\s*", " ", (REPO / "Dockerfile").read_text())
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
LAST_STAGE = STEPS[max(n for n, step in enumerate(STEPS) if step[0] == "FROM") :]


def copied() -> list[str]:
    return [source for word, rest in STEPS if word == "COPY" for source in rest.split()[:-1]]


def test_what_is_copied_is_there_and_reaches_the_builder() -> None:
    ignored = pathspec.GitIgnoreSpec.from_lines((REPO / ".dockerignore").read_text().splitlines())
    for source in copied():
        assert (REPO / source).exists(), source
        assert not ignored.match_file(source), source
    assert ignored.match_file(".git/config")
    assert ignored.match_file(".venv/bin/python")
    assert not any(source in {".", "./"} for source in copied()), "a key in the folder would land in the image"


def test_what_the_wheel_is_made_of_is_copied() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"]
    for path in needed:
        assert any(Path(path).is_relative_to(source) for source in copied()), path


def test_it_runs_as_a_user_without_rights_and_leaves_no_cache() -> None:
    (user,) = [rest for word, rest in LAST_STAGE if word == "USER"]
    assert user.isdecimal()
    assert int(user) > 0
    assert [word for word, _ in LAST_STAGE].index("USER") > [word for word, _ in LAST_STAGE].index("RUN")
    for word, rest in STEPS:
        assert word != "ADD"
        for command in re.findall(r"pip (?:install|wheel)[^&]*", rest):
            assert "--no-cache-dir" in command


def test_its_commands_exist() -> None:
    words = dict(LAST_STAGE)
    assert json.loads(words["ENTRYPOINT"]) == ["spotd"]
    assert json.loads(words["CMD"])[0] in DAEMON_COMMANDS
    program, command, *_ = json.loads(words["HEALTHCHECK"].partition("CMD ")[2])
    assert (program, command in COMMANDS) == ("spotctl", True)
