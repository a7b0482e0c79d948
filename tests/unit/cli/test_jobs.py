from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.api.responses import ApiUnavailable, OverBudget
from spotd.api.schemas.jobs import JobResponse
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.core.domain.world import UnreadableRow
from spotd.store import Reads
from spotd.words import dollars, money, price, run_span, short_span, size_text, span_text
from tests.cases import every
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl


@pytest.fixture
def stocked(ctl: Ctl) -> Ctl:
    """Three jobs: one runs, one waits, one failed."""
    ctl.place.write_three_jobs()
    return ctl


def test_the_time_that_a_machine_ran_is_not_cut_to_its_hours() -> None:
    began = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)
    spans = {59: "59s", 3599: "59m", 10_440: "2h54m", 172_799: "47h59m", 187_200: "2d04h", 0: "0s"}
    for seconds, text in spans.items():
        assert run_span(began.isoformat(), (began + timedelta(seconds=seconds)).isoformat()) == text


def test_ls_prints_the_columns_of_the_design_aligned_when_piped(stocked: Ctl) -> None:
    result = stocked("ls")
    assert result.code == 0
    assert result.out == (
        "ID          NAME        STATE          GPU     WHERE      $/H  SPENT  SAVED  PREEMPT  CKPT  AGE\n"
        "6k0a1b2c3d  llama-lora  RUNNING        H100:1  local/h3  2.31  ~4.62   3.18        0  1200   3h\n"
        "6k0a9zzzzz  prep        WAITING_PRICE  H100:1  -            -   0.00   0.00        0  -      3h\n"
        "6j99ffffff  old         FAILED         H100:1  -            -   4.62      -        0  1200   3h\n"
    )
    assert "old (6j99ffffff) failed" in result.err


@pytest.mark.parametrize("alias", ["ps", "queue"])
def test_aliases_print_the_same(stocked: Ctl, alias: str) -> None:
    assert stocked(alias).out == stocked("ls").out


def test_ls_json_is_the_promised_job_object(stocked: Ctl) -> None:
    body = json.loads(stocked("ls", "-o", "json").out)
    assert body["schema"] == 1
    promised = (
        "id name state reason provider host gpu gpu_count nodes attempt attempts effective_usd_h spent_usd estimated "
        "on_demand_usd saved_usd recoveries checkpoint submitted_at started_at ended_at verdict exit_code transfer "
        "gpus uncompared_usd summary checkpoint_late array ceiling_usd_gpu_h stage moves submitted_by "
        "gpu_wanted failure"
    )
    assert list(body["jobs"][0]) == promised.split()
    assert set(body["jobs"][0]["checkpoint"]) >= {"name", "step", "bytes", "at"}


def test_ls_id_prints_ids_only(stocked: Ctl) -> None:
    assert stocked("ls", "-o", "id").out == "6k0a1b2c3d\n6k0a9zzzzz\n6j99ffffff\n"


def test_ls_filters_by_state_in_any_case(stocked: Ctl) -> None:
    assert stocked("ls", "-o", "id", "--state", "failed").out == "6j99ffffff\n"
    assert stocked("ls", "-o", "id", "--active").out == "6k0a1b2c3d\n6k0a9zzzzz\n"


def test_ls_refuses_a_state_that_does_not_exist(stocked: Ctl) -> None:
    result = stocked("ls", "--state", "RUNING")
    assert result.code == 2
    assert "no job is ever in a state 'RUNING'" in result.err
    assert "RUNNING" in result.err


def test_ls_says_that_nothing_matches(stocked: Ctl) -> None:
    assert stocked("ls", "--state", "EXPIRED").err == "no job matches\n"


def test_ls_says_when_jobs_are_left_out(stocked: Ctl) -> None:
    result = stocked("ls", "-n", "1")
    assert result.out.count("\n") == 3, "an unfinished job is never left out"
    assert "--limit 10 shows more" in result.err


