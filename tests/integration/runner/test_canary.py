"""The canary on a real machine: what it measures, what it refuses, and what ends it. The GPUs and torch are doubles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner.canary import _BURSTS_MIN, _MULTIPLY, FILE, Canary, _rows
from spotd_jobs.runner.process import CANARY_MARK, MARK, JobProcess, marked_processes
from spotd_jobs.wire.grant import CanaryRules, Grant
from spotd_jobs.wire.reports import Outcome, Phase
from tests.integration.runner.rig import PATIENCE_S, Machine, Rig, until
from tests.integration.runner.servers import Answer, Server

pytestmark = pytest.mark.e2e
RULES = CanaryRules(
    time_s=20.0, may_refuse=True, gpus=2, gpu_memory_mb_min=68_000, tflops=989.0, tflops_min=247.25, download_mbps=1000
)
RUN = ["/bin/sh", "-c", "echo it runs"]
DEVICES = {"TORCH_CUDA": "12.8", "TORCH_DEVICES": "2"}
CARD = "{index}, NVIDIA H100 80GB HBM3, 0, 4, {memory}, 70.0, 31"
TORCH = """
import os, time
clock, begun = [0.0], time.monotonic()
time.perf_counter = lambda: clock[0]
float16 = "float16"
if os.environ["TORCH"] == "broken":
    raise OSError("libcudart.so: cannot open shared object file")
class version:
    cuda = os.environ["TORCH_CUDA"] or None
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: int(os.environ["TORCH_DEVICES"]))
    synchronize = staticmethod(lambda device: None)
def randn(size, other, device, dtype):
    if os.environ["TORCH"] == "error":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    while os.environ["TORCH"] == "hangs":
        time.sleep(60)
    return size
def mm(size, other, out=None):
    clock[0] += 2 * size**3 / (float(os.environ["TORCH"]) * 1e12)
    return size
"""


def environment(
    folder: Path, *, cards: int = 2, memory: int = 81_559, torch: str = "600", **more: str
) -> dict[str, str]:
    """A machine with so many cards, and with a torch of this many TFLOPS; empty: without one."""
    tools, modules = folder / "tools", folder / "modules"
    for made in (tools, modules):
        made.mkdir()
    rows = "\n".join(CARD.format(index=index, memory=memory) for index in range(cards))
    smi = tools / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{rows or more.pop('none', '')}\nEND\n")
    smi.chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    if torch:
        (modules / "torch.py").write_text(TORCH)
    return {"PATH": f"{tools}{os.pathsep}/usr/bin:/bin", "PYTHONPATH": str(modules), "TORCH": torch, **DEVICES, **more}


def with_canary(rig: Rig, **changes: Any) -> Grant:
    return rig.renew(rig.grant(RUN), canary=RULES.model_copy(update=changes))


def outcome(machine: Machine) -> Outcome:
    done = machine.events()[-1].exit()
    assert done is not None, machine.console()
    return done.outcome


def has_run(machine: Machine) -> bool:
    return "it runs" in machine.log()


def canaries(rig: Rig) -> list[int]:
    """The processes of the matrix multiply."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            text, command = environ.read_bytes(), (environ.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"torch.mm" in command and f"PYTHONPATH={rig.folder}".encode() in text:
            found.append(int(environ.parent.name))
    return found


