"""`spotctl web` before it serves: what is refused, and with which way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.kit.boundary import install_command
from tests.unit.cli.conftest import Ctl


def test_without_its_library_the_dashboard_names_the_extra(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.cli.inputs.options.find_spec", lambda _name: None)
    result = ctl("web")
    assert result.code == 2
    assert f"hint: {install_command('web')}" in result.err


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "cannot be read: No such file"),
        ("x" * 40, 0o644, "others may read the token's file"),
        ("short", 0o600, "is not one line of 16 characters"),
        ("x" * 20 + "\n" + "y" * 20, 0o600, "is not one line of 16 characters"),
    ],
)
def test_a_token_file_that_protects_nothing_is_refused(
    ctl: Ctl, tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    result = ctl("web", "--token-file", str(file))
    assert result.code in {2, 74}
    assert words in result.err
    assert content is None or content not in result.err
