"""Which of vast.ai's four state words decides, and why a machine stopped."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_providers.contract.values import AttemptKey, Billing, InstallId, InstanceState, Loss, Market
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.text import key_of
from spotd_providers.testkit.clock import START
from spotd_providers.vastai.listing import as_instance, standing
from spotd_providers.vastai.wire import InstanceRow
from tests.cases import every

KEY = AttemptKey("spotd-lab-7f3a-1")
OLD = START - timedelta(hours=3)
FRESH = START - timedelta(seconds=20)
P, R, S, E, G, U = (
    InstanceState.PENDING,
    InstanceState.RUNNING,
    InstanceState.PAUSED,
    InstanceState.ENDING,
    InstanceState.GONE,
    InstanceState.UNKNOWN,
)
OCI = "Error: failed to create task: OCI runtime create failed: runc create failed"
PULL = "Error response from daemon: pull access denied for nobody/nothing"


def row(actual: str | None, current: str | None, wanted: str | None, **more: Any) -> InstanceRow:
    fields = {
        "id": 27311904,
        "label": KEY,
        "is_bid": True,
        "actual_status": actual,
        "cur_state": current,
        "next_state": current,
        "intended_status": wanted,
        "start_date": OLD.timestamp(),
        "end_date": (START + timedelta(days=9)).timestamp(),
        **more,
    }
    found = row_or_none(InstanceRow, fields)
    assert found is not None
    return found


@every(
    ("seen", "state", "loss"),
    [
        pytest.param(row(None, "running", "running"), P, None, id="host has not reported yet"),
        pytest.param(row("", "running", "running"), P, None, id="empty status"),
        pytest.param(row("created", "running", "running"), P, None, id="container made"),
        pytest.param(row("loading", "running", "running"), P, None, id="image is pulled"),
        pytest.param(row("rebooting", "running", "running"), P, None, id="rebooting"),
        pytest.param(row("RESTARTING", "running", "running"), P, None, id="restarting in capitals"),
        pytest.param(row("running", "running", "running"), R, None, id="running"),
        pytest.param(row("running", "running", "stopped"), R, None, id="running, stop wanted"),
        pytest.param(row("exited", "stopped", "stopped"), S, Loss.OUTBID, id="outbid, agent says exited"),
        pytest.param(row("running", "stopped", "stopped"), S, Loss.OUTBID, id="outbid, agent still says running"),
        pytest.param(row(None, "stopped", "stopped"), S, Loss.OUTBID, id="outbid before it ever ran"),
        pytest.param(row("loading", "stopped", "stopped"), S, Loss.OUTBID, id="outbid while loading"),
        pytest.param(row("offline", "stopped", "stopped"), S, Loss.OUTBID, id="outbid on a host that is offline"),
        pytest.param(row("exited", "stopped", "running"), S, Loss.OUTBID, id="scheduling"),
        pytest.param(row("scheduling", "stopped", "running"), S, Loss.OUTBID, id="scheduling by its own word"),
        pytest.param(
            row(None, "stopped", "running", start_date=FRESH.timestamp()), P, None, id="scheduling in its first moments"
        ),
        pytest.param(
            row("running", "stopped", "running", start_date=FRESH.timestamp()),
            S,
            Loss.OUTBID,
            id="lost its GPU although it is young",
        ),
        pytest.param(row("stopped", "running", "running"), S, Loss.OUTBID, id="halted by the host"),
        pytest.param(row("exited", "stopped", "stopped", is_bid=False), S, Loss.HOST_LOST, id="on-demand stopped"),
        pytest.param(
            row("exited", "stopped", "stopped", end_date=START.timestamp()), S, Loss.EXPIRED, id="contract ended"
        ),
        pytest.param(row("exited", "running", "running"), S, Loss.SELF, id="container ended by itself"),
        pytest.param(row("exited", "running", "running", status_msg=OCI), S, Loss.PROVISION_FAILED, id="exited by OCI"),
        pytest.param(row("created", "running", "running", status_msg=OCI), S, Loss.PROVISION_FAILED, id="OCI error"),
        pytest.param(row("loading", "running", "running", status_msg=PULL), S, Loss.IMAGE_ERROR, id="no such image"),
        pytest.param(row(None, "running", "running", status_msg=PULL), S, Loss.IMAGE_ERROR, id="no image, no status"),
        pytest.param(row("frozen", "running", "frozen"), S, Loss.HOST_LOST, id="frozen"),
        pytest.param(row("unknown", "running", "running"), U, None, id="no heartbeat"),
        pytest.param(row("offline", "running", "running"), U, None, id="offline"),
        pytest.param(row("meditating", "running", "running"), U, None, id="a word never heard"),
        pytest.param(row("exited", "unloaded", "stopped"), E, None, id="released by destroy"),
        pytest.param(row("running", "running", "destroyed"), E, None, id="destruction wanted"),
        pytest.param(row("destroyed", "unloaded", "destroyed"), G, None, id="destroyed"),
    ],
)
def test_the_four_words_come_to_one_state(seen: InstanceRow, state: InstanceState, loss: Loss | None) -> None:
    found = standing(seen, now=START)
    assert (found.state, found.loss) == (state, loss)


CDI = (
    "Error response from daemon: failed to create task for container: failed to create shim task: OCI runtime create "
    "failed: could not apply required modification to OCI specification: error modifying OCI spec: failed to inject "
    "CDI devices: unresolvable CDI devices"
)
NO_SHELL = (
    "Error response from daemon: failed to create task for container: failed to create shim task: OCI runtime create "
    'failed: runc create failed: unable to start container process: exec: "/bin/sh": stat /bin/sh: no such file or '
    "directory: unknown"
)


@every("actual", ["created", "exited", "stopped", None, "loading"])
@every(("current", "wanted"), [("stopped", "stopped"), ("stopped", "running"), ("running", "running")])
@every(
    ("text", "loss"),
    [
        pytest.param(CDI, Loss.PROVISION_FAILED, id="recorded"),
        pytest.param(OCI, Loss.PROVISION_FAILED, id="oci"),
        pytest.param("nvidia-container-cli: initialization error: nvml error", Loss.PROVISION_FAILED, id="driver"),
        pytest.param("Error: write /var/lib/docker/x: no space left on device", Loss.PROVISION_FAILED, id="disk"),
        pytest.param('could not select device driver "" with capabilities: [[gpu]]', Loss.PROVISION_FAILED, id="gpu"),
        pytest.param(NO_SHELL, Loss.IMAGE_ERROR, id="no-shell-in-the-image"),
        pytest.param(PULL, Loss.IMAGE_ERROR, id="no-image"),
        pytest.param("Error: manifest unknown: nobody/x:1", Loss.IMAGE_ERROR, id="no-tag"),
    ],
)
def test_what_the_host_says_of_a_failed_start_goes_before_the_words_of_the_contract(
    actual: str | None, current: str, wanted: str, text: str, loss: Loss
) -> None:
    found = standing(row(actual, current, wanted, status_msg=text), now=START)
    assert (found.state, found.loss) == (S, loss)


@every("text", ["success, running pytorch", "", "Error response from daemon: No such container: C.7"])
def test_an_outbid_machine_stays_one_whatever_else_its_host_says(text: str) -> None:
    assert standing(row("exited", "stopped", "stopped", status_msg=text), now=START).loss is Loss.OUTBID


def test_a_machine_that_runs_is_not_judged_by_an_old_text() -> None:
    assert standing(row("running", "running", "running", status_msg=CDI), now=START).state is R


words: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "running", "stopped", "exited", "offline", "frozen", "unloaded", "destroyed", "created", "x", 7, [], {}]
)


@given(words, words, words, words, st.sampled_from([None, True, False, "yes"]), st.floats() | st.none() | st.text())
def test_no_combination_of_words_is_a_crash(
    actual: Any, current: Any, following: Any, wanted: Any, is_bid: Any, start: Any
) -> None:
    seen = row_or_none(
        InstanceRow,
        {
            "id": 1,
            "label": KEY,
            "actual_status": actual,
            "cur_state": current,
            "next_state": following,
            "intended_status": wanted,
            "is_bid": is_bid,
            "start_date": start,
            "end_date": start,
        },
    )
    assert seen is not None
    machine = as_instance(seen, KEY, now=START)
    assert machine.key == KEY
    if machine.state is InstanceState.GONE:
        assert actual == "destroyed"
    if isinstance(is_bid, bool):
        assert machine.market is (Market.SPOT if is_bid else Market.ON_DEMAND)


@every(
    ("label", "ours"),
    [
        ("spotd-lab-7f3a-1", True),
        ("  spotd-lab-7f3a-12\n", True),
        ("spotd-lab2-7f3a-1", False),
        ("spotd-lab-2-7f3a-1", False),
        ("spotd-lab-7f3a", False),
        ("spotd-lab-7f3a-x", False),
        ("spotd-lab--1", False),
        ("my notebook", False),
        ("", False),
        (None, False),
        (["spotd-lab-7f3a-1"], False),
    ],
)
def test_only_labels_of_this_installation_are_ours(label: Any, ours: bool) -> None:
    assert (key_of(label, InstallId("lab")) is not None) is ours


@every(
    ("more", "floor"),
    [
        pytest.param({"min_bid": 0.171}, 171_000, id="of a bid"),
        pytest.param({"min_bid": 0.171, "is_bid": False}, None, id="on-demand has none"),
        pytest.param({"min_bid": "0.171 $"}, None, id="no number"),
        pytest.param({}, None, id="not stated"),
    ],
)
def test_the_lowest_bid_that_wins_is_read_where_there_is_one(more: dict[str, Any], floor: int | None) -> None:
    assert as_instance(row("running", "running", "running", **more), KEY, now=START).bid_floor == floor


@every(
    ("seen", "billing"),
    [
        pytest.param(row("running", "running", "running"), Billing.FULL, id="it runs"),
        pytest.param(row("loading", "running", "running"), Billing.DISK, id="its image is pulled"),
        pytest.param(row("offline", "running", "running"), Billing.NOTHING, id="its host is offline"),
        pytest.param(row("offline", "stopped", "stopped"), Billing.NOTHING, id="outbid on a host that is offline"),
        pytest.param(row("exited", "running", "running"), Billing.DISK, id="its container is down"),
        pytest.param(row("exited", "stopped", "stopped"), Billing.DISK, id="outbid"),
        pytest.param(row("frozen", "running", "frozen"), Billing.FULL, id="frozen"),
        pytest.param(row("unknown", "running", "running"), Billing.UNKNOWN, id="no recent report"),
        pytest.param(row("meditating", "running", "running"), Billing.UNKNOWN, id="a new word"),
        pytest.param(row("offline", "unloaded", "destroyed"), Billing.UNKNOWN, id="it is being ended"),
    ],
)
def test_what_is_billed_follows_the_container_and_the_reach_of_its_host(seen: InstanceRow, billing: Billing) -> None:
    assert as_instance(seen, KEY, now=START).billing is billing
