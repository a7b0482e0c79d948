"""Providers and hosts."""

from __future__ import annotations

from spotd.web.pages.live import Page
from spotd.web.topics import WatchTopic
from spotd.web.views import providers as view


def build(page: Page) -> None:
    page.section([WatchTopic("providers")], lambda answer, now: view.cards(answer, now), name="the providers")
    page.section([WatchTopic("hosts")], lambda answer, now: view.hosts(answer, now), name="the hosts")
