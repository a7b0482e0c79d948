"""Four machines that train together, of which the healthy ones are kept while a lost one is replaced."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spotd_providers.local.market.floor import Machine, load
from spotd_providers.local.settings import find_endpoint
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, assert_books_are_clean, host, lab, until
from tests.e2e.test_gang import NODES, SCALE, code_folder, command, kill, processes

pytestmark = pytest.mark.e2e
STEPS = 1500
ONE_HOST = host("pool0", 0.30) + f"slots = {NODES}\n"
HOSTS = ONE_HOST + "".join(host(f"pool{i}", 0.50 + i / 100) + f"slots = {NODES}\n" for i in range(1, 6))


def submit(found: Lab, tmp_path: Path, nodes: int | str = NODES, within: str = "20m") -> str:
    return found.submit(
        "gang",
        command(tmp_path, STEPS),
        workdir=code_folder(tmp_path),
        nodes=nodes,
        replace_within=within,
        outputs=["out/**"],
        checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s", "saved_by": "first"},
    )


def gang_of(found: Lab) -> Machine:
    """The newest gang that exists."""
    memory = load(found.market_folder / "market.json")
    assert memory is not None
    return [one for one in memory.machines.values() if one.exists and one.install != "other"][-1]


def events_of(found: Lab, job: str, kind: str) -> list[str]:
    return [one["message"] for one in found.events(job) if one["kind"] == kind]


def trains(found: Lab, job: str, rounds: int) -> Machine | None:
    """The gang, once all of it trains again after so many losses, and has saved since."""
    assert found.state(job) not in {"FAILED", "CANCELLED"}, found.job(job)
    kinds = [one["kind"] for one in found.events(job)]
    if not found.running_machines() or kinds.count("attempt.went_on") < rounds:
        return None
    since = max((at for at, kind in enumerate(kinds) if kind == "attempt.went_on"), default=0)
    return gang_of(found) if kinds[since:].count("checkpoint.accepted") >= 2 else None


def expected_hash(tmp_path: Path) -> str:
    with lab(tmp_path / "calm", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        calm = tmp_path / "one"
        calm.mkdir()
        (calm / "release").touch()
        job = submit(found, calm)
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED", found.job(job)
        return found.delivered(job, "weights.sha256")


@contextmanager
def training(tmp_path: Path, nodes: int | str = NODES, within: str = "20m") -> Iterator[tuple[Lab, str]]:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        found.shares_machines = True  # an attempt goes on with the machines of the one before
        job = submit(found, tmp_path, nodes, within)
        until(lambda: trains(found, job, 0), what="all to train", within=120)
        yield found, job


def finish(found: Lab, tmp_path: Path, job: str, other: str = "") -> None:
    (tmp_path / "release").touch()
    found.wait_final(job, within=120)
    assert found.state(job) == "SUCCEEDED", found.job(job)
    leave_out(found, other)
    until(lambda: not found.open_machines(), what="every machine to be gone")
    assert_books_are_clean(found, reconcile_s=2 * SCALE)


def leave_out(found: Lab, other: str) -> None:
    """From now on the books are those of this install alone."""
    if other:
        as_another(found, "DELETE", f"/v1/machines/{other}")
        until(lambda: not {other} & {one.machine_id for one in found.open_machines()}, what="the other one to be gone")
        until(lambda: not found.open_machines(), what="every machine to be gone")
        ours = found.folder / "ours.jsonl"
        lines = found.ledgers[0].read_text().splitlines(keepends=True)
        ours.write_text("".join(line for line in lines if f'"{other}"' not in line))
        found.ledgers = [ours]


@pytest.mark.lengthy
def test_each_of_four_is_lost_in_turn_and_the_others_are_never_bought_again(tmp_path: Path) -> None:
    expected = expected_hash(tmp_path)
    with training(tmp_path) as (found, job):
        first = gang_of(found)
        leaders = {rank: processes(found, first.member(rank))[0] for rank in range(NODES)}
        machine = first
        for lost, ranks in enumerate(([1], [2], [3], [1, 3]), start=1):
            kill(found, *(machine.member(rank) for rank in ranks))
            machine = until(partial(trains, found, job, lost), what="all to train", within=120)
        assert machine.machine_id == first.machine_id
        # The first machine's first process is what it was: it was neither bought nor started again.
        assert processes(found, machine.member(0))[0] == leaders[0]
        assert machine.rounds == {1: 4, 2: 2, 3: 4}
        assert len({span.machine_id for span in found.ledger()}) == 1, "the gang was bought again"
        assert len(found.job(job)["attempts"]) == 1
        finish(found, tmp_path, job)
        assert found.delivered(job, "weights.sha256") == expected
        assert len({span.machine_id for span in found.ledger()}) == 1


@pytest.mark.lengthy
def test_the_first_one_is_lost_and_the_others_are_never_bought_again(tmp_path: Path) -> None:
    expected = expected_hash(tmp_path)
    with training(tmp_path) as (found, job):
        first = gang_of(found)
        leaders = {rank: processes(found, first.member(rank))[0] for rank in range(NODES)}
        machine = first
        for lost, ranks in enumerate(([0], [0, 2], [1], [0]), start=1):
            kill(found, *(machine.member(rank) for rank in ranks))
            machine = until(partial(trains, found, job, lost), what="all to train", within=120)
        assert machine.machine_id == first.machine_id
        assert processes(found, machine.member(3))[0] == leaders[3]
        assert machine.rounds == {0: 7, 1: 5, 2: 4}
        assert len({span.machine_id for span in found.ledger()}) == 1, "the gang was bought again"
        attempts = found.job(job)["attempts"]
        assert [one.get("reason") for one in attempts] == ["host_lost"] * 3 + [None]
        finish(found, tmp_path, job)
        assert found.delivered(job, "weights.sha256") == expected
        assert len({span.machine_id for span in found.ledger()}) == 1


@pytest.mark.lengthy
def test_a_first_one_that_is_cut_off_and_back_changes_nothing_of_what_goes_on_without_it(tmp_path: Path) -> None:
    expected = expected_hash(tmp_path)
    with training(tmp_path) as (found, job):
        first = gang_of(found)
        cut_off = processes(found, first.member(0))
        for pid in cut_off:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: len(found.job(job)["attempts"]) == 2, what="the next attempt", within=120)
        for pid in cut_off:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        machine = until(partial(trains, found, job, 1), what="all to train", within=120)
        assert (machine.machine_id, machine.rounds[0]) == (first.machine_id, 2)
        until(lambda: not processes(found, first.member(0)), what="the former first one to end")
        finish(found, tmp_path, job)
        assert found.delivered(job, "weights.sha256") == expected
        (line,) = [one for one in found.api.cost(job)["receipts"][0]["attempts"] if one["attempt"] == 2]
        assert 0 < line["kept_s"] <= 1200
        assert line["kept_usd"] > 0


@pytest.mark.lengthy
def test_the_others_go_on_without_a_first_one_that_nobody_replaces(tmp_path: Path) -> None:
    with training(tmp_path, "2..4", "5m") as (found, job):
        first = gang_of(found)
        other = lose_for_good(found, 0)
        machine = until(partial(trains, found, job, 1), what="the others to train", within=120)
        assert (machine.machine_id, machine.nodes, machine.dropped) == (first.machine_id, 3, [0])
        assert machine.price * NODES == first.price * 3
        kill(found, machine.member(1))
        until(partial(trains, found, job, 2), what="all to train again", within=120)
        finish(found, tmp_path, job, other)
        assert len(found.job(job)["attempts"]) == 3


def as_another(found: Lab, method: str, path: str, body: object = None) -> dict[str, object]:
    """Return what the market answers to another customer."""
    endpoint = find_endpoint(found.market_folder)
    assert endpoint is not None
    url = urlsplit(endpoint.url)
    headers = {"authorization": f"Bearer {endpoint.token}", "content-type": "application/json"}
    with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)) as connection:
        connection.request(method, f"{path}?install=other", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    assert answer.status < 300, (answer.status, text)
    return dict(json.loads(text))


def bought_by_another(found: Lab) -> str:
    """Another customer takes the slot that a lost machine left."""
    machine = {"image": "scratch", "disk_gb": 1, "start_script": "exec sleep 1000", "offer_id": "pool0:spot"}
    terms = {"key": "spotd-other-j1-1", "install": "other", "price_max": 2_000_000, "expires_at": time.time() + 30}
    ref = as_another(found, "POST", "/v1/machines", {**machine, **terms})["ref"]
    assert isinstance(ref, dict)
    return str(ref["instance_id"])


def lose_for_good(found: Lab, rank: int) -> str:
    """One machine is lost while the daemon is dead, and its slot is taken before that is back."""
    machine = gang_of(found)
    found.kill()
    kill(found, machine.member(rank))

    def left() -> bool:
        memory = load(found.market_folder / "market.json")
        return memory is not None and rank in memory.machines[machine.machine_id].vanished

    until(left, what="the market to see that it vanished")
    other = bought_by_another(found)
    found.start()
    until(lambda: events_of(found, job_of(found), "attempt.kept"), what="the others to be kept")
    return other


def job_of(found: Lab) -> str:
    (job,) = {one["id"] for one in found.api.jobs()["jobs"]}
    return str(job)


@pytest.mark.lengthy
def test_the_others_go_on_without_one_that_nobody_replaces_at_the_price_of_those_that_are_left(tmp_path: Path) -> None:
    with training(tmp_path, "2..4", "5m") as (found, job):
        first = gang_of(found)
        other = lose_for_good(found, 2)
        machine = until(partial(trains, found, job, 1), what="the others to train", within=120)
        assert (machine.machine_id, machine.nodes, machine.dropped) == (first.machine_id, 3, [2])
        assert events_of(found, job, "attempt.not_replaced")
        (line,) = found.api.cost(job)["receipts"][0]["attempts"]
        assert machine.price * NODES == first.price * 3
        assert (line["nodes"], line["gpu_count"]) == (3, 3)
        # Five minutes for another one, and what it took to leave it out.
        assert 300 <= line["kept_s"] <= 900
        assert 0 < line["kept_usd"] < line["spent_usd"]
        kill(found, machine.member(3))
        until(partial(trains, found, job, 2), what="all to train again", within=120)
        assert gang_of(found).rounds == {3: 2}
        finish(found, tmp_path, job, other)
        assert len(found.job(job)["attempts"]) == 1


def test_machines_that_are_kept_in_vain_are_ended_and_the_job_begins_as_a_new_gang(tmp_path: Path) -> None:
    with training(tmp_path, NODES, "2m") as (found, job):
        first = gang_of(found)
        other = lose_for_good(found, 1)
        until(lambda: len(found.job(job)["attempts"]) == 2, what="a new gang")
        assert found.job(job)["attempts"][0]["reason"] == "host_lost"
        until(lambda: first.machine_id not in {one.machine_id for one in found.open_machines()}, what="all to end")
        assert not [pid for member in first.members for pid in processes(found, member)]
        finish(found, tmp_path, job, other)


def test_a_cancelled_job_ends_the_machines_that_are_kept_for_it(tmp_path: Path) -> None:
    with training(tmp_path, NODES, "60m") as (found, job):
        first = gang_of(found)
        other = lose_for_good(found, 3)
        found.api.cancel(job)
        found.wait_final(job, within=120)
        assert found.state(job) == "CANCELLED"
        leave_out(found, other)
        assert not [pid for member in first.members for pid in processes(found, member)]
