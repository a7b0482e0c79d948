"""How large a disk a job needs: what its owner asked for, and what is known of it since.

A machine on which the newest checkpoint cannot be restored is money for nothing, so it is no candidate. Asking for
more disk than the job file states is better than that, since its price is part of the quote and of the ceiling.
"""

from __future__ import annotations

from typing import Final

from spotd.core.domain.bounds import bytes_within
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason
from spotd_providers.contract.values import Offer

GB: Final = 1_000_000_000
CODE_COPIES: Final = 2
"""The archive of the code, and what is unpacked from it."""
DATA_BLOCK: Final = 4096
"""What a small file takes up on a disk beside its bytes."""
FILES_MAX: Final = 10**9
MARGIN_PERCENT: Final = 10
GROWTH_PERCENT: Final = 50
"""A disk that was full is followed by one that is larger by so much."""
DISK_GB_MAX: Final = 1_000_000


def disk_gb_for(job: Job, checkpoint_bytes: int | None = None) -> int:
    """Return what to ask for, when the newest checkpoint, or one of so many bytes, is to be restored."""
    newest = job.checkpoints[0].bytes if job.checkpoints else 0
    stored = bytes_within(newest if checkpoint_bytes is None else checkpoint_bytes)
    stored += CODE_COPIES * bytes_within(job.code_bytes) + bytes_within(job.input_bytes)
    stored += bytes_within(job.data_bytes) + DATA_BLOCK * min(sum(one.files for one in job.spec.data), FILES_MAX)
    restored = 0 if stored == 0 else -(-stored * (100 + MARGIN_PERCENT) // (100 * GB))
    return max(job.spec.resources.disk_gb, restored, job.disk_gb_seen)


def disk_gb_on(job: Job, offer: Offer) -> int:
    """Return what to ask for on this machine, which may hold an older checkpoint only."""
    wanted, most = disk_gb_for(job), offer.disk_gb_max
    if most is None or wanted <= most or not job.checkpoints:
        return wanted
    return disk_gb_for(job, min(saved.bytes for saved in job.checkpoints))


def disk_gb_after(job: Job, reason: EndReason) -> int:
    """Return what is known to be too small once an attempt of the job has ended."""
    if reason is not EndReason.DISK_FULL:
        return job.disk_gb_seen
    return min(DISK_GB_MAX, -(-disk_gb_for(job) * (100 + GROWTH_PERCENT) // 100))
