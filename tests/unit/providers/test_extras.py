"""The command that a hint names fits the way spotd was installed."""

from __future__ import annotations

import json
from importlib.metadata import requires
from pathlib import Path

import pytest

from spotd_providers.kit import boundary
from spotd_providers.kit.boundary import install_command, libraries_of

REQUIRES = ("anyio>=4.6", 'boto3>=1.35; extra == "s3"', "boto3>=1.35 ; extra == 'aws'", 'spotd[aws]; extra == "dev"')


class Installed:
    """What a record of an installed distribution answers."""

    requires = REQUIRES

    def __init__(self, direct_url: str | None) -> None:
        self._direct_url = direct_url

    def read_text(self, name: str) -> str | None:
        return self._direct_url if name == "direct_url.json" else None


def command(monkeypatch: pytest.MonkeyPatch, prefix: Path, *, direct_url: str | None = None, extra: str = "s3") -> str:
    monkeypatch.setattr(boundary, "_distribution", lambda: Installed(direct_url))
    return install_command(extra, prefix=prefix, python="/opt/py/bin/python")


def test_pipx_injects_the_libraries_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pipx_metadata.json").write_text("{}")
    assert command(monkeypatch, tmp_path) == "pipx inject spotd 'boto3>=1.35'"


def test_a_tool_of_uv_is_named_by_its_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv-receipt.toml").write_text("")
    assert command(monkeypatch, tmp_path) == "uv pip install --python /opt/py/bin/python 'boto3>=1.35'"


def test_a_clone_is_installed_again_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").write_text("")
    record = json.dumps({"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert command(monkeypatch, tmp_path, direct_url=record) == f"/opt/py/bin/python -m pip install -e '{clone}[s3]'"


def test_an_environment_with_its_own_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").write_text("")
    assert command(monkeypatch, tmp_path, extra="aws") == f"{tmp_path}/bin/pip install 'boto3>=1.35'"


@pytest.mark.parametrize(
    "record",
    [
        None,
        "",
        "[]",
        "{",
        '{"dir_info": {"editable": true}}',
        '{"url": 3, "dir_info": {"editable": true}}',
        '{"url": "file:///nowhere", "dir_info": {"editable": true}}',
        '{"url": "file:///tmp", "dir_info": {"editable": false}}',
    ],
)
def test_a_record_that_says_nothing_of_a_clone_leaves_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: str | None
) -> None:
    assert command(monkeypatch, tmp_path, direct_url=record) == "/opt/py/bin/python -m pip install 'boto3>=1.35'"


def test_every_extra_that_a_user_is_sent_to_consists_of_libraries() -> None:
    for extra in ("aws", "s3", "plot", "web", "tui", "metrics", "notify", "mcp", "timezones", "demo"):
        assert libraries_of(extra, requires("spotd") or ()), extra
