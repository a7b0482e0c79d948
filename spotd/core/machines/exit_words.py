"""What the end of a command usually means, and what its owner can do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ExitExplanation:
    """The usual meaning of an end, empty where the code alone means nothing, and the next step."""

    meaning: str
    step: str


_READ: Final = "read its output with spotctl logs {name}, mend the cause, then spotctl retry {name}"
_BY_OUTPUT: Final = (
    (
        re.compile(r"cuda out of memory|outofmemoryerror|cuda error: out of memory|hip out of memory", re.IGNORECASE),
        ExitExplanation(
            "the memory of the GPU was full (CUDA out of memory)",
            "take a smaller batch, or a GPU with more memory: spotctl size states what a model needs",
        ),
    ),
    (
        re.compile(r"no space left on device", re.IGNORECASE),
        ExitExplanation("the disk was full", "ask for more: disk under [resources]"),
    ),
    (
        re.compile(r"modulenotfounderror|no module named", re.IGNORECASE),
        ExitExplanation("a Python package is missing", "install it in `setup`, or take an image that has it"),
    ),
)
_BY_CODE: Final = {
    126: ExitExplanation("the command cannot be executed", "make it executable, or name its interpreter in `run`"),
    127: ExitExplanation("the command was not found", "check the name in `run`, and that `setup` or the image has it"),
    134: ExitExplanation("the command aborted itself (SIGABRT)", _READ),
    137: ExitExplanation(
        "the command was killed (SIGKILL), usually because the machine's memory was full",
        "ask for more: memory under [resources], or load less at once",
    ),
    139: ExitExplanation("the command crashed (SIGSEGV, invalid memory access)", _READ),
}
_SIGNALS: Final = 128


def explain_exit(exit_code: int | None, output: Sequence[str], name: str) -> ExitExplanation:
    """Return what the end of a failed job means. What the command wrote last says more than its code."""
    text = "\n".join(output)
    code = None if exit_code is None else exit_code if exit_code >= 0 else _SIGNALS - exit_code
    found = next((known for pattern, known in _BY_OUTPUT if pattern.search(text)), None)
    if found is None and code is not None:
        found = _BY_CODE.get(code) or ExitExplanation(_signal_words(code), _READ)
    if found is None:
        found = ExitExplanation("", _READ)
    return ExitExplanation(found.meaning, found.step.format(name=name))


def _signal_words(code: int) -> str:
    try:
        return f"the command was ended by {signal.Signals(code - _SIGNALS).name}" if code > _SIGNALS else ""
    except ValueError:
        return ""
