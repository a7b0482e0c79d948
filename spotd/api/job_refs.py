"""Which job a user means by an id, a name or a prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from spotd.api.errors import Ambiguous, NotFound

_NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """As much of a job as is needed to find it. `order` grows with submission."""

    id: str
    name: str
    is_final: bool
    order: float


def resolve(ref: str, heads: Iterable[JobHead]) -> str:
    """Return the id of the one job that `ref` means.

    An exact id comes first, then an exact name, then a prefix of an id. Of several jobs of one name the unfinished one
    is meant, or the newest if all have ended: an earlier run must not stand in the way of its successor.

    Raises:
        NotFound: no job.
        Ambiguous: several unfinished jobs of that name, or several ids with that prefix.
    """
    known = list(heads)
    if any(head.id == ref for head in known):
        return ref
    named = [head for head in known if head.name == ref]
    unfinished = [head for head in named if not head.is_final]
    if len(unfinished) > 1:
        raise _ambiguous(ref, unfinished)
    if unfinished:
        return unfinished[0].id
    if named:
        return max(named, key=lambda head: head.order).id
    prefixed = [head for head in known if ref and head.id.startswith(ref)]
    if len(prefixed) > 1:
        raise _ambiguous(ref, prefixed)
    if prefixed:
        return prefixed[0].id
    raise NotFound(f"there is no job {ref!r}", hint="spotctl ls")


def _ambiguous(ref: str, found: list[JobHead]) -> Ambiguous:
    newest_first = sorted(found, key=lambda head: head.order, reverse=True)
    shown = ", ".join(f"{head.id} ({head.name})" for head in newest_first[:_NAMED_MAX])
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return Ambiguous(f"{ref!r} means {len(found)} jobs", hint=f"one of {shown}{more}")
