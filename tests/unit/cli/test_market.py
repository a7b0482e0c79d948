from __future__ import annotations

import csv
import io
import json
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.domain.plan import Event, Plan
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl


@pytest.fixture
def market(ctl: Ctl) -> Ctl:
    """Two quotes, and one provider that does not answer."""
    quotes = [
        made_responses.quote(),
        made_responses.quote(
            provider="aws", host="", gpu="A100-80GB", gpu_count=8, effective_usd_h=9.7, effective_usd_gpu_h=1.2125,
            ceiling_usd_gpu_h=1.0, fits=False, verdict="above the ceiling", region="us-east-1",
        ),
    ]  # fmt: skip
    polls = [
        made_responses.board(),
        made_responses.board(provider="runpod", error="rate limited", at=made_responses.EARLIER),
    ]
    ctl.place.answers("prices.quotes", {"quotes": quotes, "offers": polls, "more": False})
    return ctl


def test_prices_show_the_effective_price_beside_the_ceiling(market: Ctl) -> None:
    result = market("prices")
    assert result.out == (
        "WHERE      REGION     GPU          MARKET  $/GPU-H    $/H  ON-DEMAND  CEILING  VERDICT\n"
        "vast/4410  SE         H100:1       spot      2.310  2.310      3.900    2.400  ok\n"
        "aws        us-east-1  A100-80GB:8  spot      1.212  9.700      3.900    1.000  above the ceiling\n"
    )
    assert result.err == "warning: no prices from runpod since 2026-11-21 07:00:00: rate limited\n"


def test_explain_shows_every_term(ctl: Ctl) -> None:
    ctl.place.answers("prices.quotes", {"quotes": [made_responses.quote()], "offers": [], "more": False})
    result = ctl("offers", "--gpu", "H100", "--explain")
    assert result.out == (
        "WHERE      GPU     MARKET  GPU$/H  +STORAGE    +FEE  (FEE X)  +UPLOAD  +RESTORE   =$/H  $/GPU-H"
        "    BID  CEILING\n"
        "vast/4410  H100:1  spot     1.850    0.0417  0.3783     1.20   0.0300    0.0100  2.310    2.310"
        "  2.400    2.400\n"
    )
    assert "fee multiplier x (gpu + disk GB x storage price / 720)" in result.err


def test_prices_json_holds_the_breakdown(ctl: Ctl) -> None:
    ctl.rig.shop.offer_index = [worlds.h100("h3"), worlds.h100("h4")]
    ctl.place.cycle()
    body = json.loads(ctl("prices", "-n", "1", "-o", "json").out)
    assert (body["schema"], body["more"], len(body["quotes"])) == (1, True, 1)
    assert body["quotes"][0]["breakdown"]["fee_multiplier"] == 1.0


def test_no_offer_is_said_and_not_left_blank(ctl: Ctl) -> None:
    result = ctl("prices", "--gpu", "B300")
    assert (result.code, result.out, result.err) == (0, "", "nothing is offered for B300 now\n")


def test_a_receipt_tells_spent_saved_recoveries_and_minutes_lost(ctl: Ctl) -> None:
    attempts = [made_responses.attempt_cost(), made_responses.attempt_cost(attempt=2, reason="done")]
    ctl.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=attempts)))
    assert ctl("cost", "llama-lora").out == (
        "job:        llama-lora (6k0a1b2c3d), SUCCEEDED\n"
        "spent:      $4.62 of $120.00\n"
        "on demand:  $7.80 for the same hours on the same hardware\n"
        "saved:      $3.18 (41 %)\n"
        "preempted:  1 time\n"
        "lost:       6.2 minutes of work repeated after preemptions\n"
        "\n"
        "TRY  WHERE     GPU     MARKET  FROM                       RAN    $/H  SPENT  ON-DEMAND  END\n"
        "  1  local/h3  H100:1  spot    2026-11-21 08:00:00  2 h 0 min  2.310   4.62       7.80  preempted\n"
        "  2  local/h3  H100:1  spot    2026-11-21 08:00:00  2 h 0 min  2.310   4.62       7.80  done\n"
    )


