"""Logins at Google Cloud: a service account's key, a token, and no import of Google's libraries without need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.googlecloud.access import TOKEN_FOR, project_of
from spotd_providers.googlecloud.wire import GoogleSettings
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.harness import CANARY
from tests.cases import every
from tests.unit.providers.googlecloud.harness import GoogleHarness, open_harness

pytest.importorskip("google.auth", reason="google-auth is not installed (spotd[gcp])")


def _key_file(h: GoogleHarness, token_uri: str = "") -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return json.dumps(
        {
            "type": "service_account",
            "project_id": h.cloud.project,
            "private_key_id": "1",
            "private_key": pem,
            "client_email": h.cloud.client_email,
            "token_uri": token_uri or f"{h.served.url}/token",
        }
    )


def test_the_key_of_a_service_account_gives_tokens_and_names_the_project(tmp_path: Path) -> None:
    with open_harness(tmp_path, project="") as h:
        h.credential = _key_file(h)
        del h.cloud.access[CANARY]

        async def main() -> None:
            async with h.opened() as provider:
                assert await provider.account() == h.cloud.project  # type: ignore[attr-defined] # an optional call
                assert (await provider.offers(h.query())).offers
                logins = [one for one in h.requests() if one.path == "/token"]
                assert len(logins) == 1
                await provider.instances()
                h.cloud.access.clear()  # as if it had run out early: the next one is fetched at once
                await provider.instances()
                h.fake_clock.advance(TOKEN_FOR)
                await provider.instances()
                assert len([one for one in h.requests() if one.path == "/token"]) == 3
                h.cloud.break_auth()
                with pytest.raises(AuthFailed, match="api_key") as refused:
                    await provider.instances()
                assert "PRIVATE KEY" not in repr(refused.value.__cause__) + str(refused.value)

        run_virtually(main)


def test_a_login_that_does_not_answer_says_nothing_of_the_key(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        h.credential = _key_file(h, "http://127.0.0.1:9/token")

        async def main() -> None:
            async with h.opened() as provider:
                with pytest.raises(Unavailable):
                    await provider.instances()

        run_virtually(main)


@every("credential", [None, "", "{}", "[]", "ya29.token", '{"project_id": 7}'])
def test_without_a_project_nothing_is_opened(credential: str | None) -> None:
    with pytest.raises(AuthFailed, match="project"):
        project_of(GoogleSettings(), credential)


def test_a_key_file_that_is_none_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        h.credential = '{"type": "service_account"}'

        async def main() -> None:
            async with h.opened() as provider:
                with pytest.raises(AuthFailed, match="gcloud auth"):
                    await provider.instances()

        run_virtually(main)


def test_googles_libraries_are_not_imported_with_the_adapter() -> None:
    script = "import sys, spotd_providers.googlecloud.plugin as p; sys.exit('google.auth' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
