"""The notifier over a running daemon in virtual time: what arrives, and what crashes, failures and quiet nights do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import pytest

from spotd.core.domain.intents import AttemptId
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import JobState
from spotd.core.notifications import KEPT_FOR, ChannelRules, Message, Severity, Topic, notification_of
from spotd.daemon.notifications.channels import SendFailed
from spotd.daemon.notifications.notifier import Channel, Notifier
from spotd_jobs.spec.fields import parse_window
from spotd_providers.contract.values import InstanceState, Loss, MicroUsd
from tests.unit.daemon.rig import Killed, Rig

pytestmark = pytest.mark.anyio
SECRET = "s3cr3t-token-of-the-address"


class Phone:
    """A channel that keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.tries: list[float] = []
        self.error: BaseException | None = None
        self.hangs = False
        self.dies_after: bool = False

    async def __call__(self, message: Message) -> None:
        self.tries.append(anyio.current_time())
        if self.hangs:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        self.got.append(message)
        if self.dies_after:
            raise Killed

    @property
    def titles(self) -> list[str]:
        return [message.title for message in self.got]


def make(rig: Rig, phone: Phone, *others: Channel, output_of: Any = None, **rules: object) -> Notifier:
    own = Channel(rules=ChannelRules(name="phone", **rules), sender=phone)  # type: ignore[arg-type]  # by name
    return Notifier(
        [own, *others],
        database=rig.database,
        clock=rig.clock,
        log=rig.log,
        world=lambda: None if rig.control_loop.state is None else rig.control_loop.state.world,
        market=rig.offer_cache.snapshot,
        use_of=lambda _attempt: None,
        output_of=output_of,
        collect_s=20.0,
    )


@asynccontextmanager
async def sending(notifier: Notifier) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for controller in notifier.controllers:
            group.start_soon(controller.run, name=controller.name)
        await anyio.sleep(1)
        yield
        group.cancel_scope.cancel()


def record(rig: Rig, *events: Event) -> None:
    rig.store.tx(lambda tx: tx.commit(Plan(events=events)))


def failures(rig: Rig, count: int, *, first: int = 0) -> None:
    now = rig.clock.now()
    record(rig, *(Event(at=now, kind="job.failed", message=f"exit code {n}") for n in range(first, first + count)))


async def minutes(rig: Rig, count: float) -> None:
    await rig.clock.sleep(timedelta(minutes=count))


