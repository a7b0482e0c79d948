"""What the queue needs of any offer of one provider, so that a marketplace with short answers can be asked for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from spotd.core.domain.disk import disk_gb_for
from spotd.core.domain.gpu_names import resolve_gpu
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd_providers.contract.values import NO_GPU, OfferQuery, ProviderName

GPUS_MAX: Final = 64
_WAITING: Final = frozenset({JobState.WAITING_PRICE, JobState.RECOVERING, JobState.QUEUED})


def offer_query(world: World, provider: ProviderName) -> OfferQuery:
    """Return the GPUs that jobs wait for (those of running jobs after them), those with a ceiling, and the room."""
    jobs = [job for job in world.jobs.values() if not job.state.is_final and _may_go_to(job, provider)]
    jobs.sort(key=lambda job: job.state not in _WAITING)
    gpus: dict[str, None] = {}
    counts: set[int] = set()
    vram: list[int] = []
    for job in jobs:
        wanted = job.spec.resources
        for one in wanted.gpu:
            counts.add(one.count)
            for name in _canonical(one.name):
                gpus.setdefault(name)
        if not wanted.gpu and wanted.gpu_count:
            counts.add(wanted.gpu_count)
            vram.append(wanted.min_vram_mb or 0)
    disks = [disk_gb_for(job) for job in jobs]
    watched = tuple(name for name in sorted(world.policy.ceilings) if name not in gpus and name != NO_GPU)
    return OfferQuery(
        gpus=tuple(gpus)[:GPUS_MAX],
        disk_gb=max(disks, default=OfferQuery().disk_gb),
        gpu_counts=tuple(sorted(counts)),
        watched=watched[:GPUS_MAX],
        vram_mb_min=min(vram, default=None),
    )


def _may_go_to(job: Job, provider: ProviderName) -> bool:
    named = job.spec.resources.providers
    return not named or provider in named


@lru_cache(maxsize=1024)
def _canonical(name: str) -> tuple[str, ...]:
    return tuple(sorted(resolve_gpu(name)))
