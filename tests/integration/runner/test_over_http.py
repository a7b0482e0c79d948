"""A whole attempt over HTTP alone: presigned reads, POST forms, a store that fails now and then, no shared files."""

from __future__ import annotations

import email
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.wire.grant import Grant, Upload, UploadMethod, attempt_prefix
from spotd_jobs.wire.reports import Outcome
from tests.integration.runner.rig import JOB, Rig
from tests.integration.runner.servers import Answer, Request, Server
from tests.integration.runner.trainer import TRAINER, final_weights

pytestmark = pytest.mark.e2e
SIGNATURE = "s1gnature-canary"


class Bucket:
    """A store that knows GET by presigned URL and POST by form, and refuses the rest."""

    def __init__(self, rig: Rig, *, failures: float, seed: int) -> None:
        self._rig = rig
        self._rng = random.Random(seed)
        self._failures = failures
        self.refused: list[str] = []

    def answer(self, request: Request) -> Answer:
        if self._rng.random() < self._failures:
            return Answer(503, b"<Error><Code>SlowDown</Code></Error>")
        path, _, query = request.path.partition("?")
        if request.method == "POST":
            return self._post(request)
        if request.method != "GET" or SIGNATURE not in query:
            self.refused.append(f"{request.method} {path}")
            return Answer(403)
        data = self._rig.store.get(path.removeprefix("/bucket/"))
        if data is None:
            return Answer(404)
        return Answer(200, data, cut=min(3, len(data)) if self._rng.random() < self._failures else 0)

    def _post(self, request: Request) -> Answer:
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        fields: dict[str, Any] = {}
        for part in email.message_from_bytes(head + request.body).walk():
            if not part.is_multipart():
                fields[str(part.get_param("name", header="content-disposition"))] = part.get_payload(decode=True)
        # The parser above mends line ends in binary content, so the file is cut out by hand.
        boundary = request.headers["content-type"].split("boundary=")[1].encode()
        start = request.body.index(b'name="file"')
        start = request.body.index(b"\r\n\r\n", start) + 4
        content = request.body[start : request.body.rindex(b"\r\n--" + boundary)]
        key = fields["key"].decode()
        if fields.get("x-amz-signature") != SIGNATURE.encode() or not key.startswith(fields["allowed"].decode()):
            self.refused.append(key)
            return Answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        self._rig.store.put(key.removeprefix("root/"), content)
        return Answer(204)


def over_http(rig: Rig, server: Server, grant: Grant) -> Grant:
    """The same grant for a host that shares no files with us."""

    def url(key: str) -> str:
        return f"{server.url}/bucket/{key}?X-Amz-Signature={SIGNATURE}"

    prefix = grant.upload.prefix
    restore = [
        offer.model_copy(
            update={
                "manifest": offer.manifest.model_copy(update={"url": url(offer.manifest.key)}),
                "chunks": {key: url(key) for key in offer.chunks},
            }
        )
        for offer in grant.restore
    ]
    upload = Upload(
        method=UploadMethod.POST,
        prefix=prefix,
        expires=datetime.now(UTC) + timedelta(hours=1),
        size_max=1 << 26,
        fields={
            "url": f"{server.url}/bucket",
            "form": {
                "key": "root/" + prefix + "${filename}",
                "allowed": "root/" + prefix,
                "x-amz-signature": SIGNATURE,
            },
            "key_prefix": "root/" + prefix,
        },
    )
    return rig.renew(
        grant,
        grant_url=url(prefix + "grant.json"),
        code=grant.code and grant.code.model_copy(update={"url": url("code/code.tar.gz")}),
        runner=grant.runner.model_copy(update={"url": url("runner/runner.pyz")}),
        restore=restore,
        upload=upload,
    )


def test_a_job_is_saved_and_resumed_through_a_store_that_fails_now_and_then(tmp_path: Path) -> None:
    train = [sys.executable, "-IS", "train.py", "1", "600", "marked"]
    with Rig(tmp_path) as rig:
        bucket = Bucket(rig, failures=0.1, seed=7)
        with Server(bucket.answer) as server:
            first = rig.start(over_http(rig, server, rig.grant(train, code={"train.py": TRAINER})))
            first.event("checkpoint")
            first.kill()
            train[3:5] = ["6", "0"]
            grant = rig.grant(train, attempt=2, code={"train.py": TRAINER}, restore=rig.restores(1), outputs=["t*"])
            second = rig.start(over_http(rig, server, grant))
            assert second.wait() == 0
        done = second.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.SUCCEEDED
        second.event("restored")
        assert (second.home / "outputs/final").read_text() == final_weights(6)
        assert rig.accepted(2)
        assert second.events("outputs")
        assert bucket.refused == []
        for machine in (first, second):
            assert SIGNATURE not in machine.console() + machine.log()


def test_a_store_that_refuses_every_write_ends_the_attempt_when_its_lease_is_over(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        bucket = Bucket(rig, failures=0.0, seed=1)
        with Server(bucket.answer) as server:
            grant = over_http(rig, server, rig.grant(["/bin/true"], lease_s=0.5))
            fields = {**grant.upload.fields, "key_prefix": "root/" + attempt_prefix(JOB, 9)}
            grant = rig.renew(grant, upload=grant.upload.model_copy(update={"fields": fields}))
            machine = rig.start(grant)
            assert machine.wait() == 0
        assert set(bucket.refused) > {"root/jobs/j1/attempts/9/heartbeat.json"}
        assert rig.store.keys(machine.prefix) == [machine.prefix + "grant.json"]
        assert (machine.directory / "machine-done").exists()
