"""A daemon that waits, over real TLS: the leader answers and judges, or the database does; nothing is done twice."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from spotd.api.app import api_routes
from spotd.api.handlers import HandlerContext
from spotd.certificates import certificate_hash
from spotd.cli.client import spotctl
from spotd.cli.entry import run
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonNotice, DaemonRefused, DaemonUnreachable
from spotd.core.domain.policy import Right
from spotd.service import forwarding, waiting
from spotd.service.waiting import READS, DatabaseReads
from spotd.store import Leader, SecretsKey, SecretsKeys, Store
from spotd.tokens import digest_of
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import KEYS, LEADER, TOKENS, USERS, Team, in_use, proven, team_of, user
from tests.integration.team.test_rights import ask, draft

Client = Callable[..., Daemon]
OTHER = SecretsKeys(current=SecretsKey.of(b"o" * 32))
FROM_DATABASE = rf"read from the database at \S+Z: the state is in use by {LEADER}"


@pytest.fixture
def leader(tmp_path: Path, authority: Authority) -> Iterator[Team]:
    """The daemon that leads; its certificate has expired, which is not what it is known by."""
    (folder := tmp_path / "leader").mkdir()
    with team_of(folder, authority.issue(f"l{tmp_path.name[-20:]}", "127.0.0.1", days=-1)) as found:
        yield found


def submitted(team: Team) -> list[tuple[str, str]]:
    """Name and author of each job of a daemon."""
    return [(one.name, one.submitted_by) for one in team.served.rig.store.read(lambda reads: reads.jobs())]


@contextmanager
def peer(
    authority: Authority, answer: bytes | None = b"", connected: threading.Event | None = None
) -> Iterator[tuple[Leader, list[bytes]]]:
    """What a leader would be that answers so: `None` does not even shake hands. Beside it what it is sent."""
    files = authority.issue("peer", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    taken = server.accept()[0]
                    if connected is not None:
                        connected.set()
                    if answer is None:
                        silent.append(taken)
                        continue
                    with suppress(OSError), context.wrap_socket(taken, server_side=True) as tls:
                        data = b""
                        while not data.endswith((b"}", b"\r\n\r\n")) and (more := tls.recv(65_536)):
                            data += more
                        asked.append(data)
                        tls.sendall(answer)
                        with suppress(OSError):
                            tls.unwrap()

        silent: list[socket.socket] = []
        thread = threading.Thread(target=take)
        thread.start()
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        try:
            yield proven(Leader(term="me.1", words=LEADER, url=url, certificate=certificate_hash(files[0]))), asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for one in silent:
                one.close()


def own_token(term: str, team: Team) -> str:
    assert KEYS.current is not None
    assert team.files is not None
    return KEYS.current.token_for(term, certificate_hash(team.files[0]))


def refused(call: Callable[[], Any]) -> DaemonRefused:
    with pytest.raises(DaemonRefused) as caught:
        call()
    return caught.value


def test_the_leader_answers_and_judges_who_asks_at_the_one_that_waits(
    team: Team, leader: Team, as_user: Client
) -> None:
    leader.served.write_three_jobs()
    team.wait_for_lead(leader.lead())
    with team.owner() as owner, warnings.catch_warnings():
        warnings.simplefilter("error", DaemonNotice)
        assert len(owner.jobs()["jobs"]) == 3
        assert owner.prices({"gpu": "H100"})["offers"]
        made = owner.submit(draft("of-the-owner"))
        assert made["job"]["submitted_by"] == ""
        ada = as_user("ada", team)
        assert ada.submit(draft("of-ada"))["job"]["submitted_by"] == "ada"
        assert "hold $20.00 already" in refused(lambda: ada.submit(draft("too-much", budget={"job": 40}))).message
        assert refused(lambda: ada.cancel("of-the-owner")).code == "forbidden"
        assert "by ada" in str(list(owner.events({"job": "of-ada"})))
        assert refused(lambda: owner.job("no-such-job")).code == "not_found"
        assert "run spotctl there" in refused(lambda: list(owner.port("llama-lora", 80))).hint
    assert {("of-ada", "ada"), ("of-the-owner", "")} < set(submitted(leader))
    assert submitted(team) == []
    acts = [row for row in leader.log.lines if row["event"] == "api.act"]
    assert {"ada", ""} == {row["user"] for row in acts}


def test_code_and_streams_pass_piece_by_piece_and_within_the_bounds_of_the_leader(
    team: Team, leader: Team, as_user: Client
) -> None:
    leader.served.write_three_jobs()
    team.wait_for_lead(leader.lead())
    code = bytes(range(256)) * 3_000
    too_long = code * 2
    with team.owner() as owner:
        digest = hashlib.sha256(code).hexdigest()
        assert owner.put_code(digest, io.BytesIO(code), len(code))["code"]["bytes"] == len(code)
        assert owner.has_code(digest)
        found = refused(lambda: owner.put_code("0" * 64, io.BytesIO(too_long), len(too_long)))
        assert "larger than" in found.message
        assert len(list(owner.events({"limit": 5}))) == 5
        assert refused(lambda: list(owner.logs("no-such-job"))).code == "not_found"


def test_one_that_the_leader_does_not_know_is_not_let_in_by_the_other(
    team: Team, leader: Team, as_user: Client
) -> None:
    leader.served.write_three_jobs()
    team.wait_for_lead(leader.lead())
    leader.set_users(*(one for one in USERS if one.caller.name != "ole"))
    ole = as_user("ole", team)
    assert refused(ole.jobs).code == "unauthorized"
    assert refused(lambda: ole.cancel("prep")).code == "unauthorized"
    leader.set_users(user("ole", Right.VIEW))
    assert refused(lambda: ole.cancel("prep")).code == "forbidden"


def test_a_key_of_another_daemon_opens_nothing(team: Team, leader: Team, as_user: Client) -> None:
    stated = leader.lead()
    team.wait_for_lead(stated, OTHER)
    with team.owner() as owner:
        with pytest.warns(DaemonNotice, match=rf"{FROM_DATABASE}; {LEADER} has another secrets_key"):
            assert owner.jobs()["jobs"] == []
        found = refused(lambda: owner.submit(draft("mine")))
        assert "has another secrets_key in [daemon] than this spotd" in found.message
        for client in (owner, as_user("vic", team)):
            with pytest.warns(DaemonNotice, match=FROM_DATABASE):
                client.jobs()
    team.wait_for_lead(stated, SecretsKeys())
    with team.owner() as owner:
        assert "this spotd has no secrets_key in [daemon]" in refused(lambda: owner.cancel("x")).message
    assert {"mine"}.isdisjoint(name for name, _ in submitted(leader))


def test_a_token_of_a_former_term_opens_nothing(team: Team, authority: Authority) -> None:
    team.lead("me.2")
    assert ask(team, authority, "GET", "/v1/jobs", own_token("me.1", team))[0] == 401
    assert ask(team, authority, "GET", "/v1/jobs", own_token("me.2", team))[0] == 200

    async def end() -> None:
        team.listener.gate.reset()

    team.served.call(end)
    assert ask(team, authority, "GET", "/v1/jobs", own_token("me.2", team))[0] == 401


def test_a_row_that_whoever_writes_the_database_changed_is_sent_nothing_where_there_is_a_key(
    team: Team, leader: Team, authority: Authority, as_user: Client
) -> None:
    team.served.write_three_jobs()
    former, stated, others = leader.lead("me.0"), leader.lead(), leader.lead(keys=OTHER).proofs
    with peer(authority) as (elsewhere, asked):
        elsewhere = replace(elsewhere, proofs=stated.proofs)
        forged = (
            elsewhere,
            replace(elsewhere, proofs=()),
            replace(elsewhere, proofs=("\ud800", "", "0" * 64)),
            replace(elsewhere, proofs=others),
            replace(stated, url=elsewhere.url),
            replace(stated, certificate=elsewhere.certificate),
            replace(former, term=stated.term),
        )
        for one in forged:
            team.wait_for_lead(one)
            with team.owner() as owner:
                for client in (owner, as_user("ole", team)):
                    found = refused(lambda client=client: client.cancel("prep"))  # type: ignore[misc]  # a lambda's default
                    assert "another one wrote into the database where it is reached" in found.message
                    with pytest.warns(DaemonNotice, match=FROM_DATABASE):
                        assert len(client.jobs()["jobs"]) == 3
        team.wait_for_lead(elsewhere, SecretsKeys(error="the file is not there"))
        found = refused(lambda: as_user("ole", team).cancel("prep"))
        assert "secrets_key in [daemon] cannot be used here: the file is not there" in found.message
    assert asked == []


def test_without_a_key_users_are_passed_on_to_what_the_row_says(team: Team, leader: Team, as_user: Client) -> None:
    leader.served.write_three_jobs()
    team.wait_for_lead(leader.lead(), SecretsKeys())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DaemonNotice)
        assert len(as_user("ole", team).jobs()["jobs"]) == 3


def test_what_another_place_was_sent_does_not_open_the_leader(team: Team, leader: Team, authority: Authority) -> None:
    leader.lead()
    with peer(authority) as (elsewhere, asked):
        team.wait_for_lead(elsewhere)
        with team.owner() as owner:
            refused(lambda: owner.cancel("x"))
    sent = re.findall(rb"authorization: Bearer (daemon_\w+)", asked[0])
    assert len(sent) == 1
    tokens = own_token("me.1", leader), sent[0].decode()
    assert [leader.listener.gate._user_with(digest_of(one)) is not None for one in tokens] == [True, False]


BOTH = SecretsKeys(current=OTHER.current, former=KEYS.current)


@pytest.mark.parametrize(
    ("leads", "waits"),
    [(BOTH, KEYS), (KEYS, BOTH), (BOTH, BOTH), (OTHER, BOTH), (BOTH, OTHER), (OTHER, OTHER)],
    ids=["leader first", "the one that waits first", "both have both", "gone there", "gone here", "over"],
)
def test_while_the_key_is_replaced_daemons_know_each_other_whichever_is_reloaded_first(
    team: Team, leader: Team, as_user: Client, leads: SecretsKeys, waits: SecretsKeys
) -> None:
    team.wait_for_lead(leader.lead(keys=leads), waits)
    with team.owner() as owner:
        owner.submit(draft("mine"))
    as_user("ada", team).submit(draft("of-ada"))
    assert sorted(submitted(leader)) == [("mine", ""), ("of-ada", "ada")]


@pytest.mark.parametrize("term", ["me.2", "other.1"])
def test_one_that_leads_in_another_term_does_nothing(team: Team, leader: Team, as_user: Client, term: str) -> None:
    stated = leader.lead()
    leader.lead(term)
    team.wait_for_lead(stated)
    for client in (as_user("ole", team),):
        assert "does not lead any more" in refused(lambda client=client: client.submit(draft("mine"))).message  # type: ignore[misc]  # a lambda's default
        with pytest.warns(DaemonNotice, match="does not lead any more"):
            client.jobs()
    assert submitted(leader) == []


def test_a_request_is_passed_on_once_though_the_row_names_the_one_that_waits(
    team: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = Leader(term="me.1", words=LEADER, url=team.url, certificate=certificate_hash(team.files[0]))  # type: ignore[index]  # there are files
    team.wait_for_lead(proven(itself))
    exchanges = []
    run = forwarding.Exchange.run

    async def noted(self: forwarding.Exchange, ended: Any) -> None:
        exchanges.append(self)
        await run(self, ended)

    monkeypatch.setattr(forwarding.Exchange, "run", noted)
    for client in (as_user("ole", team),):
        assert "does not lead any more" in refused(lambda client=client: client.submit(draft("mine"))).message  # type: ignore[misc]  # a lambda's default
    assert len(exchanges) == 1


def test_nothing_is_sent_to_what_has_another_certificate(team: Team, authority: Authority, as_user: Client) -> None:
    team.served.write_three_jobs()
    with peer(authority) as (stated, asked):
        team.wait_for_lead(proven(replace(stated, certificate="0" * 64)))
        ole = as_user("ole", team)
        assert "has another certificate than the leader" in refused(lambda: ole.cancel("prep")).message
        with pytest.warns(DaemonNotice, match="has another certificate than the leader"):
            assert len(ole.jobs()["jobs"]) == 3
        assert b"".join(asked) == b""


def test_a_leader_that_is_frozen_is_noticed_and_the_database_is_read(
    team: Team, authority: Authority, as_user: Client, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(forwarding, "CONNECT_S", 0.2)
    team.served.write_three_jobs()
    with peer(authority, None) as (stated, _):
        team.wait_for_lead(stated)
        client = as_user("vic", team)
        with pytest.warns(DaemonNotice, match=rf"{FROM_DATABASE}; the leader does not answer at https://127"):
            assert len(client.jobs()["jobs"]) == 3
        with pytest.warns(DaemonNotice, match="does not answer"):  # and for a while it is not asked again
            assert client.why("prep")["why"]["state"] == "WAITING_PRICE"
        found = refused(lambda: client.prices({"gpu": "H100"}))
        assert "the leader does not answer" in found.message
        assert run(spotctl, "spotctl", ["ls"]) == 0
        shown = capsys.readouterr()
        assert "llama-lora" in shown.out
        assert shown.err.startswith("warning: read from the database at ")
        assert shown.err.count("read from the database") == 1


def test_a_leader_that_is_slow_with_one_answer_is_asked_for_the_others(
    team: Team, leader: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.served.write_three_jobs()
    team.served.write_three_jobs()
    team.wait_for_lead(leader.lead())
    run_exchange, asked, released = forwarding.Exchange.run, threading.Event(), threading.Event()
    answered = threading.Event()

    async def run_slowly(self: forwarding.Exchange, ended: Any) -> None:
        if not self.scope["path"].endswith("/why"):
            await run_exchange(self, ended)
            answered.set()  # who asked may have read all before it is noted here
            return
        asked.set()
        await anyio.to_thread.run_sync(released.wait)
        raise forwarding.NotAnswered("it did not answer in time")

    monkeypatch.setattr(forwarding.Exchange, "run", run_slowly)
    client = as_user("vic", team)
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error", DaemonNotice)
        for is_slow_alone in (True, False):
            asked.clear()
            answered.clear()
            released.clear()
            slow = pool.submit(client.why, "prep")
            assert asked.wait(20)
            if is_slow_alone:
                assert len(client.jobs()["jobs"]) == 3
                assert answered.wait(20)
            released.set()
            assert isinstance(slow.exception(20), DaemonNotice)
            if is_slow_alone:
                assert len(client.jobs()["jobs"]) == 3
        with pytest.raises(DaemonNotice, match="it did not answer in time"):
            client.jobs()


def test_a_write_whose_answer_is_lost_is_unknown_and_is_sent_once(
    team: Team, authority: Authority, as_user: Client
) -> None:
    with peer(authority) as (stated, asked):
        team.wait_for_lead(stated)
        with team.owner() as owner:
            found = refused(lambda: owner.submit(draft("mine")))
            assert "whether it did what was asked is unknown" in found.message
            assert "do not repeat it before" in found.hint
            assert len(asked) == 1
            with pytest.warns(DaemonNotice, match=f"{LEADER} did not answer at"):
                owner.jobs()
        # Nor does spotctl ask another daemon to do it.
        ole = as_user("ole", team, team)
        assert "is unknown" in refused(lambda: ole.submit(draft("mine"))).message
        assert len([one for one in asked if b"POST" in one]) == 2
        for secret in (TOKENS["ole"], "Bearer", "daemon_"):
            assert secret not in str(team.log.lines) + found.message


def test_what_is_under_way_ends_as_soon_as_another_one_leads(
    team: Team, leader: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.served.write_three_jobs()
    stated = leader.lead()
    app = team.wait_for_lead(stated)
    client = as_user("ole", team)
    events = client.events(follow=True)
    assert next(events)["kind"]
    asked = threading.Event()

    async def never(*_: Any) -> None:
        asked.set()
        await anyio.sleep_forever()

    leader.served.replace("jobs.cancel", never)
    found: list[DaemonRefused] = []
    writer = threading.Thread(target=lambda: found.append(refused(lambda: as_user("ole", team).cancel("prep"))))
    writer.start()
    assert asked.wait(20)

    async def follow(term: str) -> None:
        app.update(in_use(replace(stated, term=term)))

    team.served.call(lambda: follow(stated.term))
    assert writer.is_alive()  # the same one leads
    team.served.call(lambda: follow("another.2"))
    writer.join(20)
    assert "is unknown" in found[0].message
    with pytest.raises(DaemonRefused, match="did not answer"):
        for _ in events:
            pass


def test_no_more_than_so_many_requests_are_on_their_way(
    team: Team, leader: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FORWARDS_MAX", 0)
    team.wait_for_lead(leader.lead())
    assert "0 requests are on their way" in refused(lambda: as_user("ole", team).cancel("x")).message


def test_users_leave_room_for_each_other_and_for_the_owner(
    team: Team, leader: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "USER_FORWARDS_MAX", 2)
    monkeypatch.setattr(waiting, "USERS_FORWARDS_MAX", 3)
    leader.served.write_three_jobs()
    team.wait_for_lead(leader.lead())
    with ExitStack() as held, team.owner() as owner:

        def follow(name: str) -> Daemon:
            client = as_user(name, team)
            next(stream := client.events(follow=True))
            held.callback(stream.close)  # type: ignore[attr-defined]  # a generator
            return client

        follow("vic")
        vic = follow("vic")
        assert "2 requests of vic are on their way" in refused(lambda: vic.prices({"gpu": "H100"})).message
        ada = follow("ada")
        assert "3 requests are on their way" in refused(lambda: ada.cancel("prep")).message
        assert owner.cancel("prep")["job"]


def test_a_leader_without_an_address_leaves_what_only_reads(team: Team, as_user: Client) -> None:
    team.served.write_three_jobs()
    team.wait_for_lead(Leader(term="me.1", words=LEADER))
    with team.owner() as owner:
        with pytest.warns(DaemonNotice, match=r"that one does not state in \[api\] where others reach it"):
            assert len(owner.jobs()["jobs"]) == 3
        for call in (
            lambda: owner.submit(draft("mine")),
            owner.doctor,
            owner.providers,
            lambda: owner.plan(draft("x")),
        ):
            assert "does not state in [api]" in refused(call).message
    with pytest.raises((DaemonRefused, DaemonUnreachable), match="this spotd waits"):
        as_user("ole", team).cancel("prep")


def test_what_the_database_answers_are_routes_that_change_nothing() -> None:
    found = {one.name: one for one in api_routes() if one.name in READS}
    assert found.keys() == READS
    assert {one.method for one in found.values()} == {"GET"}


def test_many_requests_at_a_time_find_room_at_the_leader(team: Team, leader: Team) -> None:
    team.wait_for_lead(leader.lead())
    with team.owner() as owner, ThreadPoolExecutor(48) as pool:
        made = list(pool.map(lambda number: owner.submit(draft(f"job-{number}")), range(48)))
    assert len(made) == len(submitted(leader)) == 48


@pytest.mark.parametrize("url", ["https://[::1", "https://127.0.0.1:1/\r\nx: y", "https://h:99999", "https://"])
def test_a_row_that_names_no_place_leaves_what_only_reads(team: Team, url: str) -> None:
    team.served.write_three_jobs()
    team.wait_for_lead(proven(Leader(term="me.1", words="a\r\nb", url=url, certificate="0" * 64)))
    with team.owner() as owner:
        assert "the leader cannot be reached at" in refused(lambda: owner.cancel("prep")).message
        with pytest.warns(DaemonNotice, match="the leader cannot be reached at"):
            assert len(owner.jobs()["jobs"]) == 3


def test_the_silence_of_a_leader_is_not_held_against_the_next(
    team: Team, leader: Team, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "CONNECT_S", 60.0)
    leader.served.write_three_jobs()
    stated = leader.lead("next.2")
    with peer(authority, None, connected := threading.Event()) as (frozen, _):
        app = team.wait_for_lead(frozen)

        async def follow() -> None:
            app.update(in_use(stated))

        with team.owner() as owner, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: refused(lambda: owner.cancel("prep")))
            assert connected.wait(20)
            team.served.call(follow)
            assert "does not lead any more" in asked.result(20).message
            with warnings.catch_warnings():
                warnings.simplefilter("error", DaemonNotice)
                assert len(owner.jobs()["jobs"]) == 3


def test_nothing_is_read_or_passed_on_once_the_wait_is_over(
    team: Team, authority: Authority, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "CONNECT_S", 60.0)
    with peer(authority, None, connected := threading.Event()) as (frozen, _):
        app = team.wait_for_lead(frozen)

        async def never(_: Store) -> HandlerContext:
            raise AssertionError("parts of a daemon were made beside one that leads")

        app._reads = DatabaseReads(
            "postgresql://spotd@127.0.0.1:1/x", never, why=lambda: "", on_failure=lambda *_: None
        )

        async def end() -> None:
            app.update(None)

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: refused(as_user("vic", team).jobs))
            assert connected.wait(20)
            team.served.call(end)
            assert asked.result(20).message.startswith("this spotd begins to lead or ends")
        assert "begins to lead or ends" in refused(lambda: as_user("ole", team).cancel("prep")).message
