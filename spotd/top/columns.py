"""What each table shows of the daemon's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from spotd.top.screens import Snapshot
from spotd.words import (
    NOTHING,
    STATE_COLOURS,
    age_text,
    clean,
    gpu_text,
    local_text,
    price,
    saved_text,
    sized,
    spent_text,
    stage_text,
    stage_word,
    verdict_text,
    where_text,
)

# A table that draws only the rows on the screen, so that a thousand rows cost no more than twenty.


_GAP: Final = 1
_CELL_CHARS_MAX: Final = 400
"""More of a text is not read: a host may have written a million characters."""
_BOLD: Final = Style(bold=True)
_REVERSED: Final = Style(reverse=True)
_PLAIN: Final = Style()


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetColumn:
    """A column.

    Attributes:
        of: what it shows of an item.
        width: in characters; the column with 0 takes what is left, `least` of it at the least.
        drop: where there is no room, columns are left out, those with the greatest figure first; 0 never is.
        style: the colour of an item's text.
    """

    title: str
    of: Callable[[Any], str]
    width: int = 0
    least: int = 8
    right: bool = False
    drop: int = 0
    style: Callable[[Any], Style] | None = None


class Sheet(ScrollView, can_focus=True):
    """Rows with a cursor, which stays on its item while rows come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(0)", "First", show=False),
        Binding("end,G", "edge(1)", "Last", show=False),
    ]
    DEFAULT_CSS = "Sheet { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }"

    class Moved(Message):
        """Another item has the cursor."""

    def __init__(self, columns: Sequence[SheetColumn], *, key: Callable[[Any], str], empty: str, name: str) -> None:
        super().__init__(id=name)
        self._columns = tuple(columns)
        self._key = key
        self.empty = empty
        self._wanted = ""
        self._items: Sequence[Any] = ()
        self._is_known = False
        self._cursor = 0
        self._fitted_for = -1
        self._widths: dict[int, int] = {}

    @property
    def current(self) -> Any | None:
        """The item that has the cursor."""
        return self._items[self._cursor] if self._items else None

    @property
    def row_count(self) -> int:
        return len(self._items)

    def show_items(self, items: Sequence[Any], *, is_known: bool = True, wanted: str = "") -> None:
        """Show other rows, those with this text in a column; before anything is known, nothing is said of none."""
        if wanted:
            items = [item for item in items if any(wanted in _text(one, item).casefold() for one in self._columns)]
        self._wanted = wanted
        key = None if self.current is None else self._key(self.current)
        self._items, self._is_known = items, is_known
        at = next((place for place, item in enumerate(items) if self._key(item) == key), None) if key else None
        self._cursor = min(self._cursor, max(0, len(items) - 1)) if at is None else at
        self.virtual_size = Size(self.size.width, len(items) + 1)
        self._keep_in_sight()
        self.refresh()

    def action_move(self, by: int) -> None:
        self._go(self._cursor + by)

    def action_page(self, by: int) -> None:
        self._go(self._cursor + by * max(1, self.size.height - 2))

    def action_edge(self, end: int) -> None:
        self._go(len(self._items) - 1 if end else 0)

    def on_click(self, event: Click) -> None:
        if event.y > 0:
            self._go(event.y - 1 + self.scroll_offset.y)

    def on_resize(self, event: Resize) -> None:
        self.virtual_size = Size(event.size.width, len(self._items) + 1)
        self._keep_in_sight()

    def _go(self, to: int) -> None:
        self._cursor = max(0, min(to, len(self._items) - 1))
        self._keep_in_sight()
        self.refresh()
        self.post_message(self.Moved())

    def _keep_in_sight(self) -> None:
        room, top = max(1, self.size.height - 1), self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False, immediate=True)
        elif self._cursor >= top + room:
            self.scroll_to(y=self._cursor - room + 1, animate=False, immediate=True)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        if width != self._fitted_for:
            self._fitted_for, self._widths = width, fitted_widths(self._columns, width)
        if y == 0:
            return self._line([column.title for column in self._columns], [_BOLD] * len(self._columns), width)
        at = y - 1 + self.scroll_offset.y
        if not self._items and self._is_known and y == 1:
            empty = f"no row has {clean(self._wanted)} in it" if self._wanted else self.empty
            return Strip([Segment(empty[:width])]).adjust_cell_length(width)
        if at >= len(self._items):
            return Strip.blank(width)
        item = self._items[at]
        base = _REVERSED if at == self._cursor and self.has_focus else _PLAIN
        texts = [_text(column, item) for column in self._columns]
        styles = [base if column.style is None or base is _REVERSED else column.style(item) for column in self._columns]
        return self._line(texts, styles, width, base)

    def _line(self, texts: Sequence[str], styles: Sequence[Style], width: int, base: Style = _PLAIN) -> Strip:
        segments: list[Segment] = []
        for place, room in self._widths.items():
            if segments:
                segments.append(Segment(" " * _GAP, base))
            segments.append(Segment(sized(texts[place], room, right=self._columns[place].right), styles[place]))
        return Strip(segments).adjust_cell_length(width, base)


