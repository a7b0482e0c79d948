"""The tables of a team: who may use the API by TCP, and where that is served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotd.cli.daemon import spotd
from spotd.cli.entry import run
from spotd.config.load import load
from spotd.config.values import ConfigError
from spotd.core.domain.policy import Right
from spotd.daemon.policy import User
from spotd.service.main import load_settings
from spotd.tokens import digest_of

HASH = "ab" * 32
USER = f'[users.ada]\nrole = "view"\ntoken_sha256 = "{HASH}"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


NEAR = "[providers.local]\nenabled = false\n"
"""Without jobs that can read the files of this computer, beside which no user may submit only."""


def users(path: Path, **environ: str) -> dict[str, User]:
    state = {"HOME": str(path.parent), "STATE_DIRECTORY": str(path.parent / "state"), **environ}
    return {one.caller.name: one for one in load_settings(path, state).users}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('[api]\nlisten = "0.0.0.0:7443"', "api", "in the clear"),
        ('[api]\nlisten = "192.168.1.7:7443"', "api", "in the clear"),
        ('[api]\nlisten = "7443"', "api.listen", "no address with a port"),
        ('[api]\nlisten = "127.0.0.1:7443"\nkey = "/k"', "api", "need each other"),
        ('[users.ada]\nrole = "view"', "users.ada", "one of token_sha256 and token"),
        (USER.replace("view", "submit"), "users.ada", "no budget_per_day"),
        (f"{USER}budget_per_day = 5", "users.ada", "has no budget"),
        (USER.replace("view", "admin"), "users.ada.role", "must be one of"),
        (USER.replace(HASH, HASH.upper()), "users.ada.token_sha256", "no SHA-256"),
        (f'{USER}token = {{ env = "T" }}', "users.ada", "one of token_sha256 and token"),
        ('[users.ada]\nrole = "view"\ntoken = "written-here-in-the-clear"', "users.ada.token", "not written into"),
        (USER.replace("ada", "agent"), "users.agent", "all agents"),
        (USER.replace("ada", "Ada"), "users.Ada", "no name for a user"),
    ],
)
def test_what_is_wrong_is_refused_with_its_key_and_without_a_secret(
    tmp_path: Path, text: str, key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, text), environ={})
    assert any(one.key == key and words in one.message for one in refused.value.problems), refused.value.problems
    assert "written-here" not in str(refused.value)


def test_no_user_may_submit_only_where_jobs_can_read_the_files_of_the_daemon(tmp_path: Path) -> None:
    text = USER.replace("view", "submit") + "budget_per_day = 5\n"
    with pytest.raises(ConfigError, match="so do everything"):
        load(written(tmp_path, text), environ={})
    assert load(written(tmp_path, text + NEAR), environ={}).config.users["ada"].budget_per_day == 5_000_000
    for role in ("view", "operate"):
        load(written(tmp_path, USER.replace("view", role)), environ={})


def test_without_tls_only_this_computer_is_served(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert load(written(tmp_path, f'[api]\nlisten = "{host}:7443"\n{USER}'), environ={}).warnings == ()
    assert load(written(tmp_path, ""), environ={}).config.api.listen is None


def test_tokens_are_hashes_or_kept_elsewhere(tmp_path: Path) -> None:
    token = "t" * 43
    text = f"""{NEAR}{USER}
[users.bob]
role = "submit"
budget_per_day = 2.5
token = {{ env = "TOKEN_BOB" }}
[users.cid]
role = "operate"
token = {{ env = "TOKEN_CID" }}
[users.dan]
role = "view"
token_sha256 = "{"cd" * 32}"
[users.eve]
role = "view"
token_sha256 = "{"cd" * 32}"
"""
    path = written(tmp_path, text)
    found = users(path, TOKEN_BOB=token, TOKEN_CID="short")
    assert set(found) == {"ada", "bob"}, "a short token lets in none, nor does one of two users"
    assert found["bob"].digest == digest_of(token)
    assert (found["bob"].caller.right, found["bob"].caller.budget_per_day) == (Right.SUBMIT, 2_500_000)
    assert found["ada"].caller.budget_per_day is None
    assert token not in repr(found)
    keys = {one.key for one in load(path, environ={"TOKEN_BOB": token, "TOKEN_CID": "short"}).warnings}
    assert keys == {"users.cid.token", "users.eve"}


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    key = tmp_path / "api.key"
    key.write_text("")
    key.chmod(0o644)
    text = f'[api]\nlisten = "0.0.0.0:7443"\ncertificate = "/c"\nkey = "{key}"\n{USER}'
    (warning,) = load(written(tmp_path, text), environ={}).warnings
    assert (warning.key, warning.hint) == ("api.key", f"chmod 600 {key}")
    key.chmod(0o600)
    assert load(written(tmp_path, text), environ={}).warnings == ()


def test_a_user_who_is_added_has_a_token_that_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, f'{NEAR}[daemon]\ninstall = "lab"')
    command = ["user", "add", "ada", "--config", str(path), "--role"]
    assert run(spotd, "spotd", [*command, "submit", "--budget-per-day", "7.50"]) == 0
    token = capsys.readouterr().out.strip()
    assert len(token) >= 43
    assert token not in path.read_text()
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, os.getuid())
    found = users(path)["ada"]
    assert (found.digest, found.caller.budget_per_day) == (digest_of(token), 7_500_000)
    before = path.read_text()
    refused = (
        [*command, "view"],
        [*command[:2], "bob", *command[3:], "submit"],
        [*command[:2], "bob", *command[3:], "view", "--budget-per-day", "1"],
        [*command[:2], "bob", *command[3:], "submit", "--budget-per-day", "-1"],
        [*command[:2], 'x]\n[budget]\nday=9\n[y"', *command[3:], "view"],
        [*command[:2], "agent", *command[3:], "view"],
    )
    for arguments in refused:
        assert run(spotd, "spotd", arguments) == 2
        assert capsys.readouterr().out == ""
        assert path.read_text() == before
