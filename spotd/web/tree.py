"""The element that draws a tree, keeping what has not changed: focus and selection stay where they are."""

from __future__ import annotations

from nicegui.element import Element

from spotd.web.markup import Node


class TreeElement(Element, component="tree.js"):
    """A part of a page that is drawn from plain values."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__()
        self.props["tree"] = list(nodes)

    def show(self, *nodes: Node) -> None:
        """Draw this instead; nothing is sent where nothing differs."""
        if self.props["tree"] != list(nodes):
            self.props["tree"] = list(nodes)
            self.update()
