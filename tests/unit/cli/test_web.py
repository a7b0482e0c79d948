"""`spotctl web` before it serves: what is refused, and with which way out."""

from __future__ import annotations

import errno
import socket
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


@pytest.mark.process  # the import of NiceGUI asks the system for its libraries
@pytest.mark.parametrize(
    ("failure", "way_out"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "spotctl web --port 0"),
        (OSError(errno.EACCES, "Permission denied"), "spotctl web --port 0"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "give --host an address of this computer"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "give --host an address of this computer"),
    ],
)
def test_an_address_that_cannot_be_listened_on_has_its_own_way_out_and_shows_no_token(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, failure: OSError, way_out: str
) -> None:
    pytest.importorskip("nicegui", reason="needs spotd[web]")

    def refuse(_host: str, _port: int) -> None:
        raise failure

    monkeypatch.setattr("spotd.web.main.listen", refuse)
    result = ctl("web", "--host", "192.0.2.1")
    assert str(failure.strerror) in result.err
    assert way_out in result.err
    assert "token" not in result.err