@pytest.mark.parametrize("jobs", [True, False], ids=["jobs", "none"])
def test_ls_says_why_nothing_is_launched_now(stocked: Ctl, *, jobs: bool) -> None:
    calm = stocked("ls")
    if not jobs:
        stocked.place.reset()
    why = "spotd has just started and first asks the checkpoint store which attempts were made"
    stocked.rig.policy.paused = why
    held = stocked("ls")
    assert held.err.startswith("warning: nothing is launched now: spotd has just started and first asks the checkpoint")
    assert (held.code, held.out) == (0, calm.out if jobs else "")
    assert json.loads(stocked("ls", "-o", "json").out)["paused"] == why
    assert stocked("ls", "-o", "id").err == ""


def test_an_empty_queue_leaves_stdout_empty(ctl: Ctl) -> None:
    result = ctl("ls")
    assert (result.code, result.out) == (0, "")
    assert "spotctl submit" in result.err


def test_text_from_hosts_cannot_steer_the_terminal(ctl: Ctl) -> None:
    host = "h\x1b[31m3\x1b]0;owned\x07\u202eevil\nline"
    ctl.place.write(worlds.running(host=host, reason="a\x9b2Jb"))
    for command in (("ls",), ("show", "llama-lora"), ("why", "llama-lora")):
        out = ctl(*command).out
        assert not {char for char in out if char in "\x1b\x07\x9b\u202e"}
    assert "local/h3evil line" in ctl("ls").out


def test_show_tells_state_money_checkpoint_and_attempts(stocked: Ctl) -> None:
    result = stocked("show", "llama-lora")
    assert result.code == 0
    assert result.out == (
        "id:         6k0a1b2c3d\n"
        "name:       llama-lora\n"
        "state:      RUNNING: runs on local h3\n"
        "verdict:    runs on local h3; agreed at 1 x H100 at local, spot, $2.3100/GPU-h\n"
        "gpu:        H100:1\n"
        "where:      local/h3\n"
        "price:      $2.310 per hour for the machine\n"
        "ceiling:    $2.400 per GPU-hour\n"
        "spent:      $4.62 (estimated) of $120.00\n"
        "saved:      $3.18 against $7.80 on demand\n"
        "preempted:  0 times\n"
        "checkpoint: step-1200, 1.5 MB, 2026-11-21 09:30:00, by attempt 1\n"
        "phase:      run\n"
        "submitted:  2026-11-21 07:00:00\n"
        "started:    2026-11-21 08:01:00\n"
        "code:       12.3 kB, sha256 abababababab\n"
        "image:      pytorch/pytorch:2.9.0\n"
        "run:        python train.py\n"
        "secrets:    TOKEN\n"
        "\n"
        "TRY  WHERE     GPU       $/H  SPENT  STARTED                RAN  RESUMED FROM  END\n"
        "  1  local/h3  H100:1  2.310  ~4.62  2026-11-21 08:00:01  1h59m  -             running\n"
    )


def test_show_warns_of_each_row_that_is_set_aside_and_shows_the_others(stocked: Ctl) -> None:
    plain = stocked("show", "llama-lora")
    aside = UnreadableRow(job=JobId(worlds.RUNNING_ID), attempt=2, error="ValueError: x")
    stocked.monkeypatch.setattr(Reads, "set_aside", lambda _reads, _job: (aside,))
    warned = stocked("show", "llama-lora")
    assert (warned.code, warned.out) == (0, plain.out)
    assert warned.err == "warning: attempt 2: its row in the state cannot be understood (ValueError: x)\n"


def test_show_finds_a_job_by_prefix_and_prints_its_id(stocked: Ctl) -> None:
    assert stocked("show", "6j", "-o", "id").out == "6j99ffffff\n"


def test_show_json_holds_the_job_and_its_settings(stocked: Ctl) -> None:
    body = json.loads(stocked("show", "prep", "-o", "json").out)
    assert (body["schema"], body["job"]["state"], body["budget_usd"]) == (1, "WAITING_PRICE", 120.0)


