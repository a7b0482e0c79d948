"""Jobs read data that stays in a hub and in another bucket; no token and no key of it reaches a host."""

from __future__ import annotations

import csv
import hashlib
import io
import random
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, host, lab
from tests.e2e.test_bucket import files_below, store_keys, store_section
from tests.e2e.test_data import CHECK, HOSTS, JOB
from tests.fakes.hub import TOKEN, FakeRepository, running
from tests.fakes.seaweed import BUCKET, CANARY, Weed
from tests.waiting import until

pytestmark = pytest.mark.e2e


def contents(seed: int, size: int = 3_000_000) -> dict[str, bytes]:
    draw = random.Random(seed)
    return {"config.json": b"{}\n", "empty": b"", "sub/model one.bin": draw.randbytes(size)}


def job_file(folder: Path, source: str, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
    (folder / "sums").write_text(sums, encoding="utf-8")
    job = folder / "job.toml"
    text = JOB.format(name=folder.name, run=f"{CHECK} && sleep 4", source=source)
    job.write_text(text.replace("outputs", 'workdir = "."\noutputs', 1))
    return job


def submit(found: Lab, job: Path) -> str:
    answer = spotctl(found, "submit", str(job), "-y", "-o", "id")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_a_job_reads_a_public_and_a_private_repository_and_its_host_sees_no_token(tmp_path: Path) -> None:
    with running() as hub:
        hub.repositories["models/org/open"] = FakeRepository(contents(1))
        hub.repositories["datasets/org/closed"] = FakeRepository(contents(2), access="private")
        section = f'\n[hub]\nurl = "{hub.url}"\ntoken = {{ env = "HUB_TOKEN" }}\n'
        with lab(tmp_path / "lab", hosts=HOSTS + section) as found:
            found.environment = {"HUB_TOKEN": TOKEN}
            found.start()
            public = job_file(tmp_path / "public", "hf://org/open@v1", contents(1))
            planned = spotctl(found, "submit", str(public), "--dry-run")
            assert f"commit {hub.repositories['models/org/open'].commit[:12]}" in planned.stdout, planned.stderr
            private = job_file(tmp_path / "private", "hf://datasets/org/closed", contents(2))
            for job in (submit(found, public), submit(found, private)):
                found.wait_final(job)
                assert found.state(job) == "SUCCEEDED", found.last_state()
            missing = job_file(tmp_path / "missing", "hf://org/nothing", {})
            refused = spotctl(found, "submit", str(missing), "-y")
            assert refused.returncode == 2
            assert "is not there" in refused.stderr
            assert_no_traceback(found)
            written = files_below(tmp_path / "lab")
        assert hub.tokens_elsewhere == 0
        assert not [path for path, content in written.items() if TOKEN.encode() in content]


@pytest.mark.lengthy  # as a plain function: tests/unit/core/domain/test_backoff.py
def test_a_hub_that_is_away_at_the_launch_puts_off_its_job_alone_and_costs_nothing(tmp_path: Path) -> None:
    with running() as hub:
        hub.repositories["models/org/closed"] = FakeRepository(contents(4), access="private")
        section = f'\n[hub]\nurl = "{hub.url}"\ntoken = {{ env = "HUB_TOKEN" }}\n'
        with lab(tmp_path / "lab", hosts=HOSTS + section, scale=60.0) as found:
            found.environment = {"HUB_TOKEN": TOKEN}
            found.start()
            reads = job_file(tmp_path / "reads", "hf://org/closed", contents(4))
            answer = spotctl(found, "submit", str(reads), "-y", "--max-price", "0.01", "-o", "id")
            assert answer.returncode == 0, answer.stderr
            job = answer.stdout.strip()
            hub.status = 503
            assert spotctl(found, "ceiling", job, "1.00").returncode == 0
            until(lambda: "hub" in found.api.why(job)["why"]["sentence"], what="a reason that names the hub")
            other = found.submit("other", "true", resources={"gpu": ["RTX_4090:1"]}, price={"max_price": 1.0})
            found.wait_final(str(other))
            assert found.state(str(other)) == "SUCCEEDED"
            assert not found.job(job)["spent_usd"]
            assert all(attempt["launched_at"] is None for attempt in found.job(job)["attempts"])
            assert found.state(job) not in {"FAILED", "EXPIRED"}
            hub.status = 0
            found.wait_final(job)
            assert found.state(job) == "SUCCEEDED", found.last_state()
            assert_no_traceback(found)


def test_a_job_reads_another_bucket_by_signed_urls_and_pays_its_owner(weed: Weed, tmp_path: Path) -> None:
    prefix, files = f"corpus-{tmp_path.name}", contents(3, 30_000_000)
    client = weed.owner()
    for name, content in files.items():
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/v1/{name}", Body=content)
    section = f"""
[buckets.corpus]
url = "s3://{BUCKET}/{prefix}"
endpoint_url = "{weed.url}"
region = "us-east-1"
access_key = {{ env = "STORE_ACCESS" }}
secret_key = {{ env = "STORE_SECRET" }}
egress_per_gb = 1.00
"""
    hosts = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(2)) + store_section(weed, tmp_path.name) + section
    with lab(tmp_path / "lab", hosts=hosts, daemon=LEAVES_AT_ONCE) as found:
        found.environment = store_keys(weed)
        found.start()
        job_toml = job_file(tmp_path / "job", f"s3://{BUCKET}/{prefix}/v1", files)
        planned = spotctl(found, "submit", str(job_toml), "--dry-run")
        assert "$0.03 egress" in planned.stdout, planned.stdout + planned.stderr
        job = submit(found, job_toml)
        found.wait_final(job)
        assert found.state(job) == "SUCCEEDED", found.last_state()
        (line,) = csv.DictReader(io.StringIO(spotctl(found, "cost", job, "-o", "csv").stdout))
        outside = job_file(tmp_path / "outside", f"s3://{BUCKET}/{tmp_path.name}", files)
        assert "no bucket that the config names" in spotctl(found, "submit", str(outside), "-y").stderr
        written = files_below(tmp_path / "lab" / "hosts") | files_below(tmp_path / "lab")
    assert float(line["egress_usd"]) == pytest.approx(0.030003, abs=1e-4), line
    assert not [path for path, content in written.items() if CANARY.encode() in content]