async def test_the_way_of_a_job_is_told_line_by_line(rig: Rig) -> None:
    phone = Phone()
    async with rig.ready(), sending(make(rig, phone)):
        job_id = await rig.submit()
        await rig.until_running(job_id, 1)
        rig.shop.set_state(rig.attempts(job_id)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        host = await rig.until_running(job_id, 2)
        host.exit()
        await rig.until_state(job_id, JobState.SUCCEEDED)
        await minutes(rig, 1)
    assert phone.titles == ["job1 was preempted", "job1 runs again", "job1 has finished"]
    assert "instead of" in phone.got[-1].text
    assert [message.job for message in phone.got] == [job_id] * 3
    assert len({message.key for message in phone.got}) == 3


async def test_of_a_failed_job_meaning_last_lines_and_next_step_are_sent(rig: Rig) -> None:
    phone, asked = Phone(), []

    async def output_of(attempt: AttemptId) -> list[str]:
        asked.append(attempt)
        return [f"line {n}" for n in range(9)] + ["RuntimeError: CUDA out of memory"]

    async with rig.ready(), sending(make(rig, phone, output_of=output_of)):
        job_id = await rig.submit()
        await rig.until_running(job_id, 1)
        failed = Event(at=rig.clock.now(), kind="job.failed", message="the command failed: exit code 1", job=job_id)
        record(rig, failed)
        await minutes(rig, 1)
    assert asked == [AttemptId(job=job_id, number=1)]
    lines = phone.got[0].text.splitlines()
    assert lines[0] == "the command failed: exit code 1"
    assert "memory of the GPU" in lines[1]
    assert lines[2:7] == ["line 5", "line 6", "line 7", "line 8", "RuntimeError: CUDA out of memory"]
    assert lines[7].startswith("Try: take a smaller batch")


async def test_what_happened_before_the_first_start_is_no_news(rig: Rig) -> None:
    phone = Phone()
    failures(rig, 5)
    async with sending(make(rig, phone)):
        await minutes(rig, 1)
        failures(rig, 1, first=5)
        await minutes(rig, 1)
    assert [message.text for message in phone.got] == ["exit code 5"]


async def test_a_burst_of_failures_is_one_message(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.core.notifications.QUEUE_MAX", 600)
    phone = Phone()
    async with sending(make(rig, phone)):
        failures(rig, 1_000)
        await minutes(rig, 15)
    assert phone.titles == ["1,000 notifications: 600 failed"]
    assert phone.got[0].uncounted == 400


async def test_a_steady_stream_is_a_few_messages_and_then_summaries(rig: Rig) -> None:
    phone = Phone()
    async with sending(make(rig, phone)):
        for number in range(40):
            failures(rig, 1, first=number)
            await minutes(rig, 0.5)
        await minutes(rig, 11)
    assert len(phone.got) < 18
    assert sum(len(message.ids) for message in phone.got) == 40


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(SendFailed("its server answered with HTTP 500"), id="refused"),
        pytest.param(RuntimeError(f"https://x/{SECRET}"), id="a defect whose text is the address"),
        pytest.param(None, id="hangs"),
    ],
)
async def test_a_channel_that_fails_is_tried_again_ever_later_and_holds_up_no_other(
    rig: Rig, error: Exception | None
) -> None:
    phone, mail = Phone(), Phone()
    phone.error, phone.hangs = error, error is None
    notifier = make(rig, phone, Channel(rules=ChannelRules(name="mail"), sender=mail))
    async with sending(notifier):
        failures(rig, 1)
        await minutes(rig, 2)
        assert len(mail.got) == 1
        await minutes(rig, 90)
        gaps = [round(b - a) for a, b in pairwise(phone.tries)]
        assert 7 <= len(gaps) <= 10
        assert gaps == sorted(gaps)
        assert gaps[0] <= 70 < 1_000 < gaps[-1] <= 3660
        assert notifier.status["phone"].error
        assert notifier.status["mail"].error == ""
        phone.error, phone.hangs = None, False
        await minutes(rig, 61)
        assert len(phone.got) == 1
        assert notifier.status["phone"].error == ""
    assert rig.log.events().count("notify.failing") == 1
    assert rig.log.events().count("notify.works") == 1
    assert SECRET not in repr(rig.log.lines)


async def test_a_test_that_arrives_ends_the_wait_of_what_is_owed(rig: Rig) -> None:
    phone = Phone()
    phone.error = SendFailed("its server answered with HTTP 404")
    notifier = make(rig, phone)
    async with sending(notifier):
        failures(rig, 1)
        await minutes(rig, 30)
        phone.error = None
        assert await notifier.test(None) == {"phone": ""}
        await minutes(rig, 0.1)
    assert [message.topic for message in phone.got] == ["test", "failed"]


async def test_a_channel_that_does_not_work_for_days_gives_up_what_is_no_news_any_more(rig: Rig) -> None:
    phone = Phone()
    phone.error = SendFailed("no connection to its server")
    async with sending(make(rig, phone)):
        failures(rig, 3)
        await minutes(rig, 2)
        rig.clock.offset += KEPT_FOR
        await minutes(rig, 2)
        assert rig.store.read(lambda reads: reads.outbox().queued(["phone"])) == ()
    assert "notify.dropped" in rig.log.events()


async def test_what_is_owed_survives_a_crash_and_is_sent_once(rig: Rig) -> None:
    phone = Phone()
    phone.error = SendFailed("HTTP 503")
    async with sending(make(rig, phone)):
        failures(rig, 1)
        await minutes(rig, 1)
    failures(rig, 1, first=1)  # nothing runs at this moment
    phone.error = None
    async with sending(make(rig, phone)):
        await minutes(rig, 15)
    async with sending(make(rig, phone)):
        await minutes(rig, 15)
    assert [message.text for message in phone.got] == ["exit code 0", "exit code 1"]


async def test_a_crash_between_sending_and_marking_sends_once_more_with_the_same_key(rig: Rig) -> None:
    phone = Phone()
    phone.dies_after = True
    with pytest.RaisesGroup(Killed, flatten_subgroups=True, allow_unwrapped=True):
        async with sending(make(rig, phone)):
            failures(rig, 1)
            await minutes(rig, 1)
    phone.dies_after = False
    async with sending(make(rig, phone)):
        await minutes(rig, 1)
    assert len(phone.got) == 2
    assert phone.got[0].key == phone.got[1].key


