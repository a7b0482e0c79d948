"""Money, spans, sizes and instants as a person reads them, and untrusted text made harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spotd_providers.contract.printable import MarkLimit

NOTHING: Final = "-"
WITHOUT_CEILING: Final = "no ceiling applies to this GPU"
"""The verdict of the API on a quote against which nothing else speaks."""
FINAL_STATES: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
"""Of a job that has ended."""
LOSSES: Final = frozenset(
    {
        "preempted", "outbid", "host_lost", "lease_expired", "price_rose", "provider_balance", "stalled",
        "provision_timeout", "image_error", "code_error", "input_error", "input_away",
        "disk_full", "forgotten",
        "not_handed_over",
    }
)  # fmt: skip
"""Why an attempt ended that its job did not want to end."""
STATE_COLOURS: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "STARTING": "cyan",
    "PROVISIONING": "cyan",
    "RECOVERING": "yellow",
    "WAITING_PRICE": "yellow",
    "FAILED": "red",
    "EXPIRED": "red",
}
"""On a terminal."""
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400

# Controls of C0 and C1: with these, text from a rented host could forge what the terminal shows, as it could with what
# `spotd_providers.contract.printable` lists.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SPACES: Final = re.compile(r"\s+")
# A string ends at the next control that could begin another sequence, as it does in a terminal. So no character is
# examined by more than two of the searches, and a text of nothing but beginnings costs no more than any other.
_STRING: Final = "(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x18\x1a\x1b\x80-\x9f]*"  # OSC, DCS, SOS, PM, APC
_SEQUENCE: Final = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    f"|{_STRING}(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]+[0-~]"  # two-part escapes, such as the choice of a character set
    "|\x1b[0-OQ-WYZ\\\\`-~]"  # the rest, but not what begins one of the above
)
_UNFINISHED: Final = re.compile(f"(?:(?:\x1b\\[|\x9b)[0-?]*[ -/]*|{_STRING}\x1b?|\x1b[ -/]*)\\Z")
_HELD_MAX: Final = 4096


def clean(text: str) -> str:
    """Return the text on one line, without anything that a terminal would obey."""
    return _SPACES.sub(" ", _Shown().feed(_SEQUENCE.sub("", text))).strip()


def visible(text: str) -> str:
    """Return the text without what is hidden and without piled marks; its layout and our own colours stay."""
    if text.isascii():
        return text
    from spotd_providers.contract.printable import without_piles  # most texts need none of it

    return without_piles(text)


class _Shown:
    """What may be shown of a text without sequences, also where it comes in pieces."""

    _others: MarkLimit | None = None

    def feed(self, text: str) -> str:
        """Return the piece without controls and what is hidden."""
        text = _CONTROLS.sub("", text)
        if self._others is None:
            if text.isascii():
                return text
            from spotd_providers.contract.printable import MarkLimit  # most texts need none of it

            self._others = MarkLimit()
        return self._others.feed(text)


class ControlFilter:
    """Takes the control sequences out of a stream of text, also where one is cut in two.

    Line feeds and tabs stay. A carriage return becomes a line feed, so that progress bars remain readable.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_return = False
        self._shown = _Shown()

    def feed(self, text: str) -> str:
        """Return what may be shown of the text so far."""
        text = self._held + text
        self._held = ""
        text = _SEQUENCE.sub("", text)
        unfinished = _UNFINISHED.search(text)
        if unfinished is not None and len(unfinished.group()) <= _HELD_MAX:
            self._held = unfinished.group()
            text = text[: unfinished.start()]
        return self._lines(text)

    def end(self) -> str:
        """Return what was held back in case its end arrived."""
        rest, self._held = self._held, ""
        return self._lines(rest)

    def _lines(self, text: str) -> str:
        if self._after_return and text.startswith("\n"):
            text = text[1:]
        if text:
            self._after_return = text.endswith("\r")
        return self._shown.feed(text.replace("\r\n", "\n").replace("\r", "\n"))