def test_a_receipt_names_the_time_that_was_free(ctl: Ctl) -> None:
    taken = made_responses.attempt_cost(provider="aws", spent_usd=0.01, free_usd=0.4)
    receipt = made_responses.receipt(attempts=[taken, made_responses.attempt_cost(attempt=2)])
    ctl.place.answers("receipts.cost", made_responses.cost(receipt))
    lines = [line for line in ctl("cost", "llama-lora").out.splitlines() if line.startswith("free:")]
    assert lines == ["free:       $0.400 of attempt 1: aws took the machine soon and bills no time of it"]


def test_a_receipt_tells_which_checkpoint_could_not_be_resumed_from(ctl: Ctl) -> None:
    row = {"attempt": 2, "name": "c9", "reason": "a chunk is gone", "next": "c8", "at": made_responses.NOW}
    receipt = made_responses.receipt(fallbacks=[row, {**row, "attempt": 3, "next": None}])
    ctl.place.answers("receipts.cost", made_responses.cost(receipt))
    lines = [line for line in ctl("cost", "llama-lora").out.splitlines() if line.startswith("fallback:")]
    assert lines == [
        "fallback:   attempt 2 began from c8: c9 could not be restored (a chunk is gone)",
        "fallback:   attempt 3 began afresh: c9 could not be restored (a chunk is gone)",
    ]


def test_cost_of_all_jobs_ends_with_the_sum_and_the_budgets(ctl: Ctl) -> None:
    prep = made_responses.receipt(id="6k0a9zzzzz", name="prep", spent_usd=0.0001)
    answer = made_responses.cost(made_responses.receipt(), prep)
    answer["budgets"] = [
        {"name": "day", "used": 12.5, "committed": 0.4, "limit": 50.0},
        {"name": "month", "used": 12.5, "committed": 0.4, "limit": None},
        {"name": "machines", "used": 2, "committed": 0, "limit": 8},
    ]
    ctl.place.answers("receipts.cost", answer)
    assert ctl("cost").out == (
        "ID          NAME        STATE       SPENT  ON-DEMAND  SAVED  PREEMPT        LOST\n"
        "6k0a1b2c3d  llama-lora  SUCCEEDED    4.62       7.80   3.18        1  6 min 12 s\n"
        "6k0a9zzzzz  prep        SUCCEEDED  <0.001       7.80   3.18        1  6 min 12 s\n"
        "\n"
        "total: spent $4.62, on demand $15.60, saved $6.36 (41 %), 2 preemptions, 12.4 minutes lost\n"
        "budget day: $12.50 of $50.00, $0.400 more committed\n"
        "budget machines: 2 of 8\n"
    )


def test_cost_json_is_the_receipts(ctl: Ctl) -> None:
    ctl.place.write(worlds.ended(lost=timedelta(seconds=372)))
    body = json.loads(ctl("cost", "-o", "json").out)
    assert (body["schema"], body["receipts"][0]["saved_usd"], body["lost_s"]) == (1, 0.0, 372.0), (
        "a failure saves nothing"
    )


def test_providers_show_health_in_one_line_each(ctl: Ctl) -> None:
    rows = [
        made_responses.provider(),
        made_responses.provider(name="aws", ok=False, detail="the key is wrong", offers=0, last_poll_at=None),
        made_responses.provider(name="runpod", enabled=False, detail="not enabled"),
    ]
    ctl.place.answers("health.providers", rows)
    result = ctl("providers", "--explain")
    assert result.out == (
        "PROVIDER  HEALTH   OFFERS  MACHINES   POLLED  REQ/H  REQ/MIN    FEE  CAN         DETAIL\n"
        "vast      ok           64         1  30s ago    372        7  x1.20  bid_change  64 offers\n"
        "aws       failing       0         1        -    372        7  x1.20  bid_change  the key is wrong\n"
        "runpod    off          64         1  30s ago    372        7  x1.20  bid_change  not enabled\n"
        "vast: no notices: vast.ai stops machines without a word\n"
        "aws: no notices: vast.ai stops machines without a word\n"
        "runpod: no notices: vast.ai stops machines without a word\n"
    )
    assert ctl("providers", "-o", "id").out == "vast\naws\nrunpod\n"


def test_doctor_says_what_is_wrong_with_a_way_out_and_exits_1(ctl: Ctl) -> None:
    checks = [
        {"area": "store", "name": "writable", "ok": True, "detail": "a folder", "hint": ""},
        {"area": "vast", "name": "balance", "ok": False, "detail": "$0.12 left", "hint": "add credit at vast.ai"},
    ]
    ctl.place.answers("doctor.report", {"ok": False, "checks": checks})
    result = ctl("doctor")
    assert result.code == 1
    assert result.out == (
        f"ok    daemon: reachable: answers at {ctl.place.socket}\n"
        "ok    store: writable: a folder\n"
        "FAIL  vast: balance: $0.12 left\n"
        "      hint: add credit at vast.ai\n"
    )
    assert result.err == "1 of 3 checks failed\n"