async def test_a_night_is_quiet_and_ends_with_one_summary(rig: Rig) -> None:
    phone = Phone()
    quiet = (parse_window("10:00-16:00"),)  # the rig begins at noon
    async with sending(make(rig, phone, quiet=quiet, zone=ZoneInfo("UTC"), urgent_passes=True)):
        for number in range(4):
            failures(rig, 1, first=number)
            await minutes(rig, 10)
        assert phone.got == []
        record(rig, Event(at=rig.clock.now(), kind="job.quarantined", message="odd"))
        await minutes(rig, 1)
        assert [message.topic for message in phone.got] == ["quarantined"]
        rig.clock.offset += timedelta(hours=3)
        await minutes(rig, 30)
    assert phone.titles[1:] == ["4 notifications: 4 failed"]


async def test_a_condition_is_told_once_however_long_it_lasts(rig: Rig) -> None:
    phone = Phone()
    rig.policy.reload(replace(rig.policy.current, budget_day=MicroUsd(1000)))
    async with rig.ready():
        state = rig.control_loop.state
        assert state is not None
        world = replace(state.world, spent_by_day={rig.clock.now().date(): MicroUsd(900)})
    for _ in range(2):
        notifier = make(rig, phone)
        notifier._world = lambda: world
        async with sending(notifier):
            await minutes(rig, 5)
    assert phone.titles == ["80 % of today's budget is spent"]


async def test_a_defect_ends_neither_the_daemon_nor_the_news(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    phone = Phone()

    def odd(event: Event, *arguments: object, **named: object) -> object:
        if event.message == "exit code 1":
            raise KeyError("a bug")
        return notification_of(event, *arguments, **named)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr("spotd.core.notifications.notification_of", odd)
    monkeypatch.setattr("spotd.core.notifications.conditions", lambda *_: 1 / 0)
    async with rig.ready(), sending(make(rig, phone)):
        failures(rig, 3)
        await minutes(rig, 2)
    assert [message.text for message in phone.got] == ["exit code 0", "exit code 2"]
    assert {"notify.event_failed", "notify.conditions_failed"} <= set(rig.log.events())


async def test_a_clock_that_is_set_back_holds_nothing_up_for_long(rig: Rig) -> None:
    phone = Phone()
    phone.error = SendFailed("HTTP 503")
    async with sending(make(rig, phone)):
        failures(rig, 1)
        await minutes(rig, 20)
        phone.error = None
        rig.clock.offset -= timedelta(days=300)
        await minutes(rig, 3)
    assert len(phone.got) == 1


async def test_each_channel_is_tried_by_a_test_and_states_what_is_wrong(rig: Rig) -> None:
    phone, mail = Phone(), Phone()
    mail.error = SendFailed("its server answered with HTTP 404")
    lost = Channel(rules=ChannelRules(name="lost"), sender=None, error="the environment variable X is not set")
    notifier = make(rig, phone, Channel(rules=ChannelRules(name="mail"), sender=mail), lost)
    assert await notifier.test(None) == {
        "lost": "the environment variable X is not set",
        "mail": "its server answered with HTTP 404",
        "phone": "",
    }
    assert await notifier.test("phone") == {"phone": ""}
    assert phone.titles == ["a test of spotd"] * 2
    assert phone.got[0].severity is Severity.INFO


async def test_gpus_that_are_hardly_used_are_told_with_a_hint(rig: Rig) -> None:
    phone = Phone()
    uses: dict[AttemptId, float] = {}
    notifier = make(rig, phone, topics=frozenset({Topic.GPU}))
    notifier._use_of = uses.get
    async with rig.ready():
        job_id = await rig.submit()
        uses[(await rig.until_running(job_id, 1)).attempt] = 0.01
        state = rig.control_loop.state
        assert state is not None
        notifier._world = lambda: state.world
    async with sending(notifier):
        await minutes(rig, 20)
        rig.clock.offset += timedelta(hours=8)  # the computer slept, and knows nothing of the time
        await minutes(rig, 20)
        assert phone.got == []
        await minutes(rig, 15)
    assert phone.titles == ["job1 uses its GPUs at 1 %"]
