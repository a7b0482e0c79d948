"""What each role may do, over real TLS: every route with every role, jobs of others, budgets of the day, authors."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest

from spotd.api.app import api_routes, make_app
from spotd.api.routes import ApiRoute, serving
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused
from spotd.core.domain.policy import Right
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import TOKENS, USERS, Team, user
from tests.waiting import until

Client = Callable[..., Daemon]
ROLES = {"vic": Right.VIEW, "ada": Right.SUBMIT, "ole": Right.OPERATE}
RIGHTS = {
    "openapi": "view", "status": "view", "plan": "submit", "has_code": "submit", "put_code": "submit",
    "datasets": "view", "store_dataset": "submit", "has_data_chunk": "submit", "put_data_chunk": "submit",
    "put_data_part": "submit", "name_dataset": "operate", "remove_dataset": "operate", "submit": "submit",
    "jobs": "view", "job": "view", "gpu_history": "view", "shell": "own", "port": "local", "why": "view",
    "cancel": "own", "retry": "own", "set_budget": "own", "set_ceiling": "own", "forget": "operate",
    "job_cost": "view", "cost": "view", "calibration": "view", "checkpoints": "view", "verify_checkpoints": "own",
    "pin_checkpoints": "own", "remove_checkpoints": "own", "files": "view", "file_content": "submit",
    "file_contents": "submit", "logs": "view", "events": "view", "prices": "view", "history": "view",
    "import_offers": "operate", "import_prices": "operate", "providers": "view", "hosts": "view",
    "forget_host": "operate", "test_notifications": "operate", "doctor": "operate", "reconcile": "operate",
    "adoption": "operate", "adopt": "operate",
}  # fmt: skip
"""What each route asks for, written here a second time: a right that is changed is changed on purpose."""
DRAFT: Mapping[str, Any] = {
    "data": {
        "name": "mine",
        "run": "python train.py",
        "image": "pytorch/pytorch:2.9.0",
        "resources": {"gpu": ["H100:1"], "disk": "50GB"},
        "price": {"max_price": 0.01},
        "budget": {"job": 20},
        "checkpoint": {"every": "15m"},
    },
    "flags": {},
    "source": "",
    "base_dir": "/",
}


def draft(name: str, **changes: Any) -> dict[str, Any]:
    return {**DRAFT, "data": {**DRAFT["data"], "name": name, **changes}}


def ask(team: Team, authority: Authority, method: str, path: str, token: str | None, body: bytes = b"{}") -> Any:
    """Status, body and headers of one request."""
    context = ssl.create_default_context(cafile=str(authority.file))
    connection = http.client.HTTPSConnection("127.0.0.1", team.port, timeout=30, context=context)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body=None if method == "GET" else body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(200_000), response.headers
    finally:
        connection.close()


def filled(route: ApiRoute) -> str:
    path = route.path.replace("{ref}", "llama-lora").replace("{sha256}", "0" * 64)
    return path.replace("{name}", "corpus").replace("{port}", "6006")


def test_each_route_asks_for_the_right_that_is_meant() -> None:
    found = {one.name: "own" if one.is_of_own else one.right.name.lower() for one in api_routes()}
    assert found == RIGHTS


def test_a_route_without_a_right_does_not_load() -> None:
    with pytest.raises(TypeError):
        serving("GET", "/v1/new")  # type: ignore[arg-type, call-arg]  # what is shown is that it fails


@pytest.mark.parametrize("name", ROLES)
def test_each_role_reaches_its_routes_and_no_other(team: Team, authority: Authority, name: str) -> None:
    team.served.write_three_jobs()  # of the owner
    for handler in ("health.reconcile", "doctor.report", "adoption.plan"):
        team.served.answers(handler, {})
    for route in api_routes():
        needed = RIGHTS[route.name]
        least = Right.OPERATE if needed == "own" else Right[needed.upper()]
        status, body, _ = ask(team, authority, route.method, filled(route), TOKENS[name])
        is_refused = status == 403 and json.loads(body)["error"]["code"] == "forbidden"
        assert is_refused == (ROLES[name] < least), (route.name, status, body[:300])
        assert status != 401


def test_no_route_answers_without_a_token_of_a_user(team: Team, authority: Authority) -> None:
    asked: list[str] = []
    team.listener.gate.app = lambda scope, *_: asked.append(scope["path"])  # type: ignore[assignment]  # it notes what came through
    for number, route in enumerate(api_routes()):
        token = None if number % 2 else ""
        status, body, headers = ask(team, authority, route.method, filled(route), token)
        assert (status, json.loads(body)["error"]["code"]) == (401, "unauthorized")
        assert headers["www-authenticate"] == "Bearer"
        assert headers["connection"] == "close"
    assert ask(team, authority, "GET", "/metrics", None)[0] == 401
    assert ask(team, authority, "GET", f"/v1/jobs?token={TOKENS['ole']}", None)[0] == 401
    assert asked == []


def test_wrong_tokens_of_one_address_are_bounded_and_written_nowhere(team: Team, authority: Authority) -> None:
    wrong = "spotd_" + "x" * 43
    found = [ask(team, authority, "GET", "/v1/status", wrong) for _ in range(9)]
    assert [status for status, _, _ in found] == [401] * 8 + [429]
    assert int(found[-1][2]["retry-after"]) > 50
    assert ask(team, authority, "GET", "/v1/status", TOKENS["ole"])[0] == 200, "a right one passes"
    assert ask(team, authority, "GET", "/v1/status", None)[0] == 429
    assert not any(wrong in str(what) or TOKENS["ole"] in str(what) for what in [*team.log.lines, *found])


def test_a_submitter_sees_all_jobs_and_changes_its_own_only(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    ada = as_user("ada", team)
    mine = ada.submit(draft("mine"))["job"]
    assert (mine["submitted_by"], len(ada.jobs()["jobs"])) == ("ada", 4)
    with pytest.raises(DaemonRefused, match="queued by the owner of spotd") as refused:
        ada.cancel("prep")
    assert refused.value.code == "forbidden"
    eve = as_user("eve", team)
    for change in (
        lambda: eve.cancel("mine"),
        lambda: eve.retry(mine["id"]),
        lambda: eve.set_budget("mine", "=1"),
        lambda: eve.set_ceiling(mine["id"][:6], "1"),
        lambda: eve.pin_checkpoints("mine", ["a"], pinned=True),
        lambda: eve.remove_checkpoints("mine", ["a"]),
    ):
        with pytest.raises(DaemonRefused, match="was queued by ada"):
            change()
    assert as_user("ada", team).cancel("mine")["job"]["state"] == "CANCELLED"
    assert as_user("ole", team).cancel("prep")["job"]["state"] == "CANCELLED"


def test_each_act_says_who_asked_for_it(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    as_user("ada", team).submit(draft("mine"))
    as_user("ole", team).set_budget("mine", "=5")
    as_user("ole", team).set_ceiling("mine", "0.02")
    as_user("ada", team).cancel("mine")
    client = as_user("vic", team)
    events = [one for one in client.events() if one["job_name"] == "mine"]
    assert [(one["kind"], one["data"]["by"]) for one in events] == [
        ("job.submitted", "ada"), ("job.budget", "ole"), ("job.ceiling", "ole"), ("job.cancelled", "ada"),
    ]  # fmt: skip
    assert "(by ole)" in events[1]["message"]
    assert any("(by ada)" in one["message"] for one in client.why("mine")["why"]["events"])
    acts = [line for line in team.log.lines if "api.act" in str(line)]
    assert len(acts) == 4
    assert "ole" in str(acts[1])


def test_a_submitters_jobs_share_a_budget_of_the_day(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    ada = as_user("ada", team)
    with pytest.raises(DaemonRefused, match="has no budget") as refused:
        ada.submit(draft("free", budget={}))
    assert refused.value.code == "budget"
    ada.submit(draft("a"))
    ada.submit(draft("b"))
    with pytest.raises(DaemonRefused, match=r"of \$50.00, jobs of ada hold \$40.00 already"):
        ada.submit(draft("c"))
    with pytest.raises(DaemonRefused, match="beyond"):
        ada.set_budget("a", "+11")
    with pytest.raises(DaemonRefused, match="beyond"):
        ada.submit(draft("d"), array="0-1")
    ada.set_budget("a", "+10")
    as_user("eve", team).submit(draft("e"))  # whose day is another
    ada = as_user("ada", team)
    ada.cancel("a")
    ada.submit(draft("c"))
    ole = as_user("ole", team)
    for one in (ada, ole):  # whoever acts, it is ada's day
        with pytest.raises(DaemonRefused, match=r"beyond \[users.ada\] budget_per_day: of \$50.00"):
            one.retry("a")
    ole.cancel("b")
    ole.retry("a")


def test_the_budget_of_a_job_that_ended_is_within_the_day_too(team: Team, as_user: Client) -> None:
    """An operator's retry would make it real."""
    ada = as_user("ada", team)
    ada.submit(draft("a"))
    ada.cancel("a")
    for change in ("=51", "+31"):
        with pytest.raises(DaemonRefused, match="beyond"):
            ada.set_budget("a", change)
    ada.set_budget("a", "=50")


