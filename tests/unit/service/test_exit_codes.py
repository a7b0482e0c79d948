"""How a start that fails is told: a sentence and a code, never a traceback for what is not a defect."""

from __future__ import annotations

import errno
import faulthandler
from pathlib import Path

import pytest

from spotd.core.domain.states import InvariantBroken
from spotd.daemon.install import BadConfig
from spotd.service import main
from tests.cases import every


@every("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_such_and_not_as_a_defect(code: int) -> None:
    error = OSError(code, "No space left on device", "/state/spool")
    words = main._words(ExceptionGroup("tasks", [error]).exceptions[0])
    assert words == "/state/spool: No space left on device\n\nhint: free some space there"
    assert main._code(ExceptionGroup("tasks", [error])) == main.CANNOT_START


def test_a_refused_config_has_its_own_code_wherever_it_is_found() -> None:
    assert main._code(ExceptionGroup("tasks", [BadConfig("renamed")])) == main.BAD_CONFIG
    assert main._code(ExceptionGroup("tasks", [BadConfig("renamed"), InvariantBroken("x")])) == main.BROKEN
    assert main._words(BadConfig("renamed")) == "renamed"


def test_a_known_label_is_read_although_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = main._own_install(tmp_path)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main._own_install(tmp_path) == label
    with pytest.raises(BadConfig, match="free some space"):
        main._own_install(tmp_path / "other")


def test_a_crash_of_the_interpreter_leaves_its_stacks_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_to: list[int] = []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", written_to.append)
    monkeypatch.setattr("spotd.daemon.log.configure", lambda _: None)
    monkeypatch.setattr("spotd.service.memory.share_one_pool", lambda: None)
    assert main.run(tmp_path / "no.toml", {}) == main.BAD_CONFIG
    assert written_to == [2]