def test_a_machine_that_is_what_was_sold_is_measured_and_then_runs_its_job(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(with_canary(rig), env=environment(tmp_path))
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.SUCCEEDED
        told = machine.event("canary").data
        assert told["unfit"] is None
        for part in ("2 GPUs, 79.6 GiB", "disk ", "600 of 989 TFLOPS"):
            assert part in str(told["finding"])
        assert "[spotd] canary: 2 GPUs" in machine.log()
        assert has_run(machine)
        assert not (machine.home / "canary").exists()


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        pytest.param({"cards": 1}, "1 of 2 GPUs", id="a GPU is missing"),
        pytest.param({"memory": 40_960}, "a GPU of 40.0 GiB, the least is 66.4 GiB", id="less memory"),
        pytest.param({"cards": 0, "none": "No devices were found"}, "0 of 2 GPUs", id="the driver finds none"),
        pytest.param({"TORCH_DEVICES": "1"}, "1 of 2 GPUs in torch", id="torch finds one"),
        pytest.param({"torch": "40"}, "40 TFLOPS, the least for this GPU is 247", id="slow"),
    ],
)
def test_a_machine_that_is_less_than_what_was_sold_ends_before_anything_of_the_job_begins(
    tmp_path: Path, machine: dict[str, Any], why: str
) -> None:
    with Rig(tmp_path) as rig:
        found = rig.start(with_canary(rig), env=environment(tmp_path, **machine))
        assert found.wait() == 0
        done = found.events()[-1].exit()
        assert done is not None
        assert (done.outcome, done.phase, done.reason) == (Outcome.UNFIT, Phase.CANARY, f"its canary found {why}")
        assert found.event("canary").data["unfit"] == why
        assert not has_run(found)
        assert not found.events("started")
        assert json.loads((found.directory / "machine-done").read_text())["outcome"] == "unfit", "the machine ends"