def test_why_names_a_provider_that_answers_and_cannot_be_relied_on(stocked: Ctl) -> None:
    slow = made_responses.board(provider="vast", note="has not answered for 25 s")
    odd = made_responses.board(provider="runpod", error="rate limited", note="7 of 7 rows cannot be used")
    stocked.place.answers("jobs.why", made_responses.why(offers=[slow, odd]))
    told = stocked("why", "prep").out
    assert "  vast: has not answered for 25 s\n" in told
    assert "  runpod shows no prices: rate limited; 7 of 7 rows cannot be used\n" in told


def test_why_answers_in_sentences(stocked: Ctl) -> None:
    twice = [made_responses.event(), made_responses.event()]  # a job's and its attempt's, shown once
    away = made_responses.board(provider="runpod", error="rate limited")
    stocked.place.answers("jobs.why", made_responses.why(offers=[away], events=twice))
    assert stocked("why", "prep").out == (
        "prep (6k0a9zzzzz) is WAITING_PRICE: the lowest H100 costs $2.61, the ceiling is $2.40\n"
        "  ceiling   $2.400 per GPU-hour\n"
        "  best now  $2.310 per GPU-hour: H100:1 spot at vast/4410 (SE); lowest winning bid $2.310, ours $2.400\n"
        "  passed over:\n"
        "       40 offers: above the ceiling\n"
        "  runpod shows no prices: rate limited\n"
        "  lately:\n"
        "    2026-11-21 07:00:00  queued\n"
    )


def test_cancel_does_not_ask_where_nobody_can_answer(stocked: Ctl) -> None:
    result = stocked("cancel", "llama-lora")
    assert (result.code, result.out) == (
        0,
        "llama-lora (6k0a1b2c3d) is CANCELLING: cancelled: the machine saves and stops\n",
    )


def test_cancel_of_an_ended_job_is_refused(stocked: Ctl) -> None:
    result = stocked("cancel", "old")
    assert (result.code, result.out, result.err) == (
        2,
        "",
        "error: old has ended already: the command ended with exit code 1\nhint: spotctl retry old\n",
    )


def test_retry_queues_an_ended_job_again(stocked: Ctl) -> None:
    stocked.rig.secrets.write(JobId("6j99ffffff"), {"TOKEN": "hunter2"})
    assert stocked("retry", "old", "-o", "id").out == "6j99ffffff\n"
    assert stocked.rig.job(JobId("6j99ffffff")).state is JobState.QUEUED


@pytest.mark.parametrize(
    "command",
    ["show", "why", "logs", "cancel", "retry", "checkpoints", "pull", "cost"],
)
def test_an_unknown_job_is_exit_6(stocked: Ctl, command: str) -> None:
    result = stocked(command, "nobody")
    assert (result.code, result.out) == (6, "")
    assert result.err == "error: there is no job 'nobody'\nhint: spotctl ls\n"


@pytest.mark.parametrize("ref", ["", "a/b", "..", "a\nb", "x" * 5000, "a?b#c", "%2e%2e", "ä"])
def test_text_that_can_be_no_job_is_not_found(stocked: Ctl, ref: str) -> None:
    result = stocked("show", ref)
    assert result.code == 6
    assert result.err.startswith("error: there is no job")


def test_a_prefix_of_several_jobs_is_refused_with_their_names(stocked: Ctl) -> None:
    result = stocked("show", "6k0a")
    assert result.code == 2
    assert "6k0a1b2c3d (llama-lora)" in result.err
    assert "6k0a9zzzzz (prep)" in result.err


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OverBudget("the day's budget is spent"), 4),
        (ApiUnavailable("the store does not answer"), 5),
        (KeyError("x"), 5),
    ],
    ids=["budget", "unavailable", "defect of the daemon"],
)
def test_refusals_have_their_exit_codes(stocked: Ctl, failure: Exception, code: int) -> None:
    stocked.place.answers("jobs.page", failure)
    result = stocked("ls")
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err


@every(
    ("usd", "text"),
    [(None, "-"), (0.0, "0.00"), (0.0001, "<0.001"), (0.0328, "0.033"), (12.345, "12.35"), (-1.5, "-1.50")],
)
def test_money_never_shows_something_as_nothing(usd: float | None, text: str) -> None:
    assert money(usd) == text


