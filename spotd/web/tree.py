"""The element that draws a tree, keeping what has not changed: focus and selection stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui.element import Element

from spotd.web.markup import Node


class TreeElement(Element, component="tree.js"):
    """A part of a page that is drawn from plain values."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__()
        self.props["tree"] = list(nodes)

    def on_pick(self, picked: Callable[[str, bool], None]) -> None:
        """Call `picked` with the `data-pick` of a checkbox, and whether it is ticked now."""

        def take(event: Any) -> None:
            what = event.args
            if isinstance(what, dict) and isinstance(what.get("id"), str):
                picked(what["id"], what.get("on") is True)

        self.on("pick", take)

    def show(self, *nodes: Node) -> None:
        """Draw this instead; nothing is sent where nothing differs."""
        if self.props["tree"] != list(nodes):
            self.props["tree"] = list(nodes)
            self.update()
