"""The runner of all loops, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from spotd.daemon.controllers import Controller, Outage, Pause, WakeEvent, backoff_s
from tests.unit.daemon.rig import Log

pytestmark = pytest.mark.anyio


class Away(Exception):
    """What the bodies of these tests work with is away."""


class Body:
    """Notes when it runs, and does what `acts` says: the first act at the first run, the last one ever after."""

    def __init__(self, *acts: Callable[[], Awaitable[Pause | None]]) -> None:
        self.acts = list(acts)
        self.began_s: list[float] = []

    async def __call__(self) -> Pause | None:
        self.began_s.append(anyio.current_time())
        if not self.acts:
            return None
        act = self.acts[0] if len(self.acts) == 1 else self.acts.pop(0)
        return await act()

    @property
    def pauses_s(self) -> list[float]:
        return [after - before for before, after in zip(self.began_s, self.began_s[1:], strict=False)]


async def works() -> None:
    return None


async def fails() -> None:
    raise Away("no answer")


async def hangs() -> None:
    await anyio.sleep_forever()


def rests(**terms: Any) -> Callable[[], Awaitable[Pause]]:
    async def act() -> Pause:
        return Pause(**terms)

    return act


async def run_for(controller: Controller, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await controller.run()


async def notify_at(controller: Controller, *seconds: float) -> None:
    began_s = anyio.current_time()
    for at in seconds:
        await anyio.sleep(began_s + at - anyio.current_time())
        controller.wake_event.notify()


async def test_a_body_runs_at_once_and_then_at_its_interval() -> None:
    body = Body(works)
    await run_for(Controller("c", body, interval_s=10), 35)
    assert body.pauses_s == [10, 10, 10]


async def test_a_first_run_can_wait_for_one_interval() -> None:
    body, began_s = Body(works), anyio.current_time()
    await run_for(Controller("c", body, interval_s=10, is_first_run_late=True), 15)
    assert [at - began_s for at in body.began_s] == [10]


async def test_a_body_that_returns_a_pause_sets_the_time_of_its_next_run() -> None:
    body = Body(rests(seconds=3), rests(seconds=0.5, gap_s=1), works)
    await run_for(Controller("c", body, interval_s=10), 10)
    assert body.pauses_s == [3, 1.5]


async def test_a_wake_up_shortens_the_pause_but_not_the_gap() -> None:
    body = Body(rests(seconds=60, gap_s=5))
    controller = Controller("c", body, interval_s=10)
    async with anyio.create_task_group() as group:
        group.start_soon(notify_at, controller, 2, 20)
        await run_for(controller, 70)
    assert body.pauses_s == [5, 15]


async def test_a_wake_up_during_a_run_is_remembered() -> None:
    async def slow() -> None:
        await anyio.sleep(3)

    body = Body(slow)
    controller = Controller("c", body, interval_s=100)
    async with anyio.create_task_group() as group:
        group.start_soon(notify_at, controller, 1, 1.5, 2)
        await run_for(controller, 50)
    assert body.pauses_s == [3], "many wake-ups count once"


async def test_several_controllers_can_share_nothing_but_a_wake_event_that_others_hold() -> None:
    wake_event, body = WakeEvent(), Body(works)
    controller = Controller("c", body, interval_s=100, wake_event=wake_event)
    wake_event.notify()
    await run_for(controller, 50)
    assert body.pauses_s == [0]


async def test_a_pause_can_end_when_something_is_found_to_have_changed() -> None:
    asked: list[float] = []

    def is_over() -> bool:
        asked.append(anyio.current_time())
        return len(asked) >= 3

    body = Body(rests(seconds=60, is_over=is_over, asked_every_s=5), hangs)
    await run_for(Controller("c", body, interval_s=10), 100)
    assert body.pauses_s == [15]


async def test_a_body_that_hangs_past_its_deadline_is_ended_and_runs_again() -> None:
    body, log = Body(hangs, works), Log()
    controller = Controller("c", body, interval_s=10, deadline_s=30, outage=Outage(log, "c.held", "c.back"))
    await run_for(controller, 45)
    assert body.pauses_s == [40]
    assert log.events() == ["c.held", "c.back"]
    assert controller.metrics.last_error == "not done within 30 s"


async def test_errors_back_off_to_a_limit_and_a_success_forgets_them() -> None:
    body = Body(*[fails] * 6, works)
    controller = Controller("c", body, interval_s=10, retry_s=1, retry_max_s=8, expected=(Away,))
    await run_for(controller, 46)
    assert body.pauses_s == [1, 2, 4, 8, 8, 8, 10]
    assert controller.failures == 0


async def test_without_a_pause_of_its_own_a_failed_run_is_followed_at_the_interval() -> None:
    body = Body(fails)
    await run_for(Controller("c", body, interval_s=10, expected=(Away,)), 25)
    assert body.pauses_s == [10, 10]


async def test_an_outage_is_logged_once_and_its_end_once() -> None:
    body, log = Body(fails, fails, fails, works, works, fails, works), Log()
    outage = Outage(log, "c.held", "c.back")
    await run_for(Controller("c", body, interval_s=1, expected=(Away,), outage=outage), 10)
    assert log.events() == ["c.held", "c.back", "c.held", "c.back"]
    assert not outage.error


async def test_an_error_that_the_body_handled_itself_counts_as_one() -> None:
    body, log = Body(rests(seconds=2, error="in part"), works), Log()
    outage = Outage(log, "c.held", "c.back")
    controller = Controller("c", body, interval_s=10, outage=outage)
    await run_for(controller, 1)
    assert (outage.error, controller.failures) == ("in part", 1)


async def test_an_error_that_is_not_expected_ends_the_loop() -> None:
    with pytest.raises(Away):
        await Controller("c", Body(fails), interval_s=10).run()


async def test_a_cancelled_controller_ends_at_once_whatever_it_does() -> None:
    for act in (hangs, works):
        began_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(Controller("c", Body(act), interval_s=10_000).run)
            await anyio.sleep(5)
            group.cancel_scope.cancel()
        assert anyio.current_time() - began_s == 5


async def test_a_body_that_is_always_due_leaves_the_others_their_turn() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(Controller("c", Body(rests(seconds=0)), interval_s=1).run)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


async def test_a_controller_that_only_has_to_succeed_once_ends_then() -> None:
    body = Body(fails, fails, works)
    await Controller("c", body, interval_s=10, expected=(Away,)).run_until_success()
    assert body.pauses_s == [10, 10]


async def test_figures_tell_runs_errors_duration_and_the_last_error() -> None:
    async def slow() -> None:
        await anyio.sleep(2)

    controller = Controller("c", Body(fails, slow), interval_s=10, expected=(Away,))
    await run_for(controller, 15)
    figures = controller.metrics
    assert (figures.runs, figures.errors, figures.last_duration_s, figures.last_error) == (2, 1, 2, "no answer")


def test_another_error_during_an_outage_is_logged_where_that_is_wanted() -> None:
    log = Log()
    outage = Outage(log, "c.held", "c.back", each_error=True)
    for error in ("one", "one", "two", "", ""):
        outage.update(error)
    assert log.events() == ["c.held", "c.held", "c.back"]


def test_a_back_off_doubles_to_its_limit_and_never_overflows() -> None:
    assert [backoff_s(1, failures, max_s=10) for failures in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 8, 10]
    assert backoff_s(1, 10**6, max_s=math.inf) == 65536