def test_dollars_carry_their_sign_in_front() -> None:
    assert [dollars(value) for value in (None, 0.0001, 2.0, -1.5)] == ["-", "<$0.001", "$2.00", "-$1.50"]


def test_prices_are_fine_enough_for_cheap_machines() -> None:
    assert [price(value) for value in (None, 0.00001, 0.2231, 2.4)] == ["-", "<0.0001", "0.2231", "2.400"]


def test_spans_and_sizes_read_well() -> None:
    assert [short_span(value) for value in (0, 59, 60, 7199, 172_799, 172_800)] == [
        "0s",
        "59s",
        "1m",
        "1h",
        "47h",
        "2d",
    ]
    assert [span_text(value) for value in (5, 372, 7260, 200_000)] == ["5 s", "6 min 12 s", "2 h 1 min", "2 d 7 h"]
    assert [size_text(value) for value in (5, 12_345, 1_500_000, 2e12)] == ["5 B", "12.3 kB", "1.5 MB", "2.0 TB"]


def only(ctl: Ctl, row: JobResponse) -> None:
    """The daemon has this job and no other."""
    ctl.place.answers("jobs.page", {"jobs": [row], "more": False, "paused": ""})
    ctl.place.answers("jobs.detail", made_responses.detail(row))


def test_a_transfer_is_told_by_ls_and_show_with_rate_and_time_left(ctl: Ctl) -> None:
    only(ctl, made_responses.job(transfer=made_responses.transfer(queued=2)))
    assert "  1200 up 30% 80.0 MB/s 35s  " in ctl("ls").out
    shown = ctl("show", "llama-lora").out
    assert "transfer:   upload of step-1300, 1.2 GB of 4.0 GB (30 %), 80.0 MB/s, 35 s left, 2 more waiting\n" in shown


def test_show_states_the_bid_and_the_moves(ctl: Ctl) -> None:
    bid = {"usd_h": 0.44, "floor_usd_h": 0.48, "changes": 2, "held_since": "2026-11-21T09:55:00.000Z"}
    only(ctl, made_responses.job(attempts=[made_responses.attempt(bid=bid)], moves=2))
    shown = ctl("show", "llama-lora").out
    assert (
        "bid:        $0.4400 per hour for its GPUs, 2 changes, lowest winning bid $0.4800, outbid for 5m,"
        " and waited for\n" in shown
    )
    assert "moves:      2, to cheaper machines\n" in shown
    only(ctl, made_responses.job())
    assert "bid:" not in ctl("show", "llama-lora").out


def test_show_states_the_use_of_each_gpu_and_its_age(ctl: Ctl) -> None:
    known = {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "util_pct": 97.0, "mem_used_mb": 62_669.0,
        "mem_total_mb": 81_559.0, "power_w": 650.1, "temp_c": 71.0, "at": "2026-11-21T09:58:00.000Z",
    }  # fmt: skip
    unknown = {**dict.fromkeys(known), "index": 1, "name": "NVIDIA H100 80GB HBM3", "at": known["at"]}
    only(ctl, made_responses.job(gpus=[known, unknown]))
    shown = ctl("show", "llama-lora").out
    assert "gpu 0:      NVIDIA H100 80GB HBM3, 97 % busy, 61.2 of 79.6 GiB, 650 W, 71 C, 2m ago\n" in shown
    assert "gpu 1:      NVIDIA H100 80GB HBM3, 2m ago\n" in shown
    assert json.loads(ctl("ls", "-o", "json").out)["jobs"][0]["gpus"] == [known, unknown]


def test_a_restore_whose_rate_is_not_known_yet_says_how_far_it_is(ctl: Ctl) -> None:
    unknown = {"kind": "restore", "bytes_per_s": None, "seconds_left": None}
    only(ctl, made_responses.job(checkpoint=None, transfer=made_responses.transfer(**unknown)))
    assert "  - down 30%  " in ctl("ls").out
    assert "transfer:   restore of step-1300, 1.2 GB of 4.0 GB (30 %)\n" in ctl("show", "llama-lora").out


