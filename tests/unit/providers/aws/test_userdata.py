"""What a machine runs at its first boot, run as a real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_jobs.runner.store import LeaseFile
from spotd_providers.aws.doctor import SCRIPT_BYTES_MAX, USER_DATA_BYTES_MAX, user_data
from spotd_providers.local.hosts import REAL_TIME, Machines
from tests.cases import every
from tests.unit.providers.local.waiting import until

IMAGE = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"
SHUTDOWN = '#!/bin/sh\necho "shutdown $*" >>"$SPOTD_HOME/calls"\n'
DOCKER = """#!/bin/sh
echo "docker $*" >>"$SPOTD_HOME/calls"
case "$1" in
pull) [ ! -e "$SPOTD_HOME/no-image" ] ;;
run) cd "$(dirname "$SPOTD_HOME")" && exec /bin/sh ./start.sh ;;
esac
"""
SLEEP = "#!/bin/sh\n"
WORKS = "#!/bin/sh\n"
CURL = """#!/bin/sh
for last; do :; done
case "$last" in
*/api/token) echo token-7 ;;
*/ami-launch-index) [ -e "$SPOTD_HOME/asked" ] && echo 3 || { : >"$SPOTD_HOME/asked"; false; } ;;
*/local-ipv4) echo 172.31.0.9 ;;
*/spot/instance-action) case "$*" in *token-7*) [ -e "$SPOTD_HOME/taken" ] ;; *) false ;; esac ;;
esac
"""


class Host:
    """A machine whose docker, shutdown and sleep only take notes."""

    def __init__(self, folder: Path, **more: str) -> None:
        binaries = folder / "bin"
        binaries.mkdir()
        for name, text in {
            "shutdown": SHUTDOWN,
            "docker": DOCKER,
            "sleep": SLEEP,
            "curl": CURL,
            "nvidia-smi": WORKS,
            **more,
        }.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        self.machines = Machines(folder / "m", clock=REAL_TIME, path=f"{binaries}:/usr/bin:/bin")

    def run(self, script: str, *files: str) -> list[str]:
        """What was called until the machine shut down, and then what it printed."""
        home = self.machines.home("m")
        home.mkdir(parents=True)
        for name in files:
            (home / name).touch()
        self.machines.start("m", script)
        calls = home / "calls"
        try:
            until(lambda: calls.exists() and "shutdown" in calls.read_text(), what="the shutdown")
            return [*calls.read_text().splitlines(), *self.machines.console("m", lines=20)]
        finally:
            self.machines.kill("m")


def test_the_image_is_run_with_the_start_script_and_then_the_machine_ends(tmp_path: Path) -> None:
    script = user_data(image=IMAGE, start_script="echo 'it runs'\nexit 3\n", container="docker")
    seen = Host(tmp_path).run(script)
    assert f"docker pull -q {IMAGE}" in seen
    ran = next(line for line in seen if line.startswith("docker run"))
    assert "--gpus all" in ran
    assert "--user 0" in ran
    assert "--entrypoint /bin/sh" in ran
    assert ran.endswith(f"{IMAGE} ./start.sh")
    assert "it runs" in seen
    assert "shutdown -h now" in seen
    assert "spotd: the start script has ended (3)" in seen


def test_the_checkpoint_is_fetched_while_the_image_is_pulled_and_nothing_else_is_done(tmp_path: Path) -> None:
    start = 'if [ -n "${SPOTD_PREFETCH:-}" ]; then echo fetched >"$SPOTD_HOME/ahead"; exit 1; fi; echo "the job runs"'
    pull = DOCKER.replace("pull) ", 'pull) until [ -e "$SPOTD_HOME/ahead" ]; do :; done; ')
    seen = Host(tmp_path, docker=pull).run(user_data(image=IMAGE, start_script=start, container="docker"))
    assert "the job runs" in seen
    assert "spotd: the start script has ended (0)" in seen


def test_a_machine_whose_gpu_does_not_work_ends_instead_of_training_without_it(tmp_path: Path) -> None:
    script = user_data(image=IMAGE, start_script="echo never", container="docker")
    seen = Host(tmp_path, **{"nvidia-smi": "#!/bin/sh\nexit 9\n"}).run(script)
    assert "spotd: this machine's GPU does not work" in seen
    assert "shutdown -h now" in seen
    assert not any(line.startswith("docker") for line in seen)


def test_a_pull_that_hangs_is_given_up_so_that_no_machine_waits_for_ever(tmp_path: Path) -> None:
    script = user_data(image=IMAGE, start_script="echo never", container="docker")
    seen = Host(tmp_path, timeout='#!/bin/sh\necho "timeout $*" >>"$SPOTD_HOME/calls"\nexit 124\n').run(script)
    assert f"timeout 900 docker pull -q {IMAGE}" in seen
    assert "spotd: the image cannot be pulled" in seen
    assert "shutdown -h now" in seen


def test_an_image_that_cannot_be_pulled_ends_the_machine_after_three_tries(tmp_path: Path) -> None:
    script = user_data(image=IMAGE, start_script="echo never", container="docker")
    seen = Host(tmp_path).run(script, "no-image")
    assert seen.count(f"docker pull -q {IMAGE}") == 3
    assert "spotd: the image cannot be pulled" in seen
    assert "shutdown -h now" in seen
    assert not any(line.startswith("docker run") for line in seen)


def test_without_a_container_the_start_script_runs_on_the_machine_itself(tmp_path: Path) -> None:
    seen = Host(tmp_path).run(user_data(image="none", start_script="echo plain", container="none"))
    assert "plain" in seen
    assert not any(line.startswith("docker") for line in seen)


def test_a_start_script_that_says_it_is_done_ends_the_machine_though_it_still_runs(tmp_path: Path) -> None:
    host = Host(tmp_path, sleep="#!/bin/sh\nexec /bin/sleep 0.05\n")
    seen = host.run(user_data(image="none", start_script=": >machine-done\n/bin/sleep 600", container="none"))
    assert "shutdown -h now" in seen


SLOW_WAIT = '#!/bin/sh\necho "sleep $*" >>"$SPOTD_HOME/calls"\n'


@pytest.mark.parametrize("taken", [True, False])
def test_a_machine_that_ec2_takes_waits_for_it_since_its_first_hour_is_free_then(tmp_path: Path, taken: bool) -> None:
    script = user_data(image="none", start_script="true", container="none")
    seen = Host(tmp_path, sleep=SLOW_WAIT).run(script, *(["taken"] if taken else []))
    assert ("sleep 150" in seen) is taken
    assert "shutdown -h now" in seen


@every("container", ["none", "docker"])
def test_one_of_several_learns_its_place_from_ec2_though_that_answers_late(tmp_path: Path, container: str) -> None:
    folder = tmp_path / container
    folder.mkdir()
    says = 'echo "place $SPOTD_NODE_RANK $SPOTD_NODE_ADDRESS"'
    script = user_data(image=IMAGE, start_script=says, container=container, nodes=4)
    seen = Host(folder, sleep=SLOW_WAIT).run(script)
    assert "place 3 172.31.0.9" in seen
    assert seen.count("sleep 2") == 1, "the first answer was a failure"
    ran = [line for line in seen if line.startswith("docker run")]
    assert all("-e SPOTD_NODE_RANK -e SPOTD_NODE_ADDRESS" in line for line in ran)
    assert len(ran) == (container == "docker")
    alone = user_data(image=IMAGE, start_script=says, container=container)
    assert "SPOTD_NODE" not in alone.replace(says, "")


def test_one_of_several_that_does_not_learn_its_place_runs_nothing_and_ends(tmp_path: Path) -> None:
    script = user_data(image="none", start_script="echo never", container="none", nodes=2)
    seen = Host(tmp_path, curl="#!/bin/sh\nexit 22\n").run(script)
    assert "spotd: this machine does not learn which of several it is" in seen
    assert "shutdown -h now" in seen
    assert "never" not in seen


SHORT_SLEEP = "#!/bin/sh\nexec /bin/sleep 0.05\n"


def test_a_runner_that_hangs_after_its_last_renewal_is_ended_by_the_machines_own_watchdog(tmp_path: Path) -> None:
    hangs = 'printf "%010d %06d\\n" 7 1 >machine-lease; exec /bin/sleep 600'
    seen = Host(tmp_path, sleep=SHORT_SLEEP).run(user_data(image="none", start_script=hangs, container="none"))
    assert "spotd: no lease was renewed for 1 s: this machine ends" in seen
    assert "shutdown -h now" in seen


def test_a_machine_whose_lease_is_renewed_is_left_alone_by_the_watchdog(tmp_path: Path) -> None:
    renews = (
        'n=0; while [ "$n" -lt 9 ]; do n=$((n + 1)); printf "%010d %06d\\n" "$n" 1 >machine-lease; /bin/sleep 0.3; '
        "done; "
        "echo 'the job is done'"
    )
    seen = Host(tmp_path, sleep=SHORT_SLEEP).run(user_data(image="none", start_script=renews, container="none"))
    assert "the job is done" in seen
    assert not any("no lease was renewed" in line for line in seen)


@pytest.mark.parametrize("mark", ["", "7", "7 ", "7 -1", "7 soon", "7 1000000", "7 $(reboot)", "x" * 5000])
def test_a_mark_that_cannot_be_read_ends_no_machine(tmp_path: Path, mark: str) -> None:
    odd = f"printf '%s' '{mark}' >machine-lease; /bin/sleep 0.3; echo 'the job is done'"
    seen = Host(tmp_path, sleep=SHORT_SLEEP).run(user_data(image="none", start_script=odd, container="none"))
    assert "the job is done" in seen
    assert not any("no lease was renewed" in line for line in seen)


def test_the_runners_mark_is_what_the_watchdog_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mark = LeaseFile(wanted=True)
    mark.mark(1800.0, 90.0)
    first = (tmp_path / "machine-lease").read_text()
    mark.mark(1e308, 1e308)
    assert (first, (tmp_path / "machine-lease").read_text()) == ("0000000001 003690\n", "0000000002 999999\n")
    (tmp_path / "machine-lease").unlink()
    (tmp_path / "machine-lease").mkdir()
    mark.mark(1.0, 1.0)
    LeaseFile(wanted=False).mark(1.0, 1.0)


def test_a_script_that_holds_the_end_mark_arrives_whole(tmp_path: Path) -> None:
    script = "cat <<'SPOTD'\nSPOTD_ inner\nSPOTD\necho after"
    seen = Host(tmp_path).run(user_data(image="none", start_script=script, container="none"))
    assert "SPOTD_ inner" in seen
    assert "after" in seen


@every("image", ["", "-v", "a b", "x;reboot", "$(id)", "x" * 600])
def test_what_is_no_image_name_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="image name"):
        user_data(image=image, start_script="true", container="docker")


@every("nodes", [1, 2])
def test_the_longest_script_with_the_longest_image_name_fits(nodes: int) -> None:
    text = user_data(image="i" * 512, start_script="#" * SCRIPT_BYTES_MAX, container="docker", nodes=nodes)
    assert len(text.encode()) <= USER_DATA_BYTES_MAX
