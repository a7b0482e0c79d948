"""torchrun over four machines with gloo: each is killed in turn, and two at once; the weights stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import GangGrant, Grant
from tests.integration.frameworks.test_real_frameworks import PATIENCE_S, PYTHON, need
from tests.integration.runner.rig import Machine, Rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NODES = 4
SCRIPT = Path(__file__).with_name("gang_sums.py")
TORCHRUN = Path(PYTHON).with_name("torchrun")
PLACE = "--nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
ENDLESS = 10**6


def grant(rig: Rig, attempt: int, steps: int) -> Grant:
    run = f"{TORCHRUN} {PLACE} train.py {steps} {0.2 if steps == ENDLESS else 0}"
    made = rig.grant(
        ["/bin/sh", "-c", run],
        attempt=attempt,
        code={"train.py": SCRIPT.read_text()},
        restore=rig.restores(attempt - 1) if attempt > 1 else None,
        stop_grace_s=5.0,
        lease_s=900.0,
        env={"OMP_NUM_THREADS": "1"},
    )
    url = rig.store.url(made.upload.prefix + "gang.json")
    return rig.renew(made, gang=GangGrant(nodes=NODES, first_url=url, wait_s=PATIENCE_S, silent_s=60.0))


def start(rig: Rig, granted: Grant, nodes: int = NODES) -> list[Machine]:
    return [
        rig.start(
            granted,
            f"a{granted.attempt}m{rank}",
            {"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"},
        )
        for rank in range(nodes)
    ]


def weights(machines: list[Machine]) -> str:
    assert [machine.wait(PATIENCE_S) for machine in machines] == [0] * NODES
    found = re.findall(r"rank \d ends with (\w{64})", machines[0].log())
    assert len(found) == NODES, machines[0].log()
    assert len(set(found)) == 1, "all ranks have the same weights"
    return str(found[0])


def lose(machines: list[Machine], *killed: int) -> None:
    """End these machines once something is saved; the others end with them."""
    until(lambda: len(machines[0].events("checkpoint")) >= 2, "two checkpoints", PATIENCE_S)
    for rank in killed:
        machines[rank].kill()
    rest = [machine for rank, machine in enumerate(machines) if rank not in killed]
    assert [machine.wait(PATIENCE_S) for machine in rest] == [0] * len(rest)
    until(lambda: not any(machine.processes() for machine in machines), "their commands to be gone")
    if 0 not in killed:
        assert machines[0].event("exit").data["outcome"] == "member_lost"


def test_the_weights_are_those_of_a_run_in_which_no_machine_was_lost(tmp_path: Path) -> None:
    need("torch")
    strikes = ((0,), (1,), (2,), (3,), (0, 2), (1, 3))
    with Rig(tmp_path / "lost") as rig:
        saved = [0]
        for attempt, killed in enumerate(strikes, start=1):
            machines = start(rig, grant(rig, attempt, ENDLESS))
            lose(machines, *killed)
            assert begun(machines) <= {saved[-1]}
            saved.append(int(rig.restores(attempt)[0].name.removeprefix("step-")))
        assert saved == sorted(set(saved)), "each goes on from where the one before it had saved"
        last = start(rig, grant(rig, len(saved), saved[-1] + 12))
        resumed = weights(last)
        assert begun(last) == {saved[-1]}
    with Rig(tmp_path / "calm") as rig:
        assert weights(start(rig, grant(rig, 1, saved[-1] + 12))) == resumed


def begun(machines: list[Machine]) -> set[int]:
    """At which steps the ranks say that they begin."""
    return {int(step) for step in re.findall(r"rank \d of 4 begins at step (\d+)", machines[0].log())}