def test_an_upload_that_fails_says_why(ctl: Ctl) -> None:
    only(ctl, made_responses.job(transfer=made_responses.transfer(failing="the store answers 503")))
    assert "  1200 up 30% failing  " in ctl("ls").out
    assert "failing: the store answers 503" in ctl("show", "llama-lora").out


def test_a_success_without_its_outputs_is_warned_of_below_the_list(ctl: Ctl) -> None:
    reason = "the command ended with exit code 0; none of its outputs is stored: its machine stored none"
    done = JobState.SUCCEEDED
    ctl.place.write(worlds.ended(done, reason=reason), worlds.ended(done, ident="j2", name="j2", reason="done"))
    result = ctl("ls")
    assert result.code == 0
    assert result.err.count("warning:") == 1
    assert "none of its outputs is stored: its machine stored none" in result.err


def test_retry_of_a_success_needs_the_word_for_it(ctl: Ctl) -> None:
    ctl.place.write(worlds.ended(JobState.SUCCEEDED))
    name = JobId("6j99ffffff")
    ctl.rig.secrets.write(name, {"TOKEN": "hunter2"})
    refused = ctl("retry", name)
    assert refused.code == 2
    assert "--anyway" in refused.err
    assert ctl("retry", "--anyway", name).code == 0
    assert ctl.rig.job(name).state is JobState.QUEUED


@every(
    ("schedule", "expected"),
    [
        ({}, ""),
        ({"priority": 0}, ""),
        ({"deadline": "36h"}, "36h, by policy slack-pacing"),
        ({"deadline": "36h", "policy": "greedy"}, "36h, by policy greedy"),
    ],
)
def test_show_names_the_deadline_and_the_policy_that_is_to_meet_it(schedule: dict[str, str], expected: str) -> None:
    from spotd.cli.commands.jobs import _deadline_text

    detail: Any = {"spec": {"schedule": schedule} if schedule else {}}
    assert _deadline_text(detail) == expected


def unfit(*reasons: tuple[str, int]) -> dict[str, Any]:
    """An answer of `why` where no offer fits, with these reasons and numbers of offers."""
    passed_over = [{"reason": reason, "offers": number} for reason, number in reasons]
    return {"kind": "no_match", "best": None, "passed_over": passed_over}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "needs $0.0400 less per GPU-hour: the cheapest 2 x RTX_4090 is $0.5400, the ceiling $0.5000"),
        ({"kind": "budget_day"}, ""),
        ({"kind": None}, ""),
        ({"best": None}, ""),
        ({"ceiling_usd_gpu_h": None}, ""),
        ({"ceiling_usd_gpu_h": 0.54}, ""),
        (
            unfit(("another GPU or count", 9), ("not a spot offer", 2), ("too little disk", 2)),
            "2 such machines are on offer and passed over: too little disk",
        ),
        (unfit(("another region", 1)), "1 such machine is on offer and passed over: another region"),
        (unfit(("another region", 1), ("too little disk", 2)), ""),
        (unfit(("another GPU or count", 9), ("not a spot offer", 2)), ""),
        (unfit(), ""),
    ],
)
def test_a_job_that_waits_for_its_price_states_the_one_thing_that_is_missing(
    stocked: Ctl, given: dict[str, Any], text: str
) -> None:
    best = made_responses.quote(gpu="RTX_4090", gpu_count=2, effective_usd_gpu_h=0.54)
    base: dict[str, Any] = {"kind": "above_ceiling", "best": best, "ceiling_usd_gpu_h": 0.5}
    stocked.place.answers("jobs.why", made_responses.why(**{**base, **given}))
    found = [line for line in stocked("why", "prep").out.splitlines() if line.startswith("  missing")]
    assert found == ([f"  missing   {text}"] if text else [])
    shown = [line for line in stocked("show", "prep").out.splitlines() if line.startswith("missing")]
    assert shown == ([f"missing:    {text}"] if text else [])
