"""What was seen of providers, pools and hosts, for tests, and any such thing for properties."""

from __future__ import annotations

from datetime import datetime, timedelta

from hypothesis import strategies as st

from spotd.core.domain.world import ONE, Experience, Record, RecordId, RecordKind
from spotd_providers.contract.values import ProviderName
from tests.unit.core.builders import NOW, SHOP

HOUR = timedelta(hours=1)
_START_STEPS = ("started 500", "started 1000", "started 3000", "failed 500", "failed 1000")


def record(
    kind: RecordKind,
    subject: str,
    count: float = 0,
    hours: float = 0,
    *,
    provider: ProviderName = SHOP,
    at: datetime = NOW,
) -> Record:
    identity = RecordId(kind=kind, provider=provider, subject=subject)
    return Record(id=identity, count=round(count * ONE), span=hours * HOUR, at=at)


def experience(*records: Record) -> Experience:
    return {one.id: one for one in records}


def experiences(providers: list[ProviderName], hosts: list[str], pools: list[str]) -> st.SearchStrategy[Experience]:
    """Any records of these, as of the last weeks, some from a clock that was ahead."""
    subjects = [
        *((RecordKind.LOSSES_PROVIDER, m) for m in ("spot", "on-demand")),
        *((RecordKind.LOSSES_POOL, f"{m} {pool}") for m in ("spot", "on-demand") for pool in pools),
        *((RecordKind.LOSSES_HOST, f"spot {host}") for host in hosts),
        *((RecordKind.LOSSES_TIME, f"spot {slot}") for slot in range(0, 56, 5)),
        *((kind, host) for kind in (RecordKind.FAILED_STARTS, RecordKind.EARLY_LOSSES) for host in hosts),
        *((RecordKind.STARTS, image) for image in ("", "scratch")),
        *((RecordKind.START_TIMES, f"{m} {what}") for m in ("spot", "on-demand") for what in _START_STEPS),
    ]
    one = st.builds(
        lambda subject, provider, count, hours, age: record(
            subject[0], subject[1], count, hours, provider=provider, at=NOW - age * HOUR
        ),
        st.sampled_from(subjects),
        st.sampled_from(providers),
        st.integers(0, 40),
        st.sampled_from([0, 0.1, 1, 7, 200, 9000]),
        st.sampled_from([-10_000, 0, 5, 400, 3000]),
    )
    return st.lists(one, max_size=8).map(lambda some: experience(*some))
