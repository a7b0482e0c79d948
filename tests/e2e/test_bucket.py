"""A job over a real S3 server: carried across a preemption bit for bit, and no key of the store ever on a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spotd_jobs.objects.s3 import S3Store
from tests.e2e.harness import (
    FINAL,
    LEAVES_AT_ONCE,
    assert_books_are_clean,
    host,
    lab,
    straight_sha256,
    training_folder,
    until,
)
from tests.fakes.seaweed import BUCKET, CANARY, Weed

pytestmark = pytest.mark.e2e
SCALE = 60.0
MUCH = 100_000_000


def store_section(weed: Weed, prefix: str) -> str:
    return f"""
[store]
url = "s3://{BUCKET}/{prefix}"
endpoint_url = "{weed.url}"
region = "us-east-1"
access_key = {{ env = "STORE_ACCESS" }}
secret_key = {{ env = "STORE_SECRET" }}
signer_access_key = {{ env = "SIGNER_ACCESS" }}
signer_secret_key = {{ env = "SIGNER_SECRET" }}
"""


def store_keys(weed: Weed) -> dict[str, str]:
    """The environment that `store_section` reads its keys from."""
    place = weed.place()
    return {
        "STORE_ACCESS": str(place.access_key),
        "STORE_SECRET": str(place.secret_key),
        "SIGNER_ACCESS": str(place.signer_key),
        "SIGNER_SECRET": str(place.signer_secret),
    }


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def test_a_preempted_job_resumes_from_the_bucket_with_the_same_bits_and_no_key_reaches_a_host(
    weed: Weed, tmp_path: Path
) -> None:
    flags = "--steps 3000 --save-every 100"
    release = tmp_path / "release"
    code = training_folder(tmp_path)
    # What the job's own process can see is written down beside what it was given.
    run = f"env > environment.txt; RELEASE={release} {sys.executable} slow_train.py {flags} --pace 0.01"
    hosts = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(4)) + store_section(weed, tmp_path.name)
    with lab(tmp_path / "lab", hosts=hosts, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.environment = store_keys(weed)
        found.start()
        job = found.submit("net", run, workdir=code, secret_values={})
        until(lambda: found.job(job)["checkpoint"], what="the first checkpoint in the bucket", within=120, every=0.1)
        assert found.state(job) not in FINAL
        first = found.running_machines()[0].machine_id
        found.control("preempt", {"machine": first, "notice": False, "lasting": "60d"})
        until(
            lambda: any(event["kind"] == "attempt.resumed" for event in found.events(job)),
            what="the job to resume on another machine",
            within=120,
            every=0.1,
        )
        release.touch()
        found.wait_final(job, within=180)
        assert found.state(job) == "SUCCEEDED", found.job(job)
        assert found.job(job)["recoveries"] == 1
        assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags)
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert_books_are_clean(found, reconcile_s=2 * SCALE)
        found.stop()

        store = S3Store(weed.place(f"{tmp_path.name}/"))
        stored = {info.key: store.get(info.key, bytes_max=MUCH) for info in store.list("")}
        on_hosts = files_below(found.market_folder)
        assert any(b"SPOTD_CHECKPOINT_DIR" in content for content in on_hosts.values()), "no environment was seen"
        assert any(b"X-Amz-Signature" in content for content in on_hosts.values()), "no grant was seen"
        assert any(key.endswith(".json") and "/checkpoints/" in key for key in stored)
        everything = {**stored, **on_hosts, **files_below(found.folder / "state")}
        everything.update({path: data for path, data in files_below(found.folder).items() if path.endswith(".log")})
        assert [name for name, content in everything.items() if CANARY.encode() in content] == []
