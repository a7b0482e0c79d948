"""One job across three markets: outbid at vast.ai, interrupted at AWS, finished at RunPod, with the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.s3 import S3Store
from tests.e2e.clouds import (
    ASK,
    AWS_SECRET,
    GPUS,
    KEYS,
    POOLS,
    PROVIDER_KEYS,
    Clouds,
    assert_one_machine_at_a_time,
    three_clouds,
)
from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import assert_receipts_agree, straight_sha256, training_folder, until
from tests.e2e.test_bucket import files_below, store_keys, store_section
from tests.fakes.aws import Phase
from tests.fakes.seaweed import CANARY, Weed

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]
FLAGS = "--steps 1500 --save-every 25"
JOB_SECRET = "secret-of-the-job-canary-91be"
NOTICE = timedelta(minutes=2)
MUCH = 100_000_000


def running_at(found: Clouds, job: str, provider: str) -> str | None:
    """The machine on which the job runs, if it is one of this provider's and has begun to compute."""
    row = found.lab.job(job)
    return str(row["host"]) if row["state"] == "RUNNING" and row["provider"] == provider else None


def in_progress(found: Clouds, job: str, provider: str, attempt: int) -> None:
    """The job runs at this provider, and a checkpoint of this very attempt was accepted."""

    def saved() -> bool:
        if running_at(found, job, provider) is None:
            return False
        return any(c["attempt"] == attempt for c in found.lab.api.checkpoints(job)["checkpoints"])

    until(saved, what=f"a checkpoint of attempt {attempt} at {provider}", within=120, every=0.1)


def spot_of_aws(found: Clouds) -> float:
    """The lowest price of its spot machines that the daemon knows."""
    quotes = found.lab.api.prices({"provider": "aws"})["quotes"]
    return min((quote["effective_usd_gpu_h"] for quote in quotes if quote["market"] == "spot"), default=0.0)


@pytest.mark.timeout(600)  # three quarters of a minute on two free cores; a busy machine stretches every restart
def test_a_job_is_outbid_at_vast_saves_in_aws_two_minutes_and_ends_at_runpod(weed: Weed, tmp_path: Path) -> None:
    release = tmp_path / "release"
    known = hashlib.sha256(JOB_SECRET.encode()).hexdigest()
    run = (
        # The job has its secret, and what else it has is written down without it; it prints the secret, too.
        f'test "$(printf %s "$WANDB_API_KEY" | sha256sum | cut -c1-64)" = {known} || exit 9; '
        'env -u WANDB_API_KEY > environment.txt; echo "my key is $WANDB_API_KEY"; '
        f"RELEASE={release} {sys.executable} slow_train.py {FLAGS} --pace 0.1"
    )
    with three_clouds(tmp_path, more=store_section(weed, tmp_path.name), environment=store_keys(weed)) as found:
        found.lab.fresh = True  # its arguments, as anybody on this computer sees them, are looked at below
        found.lab.start()
        job = found.lab.submit(
            "net",
            run,
            workdir=training_folder(tmp_path),
            image="python:3.12-slim",
            resources={"gpu": GPUS, "disk": "10GB", "market": "auto"},
            price={"max_price": 0.5},
            secrets=["WANDB_API_KEY"],
            secret_values={"WANDB_API_KEY": JOB_SECRET},
        )
        store = S3Store(weed.place(f"{tmp_path.name}/"))

        in_progress(found, job, "vast", 1)
        assert_secrets_are_kept(found, store, job, attempt=1)
        found.vast.set_min_bid(ASK, 5.0)

        in_progress(found, job, "aws", 2)
        assert_secrets_are_kept(found, store, job, attempt=2)
        (interrupted,) = found.aws.instances.values()
        for pool in POOLS:
            found.aws.set_price(pool, "0.46")
        until(lambda: spot_of_aws(found) >= 0.46, what="the new prices of AWS to be polled")
        prefix = f"jobs/{job}/attempts/2/checkpoints/"
        before = {info.key for info in store.list(prefix)}
        found.aws.interrupt(interrupted.instance_id)
        until(
            lambda: any(info.key not in before for info in store.list(prefix)),
            what="a save within the notice",
            within=30,
        )
        assert interrupted.phase is Phase.RUNNING, "it saved only after its machine was taken"

        in_progress(found, job, "runpod", 3)
        assert_secrets_are_kept(found, store, job, attempt=3)
        release.touch()
        found.lab.wait_final(job)
        assert found.lab.state(job) == "SUCCEEDED", found.lab.job(job)
        assert found.lab.job(job)["recoveries"] == 2
        assert found.lab.delivered(job, "weights.sha256") == straight_sha256(tmp_path, FLAGS)
        until(lambda: not found.left(), what="every machine to be gone")
        assert_one_machine_at_a_time(found.spending(), ["vast", "aws", "runpod"], may_outlive={"aws": NOTICE})
        assert interrupted.interrupted, (
            f"AWS was told to end what it would have taken for nothing: {interrupted.reason}"
        )
        ends = [line["reason"] for line in found.lab.job(job)["attempts"]]
        assert ends == ["outbid", "preempted", "done"]

        assert_receipts_agree(found.lab)
        told = {words: spotctl(found.lab, *words.split()) for words in asked_of_it(job)}
        assert "my key is" in told[f"logs {job}"].stdout, "the line that named the secret is not in the log"
        found.lab.stop()
        assert_secrets_are_kept(
            found, store, job, attempt=None, said="".join(d.stdout + d.stderr for d in told.values())
        )
        assert_no_traceback(found.lab)