def _text(column: SheetColumn, item: Any) -> str:
    """Return a cell; figures that are none, or a daemon of another version, must not end the view."""
    try:
        return clean(column.of(item)[:_CELL_CHARS_MAX]) or NOTHING
    except (KeyError, TypeError, ValueError, OverflowError):
        return "?"


def fitted_widths(columns: Sequence[SheetColumn], room: int) -> dict[int, int]:
    """Return the width of each column that is shown, by its place; together they never exceed the room."""
    shown = dict(enumerate(columns))
    while True:
        needed = sum(column.width or column.least for column in shown.values()) + _GAP * (len(shown) - 1)
        droppable = [place for place, column in shown.items() if column.drop]
        if needed <= room or not droppable:
            break
        del shown[max(droppable, key=lambda place: columns[place].drop)]
    widths = {place: column.width or column.least for place, column in shown.items()}
    flexible = next((place for place, column in shown.items() if not column.width), None)
    excess = sum(widths.values()) + _GAP * (len(widths) - 1) - room
    if excess < 0 and flexible is not None:
        widths[flexible] -= excess
    while excess > 0 and max(widths.values()) > 1:
        widths[max(widths, key=lambda place: widths[place])] -= 1
        excess -= 1
    return widths


Row = Mapping[str, Any]

STATE_STYLES: Final = {state: Style(color=colour) for state, colour in STATE_COLOURS.items()}
_GREEN: Final = Style(color="green")
Now = Callable[[], str]


def job_columns(now: Now) -> Sequence[SheetColumn]:
    """Return the columns of the jobs; `now` is the daemon's clock at the newest answer."""
    return (
        SheetColumn(title="NAME", of=lambda job: job["name"], least=8),
        SheetColumn(title="STATE", of=lambda job: _state_text(job, now()), width=23, style=_state_style),
        SheetColumn(title="GPU", of=gpu_text, width=12, drop=3),
        SheetColumn(title="WHERE", of=where_text, width=18, drop=4),
        SheetColumn(title="$/H", of=lambda job: price(job["effective_usd_h"]), width=7, right=True, drop=1),
        SheetColumn(title="CEILING", of=lambda job: price(job.get("ceiling_usd_gpu_h")), width=7, right=True, drop=5),
        SheetColumn(title="SPENT", of=spent_text, width=8, right=True, drop=2),
        SheetColumn(title="SAVED", of=saved_text, width=7, right=True, drop=7),
        SheetColumn(title="CKPT", of=_checkpoint_text, width=10, drop=6),
        SheetColumn(title="AGE", of=lambda job: age_text(job["submitted_at"], now()), width=4, right=True),
    )


