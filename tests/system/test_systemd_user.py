"""Jobs on an own host under a real systemd of its user, over a real sshd: its control group holds what no mark can.

systemd is not the first process of a test machine, so it runs as a user's manager in a mount namespace that says that
the machine was booted with it. Whether the user lingers is said by a script in place of `loginctl`; all else is real.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey, InstallId, InstanceState, LaunchRequest, OfferQuery
from spotd_providers.kit.ssh import own_key
from spotd_providers.local.hosts.processes import find_process
from spotd_providers.ssh.plugin import PLUGIN
from spotd_providers.ssh.settings import SshSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import RecordingLog
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, real_sshd
from tests.unit.providers.ssh.harness import wait_for
from tests.unit.providers.ssh.test_real_sshd import ctl

SYSTEMD = Path("/lib/systemd/systemd")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
    pytest.mark.skipif(not SYSTEMD.exists(), reason="systemd is not installed"),
]
KEY = AttemptKey("spotd-lab-j0b0001-1")
IN_NAMESPACE = """
mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/system || exit 97
exec "$0" --user --log-target=console
"""
SCRIPT = "#!/bin/sh\n(env -i setsid sleep 613 & echo $! >../escaped)\nexec sleep 600\n"


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Path]:
    """A user's systemd that answers; the folder of its sockets."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with (tmp_path / "systemd.log").open("wb") as log:
        command = ["unshare", "-m", "sh", "-c", IN_NAMESPACE, str(SYSTEMD)]
        manager = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while subprocess.run(["systemctl", "--user", "show-environment"], env=environ, capture_output=True).returncode:
            if manager.poll() is not None or time.monotonic() > until:
                pytest.skip(f"no user's systemd starts here: {(tmp_path / 'systemd.log').read_text()[-300:]}")
            time.sleep(0.2)
        yield folder
    finally:
        manager.terminate()
        manager.wait(20)


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_systemd_ends_a_process_that_left_its_session_and_cleared_its_mark(runtime: Path, tmp_path: Path) -> None:
    host = FakeHost("here", tmp_path / "host", Gpu(uuid="GPU-7177a000-0000-0001"))
    host.program("loginctl", "#!/bin/sh\necho yes\n")
    folder = tmp_path / "state" / "providers" / "ssh"
    folder.mkdir(parents=True)
    with real_sshd(tmp_path / "sshd", login=f"export XDG_RUNTIME_DIR={runtime}") as sshd:
        settings = SshSettings(
            hosts=[
                {
                    "name": "here", "address": "127.0.0.1", "port": sshd.port, "user": sshd.user,
                    "path": host.path, "folder": str(host.state),
                }
            ]
        )  # fmt: skip
        assert ctl(tmp_path / "state", "add", "127.0.0.1", "--port", str(sshd.port), "--yes").returncode == 0
        sshd.admit(f"restrict {own_key(folder / 'id_ed25519')}")

        async def story() -> None:
            services = Services(
                install=InstallId("lab"), clock=FakeClock(), rng=Random(1), log=RecordingLog(), state_dir=folder
            )
            async with PLUGIN.open(settings, services) as provider:
                [line] = [one for one in await provider.check() if one.name == "here"]
                assert "jobs by systemd" in line.detail
                (offer,) = (await provider.offers(OfferQuery())).offers
                request = LaunchRequest(
                    key=KEY, install=InstallId("lab"), offer=offer, price_max=offer.gpu_price, image="x", disk_gb=1,
                    start_script=SCRIPT,
                )  # fmt: skip
                made = (await provider.launch(request)).instance
                assert made.state is InstanceState.RUNNING
                escaped = host.folder(KEY) / "escaped"
                wait_for(lambda: escaped.exists() and bool(escaped.read_text().strip()))
                pid = int(escaped.read_text())
                assert find_process(pid) is not None
                assert pid not in host.members(KEY), "nothing but its group shows whose it is"
                assert f"{KEY}.service" in groups_of(pid)
                await provider.terminate(made.ref)
                wait_for(lambda: (left := find_process(pid)) is None or left.dead)
                assert await provider.find(KEY) == ()

        try:
            anyio.run(story)
        finally:
            host.shut_down()
