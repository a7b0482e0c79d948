"""Starting, stopping and reloading the daemon while machines run."""

from __future__ import annotations

import re
import signal
import socket
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from spotd_providers.local.settings import find_endpoint
from tests.e2e.ctl import assert_no_traceback, log_lines, spotctl
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, host, lab, until

pytestmark = pytest.mark.e2e
SCALE = 60.0
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(4))


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=f"[budget]\nmachines = 1\n{LEAVES_AT_ONCE}") as made:
        yield made
        assert_no_traceback(made)


def waits_for(path: Path) -> str:
    return f"until test -e {path}; do sleep 0.05; done"


def wait_running(found: Lab, job: str) -> None:
    until(lambda: found.state(job) == "RUNNING", what=f"{job} to run")


def wait_no_machines(found: Lab) -> None:
    until(lambda: not found.open_machines(), what="every machine to be gone")


def signal_daemon(found: Lab, number: signal.Signals) -> None:
    assert found.process is not None
    found.process.send_signal(number)


def test_a_stopped_daemon_leaves_the_machine_running_and_the_next_adopts_it(found: Lab, tmp_path: Path) -> None:
    found.fresh = True
    found.start()
    job = found.submit("net", waits_for(tmp_path / "release"))
    wait_running(found, job)
    assert found.stop() == 0
    (machine,) = found.running_machines()
    assert log_lines(found, "daemon.drained")[-1]["machines_left_running"] == 1
    found.start()
    assert log_lines(found, "daemon.adopted")[-1]["attempts"] == 1
    (tmp_path / "release").touch()
    found.wait_final(job)
    assert found.state(job) == "SUCCEEDED"
    wait_no_machines(found)
    assert {s.machine_id for s in found.ledger()} == {machine.machine_id}
    assert found.job(job)["recoveries"] == 0


def launches_sent(found: Lab) -> int:
    """How many launches the state holds whose call is being made."""
    state = found.folder / "state" / "state.sqlite"
    with closing(sqlite3.connect(f"file:{state}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM intents WHERE state = 'sent'").fetchone()[0])


def test_a_stopping_daemon_finishes_the_launch_under_way_and_begins_no_other(found: Lab) -> None:
    found.start()
    until(lambda: find_endpoint(found.market_folder), what="the market to run")
    found.control("faults", {"call": "launch", "slow_s": 8})
    first = found.submit("first", "true")
    until(lambda: launches_sent(found), what="the launch to begin")
    signal_daemon(found, signal.SIGTERM)
    until(lambda: log_lines(found, "daemon.stopping"), what="the daemon to stop")
    second = found.submit("second", "true")
    assert not found.is_dead
    assert found.exit_code() == 0
    assert log_lines(found, "daemon.drained")[-1]["complete"] is True
    (span,) = found.ledger()
    assert re.fullmatch(rf"spotd-lab\.[0-9a-z]{{6}}-{first}-1", span.key)
    found.start()
    found.wait_final(first, second)
    assert [found.state(first), found.state(second)] == ["SUCCEEDED", "SUCCEEDED"]
    assert not [e for e in found.events(first) if e["kind"] == "launch.unknown"]
    wait_no_machines(found)
    assert len(found.ledger()) == 2


def test_a_reload_puts_new_limits_in_force_and_says_which(found: Lab, tmp_path: Path) -> None:
    found.start()
    first = found.submit("first", waits_for(tmp_path / "release"))
    wait_running(found, first)
    second = found.submit("second", "true")
    until(lambda: "machines" in found.api.why(second)["why"]["sentence"], what="the second to wait for a machine")
    config = found.folder / "config.toml"
    text = config.read_text()

    config.write_text(text.replace("machines = 1", 'machines = "many"'))
    signal_daemon(found, signal.SIGHUP)
    (refused,) = until(lambda: log_lines(found, "config.refused"), what="the config to be refused")
    assert "budget" in refused["error"]
    assert "machines" in refused["error"]
    assert str(config) in refused["error"]
    assert found.state(second) in {"QUEUED", "WAITING_PRICE"}
    assert found.state(first) == "RUNNING"

    config.write_text(text.replace("machines = 1", "machines = 2"))
    signal_daemon(found, signal.SIGHUP)
    (reloaded,) = until(lambda: log_lines(found, "config.reloaded"), what="the config to be in force")
    assert reloaded["changed"] == ["[budget] machines"]
    assert reloaded["needs_restart"] == []
    found.wait_final(second)
    assert found.state(second) == "SUCCEEDED"
    (tmp_path / "release").touch()
    found.wait_final(first)


