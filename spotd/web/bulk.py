"""One order for several jobs: each is asked of the daemon by itself, and each has its own answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError, DaemonUnreachable
from spotd.words import clean, count

JOBS_MAX: Final = 500
"""Of one order."""
AT_ONCE: Final = 20
"""Asked in one go; between two of these others may order something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What can be done with several jobs.

    Attributes:
        verb: for the button and the question: `Cancel`.
        past: for the report: `cancelled`.
        field: what has to be written besides; empty for nothing.
        call: does it for one job or array, by id.
    """

    verb: str
    past: str
    question: str
    call: Callable[[Daemon, str, str], Mapping[str, Any]]
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOutcome:
    """What came of the order for one job; `refusal` is empty where it was done."""

    job: str
    refusal: str = ""
    hint: str = ""


def _retry(daemon: Daemon, ref: str, _text: str) -> Mapping[str, Any]:
    """Queue a job, or all of an array, again.

    Raises:
        ClientError
    """
    answer: Mapping[str, Any] = daemon.retry(ref)
    while (array := answer.get("array")) is not None and array["next_index"] is not None:
        answer = daemon.retry(ref, start=array["next_index"])
    return answer


ORDERS: Final[Mapping[str, Order]] = {
    "cancel": Order(
        verb="Cancel",
        past="cancelled",
        question="Their machines are destroyed; checkpoints are kept for a retry.",
        call=lambda daemon, ref, _text: daemon.cancel(ref),
    ),
    "retry": Order(verb="Retry", past="queued again", question="Each goes on from its newest checkpoint.", call=_retry),
    "ceiling": Order(
        verb="Change ceiling",
        past="changed",
        question="Write 2.40 per GPU-hour, 19.20/h for the machine, or config for the ceiling of the configuration.",
        call=lambda daemon, ref, text: daemon.set_ceiling(ref, text),
        field="New ceiling",
    ),
}


def perform(daemon: Daemon, order: Order, jobs: Sequence[str], text: str) -> list[OrderOutcome]:
    """Return what came of it for each job, in their order.

    Raises:
        DaemonUnreachable: it went away; those before were done.
    """
    found = []
    for job in jobs:
        try:
            order.call(daemon, job, text)
        except DaemonUnreachable:
            raise
        except ClientError as exc:
            found.append(OrderOutcome(job=job, refusal=exc.message, hint=exc.hint))
        else:
            found.append(OrderOutcome(job=job))
    return found


def report(order: Order, outcomes: Sequence[OrderOutcome]) -> str:
    """Return how many were done and refused, in a sentence."""
    refused = sum(bool(one.refusal) for one in outcomes)
    done = f"{count(len(outcomes) - refused, 'job')} {order.past}"
    return f"{done}; {refused} refused" if refused else done


def names_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first of the names, and how many there are besides."""
    shown = ", ".join(clean(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {count(len(names) - most, 'other')}"
