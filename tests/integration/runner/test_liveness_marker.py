"""A beat follows each heartbeat: written again while nothing happens, larger by one when there is something to read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner.heartbeat import MARKER_BYTES_MAX, HeartbeatWriter, Status
from spotd_jobs.runner.logs import ProgressMeter
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.sinks import SinkDenied, SinkError
from spotd_jobs.wire.grant import LIVENESS_PREFIX, LivenessMarker, UploadMethod, liveness_marker_name
from tests.integration.runner.inside import runner_grant, store_of
from tests.integration.runner.rig import JOB, Rig, until

BEAT = LIVENESS_PREFIX + liveness_marker_name(JOB, 1)


def leave(rig: Rig) -> LivenessMarker:
    folder = rig.store.path(LIVENESS_PREFIX)
    folder.mkdir(parents=True)
    return LivenessMarker(
        method=UploadMethod.FOLDER, name=liveness_marker_name(JOB, 1), fields={"directory": str(folder)}
    )


class Progress:
    """A saver's, as far as a heartbeat looks at it."""

    name: str | None = None
    done = total = rate = 0


class Saver:
    seen = stored = None
    queued = 0

    def __init__(self) -> None:
        self.progress = Progress()


class Desk:
    """A heartbeat whose beats a test asks for one by one."""

    def __init__(self, rig: Rig, store: RunnerStore, home: Path) -> None:
        self.rig = rig
        self.store = store
        self.status = Status(0)
        self.every_s = 1000.0
        self.heartbeat = HeartbeatWriter(store, self.status, str(home), lambda: self.every_s)

    def beat(self) -> int:
        """The size that a listing shows now; 0 without a beat."""
        self.heartbeat._put_liveness_marker(self.heartbeat._document())
        return len(self.rig.store.get(BEAT) or b"")


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        grant.raw["liveness_marker"] = leave(rig).model_dump()
        yield Desk(rig, store_of(grant), tmp_path)


def test_the_size_changes_with_news_and_with_nothing_else(desk: Desk) -> None:
    first = desk.beat()
    assert 1 <= first <= MARKER_BYTES_MAX
    assert [desk.beat() for _ in range(3)] == [first] * 3, "seq, time and figures are no news"
    sizes = [first]
    desk.status.phase = "run"
    sizes.append(desk.beat())
    desk.status.notice = {"source": "file", "reason": "outbid", "at": None}
    sizes.append(desk.beat())
    desk.store.events.stored += 1
    sizes.append(desk.beat())
    desk.status.exit = {"outcome": "succeeded"}
    sizes.append(desk.beat())
    steps = [(after - before) % MARKER_BYTES_MAX for before, after in pairwise(sizes)]
    assert steps == [1, 1, 1, 1]


def test_how_far_an_upload_has_come_is_news_only_now_and_then(desk: Desk) -> None:
    uploader = Saver()
    desk.status.uploader = uploader
    idle = desk.beat()
    uploader.progress.name = "step-1"
    begun = desk.beat()
    assert begun != idle
    for done in range(5):
        uploader.progress.done = uploader.progress.rate = done
        assert desk.beat() == begun
    desk.every_s = 1e-9
    assert desk.beat() != begun, "but it is"


def test_the_use_of_the_gpus_is_news_only_now_and_then(desk: Desk) -> None:
    desk.every_s = 1e9
    figures = {"index": 0, "name": "H100", "util_pct": 5.0}
    desk.heartbeat._gpus.read = lambda: [figures]  # type: ignore[method-assign]  # this machine has none
    first = desk.beat()
    figures["util_pct"] = 97.0
    assert desk.beat() == first
    desk.every_s = 1e-9
    assert desk.beat() != first


def test_a_beat_that_could_not_be_stored_loses_no_news(desk: Desk) -> None:
    first = desk.beat()
    folder = desk.rig.store.path(LIVENESS_PREFIX)
    away = folder.with_name("away")
    folder.rename(away)
    desk.status.phase = "run"
    with pytest.raises(SinkError):
        desk.beat()
    away.rename(folder)
    desk.store._marker_refused = None
    assert (desk.beat() - first) % MARKER_BYTES_MAX == 1


def test_where_a_beat_was_refused_it_is_tried_again_with_the_next_grant_only(desk: Desk) -> None:
    folder = desk.rig.store.path(LIVENESS_PREFIX)
    folder.rename(folder.with_name("away"))
    with pytest.raises(SinkDenied):
        desk.beat()
    folder.mkdir()
    assert desk.beat() == 0
    grant = desk.store._grant()
    grant.raw["liveness_marker"] = {**grant.raw["liveness_marker"], "renewed": True}
    assert desk.beat() > 0


def test_a_grant_without_a_beat_is_served_as_ever(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        assert grant.raw["liveness_marker"] is None
        assert Desk(rig, store_of(grant), tmp_path).beat() == 0


def test_a_real_runner_beats_and_its_last_beat_tells_that_it_is_over(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["sh", "-c", "while ! test -e go; do sleep 0.05; done"])
        grant = rig.renew(grant, liveness_marker=leave(rig))
        machine = rig.start(grant)
        machine.event("started")
        path = rig.store.path(BEAT)
        quiet = until(lambda: _unchanged_over_beats(path), "a beat that is written again and says the same")
        (machine.home / "work" / "go").touch()
        assert machine.wait() == 0
        assert path.stat().st_size != quiet


def _unchanged_over_beats(path: Path) -> int:
    """The size, when three beats in a row had it."""
    if not path.exists():
        return 0
    size, seen = path.stat().st_size, {path.stat().st_mtime_ns}

    def beats() -> bool:
        seen.add(path.stat().st_mtime_ns)
        return len(seen) > 3 or path.stat().st_size != size

    until(beats, "more beats")
    return size if path.stat().st_size == size else 0


def test_progress_is_stated_and_is_news_only_where_the_grant_asks_for_it(desk: Desk, tmp_path: Path) -> None:
    printed, folder = [0], tmp_path / "checkpoints"
    folder.mkdir()
    desk.status.progress = ProgressMeter(lambda: printed[0], str(folder))
    desk.status.phase = "run"
    figures: list[dict[str, Any]] = [{"util_pct": 40.0}, {"util_pct": None}, {"util_pct": 80.0}]
    desk.heartbeat._gpus.read = lambda: figures  # type: ignore[method-assign]  # this machine has none
    assert "progress" not in desk.heartbeat._document()
    desk.status.watch_s = 1e9
    first = desk.beat()
    printed[0] = 7
    (folder / "tmp-1").write_bytes(b"half")
    assert desk.beat() == first
    stated = desk.heartbeat._document()["progress"]
    assert (stated["printed"], stated["writes"]) == (7, 1)
    assert stated["gpu_busy_s"] == pytest.approx(0.8 * stated["gpu_s"], abs=0.002)
    desk.status.watch_s = 1e-9
    assert desk.beat() != first


def test_a_machine_without_figures_states_none(tmp_path: Path) -> None:
    meter = ProgressMeter(lambda: 0, str(tmp_path / "missing"))
    for rows in ([], [{"util_pct": None}]):
        assert meter.read(rows, runs=True) == {"printed": 0, "writes": 0, "gpu_s": None, "gpu_busy_s": None}
    assert meter.read([{"util_pct": 5.0}], runs=False)["gpu_s"] is None
