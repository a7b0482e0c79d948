"""From `[notify.NAME]` to a channel: its address is known to the redactor, and to no message."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd.daemon.log import Redactor
from spotd.daemon.policy import Settings
from spotd.service.main import load_settings
from spotd_providers.kit.boundary import install_command

TOKEN = "xoxb-0123456789-abcdefghijkl"


def settings(tmp_path: Path, lines: str, **environ: str) -> Settings:
    path = tmp_path / "config.toml"
    path.write_text(lines, encoding="utf-8")
    path.chmod(0o600)
    return load_settings(path, {"STATE_DIRECTORY": str(tmp_path / "state"), **environ})


def test_an_address_and_its_parts_are_hidden_wherever_they_turn_up(tmp_path: Path) -> None:
    url = f"https://hooks.example/services/{TOKEN}?key=an%40other-secret"
    found = settings(tmp_path, '[notify.team]\nurl = { env = "TEAM" }', TEAM=url)
    redactor = Redactor()
    redactor.register(found.secrets)
    for leak in (url, f"POST /services/{TOKEN} failed", "an@other-secret", "an%40other-secret"):
        assert TOKEN not in redactor.clean(leak)
        assert "other-secret" not in redactor.clean(leak)
    assert TOKEN not in repr(found)
    (channel,) = found.channels
    assert (channel.url, channel.error) == (url, "")


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (None, "the environment variable TEAM is not set"),
        ("hooks.example/" + TOKEN, "its url is no address"),
    ],
)
def test_an_address_that_is_not_there_ends_nothing(tmp_path: Path, url: str | None, error: str) -> None:
    environ = {} if url is None else {"TEAM": url}
    (channel,) = settings(tmp_path, '[notify.team]\nurl = { env = "TEAM" }', **environ).channels
    assert channel.url == ""
    assert error in channel.error
    assert TOKEN not in channel.error


def test_what_needs_apprise_says_so_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.service.main.find_spec", lambda _name: None)
    (channel,) = settings(tmp_path, '[notify.me]\nurl = "mailtos://x:y@mail.example"').channels
    assert channel.error == f"it needs apprise: {install_command('notify')}, then restart"
    (channel,) = settings(tmp_path, '[notify.me]\nurl = "https://mail.example/hook"').channels
    assert channel.error == ""