def test_a_socket_in_a_folder_that_others_may_enter_is_refused_and_the_folder_stays_as_it_is(found: Lab) -> None:
    run = found.folder / "run"
    run.chmod(0o755)
    found.start(wait=False)
    assert found.exit_code() == 1
    assert "others may enter the folder" in found.log_tail()
    assert stat.S_IMODE(run.stat().st_mode) == 0o755
    assert not (run / "spotd.sock").exists()


def test_the_service_manager_hears_of_start_life_reload_and_stop(found: Lab, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        heard: list[str] = []

        def hears(word: str) -> None:
            def arrived() -> bool:
                with suppress(BlockingIOError):
                    heard.append(manager.recv(4096).decode())
                return any(word in message.split("\n") for message in heard)

            until(arrived, what=f"the service manager to hear {word}")

        found.fresh = True
        found.environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        found.start(wait=False)
        hears("READY=1")
        assert found.answers(), "it is ready before it answers"
        for _ in range(3):
            heard.clear()
            hears("WATCHDOG=1")
        heard.clear()
        signal_daemon(found, signal.SIGHUP)
        hears("RELOADING=1")
        hears("READY=1")
        assert any(message.startswith("RELOADING=1\nMONOTONIC_USEC=") for message in heard)
        signal_daemon(found, signal.SIGTERM)
        hears("STOPPING=1")
        assert found.exit_code() == 0


CHECKPOINTS = """
for n in 1 2 3 4; do
  mkdir "$SPOTD_CHECKPOINT_DIR/tmp"; echo $n > "$SPOTD_CHECKPOINT_DIR/tmp/state"; touch "$SPOTD_CHECKPOINT_DIR/tmp/DONE"
  mv "$SPOTD_CHECKPOINT_DIR/tmp" "$SPOTD_CHECKPOINT_DIR/step-$n"
  until test -e {folder}/dead; do sleep 0.05; done
done
until test -e {folder}/release; do sleep 0.05; done
"""


def test_the_host_trains_and_saves_on_while_the_daemon_is_dead(found: Lab, tmp_path: Path) -> None:
    found.start()
    job = found.submit(
        "net", CHECKPOINTS.format(folder=tmp_path), checkpoint={"every": "1m", "settle": "1s", "keep": 20}
    )
    store = found.folder / "state" / "store" / "jobs" / job / "attempts" / "1" / "checkpoints"
    until(lambda: found.api.checkpoints(job)["checkpoints"], what="the first checkpoint")
    found.kill()
    assert len(list(store.iterdir())) == 1
    (tmp_path / "dead").touch()
    until(lambda: len(list(store.iterdir())) == 4, what="three more checkpoints")
    found.start()
    until(lambda: len(found.api.checkpoints(job)["checkpoints"]) == 4, what="them to be accepted")
    (tmp_path / "release").touch()
    found.wait_final(job)
    assert found.state(job) == "SUCCEEDED"
    wait_no_machines(found)
    assert len({s.machine_id for s in found.ledger()}) == 1


def test_the_log_outlives_every_machine_of_the_job(found: Lab) -> None:
    found.start()
    job = found.submit("net", 'echo "words of $SPOTD_ATTEMPT"; test "$SPOTD_ATTEMPT" -gt 1 || sleep 600')
    wait_running(found, job)
    until(lambda: "words of 1" in spotctl(found, "logs", job).stdout, what="the first attempt's words", every=0.2)
    (machine,) = found.running_machines()
    found.control("preempt", {"machine": machine.machine_id, "notice": False, "lasting": "2h"})
    found.wait_final(job)
    wait_no_machines(found)
    for one in {s.machine_id for s in found.ledger()}:
        assert not found.machine_folder(one).exists() or not list(found.machine_folder(one).glob("spotd/log*"))
    shown = spotctl(found, "logs", job)
    assert shown.returncode == 0
    words = [line for line in shown.stdout.splitlines() if line.startswith("words of")]
    assert words == ["words of 1", "words of 2"]
    assert spotctl(found, "logs", job, "--attempt", "1").stdout.count("words of") == 1
