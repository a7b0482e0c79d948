"""What is remembered of a host: starts that failed or were slow, and machines that were lost soon after their launch.

Theory. A host that let a job down once may do so again, and one that did so thrice is likely broken. It ranks behind by
a share of its price for each fault, which fades by half in three days, and never by more than `MALUS_PPM_MAX`: where
nothing else is sold, it is taken all the same. What is counted is what a fault costs a job of a usual stay of six
hours: a failed start 20 minutes of it, an early loss 20, a slow start 10. Its owner may forget a host's faults
(`spotctl providers --forget HOST`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.records import OF_HOSTS, ONE, Experience, Record, RecordId, RecordKind, faded, is_faded
from spotd_providers.contract.values import HostId, ProviderName

MALUS_PPM: Final[Mapping[RecordKind, int]] = {
    RecordKind.FAILED_STARTS: 55_000,
    RecordKind.EARLY_LOSSES: 55_000,
    RecordKind.SLOW_STARTS: 28_000,
}
"""How far behind its price a host ranks for one fault of each kind."""
MALUS_PPM_MAX: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What is remembered of one host, as of now.

    Attributes:
        failed_starts, slow_starts, early_losses, losses: in millionths of one, faded.
        hours: machine time of attempts that are over.
        malus_ppm: by how much it ranks behind its price.
        at: when the newest of it happened.
    """

    provider: ProviderName
    host: str
    failed_starts: int = 0
    slow_starts: int = 0
    early_losses: int = 0
    losses: int = 0
    hours: timedelta = timedelta(0)
    malus_ppm: int = 0
    at: datetime


def fault_record(kind: RecordKind, provider: ProviderName, host: str) -> RecordId:
    return RecordId(kind=kind, provider=provider, subject=host)


def malus_ppm(experience: Experience, provider: ProviderName, host: HostId | None, now: datetime) -> int:
    """Return how far behind its price a host ranks, in millionths."""
    if host is None or not experience:
        return 0
    total = 0
    for kind, each in MALUS_PPM.items():
        record = experience.get(fault_record(kind, provider, host))
        if record is not None:
            total += faded(record, now).count * each // ONE
    return min(total, MALUS_PPM_MAX)


def highest_malus_ppm(experience: Experience) -> int:
    """Return what the malus of no host exceeds."""
    return MALUS_PPM_MAX if any(identity.kind in MALUS_PPM for identity in experience) else 0


def host_memories(experience: Experience, now: datetime) -> tuple[HostMemory, ...]:
    """Return what is remembered of each host, the worst first."""
    records: dict[tuple[ProviderName, str], dict[RecordKind, list[Record]]] = {}
    for identity, record in experience.items():
        if identity.kind in OF_HOSTS and not is_faded(record, now):
            host = host_of(identity)
            records.setdefault((identity.provider, host), {}).setdefault(identity.kind, []).append(faded(record, now))
    found = [_memory(experience, key, kinds, now) for key, kinds in records.items()]
    return tuple(sorted(found, key=lambda one: (-one.malus_ppm, -one.losses, one.provider, one.host)))


def host_of(identity: RecordId) -> str:
    """Return the host of one of its records."""
    if identity.kind is RecordKind.LOSSES_HOST:
        return identity.subject.partition(" ")[2]  # a market stands before it
    return identity.subject


def records_of_host(experience: Experience, text: str) -> tuple[RecordId, ...]:
    """Return the records of the hosts that a user means by `HOST` or `PROVIDER/HOST`."""
    return tuple(
        identity
        for identity in sorted(experience, key=lambda i: (i.kind, i.provider, i.subject))
        if identity.kind in OF_HOSTS and text in {host_of(identity), f"{identity.provider}/{host_of(identity)}"}
    )


def _memory(
    experience: Experience, key: tuple[ProviderName, str], kinds: Mapping[RecordKind, list[Record]], now: datetime
) -> HostMemory:
    provider, host = key
    counts = {kind: sum(record.count for record in some) for kind, some in kinds.items()}
    losses = kinds.get(RecordKind.LOSSES_HOST, [])
    return HostMemory(
        provider=provider,
        host=host,
        failed_starts=counts.get(RecordKind.FAILED_STARTS, 0),
        slow_starts=counts.get(RecordKind.SLOW_STARTS, 0),
        early_losses=counts.get(RecordKind.EARLY_LOSSES, 0),
        losses=counts.get(RecordKind.LOSSES_HOST, 0),
        hours=sum((record.span for record in losses), timedelta(0)),
        malus_ppm=malus_ppm(experience, provider, HostId(host), now),
        at=max(experience[identity].at for identity in records_of_host(experience, f"{provider}/{host}")),
    )