def test_after_a_change_of_role_jobs_without_a_budget_need_one_first(team: Team, as_user: Client) -> None:
    ole = as_user("ole", team)
    for name in ("a", "b"):
        ole.submit(draft(name, budget={}))
    team.set_users(*USERS[:3], user("ole", Right.SUBMIT, 50))
    ole = as_user("ole", team)
    for change in (
        lambda: ole.submit(draft("c")),
        lambda: ole.set_ceiling("a", "2"),
    ):
        with pytest.raises(DaemonRefused, match=r"[ab] has no budget") as refused:
            change()
        assert "spotctl budget" in refused.value.hint
    with pytest.raises(DaemonRefused, match="beyond"):
        ole.set_budget("a", "=51")
    ole.set_budget("a", "=20")
    with pytest.raises(DaemonRefused, match="b has no budget"):
        ole.set_budget("a", "=21")
    ole.set_budget("b", "=20")
    ole.set_ceiling("a", "2")
    ole.submit(draft("c", budget={"job": 10}))


def test_requests_of_one_user_wait_for_each_other_and_no_other_ones_do(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    under_way: list[None] = []
    counts: list[int] = []
    may_end = threading.Event()

    async def slow(*_: Any) -> dict[str, Any]:
        under_way.append(None)
        counts.append(len(under_way))
        while not may_end.is_set():  # noqa: ASYNC110 - a thread sets it
            await anyio.sleep(0.01)
        under_way.pop()
        return {"jobs": []}

    team.served.replace("jobs.page", slow)
    ada, eve = as_user("ada", team), as_user("eve", team)
    threads = [threading.Thread(target=ada.jobs) for _ in range(7)]
    for one in threads:
        one.start()
    until(lambda: len(under_way) == 4, what="four to be under way", within=20)
    assert eve.status()
    assert Daemon(team.served.socket).status()
    may_end.set()
    for one in threads:
        one.join(20)
    assert (len(counts), max(counts)) == (7, 4)


@pytest.mark.parametrize("schedule", [{"priority": 1}, {"preempt": True}])
def test_a_submitters_job_neither_goes_before_others_nor_stops_them(
    team: Team, as_user: Client, schedule: dict[str, Any]
) -> None:
    team.served.write_three_jobs()
    with pytest.raises(DaemonRefused, match="only a user who may operate"):
        as_user("ada", team).submit(draft("a", schedule=schedule))
    as_user("ole", team).submit(draft("a", schedule=schedule))


def test_a_submitters_job_comes_after_own_jobs_only(team: Team, as_user: Client) -> None:
    as_user("eve", team).submit(draft("theirs"))
    ada = as_user("ada", team)
    ada.submit(draft("mine"))
    with pytest.raises(DaemonRefused) as refused:
        ada.submit(draft("a", schedule={"after": ["theirs"]}, budget={"job": 5}))
    assert "was not queued by ada" in str(refused.value.problems)
    ada.submit(draft("a", schedule={"after": ["mine"]}, budget={"job": 5}))
    as_user("ole", team).submit(draft("b", schedule={"after": ["theirs"]}))


def test_agents_queue_by_the_socket_only(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    with pytest.raises(DaemonRefused, match="by the socket"):
        as_user("ole", team).submit(draft("a"), agent=True)


def test_values_of_an_environment_are_shown_to_those_who_may_change_the_job(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    as_user("ada", team).submit(draft("mine", env={"HF_HOME": "/typed/here"}))
    shown = {name: as_user(name, team).job("mine")["spec"]["env"]["HF_HOME"] for name in ("ada", "eve", "vic", "ole")}
    assert shown == {"ada": "/typed/here", "eve": "...", "vic": "...", "ole": "/typed/here"}


def test_users_send_bounded_code_and_few_at_a_time(
    team: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotd.api import app

    ada, sha256 = as_user("ada", team), hashlib.sha256(b"a" * 100).hexdigest()
    monkeypatch.setattr(app, "USER_CODE_BYTES_MAX", 99)
    with pytest.raises(DaemonRefused, match="larger than"):
        ada.put_code(sha256, io.BytesIO(b"a" * 100), 100)
    monkeypatch.setattr(app, "USER_CODE_BYTES_MAX", 100)
    monkeypatch.setattr(app, "USER_UPLOADS_MAX", 0)
    with pytest.raises(DaemonRefused, match="others send code now"):
        ada.put_code(sha256, io.BytesIO(b"a" * 100), 100)
    monkeypatch.setattr(app, "UPLOADS_OF_ONE_MAX", 0)
    with pytest.raises(DaemonRefused, match="ada sends code 0 times now"):
        ada.put_code(sha256, io.BytesIO(b"a" * 100), 100)
    monkeypatch.setattr(app, "UPLOADS_OF_ONE_MAX", 1)
    monkeypatch.setattr(app, "USER_UPLOADS_MAX", 1)
    assert as_user("ole", team).put_code(sha256, io.BytesIO(b"a" * 100), 100), "who may operate is not counted"
    ada = as_user("ada", team)
    for _ in range(3):
        assert ada.put_code(sha256, io.BytesIO(b"a" * 100), 100)["code"]["bytes"] == 100


def test_a_submitter_sends_so_much_a_day_and_nothing_to_a_full_disk(
    team: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotd.api import app

    sha256 = hashlib.sha256(b"a" * 100).hexdigest()

    def send(name: str) -> object:
        return as_user(name, team).put_code(sha256, io.BytesIO(b"a" * 100), 100)

    monkeypatch.setattr(app, "USER_BYTES_PER_DAY_MAX", 250)
    send("ada")
    send("ada")
    with pytest.raises(DaemonRefused, match=r"ada sent .* today"):
        send("ada")
    send("eve")
    team.listener.gate.app = make_app(team.served.handlers, on_failure=lambda *_: None)  # as after a restart
    with pytest.raises(DaemonRefused, match=r"ada sent .* today"):
        send("ada")
    send("eve")
    monkeypatch.setattr(app, "FREE_BYTES_MIN", 2**62)
    with pytest.raises(DaemonRefused, match="disk is nearly full"):
        send("eve")
    send("ole")


def test_a_name_that_comes_to_mean_another_job_meanwhile_changes_none(team: Team, as_user: Client) -> None:
    """What is changed is the job whose author was checked."""
    team.served.write_three_jobs()
    ada = as_user("ada", team)
    mine = ada.submit(draft("x"))["job"]["id"]
    refs = team.served.asked("jobs.cancel")
    ada.cancel("x")
    assert refs == [(mine,)]
