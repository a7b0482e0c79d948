"""`spotd config check` refuses what can launch nothing, as `spotctl doctor` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spotd.cli.commands.daemon import check, secrets_key

VAST = '[providers.vast]\nenabled = {enabled}\napi_key = {{ env = "PATH" }}\n'


def checked(folder: Path, text: str) -> Result:
    config = folder / "config.toml"
    config.write_text(text)
    config.chmod(0o600)
    return CliRunner().invoke(check, [str(config)])


@pytest.mark.parametrize("store", ["", '[store]\nurl = "file:///srv/spotd"\n'], ids=["default", "folder"])
def test_a_rented_machine_that_cannot_reach_the_store_is_refused(tmp_path: Path, store: str) -> None:
    result = checked(tmp_path, store + VAST.format(enabled="true"))
    assert result.exit_code != 0
    assert "in order" not in result.output
    assert "nothing can be launched at vast: machines there cannot reach the checkpoint store" in str(result.exception)


@pytest.mark.parametrize(
    "text",
    ["", VAST.format(enabled="false"), '[store]\nurl = "s3://bucket/spotd"\n' + VAST.format(enabled="true")],
    ids=["local only", "vast is off", "a bucket"],
)
def test_what_can_launch_is_in_order(tmp_path: Path, text: str) -> None:
    result = checked(tmp_path, text)
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, f"{tmp_path / 'config.toml'} is in order")


def test_a_new_key_is_named_by_its_whole_path_and_a_folder_that_is_missing_by_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(secrets_key, ["my.key"])
    assert f'secrets_key = {{ file = "{tmp_path.resolve()}/my.key" }}' in made.output
    errors = [CliRunner().invoke(secrets_key, [name]).exception for name in ("my.key", "no/my.key")]
    assert [getattr(error, "hint", "")[:18] for error in errors] == ["name a file that i", "check that its fol"]