def test_doctor_shows_a_warning_with_its_way_out_and_exits_0(ctl: Ctl) -> None:
    checks = [
        {"area": "daemon", "name": "config", "ok": True, "detail": "everybody can read it", "hint": "chmod o-r it"}
    ]
    ctl.place.answers("doctor.report", {"ok": True, "checks": checks})
    result = ctl("doctor")
    assert result.code == 0
    assert result.out.endswith("warn  daemon: config: everybody can read it\n      hint: chmod o-r it\n")
    assert "nothing is wrong; 1 warning" in result.err


def test_doctor_is_content_when_all_is_well(ctl: Ctl) -> None:
    assert (ctl("doctor").code, json.loads(ctl("doctor", "-o", "json").out)["ok"]) == (0, True)


def test_doctor_answers_in_json_even_without_a_daemon(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", "/nonexistent/spotd.sock")
    result = ctl("doctor", "-o", "json")
    assert (result.code, json.loads(result.out)["checks"][0]["name"]) == (5, "reachable")


def test_reconcile_tells_what_was_listed_and_what_follows(ctl: Ctl) -> None:
    listings = [
        {"provider": "vast", "machines": 1, "complete": True, "error": ""},
        {"provider": "aws", "machines": 0, "complete": False, "error": "timed out"},
    ]
    actions = ["vast 99 belongs to no live attempt: it is being destroyed"]
    ctl.place.answers("health.reconcile", {"listings": listings, "actions": actions})
    assert ctl("reconcile").out == (
        "vast: 1 machine\naws: no complete list: timed out\nvast 99 belongs to no live attempt: it is being destroyed\n"
    )


def test_events_are_told_in_order_with_their_job(ctl: Ctl) -> None:
    ctl.place.write(worlds.ended())
    away = Event(at=worlds.EARLIER, kind="provider.down", message="vast does not answer")
    ctl.place.write(Plan(events=(away,)))
    assert ctl("events").out == (
        "2026-11-21 06:58:00  old  job.submitted  queued\n"
        "2026-11-21 10:00:00  old#1  attempt.ended  the provider took it back\n"
        "2026-11-21 07:00:00  -  provider.down  vast does not answer\n"
    )
    body = json.loads(ctl("events", "-o", "json").out)
    assert (body["schema"], [event["id"] for event in body["events"]]) == (1, [1, 2, 3])


def test_events_are_filtered_by_kind_and_all_of_them_are_in_the_json(ctl: Ctl) -> None:
    ctl.place.write_three_jobs()
    everything = json.loads(ctl("events", "-o", "json").out)["events"]
    for asked, wanted in (("job", "job."), ("job.submitted", "job.submitted"), ("attempt", "attempt.")):
        found = json.loads(ctl("events", "--kind", asked, "-o", "json").out)["events"]
        assert found == [one for one in everything if one["kind"].startswith(wanted)] != []
    both = json.loads(ctl("events", "--kind", "job", "--kind", "attempt", "-n", "2", "-o", "json").out)["events"]
    assert both == everything[-2:]
    none = ctl("events", "--kind", "bid").err
    assert "no events of the kind bid; kinds begin with job, attempt, " in none


@pytest.mark.parametrize("kind", ["%", "job.%", "", "Job", "job.failed.x", "a" * 41])
def test_a_kind_that_no_event_can_have_is_refused(ctl: Ctl, kind: str) -> None:
    result = ctl("events", "--kind", kind)
    assert (result.code, result.out) == (2, "")
    assert f"no event is ever of the kind {kind!r}" in result.err


@pytest.mark.parametrize("since", ["2h", "90s", "2026-11-21T08:00:00Z", "2026-11-21", "9999d", "3650d"])
def test_events_take_a_span_or_an_instant(ctl: Ctl, since: str) -> None:
    result = ctl("events", "--since", since)
    assert result.code == (2 if since == "9999d" else 0), result.err


def test_events_refuse_what_is_neither(ctl: Ctl) -> None:
    result = ctl("events", "--since", "yesterday")
    assert result.code == 2
    assert "'yesterday' is neither a span such as 2h nor an instant" in result.err


def ledger_of(*groups: Any, by: str = "job") -> Any:
    return {"by": by, "groups": [*groups], "total": made_responses.cost_group(key="total", name="")}


def test_what_everything_cost_is_shown_by_what_was_asked_for(ctl: Ctl) -> None:
    unknown = made_responses.cost_group(key="6k0a9zzzzz", name="prep", uncompared_usd=4.62, corrected_usd=-0.1)
    ctl.place.answers("ledger.groups", ledger_of(made_responses.cost_group(), unknown))
    lines = ctl("cost", "--by", "job").out.splitlines()
    titles = "JOB NAME MACHINES RAN GPU DISK TRAFFIC FEE FREE BOOKED BILLS SPENT ON-DEMAND SAVED"
    assert " ".join(lines[0].split()) == titles
    assert lines[1].split()[-9:] == ["0.100", "0.020", "0.900", "0.00", "4.52", "+0.100", "4.62", "7.80", "3.18"]
    assert lines[2].split()[-4:] == ["-0.100", "4.62", "-", "-"], "of savings that cannot be known nothing is said"
    assert lines[3].startswith("total")


def test_costs_for_a_spreadsheet_hold_no_formula(ctl: Ctl) -> None:
    evil = (
        "=HYPERLINK(1)",
        "+1",
        "-1",
        "@x",
        "\t=1",
        " =1",
        "\x1b[31m=1",
        "\uff1d1",
        'a "b", c',
        "\u200b=1",
        '"=1',
        "x; =1;-y",
    )
    groups = [made_responses.cost_group(name=name, saved_usd=-0.25, machines=None) for name in evil]
    ctl.place.answers("ledger.groups", ledger_of(*groups))
    rows = list(csv.DictReader(io.StringIO(ctl("cost", "-o", "csv").out)))
    names = [row["name"] for row in rows]
    assert names == [
        "'=HYPERLINK(1)",
        "'+1",
        "'-1",
        "'@x",
        "'=1",
        "'=1",
        "'=1",
        "'\uff1d1",
        'a "b", c',
        "'=1",
        "'\"=1",
        "x; '=1;'-y",
    ]
    assert {row["saved_usd"] for row in rows} == {"-0.250000"}
    assert {(row["job"], row["machines"], row["gpu_usd"]) for row in rows} == {("6k0a1b2c3d", "", "3.500000")}


def test_the_attempts_of_a_job_for_a_spreadsheet(ctl: Ctl) -> None:
    line = made_responses.attempt_cost(host="=1", gpu_usd=3.000001, fee_usd=0.9, ended_at=None)
    ctl.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=[line])))
    [row] = csv.DictReader(io.StringIO(ctl("cost", "llama-lora", "-o", "csv").out))
    assert (row["job"], row["host"], row["gpu_usd"], row["ended_at"]) == ("6k0a1b2c3d", "'=1", "3.000001", "")


