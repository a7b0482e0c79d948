"""torchrun over several machines, each of which saves its own shards by DCP: each is killed in the middle of a save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import GangGrant, Grant
from tests.integration.frameworks.test_gang_torchrun import ENDLESS, NODES, PLACE, TORCHRUN, begun, start, weights
from tests.integration.frameworks.test_real_frameworks import PATIENCE_S, need
from tests.integration.runner.rig import Machine, Rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("gang_shards.py")


def grant(rig: Rig, attempt: int, steps: int, nodes: int = NODES) -> Grant:
    run = f"{TORCHRUN} {PLACE} train.py {steps} {0.1 if steps == ENDLESS else 0}"
    made = rig.grant(
        ["/bin/sh", "-c", run],
        attempt=attempt,
        code={"train.py": SCRIPT.read_text()},
        restore=rig.restores(attempt - 1) if attempt > 1 else None,
        settle_s=0.5,
        stop_grace_s=5.0,
        lease_s=900.0,
        env={"OMP_NUM_THREADS": "1", "STRIKE": str(rig.folder / "strike")},
    )
    spec = made.spec.model_copy(update={"checkpoint": made.spec.checkpoint.model_copy(update={"saved_by": "all"})})
    url = rig.store.url(made.upload.prefix + "gang.json")
    gang = GangGrant(nodes=nodes, first_url=url, wait_s=PATIENCE_S, silent_s=60.0)
    return rig.renew(made, spec=spec, gang=gang)


def kill_in_a_save(rig: Rig, machines: list[Machine], rank: int) -> None:
    """End this machine once its shard is written and that of another one may not be; the others end with it."""
    until(lambda: machines[0].events("checkpoint"), "a checkpoint", PATIENCE_S)
    strike = rig.folder / "strike"
    strike.write_text(str(rank))
    until(strike.with_suffix(".there").exists, "the rank to be in a save", PATIENCE_S)
    strike.unlink()
    strike.with_suffix(".there").unlink()
    machines[rank].kill()
    rest = [machine for other, machine in enumerate(machines) if other != rank]
    assert [machine.wait(PATIENCE_S) for machine in rest] == [0] * len(rest)
    until(lambda: not any(machine.processes() for machine in machines), "their commands to be gone")
    if rank:
        assert machines[0].event("exit").data["outcome"] == "member_lost"


def require_whole(rig: Rig, attempt: int) -> int:
    """Each checkpoint has the shards of all ranks; return the step of the newest."""
    accepted = rig.accepted(attempt)
    for one in accepted:
        paths = {entry.path.partition("/")[2] for entry in one.files}
        assert paths == {".metadata", *(f"__{rank}_0.distcp" for rank in range(NODES))}
    return int(accepted[-1].name.removeprefix("step-"))


def test_shards_of_all_machines_come_to_the_weights_of_a_run_in_which_none_was_lost(tmp_path: Path) -> None:
    need("torch")
    with Rig(tmp_path / "lost") as rig:
        saved = [0]
        for attempt, killed in enumerate(range(NODES), start=1):
            machines = start(rig, grant(rig, attempt, ENDLESS))
            kill_in_a_save(rig, machines, killed)
            assert begun(machines) <= {saved[-1]}
            saved.append(require_whole(rig, attempt))
        assert saved == sorted(set(saved)), "each goes on from where the one before it had saved"
        steps = saved[-1] + 12
        last = start(rig, grant(rig, len(saved), steps))
        resumed = weights(last)
        assert begun(last) == {saved[-1]}

        newest = f"saved step {require_whole(rig, len(saved))} with "
        content = last[0].log().split(newest)[1].split()[0]
        fewer = start(rig, grant(rig, len(saved) + 1, steps, nodes=2), nodes=2)
        assert [machine.wait(PATIENCE_S) for machine in fewer] == [0, 0]
        assert set(re.findall(r"of 2 begins at step \d+ with (\w{64})", fewer[0].log())) == {content}
    with Rig(tmp_path / "calm") as rig:
        assert weights(start(rig, grant(rig, 1, steps))) == resumed