def asked_of_it(job: str) -> list[str]:
    return [
        f"show {job}", f"show {job} -o json", f"why {job}", f"logs {job}", f"events {job} -o json", "ls -o json",
        "prices --explain", "cost -o json", f"checkpoints {job}", "providers --explain", "doctor",
    ]  # fmt: skip


def assert_secrets_are_kept(found: Clouds, store: S3Store, job: str, *, attempt: int | None, said: str = "") -> None:
    """Keys of providers and of the store are written nowhere, the job's only where the running attempt needs them.

    `attempt` is the one that runs; after the last one the job's secret is nowhere at all.
    """
    state = found.lab.folder / "state"
    written = files_below(found.lab.folder)
    for folder in found.machine_folders():
        written |= files_below(folder)
    for info in store.list(""):
        with contextlib.suppress(ObjectMissing):  # a checkpoint that is not kept any longer
            written[f"store:{info.key}"] = store.get(info.key, bytes_max=MUCH)
    written |= {f"arguments of {pid}": arguments for pid, arguments in arguments_of_all()}
    written["said"] = said.encode()
    for number, (name, request) in enumerate(found.requests()):
        where = f"request {number} to {name}: {request.method} {request.path}"
        # A provider's own key travels in this header, and nowhere else.
        others = {k: v for k, v in request.headers.items() if k != "authorization"}
        written[where] = f"{request.url}\n{others}\n".encode() + request.body
        key = request.headers.get("authorization", "")
        strangers = [one for other, one in KEYS.items() if other != name]
        assert not any(secret in key for secret in (*strangers, AWS_SECRET, CANARY, JOB_SECRET)), where
    kept = [one.encode() for one in (*PROVIDER_KEYS, CANARY)]
    assert [where for where, content in written.items() if any(one in content for one in kept)] == []
    seen = {where for where, content in written.items() if JOB_SECRET.encode() in content}
    needed = {str(state / "secrets" / f"{job}.json"), f"store:jobs/{job}/attempts/{attempt}/grant.json"}
    assert seen == (needed if attempt is not None else set())


def arguments_of_all() -> list[tuple[str, bytes]]:
    """What anybody on this computer can see of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append((path.parent.name, path.read_bytes()))
    return found
