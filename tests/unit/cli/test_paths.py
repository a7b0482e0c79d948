from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

from spotd import paths
from tests.cases import every

HOME = {"HOME": "/home/u"}


@every(
    ("environ", "socket"),
    [
        ({"SPOTD_SOCKET": "/a/b", "RUNTIME_DIRECTORY": "/run/spotd"}, "/a/b"),
        ({"RUNTIME_DIRECTORY": "/run/spotd", "XDG_RUNTIME_DIR": "/run/user/7"}, "/run/spotd/spotd.sock"),
        ({"RUNTIME_DIRECTORY": "/run/spotd:/run/other"}, "/run/spotd/spotd.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/spotd/spotd.sock"),
        ({"SPOTD_SOCKET": "", "RUNTIME_DIRECTORY": "", "XDG_RUNTIME_DIR": "/x"}, "/x/spotd/spotd.sock"),
    ],
)
def test_the_socket_is_where_the_design_says(environ: dict[str, str], socket: str) -> None:
    assert paths.socket_path({**HOME, **environ}) == Path(socket)


@every("value", ["relative", "  "])
def test_a_runtime_folder_that_is_not_absolute_is_ignored(value: str) -> None:
    assert paths.runtime_dir({**HOME, "XDG_RUNTIME_DIR": value}) == paths.runtime_dir(HOME)


def test_without_a_session_the_socket_is_in_the_users_own_folder_and_never_in_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 99_999_999)
    assert paths.socket_path(HOME) == Path("/home/u/.local/state/spotd/run/spotd.sock")


@pytest.mark.parametrize("environ", [{}, {"XDG_STATE_HOME": "/s"}, {"XDG_STATE_HOME": "rel"}], ids=["", "set", "bad"])
def test_state_is_where_platformdirs_would_put_it(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in {**HOME, **environ}.items():
        monkeypatch.setenv(name, value)
    expected = platformdirs.user_state_path("spotd")
    if environ.get("XDG_STATE_HOME") == "rel":
        monkeypatch.delenv("XDG_STATE_HOME")
        expected = platformdirs.user_state_path("spotd")
    assert paths.state_dir({**HOME, **environ}) == expected


def test_runtime_is_where_platformdirs_would_put_it_in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.runtime_dir(os.environ | {"RUNTIME_DIRECTORY": ""}) == platformdirs.user_runtime_path("spotd")


def test_systemds_state_directory_comes_first() -> None:
    assert paths.state_dir({**HOME, "STATE_DIRECTORY": "/var/lib/spotd:/var/lib/x"}) == Path("/var/lib/spotd")


def test_config_is_looked_for_with_the_user_before_the_system() -> None:
    assert paths.config_candidates(HOME) == (
        Path("/home/u/.config/spotd/config.toml"),
        Path("/etc/spotd/config.toml"),
    )
    assert paths.config_candidates({**HOME, "XDG_CONFIG_HOME": "/c"})[0] == Path("/c/spotd/config.toml")
    assert paths.config_candidates({**HOME, "SPOTD_CONFIG": "x.toml"}) == (Path("x.toml"),)