@pytest.mark.parametrize("estimated", [True, False])
def test_every_view_says_alike_whether_a_sum_is_an_estimate(ctl: Ctl, *, estimated: bool) -> None:
    line = made_responses.attempt_cost(estimated=estimated)
    receipt = made_responses.receipt(attempts=[line], estimated=estimated)
    ctl.place.answers("receipts.cost", made_responses.cost(receipt) | {"estimated": estimated})
    group = made_responses.cost_group(estimated=estimated)
    ctl.place.answers("ledger.groups", {"schema": 1, "by": "job", "groups": [group], "total": group})
    row = made_responses.job(estimated=estimated)
    ctl.place.answers("jobs.page", {"jobs": [row], "more": False, "paused": ""})
    word, mark = (" (estimated)", "~4.62") if estimated else ("", "4.62")
    assert f"total: spent $4.62{word}," in ctl("cost").out
    assert f"spent:      $4.62{word}" in ctl("cost", "llama-lora").out
    for table in (("cost",), ("cost", "llama-lora"), ("cost", "--by", "job"), ("ls",)):
        assert mark in ctl(*table).out.split(), table
        assert ("~" in ctl(*table).out) is estimated, table
    for command in (("cost", "llama-lora"), ("cost", "--by", "job")):
        for cells in csv.DictReader(io.StringIO(ctl(*command, "-o", "csv").out)):
            assert cells["estimated"] == str(estimated).lower(), command


