"""The state diagrams of the documentation, drawn from the transition tables: `python -m tests.unit.core.diagram`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TypeVar

from spotd.core.decide import RULES
from spotd.core.domain.jobs import MachineVerdict
from spotd.core.domain.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS, AttemptState, EndReason, JobState
from spotd.core.kernel.judgements import JUDGEMENTS, Observed
from spotd.core.kernel.listed import RECORDS
from spotd.core.placement import GATES, MARKET_PARTS
from spotd.core.pricing import span_words
from spotd.core.running import PATIENCE_FIRST, VERDICTS, Need

State = TypeVar("State", bound=StrEnum)


def mermaid(first: State, table: Mapping[State, Iterable[State]]) -> str:
    """Return a Mermaid state diagram with one arrow per row of the table."""
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for before, allowed in table.items():
        following = sorted(after.value for after in allowed)
        lines.extend(f"    {before.value} --> {after}" for after in following)
        if not following:
            lines.append(f"    {before.value} --> [*]")
    return "\n".join(lines)


def page() -> str:
    """Return the whole of docs/states.md."""
    reasons = []
    for reason in EndReason:
        traits = reason.traits
        state = traits.next_state.value if traits.next_state is not None else "RECOVERING or FAILED"
        sentence = traits.sentence.replace("{detail}", "...")
        recovery = "yes" if traits.is_recovery else ""
        reasons.append(f"| `{reason.value}` | {state} | {recovery} | {traits.blame.value} | {sentence} |")
    judges = dict.fromkeys(to for row in JUDGEMENTS.values() for to in row.values())
    return "\n".join(
        [
            "# States",
            "",
            "Generated from `spotd/core/domain/states.py`, `listed.py`, `judgements.py` and `running.py` by",
            "`python -m tests.unit.core.diagram > docs/states.md`; a test fails when this page and the tables differ.",
            "",
            "## Jobs",
            "",
            "Final states lead only back to `QUEUED`, by `spotctl retry` (`SUCCEEDED` by `spotctl retry --anyway`).",
            "",
            "```mermaid",
            mermaid(JobState.QUEUED, JOB_TRANSITIONS),
            "```",
            "",
            "## Attempts",
            "",
            "One attempt is one machine and one try. It moves only forward.",
            "",
            "```mermaid",
            mermaid(AttemptState.INTENDED, ATTEMPT_TRANSITIONS),
            "```",
            "",
            "## Why attempts end",
            "",
            "| reason | the job becomes | counts as a recovery | cools down | what the user reads |",
            "|---|---|---|---|---|",
            *reasons,
            "",
            "## What is observed of an attempt's machine",
            "",
            "From the tables of `spotd/core/kernel/listed.py` and `judgements.py`. What a list shows of a machine",
            "comes first; one that is found by the key of a launch without an answer is adopted before that. A row",
            "which says that a machine is over is recorded once a second list or its own host says so, too",
            "(`is_doubted`).",
            "",
            "| listed as | recorded by | which is to |",
            "|---|---|---|",
            *(f"| {state.value} | `{to.__name__}` | {_purpose(to)} |" for state, to in RECORDS.items()),
            "",
            "Then the attempt is judged by its state and what was observed.",
            "",
            f"| | {' | '.join(observed.value for observed in Observed)} |",
            f"|---|{'---|' * len(Observed)}",
            *(_judgements(state) for state in JUDGEMENTS),
            "",
            *(f"* `{to.__name__}`: {_purpose(to)}." for to in judges),
            "",
            "## A decision",
            "",
            "From `spotd/core/decide.py`. Every rule adds to one plan; later ones see what earlier ones added.",
            "",
            *(f"{number}. `{rule.__name__}`: {_purpose(rule)}." for number, rule in enumerate(RULES, 1)),
            "",
            "## Why a job waits, whatever a machine costs",
            "",
            "From `spotd/core/placement.py`. The first that applies is the reason that `spotctl why` shows.",
            "",
            *(f"{number}. `{gate.__name__}`: {_purpose(gate)}." for number, gate in enumerate(GATES, 1)),
            "",
            "## Which machines a job may have",
            "",
            "From `spotd/core/placement.py`, where no gate holds it back. The first that applies decides.",
            "",
            *(f"{number}. `{part.__name__}`: {_purpose(part)}." for number, part in enumerate(MARKET_PARTS, 1)),
            "",
            "## What is done to a machine that runs",
            "",
            "From the table of `spotd/core/running.py`. Each decision gives a machine one of these, earlier rows",
            "first. A verdict yields to another one that is given in the same decision or is still open. What a stop",
            "needs beside what must be seen:",
            "",
            *(f"* {need.name.lower()}: {need.value}" for need in Need),
            "",
            "| verdict | what follows | seen before | needs | yields to | at most once in | costs |",
            "|---|---|---|---|---|---|---|",
            *(_verdict(verdict) for verdict in VERDICTS),
            "",
            "Where a job does not get the machine that a healthy one was stopped for, no other one is stopped for it",
            f"within {span_words(PATIENCE_FIRST)}, twice as long each time in a row, up to",
            ", ".join(f"{span_words(one)} ({words})" for one, words in _patience().items()) + ".",
            "",
        ]
    )


def _judgements(state: AttemptState) -> str:
    return f"| {state.value} | {' | '.join(f'`{JUDGEMENTS[state][observed].__name__}`' for observed in Observed)} |"


def _verdict(verdict: MachineVerdict) -> str:
    row = VERDICTS[verdict]
    needs = ", ".join(need.name.lower() for need in Need if need in row.needs)
    yields = ", ".join(other.value for other in VERDICTS if other in row.yields_to)
    if len(row.yields_to) == len(MachineVerdict) - 1:
        yields = "all others"
    every = "" if row.every is None else span_words(row.every)
    return f"| {verdict.value} | {row.does} | {row.seen} | {needs} | {yields} | {every} | {row.costs} |"


def _patience() -> dict[timedelta, str]:
    """Return the longest patience of each verdict that is for another machine, with the verdicts that have it."""
    found: dict[timedelta, str] = {}
    for verdict, row in VERDICTS.items():
        if Need.TARGET in row.needs:
            known = found.get(row.patience_max)
            found[row.patience_max] = verdict.value if known is None else f"{known}, {verdict.value}"
    return found


def _purpose(function: Callable[..., object]) -> str:
    """Return the first line of a function's description, as a part of a sentence."""
    first = inspect.cleandoc(function.__doc__ or "").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


if __name__ == "__main__":
    sys.stdout.write(page())
