"""A whole attempt under each kind of temporary credential: no key of the account is anywhere that a host can look.

The real runner saves and resumes with grants as the daemon makes them. Then everything is searched: the host's whole
folder, the environment and arguments of its processes while the job ran, and every object in the store, which is all
that it was given, wrote, logged or told.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.wire.client import web
from tests.fakes import honest_s3
from tests.fakes.seaweed import CANARY, ROLE, Weed
from tests.integration.runner.bucket import BucketStore
from tests.integration.runner.rig import Machine, Rig
from tests.integration.runner.trainer import TRAINER
from tests.unit.jobs.test_credentials import place

pytestmark = pytest.mark.process

MUCH = 1 << 26


@dataclass
class Account:
    """A store, and what of its account's must stay where it is."""

    store: S3Store
    secret: str


@pytest.fixture(params=["r2", "b2", "sts user", "seaweed's sts"])
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    if request.param == "seaweed's sts":
        weed: Weed = request.getfixturevalue("weed")
        yield Account(S3Store(weed.place(f"{uuid.uuid4().hex}/", role=ROLE)), CANARY)
        return
    with honest_s3.running() as server:
        yield Account(S3Store(place(server, request.param)), honest_s3.SECRET)
        web.drop_connections()


def processes(machine: Machine) -> dict[str, bytes]:
    """What can be seen of the runner, of the job and of whatever it started."""
    found = {}
    for pid in machine.processes():
        for what in ("environ", "cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                found[f"{what} of {pid}"] = Path(f"/proc/{pid}/{what}").read_bytes()
    return found


def below(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # rotated away
            if path.is_file() and not path.is_symlink():
                found[str(path)] = path.read_bytes()
    return found


def where(secret: str, *seen: dict[str, bytes]) -> list[str]:
    return [name for one in seen for name, content in one.items() if secret.encode() in content]


def test_no_key_of_the_account_and_no_credential_is_where_it_does_not_belong(account: Account, tmp_path: Path) -> None:
    train = [sys.executable, "-IS", "train.py", "100000", "0.2", "marked"]
    with Rig(tmp_path, store=BucketStore(account.store)) as rig:
        first = rig.start(rig.grant(train, code={"train.py": TRAINER}))
        first.event("checkpoint")
        running = processes(first)
        assert any(b"SPOTD_CHECKPOINT_DIR" in content for content in running.values()), "the job was not seen"
        first.kill()

        train[3:5] = ["3", "0"]
        grant = rig.grant(train, attempt=2, code={"train.py": TRAINER}, restore=rig.restores(1)[:1], outputs=["t*"])
        second = rig.start(grant)
        assert second.wait() == 0, second.console()
        assert second.events("restored")

        stored = {info.key: account.store.get(info.key, bytes_max=MUCH) for info in account.store.list("")}
        kinds = {key.split("/")[4] for key in stored if key.startswith("jobs/")}
        assert kinds >= {"checkpoints", "data", "events", "grant.json", "heartbeat.json", "log", "outputs"}
        on_hosts = {**below(first.directory), **below(second.directory)}
        assert where("X-Amz-Signature", running), "the URL of the grant was not seen"
        assert where(account.secret, running, on_hosts, stored) == []
        own_secrets = {credential(machine) for machine in (first, second)}
        for own in own_secrets:
            assert own not in account.secret
            told = {key: content for key, content in stored.items() if not key.endswith("grant.json")}
            assert where(own, stored) != [], "the attempt's own credential is in its grant"
            assert where(own, told, running) == [], "and in nothing that it tells, nor in any environment"


def credential(machine: Machine) -> str:
    assert machine.grant.upload.method == "sigv4"
    return str(machine.grant.upload.fields["secret_key"])
