"""What an idle daemon holds in memory, as a process with its providers open and their first prices on the board."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotd_providers.local.hosts.machines import REAL_TIME
from spotd_providers.testkit.serve import serving
from tests.e2e.harness import Lab, lab, until
from tests.fakes.aws import ACCESS_KEY, Ec2Api, Ec2Cloud
from tests.fakes.runpod import RunpodApi, RunpodCloud, some_gpus
from tests.fakes.vastai import VastApi, VastCloud, some_asks

pytestmark = pytest.mark.e2e

MIB_MAX = 90.0
MIB_MAX_WITH_AWS = 127.0


def resident_mib(lab: Lab) -> float:
    assert lab.process is not None
    status = Path(f"/proc/{lab.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def without_test_tools(folder: Path) -> Path:
    """A folder for PYTHONPATH that hides what httpcore and SQLAlchemy import where it is, as it is for tests only."""
    hidden = folder / "hidden"
    hidden.mkdir()
    for name in ("trio", "greenlet"):
        (hidden / f"{name}.py").write_text("raise ImportError('not a part of spotd')\n")
    return hidden


@contextmanager
def idle(folder: Path, *, providers: str, environment: dict[str, str]) -> Iterator[Lab]:
    """A daemon without jobs that shows prices of every provider and has polled on since."""
    with lab(folder / "lab", hosts=providers, market="enabled = false", scale=1.0, poll_s=1.0) as found:
        found.fresh = True
        found.environment = {**environment, "PYTHONPATH": str(without_test_tools(folder))}
        found.start()

        def polled() -> list[str] | None:
            rows = found.api.providers()["providers"]
            enabled = [row for row in rows if row["enabled"]]
            ready = all(row["offers"] and row["last_listing_at"] for row in enabled)
            return sorted(str(row["last_poll_at"]) for row in enabled) if ready else None

        first = until(polled, what="prices of every provider", within=120, every=0.2)
        until(lambda: (polled() or first)[0] > first[-1], what="another poll of each", within=120, every=0.2)
        yield found


def test_an_idle_daemon_with_two_marketplaces_holds_less_than_ninety_mib(tmp_path: Path) -> None:
    vast, runpod = VastCloud(tmp_path / "vast", clock=REAL_TIME), RunpodCloud(tmp_path / "runpod", clock=REAL_TIME)
    vast.stock(*some_asks())
    runpod.stock(*some_gpus())
    with serving(VastApi(vast)) as at_vast, serving(RunpodApi(runpod)) as at_runpod:
        providers = f"""
[providers.vast]
api_key = {{ env = "VAST_KEY" }}
base_url = "{at_vast.url}"
[providers.runpod]
api_key = {{ env = "RUNPOD_KEY" }}
base_url = "{at_runpod.url}"
gpu_counts = [1]
"""
        keys = {"VAST_KEY": vast.api_key, "RUNPOD_KEY": runpod.api_key}
        with idle(tmp_path, providers=providers, environment=keys) as found:
            assert resident_mib(found) <= MIB_MAX
    vast.shut_down()
    runpod.shut_down()


def test_an_idle_daemon_with_the_aws_client_holds_less_than_a_hundred_and_thirty_mib(tmp_path: Path) -> None:
    aws = Ec2Cloud(tmp_path / "aws", clock=REAL_TIME)
    aws.stock_usual()
    with serving(Ec2Api(aws)) as served:
        providers = f"""
[providers.aws]
enabled = true
api_key = {{ env = "AWS_KEY" }}
endpoint_url = "{served.url}"
regions = ["us-east-1"]
container = "none"
"""
        with idle(tmp_path, providers=providers, environment={"AWS_KEY": f"{ACCESS_KEY}:secret"}) as found:
            assert resident_mib(found) <= MIB_MAX_WITH_AWS
    aws.shut_down()
