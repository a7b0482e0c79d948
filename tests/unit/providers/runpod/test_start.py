"""The real start script and runner in RunPod's pods: any Python, no curl, no wget, started again at any time."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from spotd_jobs.start import start_script
from spotd_jobs.wire.grant import EndMethod, GangGrant, Grant, GrantStopOrder, Orders, SelfTerminate
from spotd_providers.local.hosts import Machines
from spotd_providers.runpod.offers import DIRECT_SSH, SCRIPT_BYTES_MAX
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.runpod import Phase, Pod, Quirks
from tests.fakes.runpod.clusters import Cluster
from tests.fakes.ssh.sshd import SSHD
from tests.integration.runner.images import image_with, pythons
from tests.integration.runner.rig import Rig
from tests.unit.providers.local.waiting import until
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

pytestmark = pytest.mark.e2e
SAY = ["/bin/sh", "-c", "echo ran; command -v curl wget; exit 0"]


def fit(h: RunpodHarness, rig: Rig, python: str, run: list[str] = SAY) -> str:
    """The start script of an attempt whose machines have this Python, neither curl nor wget, and end themselves."""
    path = image_with(h.folder / "image", python)
    h.cloud.machines = Machines(h.folder / "machines", clock=h.fake_clock, path=path)
    grant = rig.grant(run)
    rig.renew(grant, self_terminate=SelfTerminate(method=EndMethod.RUNPOD, base_url=h.base_url))
    return start_script(grant.grant_url, limit_bytes=SCRIPT_BYTES_MAX)


def said(rig: Rig) -> str:
    """Everything that the job printed, on whatever boot."""
    keys = [key for key in rig.store.keys("") if "/log/" in key]
    return b"".join(rig.store.get(key) or b"" for key in keys).decode()


async def running(h: RunpodHarness, pod: Pod) -> None:
    """The pod runs: its image is pulled and its container started, each in its time."""
    for _ in range(9):
        h.cloud.advance()
        if pod.phase is Phase.RUNNING:
            return
        await h.settle()
    pytest.fail(f"the pod does not come up: {pod.phase}")


@pytest.mark.parametrize("python", pythons("3.13"))
def test_a_job_runs_once_and_the_machine_ends_itself_under_this_python(python: str, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, python)
            launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
            pod = h.cloud.pods[launched.instance.ref.instance_id]
            await running(h, pod)
            until(lambda: pod.phase is Phase.TERMINATED, what="the machine's own end")
            until(lambda: not h.cloud.machines.alive(pod.pod_id), what="the end of its processes")
            assert said(rig) == "ran\n"
            assert await provider.find(launched.instance.key) == ()

    play(tmp_path, story)


@pytest.mark.parametrize("restarts", [True, False], ids=["started again on a wiped disk", "left exited"])
def test_a_pod_that_starts_again_after_its_job_is_done_runs_nothing_and_ends_itself(
    restarts: bool, tmp_path: Path
) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, "3.8")
            launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
            pod = h.cloud.pods[launched.instance.ref.instance_id]
            await running(h, pod)
            h.faults.answer(Call.TERMINATE, Canned(status=503), times=1000)
            until(lambda: h.requests(Call.TERMINATE), what="an end that RunPod does not accept")
            # The daemon has read how the job ended, and asks the machine for nothing but its end.
            (grant,) = (
                Grant.model_validate_json(rig.store.get(key) or b"")
                for key in rig.store.keys("")
                if key.endswith("grant.json")
            )
            rig.renew(grant, orders=Orders(stop=GrantStopOrder(reason="over", grace_s=0)))
            h.cloud.machines.kill(pod.pod_id)
            h.cloud.advance()
            h.faults.clear()
            if not restarts:
                assert pod.phase is Phase.EXITED
                h.cloud.act(pod.pod_id, "start")
            await running(h, pod)
            until(lambda: pod.phase is Phase.TERMINATED, what="the pod's own end")
            assert said(rig) == "ran\n"

    play(tmp_path, story, Quirks(requests_a_minute=5000, restarts=restarts))


@pytest.mark.parametrize("may", [True, False], ids=["its key may", "its key may not"])
def test_machines_of_a_cluster_work_together_and_the_first_one_ends_all(tmp_path: Path, *, may: bool) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, "3.8", ["/bin/sh", "-c", 'echo "$SPOTD_NODE_RANK of $SPOTD_NODES at $MASTER_ADDR"'])
            (key,) = (key for key in rig.store.keys("") if key.endswith("grant.json"))
            grant = Grant.model_validate_json(rig.store.get(key) or b"")
            first_url = rig.store.url(grant.upload.prefix + "gang.json")
            rig.renew(grant, gang=GangGrant(nodes=2, first_url=first_url, wait_s=20))
            page = await provider.offers(h.query())
            offer = next(gang_of(one, 2) for one in page.offers if one.nodes_min > 1)
            launched = await provider.launch(h.request(offer, start_script=script))
            cluster = h.cloud.clusters.by_id[launched.instance.ref.instance_id]
            for pod in cluster.pods.values():
                await running(h, pod)
            if may:
                until(lambda: not cluster.exists, what="the end of all")
            else:
                until(lambda: any("ended yet" in one for one in consoles(h, 0, cluster)), what="a refused end")
                assert cluster.exists
                await provider.terminate(launched.instance.ref)
            assert any("the first machine ends all" in one for one in consoles(h, 1, cluster))
            lines = {line.removeprefix("[1] ") for line in said(rig).splitlines() if " of " in line}
            assert lines == {"0 of 2 at 127.0.0.2", "1 of 2 at 127.0.0.2"}
            ended = [sent.path for sent in h.requests(Call.TERMINATE)]
            assert set(ended) == {f"/v2/clusters/{cluster.cluster_id}"}
            assert not h.live()

    quirks = Quirks(requests_a_minute=5000, pod_key_ends_cluster=may)
    play(tmp_path, story, quirks, cluster_gpu_counts=(2,))


def consoles(h: RunpodHarness, rank: int, cluster: Cluster) -> list[str]:
    return h.cloud.machines.console(cluster.pods[rank].pod_id, lines=100)


@pytest.mark.skipif(SSHD is None or os.getuid() != 0, reason="needs openssh-server and root, as in a pod")
@pytest.mark.parametrize("has_key", [True, False])
def test_the_images_ssh_server_takes_the_accounts_key_alone_and_sees_no_environment(
    tmp_path: Path, has_key: bool
) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "mine")], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place = Path("/run") / f"spotd-ssh-{os.getpid()}"
    script = DIRECT_SSH.replace("/run/spotd-ssh", str(place)).replace("-p 22", f"-p {port} -o PidFile={place}/pid")
    key = (tmp_path / "mine.pub").read_text().strip() if has_key else ""
    environment = {"PATH": os.environ["PATH"], "PUBLIC_KEY": key, "RUNPOD_API_KEY": "canary"}
    try:
        started = subprocess.run(
            ["/bin/sh", "-ec", f"{script}echo job"], env=environment, capture_output=True, check=True
        )
        assert started.stdout == b"job\n", "the job starts whatever became of the ssh server"
        if not has_key:
            assert not place.exists()
            return
        assert _login(port, tmp_path / "other").returncode != 0
        done = _login(port, tmp_path / "mine")
        assert done.returncode == 0, done.stderr
        assert "canary" not in done.stdout
        server = int((place / "pid").read_text())
        assert b"canary" not in Path(f"/proc/{server}/environ").read_bytes()
    finally:
        with suppress(OSError, ValueError):
            os.kill(int((place / "pid").read_text()), signal.SIGTERM)
        shutil.rmtree(place, ignore_errors=True)


def _login(port: int, identity: Path) -> subprocess.CompletedProcess[str]:
    options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "IdentitiesOnly=yes"]
    command = ["ssh", "-F", "none", "-p", str(port), "-i", str(identity), *(f"-o{option}" for option in options)]
    return subprocess.run([*command, "root@127.0.0.1", "env"], capture_output=True, text=True, check=False, timeout=60)
