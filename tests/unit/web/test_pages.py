"""What a user orders on a page is done once, however fast it is ordered again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spotd.client.transport import ClientProblem, DaemonRefused

pytestmark = pytest.mark.process  # the import of NiceGUI asks the system for its libraries


@pytest.fixture(autouse=True)
def needs_nicegui() -> None:
    """Import it here and not above: every worker collects this file, and one runs it."""
    pytest.importorskip("nicegui", reason="needs spotd[web]")


class Slow:
    """A poller that answers after a while."""

    def __init__(self) -> None:
        self.daemon, self.orders = Orders(), 0

    async def act(self, call: Callable[[Any], Any]) -> Any:
        self.orders += 1
        await asyncio.sleep(0)
        return call(self.daemon)

    def refresh(self, *_names: str) -> None:
        pass


PROBLEM = ClientProblem(key="image", message="no such", hint="another one")


class Orders:
    def __init__(self) -> None:
        self.planned: list[dict[str, Any]] = []
        self.submitted: list[dict[str, Any]] = []

    def plan(self, draft: Any) -> dict[str, Any]:
        self.planned.append(draft["data"])
        if draft["data"].get("image") == "refused":
            raise DaemonRefused("the job file cannot be used", code="invalid", problems=[PROBLEM])
        return {"plan": {"unprotected": ""}}

    def submit(self, _draft: Any, **more: Any) -> dict[str, Any]:
        self.submitted.append(more["secrets"])
        return {"job": {"id": "6j00000000"}}


def events_of(build: Callable[[Any], None], poller: Slow, prepare: Callable[[Any, Any], Any]) -> int:
    """Draw a part of a page, send events to it, and return how many orders came of them."""
    from nicegui import Client, core
    from nicegui.page import page

    async def work() -> None:
        core.loop = asyncio.get_running_loop()
        client = Client(page("/made-by-a-test"), request=None)
        with client:
            build(SimpleNamespace(poller=poller))

        def send(element: Any, kind: str) -> None:
            listener = next(one for one in element._event_listeners.values() if one.type.startswith(kind))
            client.handle_event({"id": element.id, "listener_id": listener.id, "args": []})

        await prepare(client, send)
        for _ in range(5):
            await asyncio.sleep(0)
        client.delete()

    asyncio.run(work())
    return poller.orders


def test_enter_twice_changes_a_budget_once() -> None:
    from nicegui import ui

    from spotd.web.pages import jobs

    async def twice(client: Any, send: Any) -> None:
        field = next(one for one in client.elements.values() if isinstance(one, ui.input))
        field.value = "+20"
        for _ in range(3):
            send(field, "keydown")
            await asyncio.sleep(0)

    def build(page: Any) -> None:
        jobs._confirm(page, "T", "S", "Change", lambda *_: None, field="New budget")

    assert events_of(build, Slow(), twice) == 1


def test_a_second_click_queues_no_second_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from nicegui import ui

    from spotd.web.pages import submit

    monkeypatch.setattr("spotd.web.views.market.plan", lambda _plan: "")
    monkeypatch.setattr("nicegui.ui.navigate.to", lambda _address: None)
    poller = Slow()

    async def twice(client: Any, send: Any) -> None:
        named = {one.text: one for one in client.elements.values() if isinstance(one, ui.button)}
        send(named["Show the plan"], "click")
        for _ in range(5):
            await asyncio.sleep(0)
        assert poller.orders == 1
        for _ in range(2):
            send(named["Queue the job"], "click")

    assert events_of(submit.submit_page, poller, twice) == 2


FILE = 'name = "a"\nrun = "true"\nimage = "{image}"\n{more}\n'


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_secret_is_asked_for_by_its_name_and_its_field_is_gone_once_the_job_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nicegui import ui

    from spotd.web.pages import submit

    monkeypatch.setattr("spotd.web.views.market.plan", lambda _plan: "")
    monkeypatch.setattr("nicegui.ui.navigate.to", lambda _address: None)
    poller = Slow()

    async def fill(client: Any, send: Any) -> None:
        def fields() -> dict[str, Any]:
            inputs = [one for one in client.elements.values() if type(one) is ui.input]
            return {one.props["label"]: one for one in inputs}

        named = {one.text: one for one in client.elements.values() if isinstance(one, ui.button)}
        text = next(one for one in client.elements.values() if isinstance(one, ui.textarea))
        text.value = FILE.format(image="x", more='secrets = ["TOKEN", "KEY"]')
        send(named["Show the plan"], "click")
        await turns()
        assert set(fields()) == {"Secret TOKEN", "Secret KEY"}
        assert all(one.props["type"] == "password" for one in fields().values())
        fields()["Secret TOKEN"].value = "t-value"
        send(named["Queue the job"], "click")
        await turns()
        assert poller.daemon.submitted == []
        assert any("KEY" in str(one.props.get("tree", "")) for one in client.elements.values())
        fields()["Secret KEY"].value = "k-value"
        send(named["Queue the job"], "click")
        await turns()
        assert poller.daemon.submitted == [{"TOKEN": "t-value", "KEY": "k-value"}]
        assert fields() == {}

    events_of(submit.submit_page, poller, fill)


def test_what_a_browser_cannot_send_is_stated_beside_all_else_that_is_wrong() -> None:
    from nicegui import ui

    from spotd.web.pages import submit

    poller = Slow()

    async def ask(client: Any, send: Any) -> None:
        named = {one.text: one for one in client.elements.values() if isinstance(one, ui.button)}
        text = next(one for one in client.elements.values() if isinstance(one, ui.textarea))
        for image in ("refused", "x"):
            text.value = FILE.format(image=image, more='workdir = "."')
            send(named["Show the plan"], "click")
            await turns()
            shown = " ".join(str(one.props.get("tree", "")) for one in client.elements.values())
            assert "workdir: is a folder of your computer" in shown
            assert ("image: no such" in shown) is (image == "refused")
            assert not named["Queue the job"].enabled
        assert [sorted(one) for one in poller.daemon.planned] == [["image", "name", "run"]] * 2
        folder = next(one for one in client.elements.values() if isinstance(one, ui.upload) and "zip" in str(one.props))
        for image, more in (("refused", 'workdir = "."'), ("x", 'workdir = "."'), ("x", "")):
            await folder.handle_uploads([ui.upload.SmallFileUpload("code.zip", "", b"no archive")])
            text.value = FILE.format(image=image, more=more)
            send(named["Show the plan"], "click")
            shown = ""
            for _ in range(2_000):  # the archive is written by a thread
                await asyncio.sleep(0.002)
                shown = " ".join(str(one.props.get("tree", "")) for one in client.elements.values())
                if "Asking the daemon" not in shown:
                    break
            assert "neither a .tar.gz nor a .zip" in shown
            assert ("image: no such" in shown) is (image == "refused")
            assert ("workdir: is not in the job file" in shown) is (not more)
            assert not named["Queue the job"].enabled

    events_of(submit.submit_page, poller, ask)
