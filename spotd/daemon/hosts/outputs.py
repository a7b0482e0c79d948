"""The outputs of an attempt that ended well: which manifest they are, pinned by its hash when the end is read.

Whatever the host, or any other, writes there later is not what the job made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Outputs
from spotd.daemon import object_keys
from spotd.daemon.hosts.known_manifests import accepted_manifest
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, ObjectTooLarge
from spotd_jobs.spec.outputs import unmatched_patterns
from spotd_jobs.wire.client.manifest_text import MANIFEST_BYTES_MAX
from spotd_jobs.wire.client.names import raw_of
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, StoredObject, verify_manifest
from spotd_jobs.wire.manifest_document import ManifestKind

LISTED_MAX: Final = 500_000
NONE_STORED: Final = "its machine stored none"
_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsSeen:
    """What was there when the attempt's end was read."""

    sha256: str | None = None
    bytes: int = 0
    problem: str = ""
    lost: int = 0
    """Outputs that the host says there were and that it could not store."""


def outputs_of(objects: ObjectStore, attempt: Attempt, patterns: Sequence[str]) -> OutputsSeen:
    """Return the attempt's outputs as they are now, and which patterns of the job match none of them.

    Its chunks are not asked for one by one: they are verified by content whenever they are read.

    Raises:
        StoreError: the store does not answer, or refuses to, so nothing can be said.
    """
    try:
        data = objects.get(object_keys.outputs_key(attempt.id), bytes_max=MANIFEST_BYTES_MAX)
    except ObjectMissing:
        return OutputsSeen(problem=NONE_STORED)
    except ObjectTooLarge as exc:
        return unreadable(exc)
    verdict = verify_manifest(data, attempt.id.job, attempt.id.number, None)
    if isinstance(verdict, BadManifest):
        return unreadable(verdict.reason)
    seen = _judged(objects, verdict)
    absent = unmatched_patterns(patterns, {_name(entry.path) for entry in verdict.files})
    return _with_problem(seen, f"nothing matches {_some(absent)}") if absent else seen


def with_lost(seen: OutputsSeen, lost: int) -> OutputsSeen:
    """Return the same, with what the host itself says that it could not store."""
    if not lost:
        return seen
    sentence = f"{lost} file{'s' if lost > 1 else ''} could not be stored by the machine"
    known = replace(seen, problem="") if seen.problem == NONE_STORED else seen
    return replace(_with_problem(known, sentence), lost=lost)


def _with_problem(seen: OutputsSeen, problem: str) -> OutputsSeen:
    return replace(seen, problem=f"{seen.problem}; {problem}" if seen.problem else problem)


def _name(path: str) -> str:
    """Return the path as the job's file spells it."""
    return raw_of(path).decode("utf-8", "surrogateescape")


def _some(patterns: Sequence[str]) -> str:
    more = len(patterns) - _NAMED_MAX
    return ", ".join(patterns[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def unreadable(why: object) -> OutputsSeen:
    """Return that there is a manifest, and that it cannot be read."""
    return OutputsSeen(problem=f"their manifest cannot be read: {why}")


def _judged(objects: ObjectStore, found: AcceptedManifest) -> OutputsSeen:
    if found.kind is not ManifestKind.OUTPUTS:
        return unreadable("it is no manifest of outputs")
    lacking = _lacking(objects, found)
    absent = f"{lacking} of {len(found.chunk_keys)} pieces of them are not in the store" if lacking else ""
    return OutputsSeen(sha256=found.sha256, bytes=found.bytes, problem=absent)


def _lacking(objects: ObjectStore, found: AcceptedManifest) -> int:
    """Return how many of the chunks are not in the store at their size."""
    wanted = {chunk.key: chunk.size for entry in found.files for chunk in entry.chunks}
    there: set[str] = set()
    for folder in {key.rpartition("/")[0] + "/" for key in wanted}:
        there.update(
            info.key for info in islice(objects.list(folder), LISTED_MAX) if _is_it(info, wanted.get(info.key))
        )
    return len(wanted.keys() - there)


def _is_it(info: StoredObject, size: int | None) -> bool:
    return size is not None and info.size == size


def pinned_manifest(objects: ObjectStore, attempt: AttemptId, pinned: Outputs) -> AcceptedManifest | None:
    """Return the manifest of this very hash, also where it was written over in a store that keeps versions.

    Raises:
        StoreUnavailable
    """
    return accepted_manifest(objects, object_keys.outputs_key(attempt), pinned.sha256, attempt)