def folded(text: str, room: int, indent: int) -> str:
    """Return one line as lines of so many characters, cut between words, the later ones indented."""
    if len(text) <= room:
        return text
    from textwrap import fill  # here, since only a narrow terminal needs it

    begin = " " * (len(text) - len(text.lstrip(" ")))
    below = " " * min(indent, room // 2)
    return fill(
        text.lstrip(" "), room, initial_indent=begin, subsequent_indent=below, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip


def sized(text: str, room: int, *, right: bool = False) -> str:
    """Return the text in exactly so many columns of a terminal, cut where it is longer."""
    from rich.cells import cell_len, set_cell_size  # here, since only a terminal needs it

    taken = cell_len(text)
    if taken > room:
        return set_cell_size(text, room - 1) + "\u2026" if room > 0 else ""
    return " " * (room - taken) + text if right else text + " " * (room - taken)


def money(usd: float | None) -> str:
    """Return dollars and cents, finer below a dollar so that sums add up; an amount is never shown as nothing."""
    if usd is None:
        return NOTHING
    if 0 < usd < 0.0005:
        return "<0.001"
    return f"{usd:.3f}" if 0 < abs(usd) < 1 else f"{usd:.2f}"


def dollars(usd: float | None) -> str:
    """Return the same with its sign."""
    text = money(usd)
    if text.startswith("-") and usd is not None:
        return f"-${text[1:]}"
    return text if usd is None else f"<${text[1:]}" if text.startswith("<") else f"${text}"


def spent_text(costs: Mapping[str, Any]) -> str:
    """Return what was spent as a cell of a table, `~4.62` where a part of it is not billed yet."""
    return ("~" if costs.get("estimated") else "") + money(costs["spent_usd"])


def spent_words(costs: Mapping[str, Any]) -> str:
    """Return the same in a sentence: `$4.62 (estimated)`."""
    return dollars(costs["spent_usd"]) + (" (estimated)" if costs.get("estimated") else "")


def compared_text(costs: Mapping[str, Any], usd: float) -> str:
    """Return a figure against on-demand; nothing where no on-demand price is known for anything that was spent."""
    uncompared = costs.get("uncompared_usd", 0)
    return NOTHING if uncompared and uncompared >= costs["spent_usd"] else money(usd)


def saved_text(job: Mapping[str, Any]) -> str:
    """Return what a job saved; nothing for one that failed, which saved nothing."""
    return NOTHING if job["state"] == "FAILED" else compared_text(job, job["saved_usd"])


def failure_lines(failure: Mapping[str, Any]) -> list[str]:
    """Return why a job failed and what to do, each on a line, the last lines of its output between."""
    code = "" if failure["exit_code"] is None else f"exit code {failure['exit_code']}"
    reason = clean(failure["reason"])
    parts = [reason, "" if code in reason else code, clean(failure["meaning"])]
    return [
        "; ".join(part for part in parts if part),
        *(f"| {_indent(line)}" for line in failure["output"]),
        f"Try: {clean(failure['next_step'])}",
    ]


def _indent(line: str) -> str:
    """Return a line of output harmless, with its indentation: a traceback is read by it."""
    line = line.expandtabs(4)
    return " " * (len(line) - len(line.lstrip(" "))) + clean(line)


OWN: Final = "own"
"""What the API states in place of the market of an own machine."""


def on_demand_text(costs: Mapping[str, Any]) -> str:
    """Return what on-demand would have cost, without what was spent where that price is not known."""
    return compared_text(costs, costs["on_demand_usd"] - costs.get("uncompared_usd", 0))


def price(usd_h: float | None) -> str:
    """Return a price per hour, fine enough to distinguish cheap machines."""
    if usd_h is None:
        return NOTHING
    if 0 < usd_h < 0.00005:
        return "<0.0001"
    return f"{usd_h:.4f}" if usd_h < 1 else f"{usd_h:.3f}"


def short_span(seconds: float) -> str:
    """Return a span in one unit, for a narrow column."""
    whole = max(0, int(seconds))
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m"
    if whole < 2 * _DAY:
        return f"{whole // _HOUR}h"
    return f"{whole // _DAY}d"


def run_span(since: str, until: str) -> str:
    """Return how long a machine ran, in two units where one would hide much of it: `2h54m`, `3d04h`."""
    whole = max(0, int(seconds_between(since, until) or 0))
    if _HOUR <= whole < 2 * _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h" if whole >= 2 * _DAY else short_span(whole)


def span_text(seconds: float) -> str:
    """Return a span in two units, for a sentence."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < 2 * _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def size_text(size: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def stage_text(stage: Mapping[str, Any], now: str) -> str:
    """Return what a machine does now in a clause, with its bytes and for how long it has done so."""
    parts = [stage["text"]]
    if stage["bytes_total"]:
        done, total = stage["bytes_done"], stage["bytes_total"]
        parts.append(f"{size_text(done)} of {size_text(total)} ({100 * done // total} %)")
    if stage["since"] is not None:
        parts.append(f"for {span_text(seconds_between(stage['since'], now) or 0)} so far")
    return ", ".join(parts)


def stage_word(stage: Mapping[str, Any], now: str) -> str:
    """Return the same for a narrow column: `restore 41% 2m`."""
    parts = [stage["name"]]
    if stage["bytes_total"]:
        parts.append(f"{100 * stage['bytes_done'] // stage['bytes_total']}%")
    if stage["since"] is not None:
        parts.append(short_span(seconds_between(stage["since"], now) or 0))
    return " ".join(parts)


def count(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where that is due."""
    ending = "" if number == 1 else "ies" if noun.endswith("y") and noun[-2:] not in {"ay", "ey"} else "s"
    return f"{number} {noun.removesuffix('y') if ending == 'ies' else noun}{ending}"


def gpu_text(machine: Mapping[str, Any]) -> str:
    """Return the GPUs of a job, an attempt or a quote, as a job file would ask for them.

    Of a job without a machine these are all that it would take. `2 x H100:8` are two machines.
    """
    if machine["provider"] is None and machine.get("gpu_wanted"):
        return str(machine["gpu_wanted"])
    nodes = machine.get("nodes", 1)
    count = f":{machine['gpu_count'] // nodes}" if machine["gpu_count"] else ""
    several = f"{nodes} x " if nodes > 1 else ""
    return f"{several}{machine['gpu']}{count}" if machine["gpu"] else NOTHING


def ceiling_text(detail: Mapping[str, Any]) -> str:
    """Return what a job accepts to pay, by GPU where that differs and no machine is chosen yet."""
    named = detail["ceilings"]
    if detail["job"]["provider"] is None and len(set(named.values())) > 1:
        return ", ".join(f"{gpu} ${price(usd)}" for gpu, usd in named.items())
    return f"${price(detail['ceiling_usd_gpu_h'])}"


def where_text(machine: Mapping[str, Any]) -> str:
    """Return provider and host, as far as there is one, and whether another job had that machine before."""
    where = "/".join(part for part in (machine["provider"], machine["host"]) if part) or NOTHING
    return f"{where}, taken over" if machine.get("taken_over_from") else where


def verdict_text(quote: Mapping[str, Any]) -> str:
    """Return the verdict on a quote; nothing where no ceiling applies, which is said once and not on each line."""
    verdict: str = quote["verdict"]
    return NOTHING if verdict == WITHOUT_CEILING else verdict


_OTHER_OFFERS: Final = frozenset({"another GPU or count", "not a spot offer"})
"""Reasons of the core for offers that no change of the job's other demands would let it take."""


def missing_text(why: Mapping[str, Any]) -> str:
    """Return the one thing for which a job waits, in figures; empty where its sentence is all there is to say."""
    if why["kind"] == "no_match":
        unfit = [row for row in why["passed_over"] if row["reason"] not in _OTHER_OFFERS]
        if len(unfit) != 1:
            return ""
        number = unfit[0]["offers"]
        such = "1 such machine is" if number == 1 else f"{number} such machines are"
        return f"{such} on offer and passed over: {clean(unfit[0]['reason'])}"
    best, ceiling = why["best"], why["ceiling_usd_gpu_h"]
    if why["kind"] != "above_ceiling" or best is None or ceiling is None:
        return ""
    least = best["effective_usd_gpu_h"]
    if round(least - ceiling, 4) <= 0:
        return ""
    machine = clean(f"{best['gpu_count']} x {best['gpu']}")
    needed = f"needs ${price(least - ceiling)} less per GPU-hour"
    return f"{needed}: the cheapest {machine} is ${price(least)}, the ceiling ${price(ceiling)}"


def silence_texts(answer: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each provider whose prices are missing: their absence must not be taken for an answer."""
    return [
        f"no prices from {poll['provider']}"
        + ("" if poll["at"] is None else f" since {local_text(poll['at'])}")
        + f": {poll['error']}"
        for poll in answer["offers"]
        if poll["error"]
    ]


def instant(text: str | None) -> datetime | None:
    """Return the instant of a JSON answer."""
    return None if text is None else datetime.fromisoformat(text)


def local_text(text: str | None) -> str:
    """Return the instant of a JSON answer in this machine's time zone."""
    moment = instant(text)
    return NOTHING if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def seconds_between(earlier: str | None, later: str | None) -> float | None:
    """Return the seconds from one instant of a JSON answer to another."""
    first, last = instant(earlier), instant(later)
    return None if first is None or last is None else (last - first).total_seconds()


def age_text(since: str | None, until: str) -> str:
    """Return how long before one instant of a JSON answer another was, for a narrow column."""
    passed = seconds_between(since, until)
    return NOTHING if passed is None else short_span(passed)
