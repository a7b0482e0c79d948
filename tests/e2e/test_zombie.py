"""A machine that was outbid, comes back after its job moved on, and runs its start script again.

It takes much to get there: the daemon ends a paused machine at once, and the job waits with its next launch until that
was accepted or the lease has run out. So the provider fails all terminations here until the job has moved on.

The zombie is the worst one there can be: it finds its old grant as if it had never been withdrawn, and a checkpoint in
it, without which a runner does not begin twice. So its runner runs the command again and uploads whatever that makes;
and the command makes everything that a rightful attempt may make.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.wire.manifest_document import parse_manifest
from tests.e2e.harness import FINAL, LEAVES_AT_ONCE, Lab, host, lab, until

pytestmark = pytest.mark.e2e
SCALE = 60.0
POLL = timedelta(seconds=SCALE / 4)
SLACK = timedelta(seconds=2 * SCALE)
"""Two real seconds for a busy computer, in virtual time."""
MARK = b"ZOMBIE-WAS-HERE"

FIRST = """
if test -e {folder}/first-ran; then
  mark=$(printf 'ZOMBIE-%s-%s' WAS HERE)
  mkdir -p "$SPOTD_CHECKPOINT_DIR/zombie-9"; echo "$mark" > "$SPOTD_CHECKPOINT_DIR/zombie-9/state"
  touch "$SPOTD_CHECKPOINT_DIR/zombie-9/DONE"
  mkdir -p out; echo "$mark" > out/result.txt; echo "$mark" > "$SPOTD_OUTPUT_DIR/result.txt"; echo "$mark"
  if test {ends} = yes; then exit 0; fi
  sleep 600
