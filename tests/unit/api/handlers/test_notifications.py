"""What `doctor` and a test state of channels, over a daemon with and without any."""

from __future__ import annotations

import pytest

from spotd.api.handlers import Handlers
from spotd.api.handlers.doctor import channel_rows
from spotd.api.responses import NotFound
from spotd.core.notifications import ChannelRules, Message
from spotd.daemon.notifications.channels import SendFailed
from spotd.daemon.notifications.notifier import Channel, Notifier
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


async def works(message: Message) -> None:
    assert message.title


async def fails(message: Message) -> None:
    assert message.title
    raise SendFailed("its server answered with HTTP 404")


def handlers(rig: Rig) -> Handlers:
    context = rig.context()
    context.notifier = Notifier(
        [
            Channel(rules=ChannelRules(name="mail"), sender=works),
            Channel(rules=ChannelRules(name="phone"), sender=fails),
            Channel(rules=ChannelRules(name="team"), sender=None, error="the environment variable X is not set"),
        ],
        database=rig.database,
        clock=rig.clock,
        log=rig.log,
        world=lambda: None,
        market=rig.offer_cache.snapshot,
        use_of=lambda _attempt: None,
    )
    return Handlers(context)


async def test_a_daemon_without_channels_says_how_to_have_one(rig: Rig) -> None:
    with pytest.raises(NotFound, match="no channel is configured") as caught:
        await rig.handlers().notifications.test(None)
    assert "[notify.phone]" in caught.value.hint
    assert channel_rows(rig.context()) == []


async def test_a_test_states_for_each_channel_whether_it_works(rig: Rig) -> None:
    asked = handlers(rig).notifications
    assert await asked.test("phone") == [
        {"channel": "phone", "ok": False, "error": "its server answered with HTTP 404"}
    ]
    assert [(row["channel"], row["ok"]) for row in await asked.test(None)] == [
        ("mail", True), ("phone", False), ("team", False)
    ]  # fmt: skip
    with pytest.raises(NotFound, match="no channel 'fax'") as caught:
        await asked.test("fax")
    assert caught.value.hint == "known here: mail, phone, team"


async def test_doctor_names_a_channel_that_cannot_send_once(rig: Rig) -> None:
    async with rig.ready():
        checks = (await handlers(rig).doctor.report())["checks"]
    rows = [row for row in checks if row["area"] == "notify"]
    assert [(row["name"], row["ok"], row["detail"]) for row in rows] == [
        ("mail", True, "works"),
        ("phone", True, "works"),
        ("team", False, "the environment variable X is not set"),
    ]
    assert rows[2]["hint"] == "spotctl notify test team tries it now; see [notify.team]"
