"""`[registries.NAME]`: which registry, whose login, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotd.config.credentials import InstalledPlugins
from spotd.config.load import Loaded, load, understand
from spotd.config.values import ConfigError
from spotd.daemon.policy import changes
from spotd.service.main import load_settings
from tests.cases import every

GOOD = {"server": "ghcr.io", "username": "me", "password": {"env": "TOKEN"}}
PASSWORD = "canary-password-0c1f"


def problems(table: Any, name: str = "ghcr") -> str:
    with pytest.raises(ConfigError) as refused:
        understand({"registries": {name: table}}, "the test", plugins=InstalledPlugins())
    return str(refused.value)


@every(
    ("written", "server"),
    [
        ("ghcr.io", "ghcr.io"),
        ("GHCR.io", "ghcr.io"),
        ("docker.io", "docker.io"),
        ("index.docker.io", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("localhost", "localhost"),
        ("localhost:5000", "localhost:5000"),
    ],
)
def test_a_server_is_kept_as_images_name_it(written: str, server: str) -> None:
    found = understand({"registries": {"one": {**GOOD, "server": written}}}, "x", plugins=InstalledPlugins())
    assert found.registries["one"].server == server


@every("server", ["", "ghcr", "https://ghcr.io", "ghcr.io/me", "ghcr.io:", "-.io", "a b.io", 7, "é.io"])
def test_what_is_no_server_is_refused(server: object) -> None:
    assert "registries.ghcr.server" in problems({**GOOD, "server": server})


@every("username", ["", "a b", "é", "x" * 256, "a\nb", None, 3])
def test_what_is_no_name_to_log_in_with_is_refused(username: object) -> None:
    assert "registries.ghcr.username" in problems({**GOOD, "username": username})


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert 'did you mean "password"?' in problems({**GOOD, "pasword": {"env": "X"}})


@every("key", ["server", "username", "password"])
def test_each_key_is_needed(key: str) -> None:
    assert f"registries.ghcr.{key}: is missing" in problems({k: v for k, v in GOOD.items() if k != key})


@every("name", ["Ghcr", "", "x" * 33, "a.b"])
def test_a_name_is_a_short_plain_word(name: str) -> None:
    assert "is no name for a registry" in problems(GOOD, name)


def test_two_logins_for_one_server_and_too_many_registries_are_refused() -> None:
    twice = {"a": {**GOOD, "server": "docker.io"}, "b": {**GOOD, "server": "index.docker.io"}}
    with pytest.raises(ConfigError, match=r"registries\.b\.server: is the server of \[registries\.a\], too"):
        understand({"registries": twice}, "x", plugins=InstalledPlugins())
    many = {f"r{i}": {**GOOD, "server": f"r{i}.io"} for i in range(33)}
    with pytest.raises(ConfigError, match="more than 32 registries"):
        understand({"registries": many}, "x", plugins=InstalledPlugins())
    with pytest.raises(ConfigError, match="must hold a table for each registry"):
        understand({"registries": 3}, "x", plugins=InstalledPlugins())


def loaded(folder: Path, text: str, **environ: str) -> Loaded:
    path = folder / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    return load(path, environ={"HOME": str(folder), **environ})


TABLE = '[registries.ghcr]\nserver = "ghcr.io"\nusername = "me"\npassword = { env = "TOKEN" }\n'


def test_a_password_that_is_not_there_is_a_warning_that_names_its_key(tmp_path: Path) -> None:
    (warning,) = loaded(tmp_path, TABLE).warnings
    assert warning.key == "registries.ghcr.password"
    assert "TOKEN is not set" in warning.message
    (short,) = loaded(tmp_path, TABLE, TOKEN="word").warnings
    assert "has not 8 to 4,096 characters" in short.message
    assert loaded(tmp_path, TABLE, TOKEN=PASSWORD).warnings == ()


def test_a_password_in_a_file_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    found = loaded(tmp_path, TABLE.replace('{ env = "TOKEN" }', f'"{PASSWORD}"'))
    assert found.warnings == ()
    assert PASSWORD not in repr(found)
    assert found.path is not None
    found.path.chmod(0o644)
    (warning,) = load(found.path, environ={"HOME": str(tmp_path)}).warnings
    assert warning.key == "registries.ghcr.password"
    assert PASSWORD not in f"{warning.message}{warning.hint}"


def test_the_daemon_knows_the_login_hides_it_and_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(TABLE)
    path.chmod(0o600)
    folders = {"STATE_DIRECTORY": str(tmp_path / "state"), "RUNTIME_DIRECTORY": str(tmp_path / "run")}
    settings = load_settings(path, {**folders, "TOKEN": PASSWORD})
    assert settings.logins["ghcr.io"].password.reveal() == PASSWORD
    assert PASSWORD in settings.secrets
    assert PASSWORD not in repr(settings)
    assert settings.registries["ghcr.io"].error == ""
    without = load_settings(path, {**folders, "TOKEN": ""})
    assert not without.logins
    assert without.registries["ghcr.io"].error.startswith("[registries.ghcr] password: the environment variable TOKEN")


def test_a_reload_takes_a_changed_password_or_registry_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(TABLE)
    path.chmod(0o600)
    folders = {"STATE_DIRECTORY": str(tmp_path / "state"), "RUNTIME_DIRECTORY": str(tmp_path / "run")}
    before = load_settings(path, {**folders, "TOKEN": PASSWORD})
    assert changes(before, load_settings(path, {**folders, "TOKEN": PASSWORD})) == ([], [])
    after = load_settings(path, {**folders, "TOKEN": f"{PASSWORD}-2"})
    assert changes(before, after) == (["the logins of [registries]"], [])
    path.write_text("")
    gone = load_settings(path, {**folders, "TOKEN": PASSWORD})
    assert changes(before, gone) == (["[registries]", "the logins of [registries]"], [])
