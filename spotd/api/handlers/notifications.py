"""The channels of notifications: a test of each, and how they are doing."""

from __future__ import annotations

from spotd.api.errors import NotFound
from spotd.api.handlers.context import ContextHandlers, HandlerContext
from spotd.api.handlers.environment_checks import row_of
from spotd.api.schemas.health import ChannelTestResponse, CheckResponse


class NotificationHandlers(ContextHandlers):
    async def test(self, channel: str | None) -> list[ChannelTestResponse]:
        """Send a message by this channel, or by each of them.

        Raises:
            NotFound: there is no such channel, or none at all.
        """
        notifier = self._context.notifier
        known = [] if notifier is None else sorted(notifier.channels)
        if notifier is None or (channel is not None and channel not in known):
            what = "no channel is configured" if notifier is None else f"there is no channel {channel!r}"
            hint = "write [notify.phone] into the config and restart spotd; docs/how-to/notifications.md"
            raise NotFound(what, hint=hint if notifier is None else f"known here: {', '.join(known)}")
        found = await notifier.test(channel)
        return [ChannelTestResponse(channel=name, ok=not error, error=error) for name, error in found.items()]


def channel_rows(context: HandlerContext) -> list[CheckResponse]:
    notifier = context.notifier
    if notifier is None:
        return []
    rows = []
    if notifier.last_error:
        hint = "nothing that is owed is lost, and everything else goes on; see the daemon's log"
        rows.append(row_of("notify", "daemon", notifier.last_error, ok=False, hint=hint))
    for name, status in sorted(notifier.status.items()):
        waiting = notifier.waiting[name]
        waits = f"; {waiting} wait" if waiting else ""
        detail = f"{status.error}{waits}" if status.error else f"works{waits}"
        hint = f"spotctl notify test {name} tries it now; see [notify.{name}]" if status.error else ""
        rows.append(row_of("notify", name, detail, ok=not status.error, hint=hint))
    return rows
