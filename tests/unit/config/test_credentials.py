from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from spotd.config.credentials import CredentialMissing, CredentialRef, resolve_credential
from tests.cases import every

SECRET = "hunter2-hunter2"


def ref(**place: str) -> CredentialRef:
    return CredentialRef.model_validate(place)


def test_a_secret_comes_from_where_the_config_says(tmp_path: Path) -> None:
    (tmp_path / "vast").write_text(f"{SECRET}\n")
    for place, environ in (
        (ref(env="VAST_API_KEY"), {"VAST_API_KEY": SECRET}),
        (ref(file=str(tmp_path / "vast")), {}),
        (ref(credential="vast"), {"CREDENTIALS_DIRECTORY": str(tmp_path)}),
        (CredentialRef.model_validate(SECRET), {}),
    ):
        secret = resolve_credential(place, environ=environ)
        assert secret.get_secret_value() == SECRET
        assert SECRET not in repr((place, secret))
        assert SECRET not in place.model_dump_json()


@pytest.mark.parametrize(
    ("place", "environ", "message", "hint"),
    [
        pytest.param({"env": "KEY"}, {}, "variable KEY is not set", "export KEY", id="env absent"),
        pytest.param({"env": "KEY"}, {"KEY": "  "}, "variable KEY is not set", "export KEY", id="env blank"),
        pytest.param({"file": "{tmp}/no"}, {}, "no cannot be read: No such file", "check the path", id="file absent"),
        pytest.param({"file": "{tmp}/empty"}, {}, "empty is empty", "check the path", id="file empty"),
        pytest.param({"file": "{tmp}/lines"}, {}, "does not hold one line of text", "check the path", id="lines"),
        pytest.param({"file": "{tmp}/binary"}, {}, "does not hold one line of text", "check the path", id="binary"),
        pytest.param({"file": "{tmp}/pipe"}, {}, "pipe is no regular file", "check the path", id="pipe"),
        pytest.param({"file": "{tmp}"}, {}, "cannot be read: Is a directory", "check the path", id="folder"),
        pytest.param({"credential": "vast"}, {}, "needs systemd", "LoadCredential=vast:/path", id="no systemd"),
        pytest.param(
            {"credential": "vast"},
            {"CREDENTIALS_DIRECTORY": "{tmp}"},
            "vast cannot be read",
            "LoadCredential=vast:/path",
            id="credential absent",
        ),
    ],
)
def test_a_missing_secret_says_where_it_was_looked_for_and_never_what_was_found(
    tmp_path: Path, place: dict[str, str], environ: dict[str, str], message: str, hint: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "lines").write_text(f"{SECRET}\n{SECRET}\n")
    (tmp_path / "binary").write_bytes(SECRET.encode() + b"\xff")
    there = {key: value.replace("{tmp}", str(tmp_path)) for key, value in place.items()}
    around = {key: value.replace("{tmp}", str(tmp_path)) for key, value in environ.items()}
    with pytest.raises(CredentialMissing) as caught:
        resolve_credential(ref(**there), environ=around)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    chain: BaseException | None = caught.value
    while chain is not None:
        assert "hunter2" not in repr(chain)
        chain = chain.__cause__ or chain.__context__


@every(
    "data",
    [
        pytest.param({}, id="empty"),
        pytest.param({"env": "A", "file": "b"}, id="two"),
        pytest.param({"env": SECRET}, id="secret for a name"),
        pytest.param({"inline": SECRET}, id="inline as a key"),
        pytest.param({"env": 3}, id="number"),
        pytest.param({"credential": f"../{SECRET}"}, id="path"),
        pytest.param("   ", id="blank"),
        pytest.param([SECRET], id="list"),
    ],
)
def test_a_malformed_reference_is_refused_without_repeating_it(data: object) -> None:
    with pytest.raises(ValidationError) as caught:
        CredentialRef.model_validate(data)
    assert SECRET not in str(caught.value)
