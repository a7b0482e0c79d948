"""A team at a real daemon: users are added while it runs, act by TLS, are recorded, and are refused once removed."""

from __future__ import annotations

import re
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from spotd.cli.daemon import spotd
from spotd.cli.entry import run
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonRefused
from tests.e2e.harness import Lab, lab, until
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import free_port
from tests.integration.team.test_rights import draft

pytestmark = pytest.mark.e2e


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lab, str]]:
    """A daemon with `[api]`, the client's environment for it, and its URL."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("api", "127.0.0.1")
    port = free_port()
    tables = f'[api]\nlisten = "127.0.0.1:{port}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
    with lab(tmp_path / "lab", hosts=tables) as found:
        (found.folder / "config.toml").chmod(0o600)
        found.start()
        monkeypatch.setenv("SPOTCTL_URL", f"https://127.0.0.1:{port}")
        monkeypatch.setenv("SPOTCTL_CA", str(authority.file))
        yield found, f"https://127.0.0.1:{port}"


def reload(found: Lab, said: str) -> None:
    """The daemon reads its config again."""
    before = found.log_tail().count(said)
    assert found.process is not None
    found.process.send_signal(signal.SIGHUP)
    until(lambda: found.log_tail().count(said) > before, what=said, within=60)


def test_users_come_and_go_while_the_daemon_runs(
    place: tuple[Lab, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, url = place
    config = found.folder / "config.toml"
    arguments = ["user", "add", "ada", "--role", "operate", "--config", str(config)]
    assert run(spotd, "spotd", arguments) == 0
    token = capsys.readouterr().out.strip()
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    monkeypatch.setenv("SPOTCTL_TOKEN_FILE", str(file))
    with pytest.raises(DaemonRefused, match="none of a user here"):
        Daemon().status()
    reload(found, "config.reloaded")
    ada = Daemon()
    until(lambda: ada.prices()["quotes"], what="prices", within=60)
    ada.submit(draft("mine", resources={"gpu": ["RTX_4090:1"]}))
    assert found.api.job("mine")["job"]["submitted_by"] == "ada"
    ada.cancel("mine")
    by = [event["data"].get("by") for event in found.api.events() if event["kind"] == "job.cancelled"]
    assert by == ["ada"]
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.crt"))
    asked = Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})  # noqa: S310 - of this test
    with urlopen(asked, timeout=30, context=context) as answer:  # noqa: S310 - the address is its own
        assert b"spotd_" in answer.read()
    followed: list[object] = []

    def follow() -> None:
        try:
            followed.extend(Daemon().events(follow=True))
        except ClientError as exc:
            followed.append(exc)

    reader = threading.Thread(target=follow)
    reader.start()
    until(lambda: followed, what="the stream", within=60)
    config.write_text(re.sub(r"\n\[users\.ada\].*", "", config.read_text(), flags=re.DOTALL))
    reload(found, "config.reloaded")
    reader.join(30)
    assert not reader.is_alive()
    with pytest.raises(DaemonRefused, match="none of a user here"):
        Daemon().status()
    assert token not in "".join(path.read_text() for path in found.folder.glob("spotd-*.log"))
    assert found.stop() == 0
    assert "Traceback" not in found.log_tail()
