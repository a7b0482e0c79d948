"""AWS's client: absent, unkeyed, unreadable; and never imported before AWS is opened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_providers.aws.plugin import PLUGIN
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import InstallId
from spotd_providers.kit.boundary import install_command
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import RecordingLog
from tests.cases import every


def opened(folder: Path, credential: str | None) -> None:
    services = Services(
        install=InstallId("lab"),
        clock=FakeClock(),
        rng=Random(1),
        log=RecordingLog(),
        state_dir=folder,
        credential=credential,
    )

    async def main() -> None:
        async with PLUGIN.open(AwsSettings(endpoint_url="http://127.0.0.1:9"), services):
            pass

    anyio.run(main)


def test_a_missing_client_is_one_sentence_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AuthFailed, match=re.escape(install_command("aws"))):
        opened(tmp_path, "AKIA:secret")


@pytest.mark.parametrize("credential", ["AKIA", "AKIA:", ":secret", "a:b:c:d", "a::c"])
def test_a_key_of_the_wrong_form_is_named_and_not_shown(tmp_path: Path, credential: str) -> None:
    with pytest.raises(AuthFailed, match="ACCESS_KEY_ID:SECRET_ACCESS_KEY") as caught:
        opened(tmp_path, credential)
    assert credential not in str(caught.value)


@pytest.mark.parametrize("credential", ["AKIA:secret", "AKIA:secret:token"])
def test_a_key_with_or_without_a_session_token_opens(tmp_path: Path, credential: str) -> None:
    opened(tmp_path, credential)


def test_knowing_the_provider_does_not_import_its_client() -> None:
    code = (
        "import sys; from spotd_providers.aws.plugin import PLUGIN; PLUGIN.traits(PLUGIN.settings_model());"
        "import spotd.cli.daemon; print([m for m in sys.modules if m.startswith('boto')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@every(
    "wrong",
    [
        {"regions": ["moon"]},
        {"regions": []},
        {"endpoint_url": "http://example.org"},
        {"on_demand_usd": {"eu-west-1": {"g5.xlarge": 0}}},
        {"container": "podman"},
        {"subnet": "subnet-1"},
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        AwsSettings.model_validate(wrong)
