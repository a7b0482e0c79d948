"""Jobs in a real docker: the image is pulled, the runner works in it, and no container is left, whatever ends it.

On an own host over a real sshd, and by the boot script that machines of VM markets run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.start import start_script
from spotd_jobs.wire.grant import Grant
from spotd_providers.contract.provider import Provider, Services
from spotd_providers.contract.values import AttemptKey, InstallId, InstanceState, LaunchRequest, OfferQuery
from spotd_providers.kit.scripted import SCRIPT_BYTES_MAX
from spotd_providers.kit.ssh import own_key
from spotd_providers.kit.vm_boot import boot_script
from spotd_providers.ssh.plugin import PLUGIN
from spotd_providers.ssh.settings import SshSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import RecordingLog
from tests.fakes.seaweed import Weed
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, real_sshd
from tests.integration.runner.bucket import BucketStore
from tests.integration.runner.rig import Rig
from tests.system.engines.docker import Docker, NotHere, missing, serve_docker
from tests.unit.providers.ssh.harness import wait_for
from tests.unit.providers.ssh.test_real_sshd import ctl

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]
KEY = AttemptKey("spotd-lab-j0b0001-1")
CARD = "GPU-7177a000-0000-0001"
PROGRAM = """
import os, pathlib, time
saved = pathlib.Path(os.environ["SPOTD_CHECKPOINT_DIR"])
(saved / "step-1").mkdir(parents=True)
(saved / "step-1" / "weights").write_text("w" * 1000)
while not (saved.parent / "enough").exists():
    time.sleep(0.1)
"""
TRAIN = ["python3", "-c", PROGRAM]
"""Saves once, and works on until a file says that it is enough."""


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    try:
        with serve_docker(tmp_path_factory.mktemp("docker") / "engine") as engine:
            yield engine
    except NotHere as exc:
        pytest.skip(str(exc))


def rig_over(weed: Weed, folder: Path) -> Rig:
    """A store that a container reaches as any host does."""
    return Rig(folder / "rig", store=BucketStore(S3Store(weed.place(f"{folder.name}/"))))


def log_of(rig: Rig) -> str:
    return b"".join(rig.store.get(key) or b"" for key in rig.store.keys("") if "/log/" in key).decode()


def has_exit(rig: Rig) -> bool:
    events = [rig.store.get(key) or b"" for key in rig.store.keys("") if "/events/" in key]
    return any(json.loads(event)["kind"] == "exit" for event in events)


def script_of(grant: Grant) -> str:
    return start_script(grant.grant_url, limit_bytes=SCRIPT_BYTES_MAX)


@contextmanager
def with_own_host(folder: Path, docker: Docker) -> Iterator[tuple[FakeHost, Path, SshSettings]]:
    host = FakeHost("here", folder / "host", Gpu(uuid=CARD))
    host.program("docker", docker.program)
    state = folder / "state" / "providers" / "ssh"
    state.mkdir(parents=True)
    with real_sshd(folder / "sshd") as sshd:
        own = {
            "name": "here", "address": "127.0.0.1", "port": sshd.port, "user": sshd.user, "path": host.path,
            "folder": str(host.state), "container": "docker",
        }  # fmt: skip
        assert ctl(folder / "state", "add", "127.0.0.1", "--port", str(sshd.port), "--yes").returncode == 0
        sshd.admit(f"restrict {own_key(state / 'id_ed25519')}")
        try:
            yield host, state, SshSettings(hosts=[own])
        finally:
            host.shut_down()


async def request_of(provider: Provider, docker: Docker, script: str) -> LaunchRequest:
    (offer,) = (await provider.offers(OfferQuery())).offers
    return LaunchRequest(
        key=KEY, install=InstallId("lab"), offer=offer, price_max=offer.gpu_price, image=docker.image, disk_gb=1,
        start_script=script,
    )  # fmt: skip


@pytest.mark.parametrize("ends", ["by itself", "by us"])
def test_a_job_of_an_own_host_runs_in_its_image_and_leaves_no_container(
    docker: Docker, weed: Weed, tmp_path: Path, ends: str
) -> None:
    with with_own_host(tmp_path, docker) as (host, state, settings), rig_over(weed, tmp_path) as rig:
        grant = rig.grant(TRAIN, checkpoint_path="out")

        async def story() -> None:
            services = Services(
                install=InstallId("lab"), clock=FakeClock(), rng=Random(1), log=RecordingLog(), state_dir=state
            )
            async with PLUGIN.open(settings, services) as provider:
                request = await request_of(provider, docker, script_of(grant))
                made = (await provider.launch(request)).instance
                wait_for(lambda: bool(rig.accepted(1)), patience_s=60)
                assert docker.containers() == [KEY]
                assert (await provider.launch(request)).instance.ref == made.ref, "the same key twice is one machine"
                assert docker.containers() == [KEY]
                (found,) = (await provider.instances()).instances
                assert found.state is InstanceState.RUNNING
                if ends == "by us":
                    await provider.terminate(made.ref)
                    assert await provider.find(KEY) == ()
                else:
                    (host.folder(KEY) / "job" / "work" / "work" / "enough").touch()
                    wait_for(lambda: has_exit(rig), patience_s=60)
                wait_for(lambda: not docker.containers(), patience_s=60)
                wait_for(lambda: not host.members(KEY))

        anyio.run(story)
        assert f'--gpus "device={CARD}"' in docker.asked.read_text()


def boot(docker: Docker, folder: Path, image: str, start: str) -> str:
    """Boot a machine of a VM market to its end, and return what its console shows."""
    programs, work = folder / "bin", folder / "machine"
    programs.mkdir()
    work.mkdir()
    for name, text in (("docker", docker.program), ("shutdown", f"#!/bin/sh\ntouch {work}/shut-down\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    script = boot_script(
        image=image, start_script=start, container="docker", has_gpu=False, bytes_max=64 * 1024
    )  # fmt: skip
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SPOTD_HOME": "work"}
    console = folder / "console"
    with console.open("wb") as file:
        machine = subprocess.Popen(
            ["/bin/sh", "-c", script], cwd=work, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            machine.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)  # the watchdog, which a shutdown would end
    assert (work / "shut-down").exists(), console.read_text()
    return console.read_text()


def test_the_boot_script_of_a_rented_machine_runs_the_job_in_its_image(
    docker: Docker, weed: Weed, tmp_path: Path
) -> None:
    with rig_over(weed, tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo trained"])
        boot(docker, tmp_path, docker.image, script_of(grant))
        assert "trained" in log_of(rig)
        assert has_exit(rig)
    docker.run("rm", "-f", "spotd")


def test_an_image_that_is_not_there_ends_the_machine(docker: Docker, tmp_path: Path) -> None:
    assert "the image cannot be pulled" in boot(docker, tmp_path, docker.image.replace("trainer", "nobodys"), "true")
    assert not docker.containers()
