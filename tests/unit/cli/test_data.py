"""Data of a job: folders that `submit` stores, and what `spotctl data` shows and refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from spotd.cli.transfers import _Uploading
from spotd.client.daemon import Daemon
from spotd.core.domain.world import World
from spotd.daemon.datasets import KEPT, Datasets, read_by_jobs
from spotd.daemon.remote_data import UrlRefused
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl

JOB = """\
name = "reads"
run = "true"
image = "i"
[resources]
gpu = "H100"
[price]
max_price = 9
[[data]]
source = "SOURCE"
path = "data"
"""


@pytest.fixture
def ctl(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    monkeypatch.chdir(tmp_path)
    ctl.rig.shop.offer_index = [replace(worlds.h100(), gpu="H100_SXM")]
    ctl.place.cycle()
    (tmp_path / "set" / "inner").mkdir(parents=True)
    (tmp_path / "set" / "a").write_bytes(b"a" * 1500)
    (tmp_path / "set" / "inner" / "b").write_bytes(b"b" * 500)
    return ctl


def job_file(folder: Path, source: str) -> str:
    path = folder / "job.toml"
    path.write_text(JOB.replace("SOURCE", source))
    return str(path)


def world(ctl: Ctl) -> World:
    ctl.place.call(ctl.rig.control_loop.adopt)
    return ctl.place.handlers.context.world()


def chunks(ctl: Ctl) -> list[str]:
    return [info.key for info in ctl.rig.objects.list("data/chunks/")]


def test_a_plan_states_how_large_a_folder_is_and_sends_nothing(ctl: Ctl, tmp_path: Path) -> None:
    planned = ctl("submit", job_file(tmp_path, "./set"), "--dry-run")
    assert planned.code == 0, planned.err
    assert f"data    {tmp_path}/set: 2.0 kB, 2 files, at data" in planned.out
    assert chunks(ctl) == []


def test_a_submitted_job_reads_what_its_folder_held(ctl: Ctl, tmp_path: Path) -> None:
    submitted = ctl("submit", job_file(tmp_path, "./set"), "-y")
    assert "stored 2 files, 2.0 kB; sent 2.0 kB of it" in submitted.err
    (job,) = world(ctl).jobs.values()
    (one,) = job.spec.data
    assert (one.source, one.bytes, one.files) == (f"{tmp_path}/set", 2000, 2)
    stored = Datasets(ctl.rig.objects).stored(str(one.sha256))
    assert stored is not None
    assert stored.bytes == 2000
    assert json.loads(ctl("data", "ls", "-o", "json").out)["datasets"] == []


def test_a_folder_is_sent_once(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("submit", job_file(tmp_path, "./set"), "-y").code == 0
    sent = chunks(ctl)
    (tmp_path / "set" / "a").touch()
    assert ctl("submit", job_file(tmp_path, str(tmp_path / "set")), "-y", "--name", "again").code == 0
    assert chunks(ctl) == sent


def test_a_folder_whose_content_is_not_the_stated_one_is_refused(ctl: Ctl, tmp_path: Path) -> None:
    file = job_file(tmp_path, "./set")
    Path(file).write_text(Path(file).read_text() + f'sha256 = "{"ab" * 32}"\n')
    refused = ctl("submit", file, "-y")
    assert refused.code == 2, refused.err
    assert "has another content now" in refused.err


@pytest.mark.parametrize(("source", "message"), [("./gone", "is no folder"), ("./empty", "is empty")])
def test_a_folder_that_cannot_be_stored_is_refused_before_the_plan(
    ctl: Ctl, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    refused = ctl("submit", job_file(tmp_path, source), "-y")
    assert refused.code != 0
    assert message in refused.err
    assert "verdict" not in refused.err


def test_a_folder_that_was_not_sent_is_refused_with_a_way_out(ctl: Ctl, tmp_path: Path) -> None:
    from spotd.client.transport import DaemonRefused

    with pytest.raises(DaemonRefused) as refused:
        Daemon().submit(
            {"data": {"name": "a", "run": "true", "image": "i", "resources": {"gpu": "H100"}, "data": [
                {"source": "./set", "path": "d"}]}, "base_dir": str(tmp_path)}
        )  # fmt: skip
    assert "was not sent" in refused.value.problems[0].message


def test_the_content_of_a_folder_goes_a_day_after_the_last_job_that_reads_it(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("submit", job_file(tmp_path, "./set"), "-y").code == 0
    datasets, now = Datasets(ctl.rig.objects), datetime.now(tz=UTC) + timedelta(days=400)
    needed_now = read_by_jobs(world(ctl))
    assert len(needed_now) == 1
    for needed, left in ((needed_now, True), (needed_now, True), ((), True), ((), False)):
        datasets.collect(needed, now)
        assert bool(chunks(ctl)) is left
        now += KEPT


URL = "https://host.example/set.tar"


def with_url(ctl: Ctl, folder: Path, measure: Callable[[str], int]) -> str:
    ctl.place.handlers.context.datasets.measure = measure
    file = Path(job_file(folder, URL))
    file.write_text(file.read_text() + f'sha256 = "{"cd" * 32}"\n')
    return str(file)


def test_a_url_is_measured_for_the_plan_and_costs_no_egress_of_the_store(ctl: Ctl, tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(url: str) -> int:
        asked.append(url)
        return 7 * 10**9

    file = with_url(ctl, tmp_path, measure)
    planned = ctl("submit", file, "--dry-run")
    assert f"data    {URL}: 7.0 GB, 1 file, at data" in planned.out, planned.err
    assert ctl("submit", file, "-y").code == 0
    (job,) = world(ctl).jobs.values()
    assert (job.spec.data[0].bytes, job.spec.data[0].sha256) == (7 * 10**9, "cd" * 32)
    assert asked == [URL, URL, URL]


def test_a_url_that_serves_nothing_is_refused_at_its_place(ctl: Ctl, tmp_path: Path) -> None:
    def measure(url: str) -> int:
        raise UrlRefused("is not there (HTTP 404)", hint="check its spelling")

    refused = ctl("submit", with_url(ctl, tmp_path, measure), "-y")
    assert refused.code == 2
    assert f"job.toml:9: data[0].source: {URL} is not there (HTTP 404)" in refused.err.replace("\n", " ")


def test_garbage_collection_goes_on_while_a_job_reads_a_url(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("submit", with_url(ctl, tmp_path, lambda url: 1), "-y").code == 0
    assert len(world(ctl).jobs) == 1
    assert read_by_jobs(world(ctl)) == frozenset()


def test_a_dataset_that_was_submitted_a_moment_ago_is_read(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("data", "put", "set", "set").code == 0
    seen = ctl.place.handlers.context.world()
    assert ctl("submit", job_file(tmp_path, "set"), "-y").code == 0
    assert ctl.place.handlers.context.world() is seen  # no cycle has run since
    refused = ctl("data", "rm", "set", "-y")
    assert "read by 1 unfinished job" in refused.err
    assert ctl("cancel", "reads", "-y").code == 0
    assert ctl("data", "rm", "set", "-y").code == 0


def test_a_retry_is_refused_once_the_data_is_gone_and_keeps_it_before(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("submit", job_file(tmp_path, "./set"), "-y").code == 0
    datasets, now = ctl.place.handlers.context.datasets, datetime.now(tz=UTC) + timedelta(days=400)
    assert ctl("cancel", "reads", "-y").code == 0
    datasets.collect((), now)
    assert ctl("retry", "reads").code == 0
    datasets.collect((), now + KEPT)  # by a world that lacks the job
    assert chunks(ctl)
    assert ctl("cancel", "reads", "-y").code == 0
    datasets.collect((), now + 2 * KEPT)
    assert not chunks(ctl)
    refused = ctl("retry", "reads")
    assert refused.code != 0
    assert f"the data {tmp_path}/set is not in the store any more" in refused.err
    assert "spotctl data put" in refused.err


def test_what_two_threads_send_at_once_is_counted_whole() -> None:
    """A size that is asked for between reading the sum and writing it lets another thread's bytes be lost."""

    class Takes:
        def has_data_chunk(self, _sha256: str) -> bool:
            return False

        def put_data_chunk(self, _sha256: str, _content: object, _size: int) -> None: ...

    uploading = _Uploading(cast("Daemon", Takes()))

    class Measured(bytes):
        asked = 0

        def __len__(self) -> int:
            self.asked += 1
            if self.asked == 2:
                other.start()
                other.join(5)
            return 3

    other = threading.Thread(target=uploading.put_chunk, args=("b", b"12345"))
    uploading.put_chunk("a", Measured(b"123"))
    if other.ident is None:
        other.start()
    other.join()
    assert uploading.sent == 8
