"""Completion, as a real shell asks for it."""

from __future__ import annotations

import os
import resource
import shutil
import socket as sockets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl

pytestmark = pytest.mark.process

HOSTILE = [
    "$(touch owned)", "`touch owned`", "*", "-rf", "--raw", "a b", "a;b", "a|b", "~root", "$HOME", "!!", "a'b", 'a"b',
    "a\nplain,b", "plain,b", "\x1b[2J", "a\x00b", "\u202eb", "../../etc/passwd", "", "[a-z]", "a\\b", "a&", ">x", "#x",
]  # fmt: skip
BASH = """
eval "$(spotctl completion bash)"
complete_all() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _spotctl_completion spotctl
  printf '%s\\n' "${{COMPREPLY[@]}}" .
}}
{lines}
"""


def shell(program: str, script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [program, "-c", script],
        cwd=folder,
        env={"HOME": str(folder), "PATH": path, "SPOTD_SOCKET": os.environ["SPOTD_SOCKET"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers in place of the last word of each line."""
    done = shell("bash", BASH.format(lines="\n".join(f"complete_all {line}" for line in lines)), folder)
    assert (done.returncode, done.stderr) == (0, "")
    return [words.splitlines() for words in done.stdout.split(".\n")[:-1]]


def offered(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the completion for bash prints, without a bash."""
    environment = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), **environment}
    return subprocess.run(
        [Path(sys.executable).with_name("spotctl")],
        env={**os.environ, "_SPOTCTL_COMPLETE": "bash_complete", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_bash_completes_commands_options_and_names_of_jobs(ctl: Ctl, tmp_path: Path) -> None:
    ctl.place.write_three_jobs()
    lines = ["spotctl lo", "spotctl logs ll", "spotctl cancel --", f"spotctl show {worlds.RUNNING_ID[:5]}"]
    commands, names, options, ids = completed(tmp_path, *lines)
    assert (commands, names, options[-1], ids) == (["logs"], ["llama-lora"], "--help", [worlds.RUNNING_ID])


def test_names_that_a_shell_would_act_on_are_not_offered(ctl: Ctl, tmp_path: Path) -> None:
    names = [{"name": name, "id": name} for name in (*HOSTILE, "good-1")]
    ctl.place.answers("jobs.page", {"jobs": names, "more": False, "paused": ""})
    assert completed(tmp_path, "spotctl logs ''") == [["good-1"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("socket", ["no.sock", "deaf.sock"])
def test_without_an_answer_of_the_daemon_it_is_silent_and_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: str
) -> None:
    with sockets.socket(sockets.AF_UNIX) as deaf:
        monkeypatch.chdir(tmp_path)  # pytest's folders are too deep for the path of a socket
        deaf.bind("deaf.sock")
        deaf.listen(1)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = offered("spotctl", "logs", "x", SPOTD_SOCKET=socket)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    )  # of processor time; a bare start of Python takes 0.1 on a busy computer


def test_a_defect_of_the_completion_stays_out_of_the_line(ctl: Ctl) -> None:
    ctl.place.answers("jobs.page", {"jobs": [{"no": "name"}]})
    done = offered("spotctl", "logs", "x")
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_accept_their_script(ctl: Ctl, tmp_path: Path, name: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed here")
    ctl.place.write_three_jobs()
    (tmp_path / "script").write_text(ctl("completion", name).out)
    if name == "zsh":
        done = shell(program, "autoload -Uz compinit; compinit -u; source ./script; whence -w _spotctl_completion",
                     tmp_path)  # fmt: skip
        assert "function" in done.stdout
    else:
        done = shell(program, "source script; complete -C 'spotctl logs ll'", tmp_path)
        assert done.stdout.split() == ["llama-lora"]
    assert (done.returncode, done.stderr) == (0, "")
