"""Writes the tables and the plot of `docs/performance.md` from the figures that `scale.py` recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
GROWTH_LIMIT = 15.0
"""Of what ten times as much costs: linear, and half for the caches of a processor that no longer hold it."""
START_LIMIT, MEMORY_LIMIT, POLL_LIMIT, DECISION_LIMIT = 1.0, 1.0, 2.5, 1.0
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 420, 70, 60, 30, 210
COLOURS = ("#00897b", "#e64a19", "#5c6bc0", "#a1887f", "#d81b60", "#689f38", "#0097a7", "#8d6e63")
"""Each can be read on white and on nearly black."""
STYLE = (
    "text{font-size:12px;fill:#212121}.paper{fill:#fff}.grid{stroke:#e0e0e0}"
    "@media (prefers-color-scheme:dark){text{fill:#eee}.paper{fill:#1e1e1e}.grid{stroke:#444}}"
)
LINES = (
    "decision, 1,000 offers",
    "decision, 100,000 offers",
    "cycle without news",
    "start",
    "API: ls",
    "API: status",
    "API: submit",
    "submission",
)


def draw(figures: Mapping[str, Any], docs: Path) -> None:
    """Write both below this folder."""
    (docs / "assets" / "performance.svg").write_text(svg(figures))
    page = docs / "performance.md"
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(head + BEGIN + "\n\n" + "\n".join(tables(figures)) + "\n\n" + END + tail)


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def growth(row: Mapping[str, float], counts: Sequence[int]) -> str:
    """How much the figure grows with the last tenfold: 10 is linear."""
    found = row[str(counts[-1])] / max(1e-9, row[str(counts[-2])])
    return f"{found:.1f} | {met(found, GROWTH_LIMIT)}"


def met(found: float, limit: float) -> str:
    return f"{limit:g}{'' if found <= limit else ', NOT MET'}"


def table(title: str, rows: Mapping[str, Mapping[str, float]], counts: Sequence[int], unit: str) -> Iterator[str]:
    yield f"| {title} | " + " | ".join(f"{count:,} {unit}" for count in counts) + " | growth | limit |"
    yield "|---|" + "---:|" * (len(counts) + 2)
    for name, row in rows.items():
        yield f"| {name} | " + " | ".join(shown(row[str(count)]) for count in counts) + f" | {growth(row, counts)} |"


def tables(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from table("ms of a processor (memory: MB)", figures["by_jobs"], figures["jobs"], "jobs")
    yield ""
    yield from table("ms of a processor", figures["by_offers"], figures["offers"], "offers")
    yield ""
    yield "| beside others | spotd | they | ratio | limit |"
    yield "|---|---:|---:|---:|---:|"
    most = str(figures["jobs"][-1])
    own = figures["by_jobs"]
    for name, row in figures["servers"].items():
        for what, unit, limit in (("start", "ms", START_LIMIT), ("memory", "MB", MEMORY_LIMIT)):
            mine = own[what][most]
            yield (
                f"| {what}, {unit}: spotd with {int(most):,} jobs, {name} | {shown(mine)} | {shown(row[what])}"
                f" | {mine / row[what]:.2f} | {met(mine / row[what], limit)} |"
            )
    for offers in figures["offers"]:
        rows = figures["by_offers"]
        for name, peer, mine, limit in (
            ("poll", "gpuhunt: poll", rows["poll"][str(offers)], POLL_LIMIT),
            (
                "decision of a job",
                "gpuhunt: one query",
                own[f"decision, {offers:,} offers"]["1000"] / 1_000,
                DECISION_LIMIT,
            ),
        ):
            if peer in rows:
                theirs = rows[peer][str(offers)]
                yield (
                    f"| {name} at {offers:,} offers, ms: {peer.partition(':')[0]} | {shown(mine)} | {shown(theirs)}"
                    f" | {mine / theirs:.3f} | {met(mine / theirs, limit)} |"
                )
    for name, (ratio, limit) in figures["transfers"].items():
        yield f"| s5cmd: {name} | | | {ratio} | {limit} |"
    for name, reason in figures.get("left_out", {}).items():
        yield f"| {name}: not measured, {' '.join(reason.replace('|', ' ').split())} | | | | |"


def svg(figures: Mapping[str, Any]) -> str:
    """Both axes are logarithmic, so that what grows linearly is a straight line of the dotted one's slope."""
    counts: Sequence[int] = figures["jobs"]
    rows = {name: figures["by_jobs"][name] for name in LINES if name in figures["by_jobs"]}
    values = [row[str(count)] for row in rows.values() for count in counts]
    low, high = int(log10(min(values)) - 1), int(log10(max(values)) + 1)

    def x(count: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * log10(count / counts[0]) / log10(counts[-1] / counts[0])

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (log10(value) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f"<style>{STYLE}</style><title>Processor time by jobs, both axes logarithmic</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="paper"/>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        name = f"{10.0**power:g} ms" if power < 3 else f"{10 ** (power - 3):,} s"
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{name}</text>')
    for count in counts:
        parts.append(f'<path d="M{x(count):.1f} {TOP}V{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{x(count):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{count:,} jobs</text>')
    first = 10.0**low * 3
    parts.append(
        f'<path d="M{x(counts[0]):.1f} {y(first):.1f}L{x(counts[-1]):.1f} {y(first * counts[-1] / counts[0]):.1f}"'
        ' stroke="#9e9e9e" stroke-dasharray="2 4" fill="none"/>'
    )
    labels: list[float] = []
    ranked = sorted(rows.items(), key=lambda item: -item[1][str(counts[-1])])
    for number, (name, row) in enumerate(ranked):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(count):.1f},{y(row[str(count)]):.1f}" for count in counts)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(c):.1f}" cy="{y(row[str(c)]):.1f}" r="3" fill="{colour}"/>' for c in counts]
        at = y(row[str(counts[-1])]) + 4
        at = max(at, labels[-1] + 15) if labels else at
        labels.append(at)
        figure = shown(row[str(counts[-1])])
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{at:.1f}" style="fill:{colour}">{name}: {figure} ms</text>')
    note = "Processor time. Dotted: the slope of what grows linearly."
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
