"""The provider over a real OpenSSH server: pinned by `spotctl hosts`, with a login that prints, from launch to end."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import OpensPorts, Services
from spotd_providers.contract.values import AttemptKey, InstallId, InstanceState, LaunchRequest, OfferQuery
from spotd_providers.kit.ssh import own_key
from spotd_providers.ssh.plugin import PLUGIN
from spotd_providers.ssh.settings import SshSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import RecordingLog
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, real_sshd
from tests.unit.providers.kit.test_port_relay import ODD, echo_server, exchange
from tests.unit.providers.ssh.harness import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
]
KEY = AttemptKey("spotd-lab-j0b0001-1")
SCRIPT = "#!/bin/sh\nenv >environment\nsetsid sleep 600 &\nexec sleep 600\n"


def ctl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "STATE_DIRECTORY": str(folder)}
    code = "import sys; from spotd.cli.client import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "hosts", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=120)


def test_a_machine_lives_and_ends_behind_a_real_sshd(tmp_path: Path) -> None:
    host = FakeHost("here", tmp_path / "host", Gpu(uuid="GPU-7177a000-0000-0001"))
    state = tmp_path / "state"
    folder = state / "providers" / "ssh"
    with real_sshd(tmp_path / "sshd") as sshd:
        settings = SshSettings(
            hosts=[
                {
                    "name": "here", "address": "127.0.0.1", "port": sshd.port, "user": sshd.user,
                    "path": host.path, "folder": str(host.state),
                }
            ]
        )  # fmt: skip
        port = ("127.0.0.1", "--port", str(sshd.port))

        async def story() -> None:
            folder.mkdir(parents=True)
            clock = FakeClock()
            services = Services(
                install=InstallId("lab"), clock=clock, rng=Random(1), log=RecordingLog(), state_dir=folder
            )
            async with PLUGIN.open(settings, services) as provider:
                with pytest.raises(AuthFailed, match="no host key of here is pinned"):
                    await provider.instances()
                refused = ctl(state, "add", *port)
                assert (refused.returncode, "SHA256:" in refused.stderr) == (2, True), refused
                assert ctl(state, "add", *port, "--yes").returncode == 0
                assert any("restrict ssh-ed25519" in line.hint for line in await provider.check() if not line.ok)
                with pytest.raises(AuthFailed, match="refuses spotd's key"):
                    await provider.instances()
                sshd.admit(f"restrict {own_key(folder / 'id_ed25519')}")
                clock.advance(timedelta(minutes=2))
                (offer,) = (await provider.offers(OfferQuery())).offers
                assert (offer.gpu, offer.gpu_price) == ("RTX_4090", 0)
                request = LaunchRequest(
                    key=KEY, install=InstallId("lab"), offer=offer, price_max=offer.gpu_price, image="x", disk_gb=1,
                    start_script=SCRIPT,
                )  # fmt: skip
                made = (await provider.launch(request)).instance
                assert made.state is InstanceState.RUNNING
            wait_for(lambda: len(host.members(KEY)) >= 3)
            async with PLUGIN.open(settings, services) as provider:
                (found,) = (await provider.instances()).instances
                assert (found.ref, found.state) == (made.ref, InstanceState.RUNNING)
                assert isinstance(provider, OpensPorts)
                with echo_server() as served:  # spotd's key may forward no ports itself: `restrict`
                    several = [await provider.open_port(found.ref, served) for _ in range(3)]
                    for one in several:
                        assert await exchange(one, ODD) == ODD
                        await one.aclose()
                seen = (host.folder(KEY) / "job" / "environment").read_text()
                assert "LEAKED" not in seen
                assert "CUDA_VISIBLE_DEVICES=GPU-7177a000-0000-0001" in seen
                await provider.terminate(made.ref)
                await provider.terminate(made.ref)
                assert not host.members(KEY)
                assert not await provider.find(KEY)
                assert ctl(state, "rm", *port).returncode == 0
                assert "127.0.0.1" not in ctl(state, "ls").stdout

        try:
            anyio.run(story)
        finally:
            host.shut_down()


def test_a_changed_key_is_refused_until_it_is_removed_and_added(tmp_path: Path) -> None:
    with real_sshd(tmp_path / "one") as sshd:
        first = ctl(tmp_path, "add", "127.0.0.1", "--port", str(sshd.port), "--yes")
        assert first.returncode == 0, first.stderr
        again = ctl(tmp_path, "add", "127.0.0.1", "--port", str(sshd.port))
        assert (again.returncode, "is pinned" in again.stdout) == (0, True)
        file = tmp_path / "providers" / "ssh" / "known_hosts"
        assert file.stat().st_mode & 0o777 == 0o600
        printed = subprocess.run(
            ["ssh-keygen", "-lf", str(tmp_path / "one" / "host_key.pub")], capture_output=True, text=True, check=True
        )
        assert printed.stdout.split()[1] in ctl(tmp_path, "ls").stdout
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
        key = (tmp_path / "other.pub").read_text().split()[:2]
        file.write_text(f"[127.0.0.1]:{sshd.port} {' '.join(key)}\n")
        changed = ctl(tmp_path, "add", "127.0.0.1", "--port", str(sshd.port), "--yes")
        assert (changed.returncode, "another key than the pinned one" in changed.stderr) == (2, True), changed
        assert key[1] in file.read_text()
