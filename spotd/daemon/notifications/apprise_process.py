"""Sends one message by apprise: address and text come by standard input, the exit code says how it went."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

REFUSED: Final = 1
NOT_UNDERSTOOD: Final = 2
NOT_INSTALLED: Final = 3


def main() -> int:
    """Send what standard input holds; return the exit code."""
    given = json.loads(sys.stdin.buffer.read())
    logging.disable(logging.CRITICAL)  # it logs addresses
    try:
        import apprise
    except ImportError:
        return NOT_INSTALLED
    kinds = {"warning": apprise.NotifyType.WARNING, "urgent": apprise.NotifyType.FAILURE}
    asset = apprise.AppriseAsset(app_id="spotd", app_desc="spotd", app_url="")
    channel = apprise.Apprise(asset=asset)
    if not channel.add(given["url"]):
        return NOT_UNDERSTOOD
    done = channel.notify(
        title=given["title"],
        body=given["text"] or given["title"],
        notify_type=kinds.get(given["severity"], apprise.NotifyType.INFO),
        body_format=apprise.NotifyFormat.TEXT,
        interpret_escapes=False,
    )
    return 0 if done else REFUSED


if __name__ == "__main__":
    sys.exit(main())
