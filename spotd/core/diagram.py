"""The state diagrams of the documentation, drawn from the transition tables: `python -m spotd.core.diagram`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from spotd.core.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS, AttemptState, EndReason, JobState

State = TypeVar("State", bound=StrEnum)


def mermaid(first: State, table: Mapping[State, Iterable[State]]) -> str:
    """A Mermaid state diagram with one arrow per row of the table."""
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for before, allowed in table.items():
        following = sorted(after.value for after in allowed)
        lines.extend(f"    {before.value} --> {after}" for after in following)
        if not following:
            lines.append(f"    {before.value} --> [*]")
    return "\n".join(lines)


def page() -> str:
    """The whole of docs/states.md."""
    reasons = []
    for reason in EndReason:
        traits = reason.traits
        state = traits.next_state.value if traits.next_state is not None else "RECOVERING or FAILED"
        sentence = traits.sentence.replace("{detail}", "...")
        recovery = "yes" if traits.is_recovery else ""
        reasons.append(f"| `{reason.value}` | {state} | {recovery} | {traits.blame.value} | {sentence} |")
    return "\n".join(
        [
            "# States",
            "",
            "Generated from `spotd/core/states.py` by `python -m spotd.core.diagram > docs/states.md`; a test fails",
            "when this page and the tables differ.",
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
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
