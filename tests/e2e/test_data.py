"""A job reads a dataset: stored with spotctl, brought to real machines of the local market, verified and kept."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, host, lab, until
from tests.e2e.test_bucket import files_below, store_keys, store_section
from tests.fakes.seaweed import CANARY, Weed

pytestmark = pytest.mark.e2e
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(3))
JOB = """
name = "{name}"
run = "{run}"
image = "scratch"
outputs = ["out/**"]
[resources]
gpu = ["RTX_4090:1"]
[price]
max_price = 1.00
[[data]]
source = "{source}"
path = "data/set"
"""
CHECK = "mkdir out && cd data/set && sha256sum -c ../../sums && touch ../../out/verified"


def make_folder(folder: Path, *, large: int, small: int) -> dict[str, str]:
    """Fill a folder with files whose names are odd; return their hashes by path."""
    draw = random.Random(7)
    sums: dict[str, str] = {}
    contents = {f"train/shard {i:03d}.bin": draw.randbytes(large) for i in range(4)}
    contents |= {f"labels/{i % 10}/Ünï {i}.txt": f"label {i}\n".encode() * (i % 7) for i in range(small)}
    for path, content in contents.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        sums[path] = hashlib.sha256(content).hexdigest()
    (folder / "empty").mkdir()
    (folder / "latest").symlink_to("train")
    return sums


def job_with_sums(tmp_path: Path, sums: dict[str, str], *, run: str = CHECK, name: str = "reads") -> Path:
    """Write a job that checks every file of its dataset."""
    work = tmp_path / f"work-{name}"
    work.mkdir()
    (work / "sums").write_text("".join(f"{digest}  {path}\n" for path, digest in sums.items()), encoding="utf-8")
    job = work / "job.toml"
    job.write_text(JOB.format(name=name, run=run, source="set").replace("outputs", 'workdir = "."\noutputs', 1))
    return job


def put(found: Lab, folder: Path, name: str = "set") -> str:
    result = spotctl(found, "data", "put", name, str(folder))
    assert result.returncode == 0, result.stderr
    assert_no_traceback(found)
    return result.stdout


def test_a_job_finds_every_file_of_its_dataset_as_it_was_stored(tmp_path: Path) -> None:
    sums = make_folder(tmp_path / "set", large=20_000_000, small=500)
    with lab(tmp_path / "lab", hosts=HOSTS) as found:
        found.start()
        assert "504 files, 80.0 MB" in put(found, tmp_path / "set")
        assert "sent 0 B" in put(found, tmp_path / "set")
        job = job_with_sums(tmp_path, sums)
        planned = spotctl(found, "submit", str(job), "--dry-run")
        assert "set: 80.0 MB" in planned.stdout, planned.stdout
        assert "egress" in planned.stdout
        ref = spotctl(found, "submit", str(job), "-y", "-o", "id").stdout.strip()
        assert "read" in spotctl(found, "data", "rm", "set", "-y").stderr
        found.wait_final(ref)
        assert found.state(ref) == "SUCCEEDED", found.last_state()
        removed = spotctl(found, "data", "rm", "set", "-y")
        assert removed.returncode == 0, removed.stderr


def test_a_job_reads_a_folder_that_its_file_names(tmp_path: Path) -> None:
    sums = make_folder(tmp_path / "set", large=1_000_000, small=20)
    with lab(tmp_path / "lab", hosts=HOSTS) as found:
        found.start()
        job = job_with_sums(tmp_path, sums)
        job.write_text(job.read_text().replace('source = "set"', 'source = "../set"'))
        ref = spotctl(found, "submit", str(job), "-y", "-o", "id").stdout.strip()
        found.wait_final(ref)
        assert found.state(ref) == "SUCCEEDED", found.last_state()


WAITS = CHECK + " && touch ../../checked && until [ -e {release} ]; do sleep 0.1; done"


def read_twice(found: Lab, tmp_path: Path) -> str:
    """Run a job on a machine that is taken away, until it has verified its data on another one; return its id."""
    sums = make_folder(tmp_path / "set", large=3_000_000, small=50)
    put(found, tmp_path / "set")
    release = tmp_path / "release"
    run = WAITS.replace("mkdir out", "mkdir -p out").format(release=release)
    ref = spotctl(found, "submit", str(job_with_sums(tmp_path, sums, run=run)), "-y", "--i-know", "-o", "id")
    job = ref.stdout.strip()
    until(lambda: list(found.market_folder.rglob("work/checked")), what="the data to be verified", within=120)
    found.control("preempt", {"machine": found.running_machines()[0].machine_id, "notice": False, "lasting": "60d"})
    until(lambda: len(found.job(job)["attempts"]) == 2, what="another machine", within=120)
    release.touch()
    found.wait_final(job, within=180)
    assert found.state(job) == "SUCCEEDED", found.last_state()
    return job


def test_a_machine_after_a_preemption_reads_the_data_again(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        read_twice(found, tmp_path)
        assert spotctl(found, "data", "rm", "set", "-y").returncode == 0


def test_data_comes_from_a_bucket_and_no_key_reaches_a_host(weed: Weed, tmp_path: Path) -> None:
    hosts = HOSTS + store_section(weed, tmp_path.name)
    with lab(tmp_path / "lab", hosts=hosts, daemon=LEAVES_AT_ONCE) as found:
        found.environment = store_keys(weed)
        found.start()
        job = read_twice(found, tmp_path)
        found.stop()
        on_hosts = files_below(found.market_folder)
        assert [name for name, content in on_hosts.items() if CANARY.encode() in content] == []
        assert job