@pytest.mark.parametrize(
    ("machine", "rules", "said"),
    [
        pytest.param({"cards": 1}, {"may_refuse": False}, "less than was sold", id="after three launches"),
        pytest.param({"cards": 0, "torch": ""}, {}, "no tool of the driver shows its GPUs", id="no driver"),
        pytest.param({"torch": ""}, {}, "no Python of the image has torch", id="no torch"),
        pytest.param({"torch": "broken"}, {}, "no Python of the image has torch", id="a broken torch"),
        pytest.param({"torch": "error"}, {}, "CUDA error: uncorrectable ECC", id="an error of CUDA"),
        pytest.param({"torch": "1"}, {"tflops": None, "tflops_min": None}, "1 TFLOPS", id="an unknown GPU"),
        pytest.param({"cards": 3}, {}, "3 GPUs", id="more than was sold"),
        pytest.param({"TORCH_DEVICES": "1", "TORCH_CUDA": ""}, {}, "600 of 989", id="a torch for other cards"),
        pytest.param({"TORCH_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, {}, "600 of 989", id="some are hidden"),
    ],
)
def test_what_shows_no_lack_refuses_nothing_and_is_said(
    tmp_path: Path, machine: dict[str, Any], rules: dict[str, Any], said: str
) -> None:
    with Rig(tmp_path) as rig:
        found = rig.start(with_canary(rig, **rules), env=environment(tmp_path, **machine))
        assert found.wait() == 0
        assert outcome(found) is Outcome.SUCCEEDED
        assert said in str(found.event("canary").data["finding"])
        assert has_run(found)


def test_one_that_hangs_is_killed_at_its_time_and_the_job_runs(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(with_canary(rig, time_s=2.0), env=environment(tmp_path, torch="hangs"))
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.SUCCEEDED
        told = machine.event("canary").data
        assert "there was no time for it" in str(told["finding"])
        assert isinstance(told["seconds"], float)
        assert told["seconds"] >= 2.0
        assert has_run(machine)
        assert not canaries(rig)


@pytest.mark.parametrize("how", ["notice", "order", "signal"])
def test_what_ends_the_attempt_meanwhile_ends_the_canary_at_once(tmp_path: Path, how: str) -> None:
    with Rig(tmp_path) as rig:
        grant = with_canary(rig, time_s=600.0)
        machine = rig.start(grant, env=environment(tmp_path, torch="hangs"))
        until(lambda: canaries(rig), "the matrix multiply")
        until(lambda: (beat := machine.heartbeat()) is not None and beat.phase is Phase.CANARY, "a heartbeat of it")
        if how == "notice":
            (machine.home / "notice").write_text(json.dumps({"at": None, "reason": "outbid"}))
        elif how == "order":
            rig.order_stop(grant)
        else:
            machine.process.send_signal(signal.SIGTERM)
        assert machine.wait() == 0
        assert outcome(machine) is (Outcome.STOPPED if how == "order" else Outcome.PREEMPTED)
        assert not machine.events("canary")
        assert not has_run(machine)
        until(lambda: not canaries(rig), "the end of the matrix multiply")


def test_stopping_it_kills_its_processes_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path, torch="hangs").items():
        monkeypatch.setenv(name, value)
    rules = json.loads(RULES.model_copy(update={"time_s": 600.0}).model_dump_json())
    with Rig(tmp_path) as rig:
        canary = Canary(rules, {}, str(tmp_path), "a mark", {})
        measuring = threading.Thread(target=canary.measure)
        measuring.start()
        until(lambda: canaries(rig), "the matrix multiply")
        canary.stop()
        measuring.join(timeout=PATIENCE_S)
        assert not measuring.is_alive()
        assert not canaries(rig)
        assert "there was no time for it" in canary.words()


def test_a_runner_that_is_started_again_measures_nothing_and_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, env = with_canary(rig, time_s=600.0), environment(tmp_path, torch="hangs")
        machine = rig.start(grant, env=env)
        until(lambda: canaries(rig), "the matrix multiply")
        machine.process.kill()
        machine.process.wait()
        until(lambda: not canaries(rig), "the end of the matrix multiply")
        again = rig.start(grant, "m1", env=env)
        assert again.wait() == 0
        assert outcome(again) is Outcome.SUCCEEDED
        assert has_run(again)
        assert not again.events("canary")


def test_what_a_measurement_that_was_cut_off_wrote_is_removed(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, env = with_canary(rig, time_s=600.0), environment(tmp_path, torch="hangs")
        machine = rig.start(grant, env=env)
        until(lambda: canaries(rig), "the matrix multiply")
        machine.process.kill()
        machine.process.wait()
        (machine.home / FILE).write_bytes(b"half of what the disk was to take")
        again = rig.start(grant, "m1", env=env)
        assert again.wait() == 0
        assert not (again.home / FILE).exists()


def test_a_thread_that_comes_late_kills_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of the multiply hangs in the disk beyond all graces; by then the job's own setup runs."""
    for name, value in environment(tmp_path, torch="hangs").items():
        monkeypatch.setenv(name, value)
    begins, goes_on = threading.Event(), threading.Event()
    right = JobProcess.__init__

    def late(self: JobProcess, *rest: Any) -> None:
        begins.set()
        assert goes_on.wait(PATIENCE_S)
        right(self, *rest)

    monkeypatch.setattr(JobProcess, "__init__", late)
    rules = json.loads(RULES.model_copy(update={"time_s": 600.0}).model_dump_json())
    with Rig(tmp_path) as rig, subprocess.Popen(["sleep", "60"], env={MARK: "a mark"}) as setup:
        canary = Canary(rules, {}, str(tmp_path), CANARY_MARK % "a mark", {})
        measuring = threading.Thread(target=canary.measure)
        measuring.start()
        assert begins.wait(PATIENCE_S)
        canary.stop()
        goes_on.set()
        measuring.join(timeout=PATIENCE_S)
        assert not measuring.is_alive()
        assert not canaries(rig)
        assert setup.poll() is None
        setup.kill()


def test_its_processes_carry_a_mark_of_their_own(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(with_canary(rig, time_s=600.0), env=environment(tmp_path, torch="hangs"))
        until(lambda: canaries(rig), "the matrix multiply")
        mark = (machine.home / "mark").read_text()
        assert set(canaries(rig)) <= marked_processes(CANARY_MARK % mark)
        assert not marked_processes(mark)
        machine.process.send_signal(signal.SIGTERM)
        assert machine.wait() == 0


CARD_OF_MILLISECONDS = """
import os, time
setting = [float(part) for part in os.environ["CARD"].split()]
speed, starts_in, worked, started = setting[0] * 1e12, setting[1], {}, set()
clock = [time.monotonic()]
time.monotonic = time.perf_counter = lambda: clock[0]
float16 = "float16"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: int(setting[2]))
    @staticmethod
    def synchronize(device):
        clock[0] += 20e-6
def randn(size, other, device, dtype):
    if device not in started:
        started.add(device)
        clock[0] += starts_in
    return size, device
def mm(one, other, out=None):
    size, device = one
    done = worked.get(device, 0.0)
    took = max(15e-6, 2 * size**3 / speed * (6 if done < 0.05 else 1))
    worked[device] = done + took
    clock[0] += took
    return one
"""
"""A card that takes seconds to start, whose clocks rise with work, and of which each call costs time by itself."""


@pytest.mark.parametrize(
    ("speed", "starts_in", "cards", "left", "is_sure"),
    [
        pytest.param(600, 1.0, 1, 40, True, id="as most"),
        pytest.param(600, 3.5, 1, 40, True, id="CUDA starts slowly"),
        pytest.param(600, 2.0, 8, 30, True, id="eight"),
        pytest.param(600, 1.0, 8, 12, True, id="eight in little time"),
        pytest.param(600, 4.9, 1, 5, None, id="hardly any time"),
        pytest.param(600, 6.0, 1, 5, None, id="no time"),
        pytest.param(5, 2.0, 1, 40, True, id="a slow card"),
        pytest.param(5, 2.0, 1, 4, False, id="a slow card in little time"),
    ],
)
def test_a_good_card_is_measured_well_however_slowly_it_starts(
    tmp_path: Path, speed: int, starts_in: float, cards: int, left: int, *, is_sure: bool | None
) -> None:
    (tmp_path / "torch.py").write_text(CARD_OF_MILLISECONDS)
    env = {"PYTHONPATH": str(tmp_path), "CARD": f"{speed} {starts_in} {cards}"}
    done = subprocess.run([sys.executable, "-c", _MULTIPLY, str(left)], env=env, capture_output=True, check=True)
    found = [row for row in _rows(done.stdout) if "tflops" in row]
    assert len(found) == cards, done.stderr
    for row in found:
        if is_sure is not None:
            assert (row["bursts"] >= _BURSTS_MIN) is is_sure
        if row["bursts"] >= _BURSTS_MIN:
            assert 0.9 * speed < row["tflops"] < 1.01 * speed


def test_a_speed_of_few_bursts_is_shown_and_refuses_nothing(tmp_path: Path) -> None:
    rules = json.loads(RULES.model_dump_json())
    canary = Canary(rules, {}, str(tmp_path), "mark", {})
    canary._judge_speeds([{"tflops": 40.0, "bursts": _BURSTS_MIN - 1}, {"tflops": 300.0, "bursts": _BURSTS_MIN}])
    assert (canary.unfit, canary.words()) == ("", "40 of 989 TFLOPS")
    canary._judge_speeds([{"tflops": 40.0, "bursts": _BURSTS_MIN}])
    assert canary.unfit == "40 TFLOPS, the least for this GPU is 247"


def test_a_grant_of_a_daemon_that_knows_of_no_canary_measures_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(RUN)
        path = rig.store.path(grant.upload.prefix + "grant.json")
        older = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "canary"}
        path.write_text(json.dumps(older))
        machine = rig.start(grant, env=environment(tmp_path, cards=1))
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.SUCCEEDED
        assert not machine.events("canary")


@pytest.mark.parametrize(
    ("bytes_", "is_said"), [pytest.param(8_000_000, True, id="8 MB"), pytest.param(1_000, False, id="1 kB")]
)
def test_the_line_is_measured_by_what_is_large_enough(tmp_path: Path, bytes_: int, *, is_said: bool) -> None:
    with Server(lambda _request: Answer(200, b"c" * bytes_)) as server:
        code = {"url": f"{server.url}/code", "size": bytes_}
        rules = json.loads(RULES.model_dump_json())
        canary = Canary(rules, {"code": code}, str(tmp_path), "mark", {})
        canary._download()
        assert (" of 1000 Mbit/s" in canary.words()) is is_said