def machine_columns(now: Now) -> Sequence[SheetColumn]:
    """Return the columns of the machines: attempts that have not ended, each with its job."""
    return (
        SheetColumn(title="WHERE", of=lambda row: where_text(row[1]), least=10),
        SheetColumn(title="MARKET", of=lambda row: row[1]["market"], width=9, drop=4),
        SheetColumn(title="GPU", of=lambda row: gpu_text(row[1]), width=12, drop=2),
        SheetColumn(title="$/H", of=lambda row: price(row[1]["effective_usd_h"]), width=7, right=True),
        SheetColumn(title="USE", of=lambda row: _use_text(row[0]), width=4, right=True, drop=3),
        SheetColumn(title="UP", of=lambda row: age_text(row[1]["launched_at"], now()), width=4, right=True, drop=5),
        SheetColumn(title="SPENT", of=lambda row: spent_text(row[1]), width=8, right=True, drop=6),
        SheetColumn(title="JOB", of=lambda row: row[0]["name"], width=14),
        SheetColumn(
            title="DOES",
            of=lambda row: _state_text(row[0], now()).removeprefix("STARTING "),
            width=16,
            drop=1,
            style=lambda row: _state_style(row[0]),
        ),
    )


MARKET_COLUMNS: Final = (
    SheetColumn(title="WHERE", of=where_text, least=10),
    SheetColumn(title="REGION", of=lambda quote: quote["region"], width=10, drop=4),
    SheetColumn(title="GPU", of=gpu_text, width=14),
    SheetColumn(title="MARKET", of=lambda quote: quote["market"], width=9, drop=3),
    SheetColumn(
        title="$/GPU-H",
        of=lambda quote: price(quote["effective_usd_gpu_h"]),
        width=7,
        right=True,
        style=lambda quote: _GREEN if quote["fits"] else _PLAIN,
    ),
    SheetColumn(title="$/H", of=lambda quote: price(quote["effective_usd_h"]), width=7, right=True, drop=2),
    SheetColumn(title="CEILING", of=lambda quote: price(quote["ceiling_usd_gpu_h"]), width=7, right=True, drop=1),
    SheetColumn(title="VERDICT", of=verdict_text, width=18, drop=5),
)
EVENT_COLUMNS: Final = (
    SheetColumn(title="AT", of=lambda event: local_text(event["at"])[11:], width=8),
    SheetColumn(title="JOB", of=lambda event: event["job_name"] or event["job"] or NOTHING, width=16, drop=1),
    SheetColumn(title="WHAT", of=lambda event: event["kind"], width=20, drop=2),
    SheetColumn(title="MESSAGE", of=lambda event: event["message"], least=10),
)


def machines(snapshot: Snapshot) -> Sequence[tuple[Row, Row]]:
    """Return each machine with its job."""
    return [(job, attempt) for job in snapshot.jobs for attempt in job["attempts"] if attempt["ended_at"] is None]


def sentence(view: str, item: Any, now: str) -> str:
    """Return what is to be said of the row that has the cursor."""
    if view == "machines":
        item = item[0]
    if view in {"jobs", "machines"}:
        stage = item.get("stage")
        words: str = item["verdict"] if stage is None else stage_text(stage, now)
        late = item.get("checkpoint_late", "")
        return f"{item['name']} ({item['id']}): {words}" + (f"; {late}" if late else "")
    if view == "market":
        return f"{item['offer']} at {item['provider']}: {item['verdict']}"
    return f"{local_text(item['at'])}  {item['message']}"


def _state_text(job: Row, now: str) -> str:
    stage = job.get("stage")
    return job["state"] if stage is None else f"{job['state']} {stage_word(stage, now)}"


def _state_style(job: Row) -> Style:
    return STATE_STYLES.get(job["state"], _PLAIN)


def _checkpoint_text(job: Row) -> str:
    newest = job["checkpoint"]
    if newest is None:
        return NOTHING
    return str(newest["name"]) if newest["step"] is None else str(newest["step"])


def _use_text(job: Row) -> str:
    """Return the use of the busiest GPU."""
    known = [gpu["util_pct"] for gpu in job["gpus"] if gpu["util_pct"] is not None]
    return f"{max(known):.0f}%" if known else NOTHING
