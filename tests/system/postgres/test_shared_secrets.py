"""Jobs with secrets over a state in PostgreSQL: who has the key starts them, who has not lets them wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotd.client.transport import DaemonRefused
from tests.e2e.ctl import log_lines, spotctl
from tests.e2e.harness import FINAL, Lab, until
from tests.system.engines.postgres import Postgres
from tests.system.postgres.pairs import leads, two_daemons

pytestmark = pytest.mark.system
CANARY = "canary-of-a-secret-7f3a"


def key_file(folder: Path, name: str) -> Path:
    """A key as the command makes it."""
    path = folder / name
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spotd")), "secrets-key", str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert path.read_text().strip() not in done.stdout + done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    return path


def named(path: Path) -> str:
    return f'secrets_key = {{ file = "{path}" }}'


def submit(one: Lab, name: str, folder: Path) -> str:
    """A job that writes what it was given, then waits."""
    run = f'echo "$TOKEN" > {folder}/{name}.given; until test -e {folder}/{name}.release; do sleep 0.05; done'
    return one.submit(name, run, secrets=["TOKEN"], secret_values={"TOKEN": CANARY})


def refused(one: Lab, folder: Path) -> str:
    with pytest.raises(DaemonRefused) as caught:
        submit(one, "refused", folder)
    assert CANARY not in str(caught.value)
    return f"{caught.value}; {caught.value.hint}"


def reads_reason(one: Lab, job: str, words: str) -> bool:
    return words in str(one.api.why(job)["why"]["sentence"])


def rows(server: Postgres, url: str) -> str:
    return server.sql(f"SELECT job_id FROM {url.rpartition('%3D')[2]}.job_secrets ORDER BY job_id")  # noqa: S608 - ours


def key_ids(server: Postgres, url: str) -> list[str]:
    return server.sql(f"SELECT DISTINCT key_id FROM {url.rpartition('%3D')[2]}.job_secrets").split()  # noqa: S608 - ours


def reload(one: Lab, lines: str, others: str) -> None:
    """Write other lines into its config, and wait until it has read them."""
    config, count = one.folder / "config.toml", len(log_lines(one, "config.reloaded"))
    config.write_text(config.read_text().replace(lines, others))
    assert one.process is not None
    one.process.send_signal(signal.SIGHUP)
    until(lambda: len(log_lines(one, "config.reloaded")) > count, what="the reload", within=60)


def assert_shown_nowhere(server: Postgres, folder: Path) -> None:
    """Neither the value nor a key is in the database, its log, or what daemons wrote; grants and machines have it."""
    dumped = server.dump()
    keys = [path.read_text().strip() for path in folder.glob("*.key")]
    places = {"the database": dumped.encode(), "the server's log": (server.root / "log").read_bytes()}
    for lab in ("a", "b"):
        for path in [*(folder / lab).glob("*.log"), *(folder / lab / "state").rglob("*")]:
            if path.is_file():
                places[str(path)] = path.read_bytes()
    for place, content in places.items():
        for value in (CANARY, *keys):
            assert value.encode() not in content, place


def test_a_successor_with_the_key_starts_jobs_with_secrets(server: Postgres, url: str, tmp_path: Path) -> None:
    key = key_file(tmp_path, "secrets.key")
    with two_daemons(tmp_path, url, more=(named(key), named(key))) as pair:
        first, second = pair.first, pair.second
        pair.start()
        running, waiting = submit(first, "running", tmp_path), submit(first, "waiting", tmp_path)
        until(lambda: (tmp_path / "running.given").exists(), what="the job to run", within=120)
        (machine,) = first.running_machines()
        assert rows(server, url).split() == sorted([running, waiting])
        first.kill()
        until(lambda: leads(second), what="the second to lead", within=60)
        assert [span.machine_id for span in first.running_machines()] == [machine.machine_id]
        (tmp_path / "running.release").touch()
        until(lambda: (tmp_path / "waiting.given").exists(), what="the other job to run", within=120)
        assert (tmp_path / "waiting.given").read_text() == f"{CANARY}\n"
        assert rows(server, url) == waiting  # those of the one that succeeded went with its commit
        (tmp_path / "waiting.release").touch()
        until(lambda: second.state(waiting) in FINAL, what="it to end", within=120)
        assert [second.state(one) for one in (running, waiting)] == ["SUCCEEDED", "SUCCEEDED"]
        assert second.job(running)["recoveries"] == 0
        assert rows(server, url) == ""
        assert_shown_nowhere(server, tmp_path)


def test_a_key_is_replaced_by_a_reload_of_the_leader_and_of_the_one_that_waits(
    server: Postgres, url: str, tmp_path: Path
) -> None:
    old, new = key_file(tmp_path, "old.key"), key_file(tmp_path, "new.key")
    with two_daemons(tmp_path, url, more=(named(old), named(old))) as pair:
        first, second = pair.first, pair.second
        pair.start()
        submit(first, "running", tmp_path)
        until(lambda: (tmp_path / "running.given").exists(), what="the job to run", within=120)
        waiting = submit(first, "waiting", tmp_path)
        before = key_ids(server, url)
        former = f"{named(new)}\nformer_{named(old)}"
        reload(first, named(old), former)
        reload(second, named(old), former)
        until(lambda: key_ids(server, url) != before, what="the rows to be encrypted anew", within=60)
        assert len(key_ids(server, url)) == 1
        reload(first, former, named(new))
        reload(second, former, named(new))
        first.kill()
        until(lambda: leads(second), what="the second to lead", within=60)
        (tmp_path / "running.release").touch()
        until(lambda: (tmp_path / "waiting.given").exists(), what="the other job to run", within=120)
        assert (tmp_path / "waiting.given").read_text() == f"{CANARY}\n"
        (tmp_path / "waiting.release").touch()
        until(lambda: second.state(waiting) in FINAL, what="it to end", within=120)
        assert_shown_nowhere(server, tmp_path)


@pytest.mark.parametrize("has", ["another key", "no key"])
def test_a_successor_without_the_key_buys_nothing_for_them_and_keeps_what_runs(
    server: Postgres, url: str, tmp_path: Path, has: str
) -> None:
    key, other = key_file(tmp_path, "secrets.key"), key_file(tmp_path, "other.key")
    lines = named(other) if has == "another key" else ""
    with two_daemons(tmp_path, url, more=(named(key), lines)) as pair:
        first, second = pair.first, pair.second
        pair.start()
        running, waiting = submit(first, "running", tmp_path), submit(first, "waiting", tmp_path)
        until(lambda: (tmp_path / "running.given").exists(), what="the job to run", within=120)
        (machine,) = first.running_machines()
        first.kill()
        until(lambda: leads(second), what="the second to lead", within=60)
        assert "encrypted with key" in refused(second, tmp_path) or has == "no key"
        issued = (tmp_path / "store").rglob("grant.json")
        before = {path: path.read_bytes() for path in issued}
        until(
            lambda: any(path.read_bytes() != content for path, content in before.items()),
            what="the lease of the machine to be renewed",
            within=60,
        )
        (tmp_path / "running.release").touch()
        until(lambda: second.state(running) in FINAL, what="the one that runs to end", within=120)
        assert second.state(running) == "SUCCEEDED"
        assert second.job(running)["recoveries"] == 0
        why = "encrypted with key"
        until(lambda: reads_reason(second, waiting, why), what="the reason to be given", within=30)
        found = spotctl(second, "doctor")
        assert f"1 job waits: its secrets were {why}" in " ".join((found.stdout + found.stderr).split())
        until(lambda: not first.open_machines(), what="no machine to be left", within=60)
        plain = second.submit("plain", "true")
        until(lambda: second.state(plain) in FINAL, what="a job without secrets to end", within=120)
        assert second.state(plain) == "SUCCEEDED"
        assert second.job(waiting)["attempts"] == []
        assert not [span for span in first.ledger() if waiting in span.key]
        config = second.folder / "config.toml"
        text = config.read_text()
        config.write_text(
            text.replace(lines, named(key)) if lines else text.replace("[store]", f"{named(key)}\n[store]")
        )
        assert second.process is not None
        second.process.send_signal(signal.SIGHUP)
        until(lambda: (tmp_path / "waiting.given").exists(), what="the other job to run", within=120)
        assert (tmp_path / "waiting.given").read_text() == f"{CANARY}\n"
        (tmp_path / "waiting.release").touch()
        until(lambda: second.state(waiting) in FINAL, what="it to end", within=120)
        assert machine.machine_id in {span.machine_id for span in first.ledger()}
        assert_shown_nowhere(server, tmp_path)
        assert not log_lines(second, "failure.contained")