fi
touch {folder}/first-ran
mkdir -p "$SPOTD_CHECKPOINT_DIR/rightful-1"; echo one > "$SPOTD_CHECKPOINT_DIR/rightful-1/state"
touch "$SPOTD_CHECKPOINT_DIR/rightful-1/DONE"
sleep 600
"""
LATER = """
test "$(cat "$SPOTD_RESUME/state")" = one || exit 7
mkdir -p "$SPOTD_CHECKPOINT_DIR/rightful-2"; echo two > "$SPOTD_CHECKPOINT_DIR/rightful-2/state"
touch "$SPOTD_CHECKPOINT_DIR/rightful-2/DONE"
echo rightful words
until test -e {folder}/release; do sleep 0.05; done
mkdir -p out; echo rightful > out/result.txt
"""


def command(folder: Path, *, ends: bool) -> str:
    words = {"folder": folder, "ends": "yes" if ends else "no"}
    return f'if test "$SPOTD_ATTEMPT" = 1; then {FIRST.format(**words)} fi; {LATER.format(**words)}'


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Lab]:
    hosts = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(4))
    with lab(tmp_path / "lab", hosts=hosts, scale=SCALE, daemon=LEAVES_AT_ONCE) as made:
        made.start()
        yield made


def freeze(found: Lab) -> None:
    assert found.process is not None
    found.process.send_signal(signal.SIGSTOP)


def thaw(found: Lab) -> None:
    assert found.process is not None
    found.process.send_signal(signal.SIGCONT)


def checkpoint_names(found: Lab, job: str) -> list[str]:
    return [item["name"] for item in found.api.checkpoints(job)["checkpoints"]]


def attempt_folder(found: Lab, job: str, number: int) -> Path:
    return found.folder / "state" / "store" / "jobs" / job / "attempts" / str(number)


def renewed(grant: dict[str, Any], manifest: Path) -> bytes:
    """The old permission, as if the daemon had gone on renewing it, and with something to resume from."""
    now = datetime.now(UTC)
    text = json.dumps(grant)
    fresh = json.loads(text.replace(str(grant["expires"]), (now + timedelta(hours=6)).isoformat()))
    data = manifest.read_bytes()
    store = manifest.parents[5]
    chunks = set(parse_manifest(data).chunk_sizes())
    offer = {
        "name": manifest.stem,
        "manifest": {
            "url": manifest.as_uri(),
            "key": str(manifest.relative_to(store)),
            "sha256": hashlib.sha256(data).hexdigest(),
        },
        "chunks": {key: (store / key).as_uri() for key in chunks},
    }
    return json.dumps({**fresh, "issued_at": now.isoformat(), "restore": [offer]}).encode()


def zombie_has_done_its_worst(found: Lab, job: str) -> bool:
    mine = attempt_folder(found, job, 1)
    published = any(mine.glob("checkpoints/zombie-9*.json"))
    logged = any(MARK in path.read_bytes() for path in mine.glob("log/*"))
    return published and logged


def files_with_the_mark(found: Lab) -> set[Path]:
    store = found.folder / "state" / "store"
    return {path.relative_to(store) for path in store.rglob("*") if path.is_file() and MARK in path.read_bytes()}


@pytest.mark.parametrize(
    ("sleep", "wake", "ends"),
    [
        pytest.param(freeze, thaw, False, id="while the daemon looks away", marks=pytest.mark.lengthy),
        pytest.param(Lab.kill, Lab.start, True, id="while the daemon is dead, and ends as if all were well"),
    ],
)
def test_a_woken_zombie_is_destroyed_within_one_poll_and_writes_nothing_that_counts(
    found: Lab, tmp_path: Path, sleep: Callable[[Lab], None], wake: Callable[[Lab], None], ends: bool
) -> None:
    job = found.submit("net", command(tmp_path, ends=ends), outputs=["out/**"])
    until(lambda: checkpoint_names(found, job) == ["rightful-1"], what="the first checkpoint")
    (zombie,) = found.running_machines()
    grant_file = attempt_folder(found, job, 1) / "grant.json"
    grant = json.loads(grant_file.read_text())
    found.control("faults", {"call": "terminate", "status": 503, "times": 1_000_000})
    found.control("preempt", {"machine": zombie.machine_id, "notice": False, "lasting": "60d"})
    until(lambda: "rightful-2" in checkpoint_names(found, job), what="the job to move on", within=120, every=0.2)

    sleep(found)
    grant_file.write_bytes(renewed(grant, grant_file.parent / "checkpoints" / "rightful-1.json"))
    found.control("no-faults", {})
    found.control("price", {"host": "h0", "price": 0.05, "lasting": "60d"})
    until(lambda: zombie_has_done_its_worst(found, job), what="the zombie to do its worst")
    where = files_with_the_mark(found)
    woken_at = found.now()
    wake(found)
    seen_at = max(woken_at, found.now())

    def gone() -> datetime | None:
        assert found.state(job) == "RUNNING", "the zombie's end was taken for the job's"
        ends = [s.end for s in found.ledger() if s.machine_id == zombie.machine_id]
        return None if None in ends else max(end for end in ends if end is not None)

    assert until(gone, what="the zombie to be gone") <= seen_at + POLL + SLACK
    assert found.job(job)["attempt"] == 2

    (tmp_path / "release").touch()
    found.wait_final(job)
    assert found.state(job) == "SUCCEEDED"
    assert found.delivered(job, "result.txt") == "rightful"
    assert checkpoint_names(found, job) == ["rightful-2", "rightful-1"]
    own = Path("jobs") / job / "attempts" / "1"
    assert where, "the zombie wrote nothing, so nothing was proved"
    assert all(path.is_relative_to(own) for path in where | files_with_the_mark(found))
    words = [record["text"] for record in found.api.logs(job, {"attempt": "2"})]
    assert "rightful words" in "".join(words)
    assert MARK.decode() not in "".join(words)
    until(lambda: not found.open_machines(), what="every machine to be gone")
    assert [job["state"] in FINAL for job in found.api.jobs({})["jobs"]] == [True]