def test_a_receipt_divides_the_cost_of_an_attempt(ctl: Ctl) -> None:
    line = made_responses.attempt_cost(gpu_usd=3.6, fee_usd=0.72, disk_usd=0.2, traffic_usd=0.2, corrected_usd=-0.1)
    ctl.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=[line])))
    [text] = [line for line in ctl("cost", "llama-lora").out.splitlines() if line.startswith("cost:")]
    assert text == (
        "cost:       attempt 1: $3.60 GPU, $0.200 disk while stopped, $0.200 traffic, $0.720 fee, "
        "$4.72 booked and $4.62 billed"
    )


def test_the_download_of_code_is_not_called_a_restore(ctl: Ctl) -> None:
    line = made_responses.attempt_cost(traffic_usd=0.0002, uploaded_bytes=0, restored_bytes=593, resumed_from=None)
    ctl.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=[line])))
    out = ctl("cost", "llama-lora").out
    assert "0 B uploaded and 593 B downloaded" in out
    assert "restored" not in out


def test_a_job_is_not_added_up_by_something(ctl: Ctl) -> None:
    assert ctl("cost", "llama-lora", "--by", "day").code == 2


def test_the_fee_that_bills_imply_is_a_line_for_the_config(ctl: Ctl) -> None:
    none = {"measured": None, "spread": None, "suggested": None}
    vast = {"provider": "vast", "machines": 30, "booked_usd": 36.0, "billed_usd": 33.0, "fee_multiplier": 1.2}
    aws = {**vast, **none, "provider": "aws", "machines": 0, "sentence": "AWS's own bill is a day late"}
    vast |= {
        "measured": 1.0953,
        "spread": 0.004,
        "suggested": 1.1,
        "sentence": "the bills make it x1.095",
    }
    ctl.place.answers("ledger.calibrations", [aws, vast])
    assert ctl("cost", "--calibrate").out == (
        "aws: AWS's own bill is a day late\n"
        "vast: the bills make it x1.095; $36.00 were booked and $33.00 billed\n"
        "\n"
        "[providers.vast]\n"
        "fee_multiplier = 1.10\n"
    )
    rows = list(csv.DictReader(io.StringIO(ctl("cost", "--calibrate", "-o", "csv").out)))
    assert [(row["provider"], row["measured"]) for row in rows] == [("aws", ""), ("vast", "1.095")]
    assert json.loads(ctl("cost", "--calibrate", "-o", "json").out)["calibration"][1]["suggested"] == 1.1
    assert ctl("cost", "--calibrate", "llama-lora").code == 2


def test_a_prepaid_balance_is_shown_with_how_long_it_lasts(ctl: Ctl) -> None:
    paid = made_responses.provider(name="vast", balance_usd=12.3, spend_usd_h=1.5, runway_s=29_520.0)
    ctl.place.answers("health.providers", [paid, made_responses.provider(name="aws")])
    titles, vast, aws = ctl("providers").out.splitlines()
    where = titles.index("BALANCE"), titles.index("LASTS") + len("LASTS")
    assert vast[: where[1]].endswith("8 h 12 min")
    assert "$12.30" in vast
    assert aws[where[0] : where[1]].split() == ["-", "-"]
    ctl.place.answers("health.providers", [made_responses.provider(name="aws")])
    assert "BALANCE" not in ctl("providers").out


def test_of_savings_that_cannot_be_known_nothing_is_said(ctl: Ctl) -> None:
    unknown = made_responses.receipt(on_demand_usd=4.62, saved_usd=0.0, uncompared_usd=4.62)
    ctl.place.answers("receipts.cost", made_responses.cost(unknown))
    _, row, _, total = ctl("cost").out.splitlines()
    assert row.split()[3:6] == ["4.62", "-", "-"]
    assert total == "total: spent $4.62, 1 preemption, 6.2 minutes lost"
    one = ctl("cost", "llama-lora").out
    assert "on demand:  not known: nothing is said of savings\n" in one
    assert "saved:" not in one
    ctl.place.answers("receipts.cost", made_responses.cost(unknown, made_responses.receipt()))
    assert ctl("cost").out.splitlines()[-1] == (
        "total: spent $9.24, on demand $7.80, saved $3.18 (41 %) ($4.62 of it failed or has no known on-demand price), "
        "2 preemptions, 12.4 minutes lost"
    )
