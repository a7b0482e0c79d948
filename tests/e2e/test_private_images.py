"""A private image at vast.ai and RunPod: refused, mended while the daemon runs, and its password shown nowhere."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.clouds import Clouds, three_clouds
from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import until

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]
IMAGE = "ghcr.io/lab/train:1"
PASSWORD = "canary-of-the-registry-5d20"
WRONG = "canary-of-before-11c7"


def submitted(found: Clouds, name: str, provider: str) -> str:
    resources = {"gpu": ["RTX_4090:1", "T4:1"], "disk": "10GB", "market": "auto", "providers": [provider]}
    run = 'echo done > "$SPOTD_OUTPUT_DIR/done.txt"'
    return found.lab.submit(name, run, image=IMAGE, resources=resources, price={"max_price": 0.5})


def reload(found: Clouds, text: str) -> None:
    (found.lab.folder / "config.toml").write_text(text, encoding="utf-8")
    process = found.lab.process
    assert process is not None
    before = found.lab.log_tail().count("config.reloaded")
    process.send_signal(signal.SIGHUP)
    until(lambda: found.lab.log_tail().count("config.reloaded") > before, what="the config to be read again")


@pytest.mark.timeout(300)
def test_a_wrong_password_is_named_and_the_next_launch_takes_the_mended_one(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(WRONG)
    secret.chmod(0o600)
    more = f'\n[registries.ghcr]\nserver = "ghcr.io"\nusername = "me"\npassword = {{ file = "{secret}" }}\n'
    with three_clouds(tmp_path, more=more) as found:
        found.vast.private[IMAGE] = found.runpod.private[IMAGE] = ("me", PASSWORD)
        foreign = found.runpod.belongings.add_registry({"name": "mine", "username": "me", "password": "x"})["id"]
        found.lab.start()
        config = (found.lab.folder / "config.toml").read_text(encoding="utf-8")
        at_aws = submitted(found, "refused", "aws")
        job = submitted(found, "mended", "vast")

        def ends() -> list[str]:
            return [line["reason"] for line in found.lab.job(job)["attempts"] if line["reason"]]

        until(lambda: "image_error" in ends(), what="the first attempt to be refused its image", within=90)
        (event,) = [one for one in found.lab.events(job) if one["kind"] == "attempt.image_error"]
        assert "ghcr.io refused it: mend username and password of [registries.ghcr]" in event["message"]

        secret.write_text(PASSWORD)
        reload(found, config)
        found.lab.wait_final(job)
        assert found.lab.state(job) == "SUCCEEDED", found.lab.job(job)
        assert ends() == ["image_error", "done"]

        stored = submitted(found, "stored", "runpod")
        found.lab.wait_final(stored)
        assert found.lab.state(stored) == "SUCCEEDED", found.lab.job(stored)
        known = found.runpod.belongings.registries
        (ours,) = set(known) - {foreign}
        assert known[ours]["name"].startswith("spotd-lab.image-")
        assert found.lab.state(at_aws) == "WAITING_PRICE"
        assert "user data" in spotctl(found.lab, "why", at_aws).stdout
        assert not found.aws.instances

        words = [f"show {job}", f"why {job}", f"logs {job}", f"events {job} -o json", "doctor", "providers --explain"]
        told = "".join(done.stdout + done.stderr for done in (spotctl(found.lab, *one.split()) for one in words))
        assert "vast.ai hands the password to the host" in told

        reload(found, config.replace(more, ""))
        until(lambda: set(known) == {foreign}, what="the dropped registry's credential to be deleted", within=60)
        found.lab.stop()
        files = [path for path in found.lab.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        for text in (PASSWORD, WRONG):
            assert text not in told
            assert not [path for path in files if text.encode() in path.read_bytes()]
            assert not [request.url for _, request in found.requests() if text in request.url]
        assert_no_traceback(found.lab)
