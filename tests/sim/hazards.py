"""What a world may hold beside the plain faults of its providers; each seed of a swarm draws some of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Hazard(StrEnum):
    """Each is drawn by itself, with a source of chance of its own, so that worlds without it stay as they were."""

    GPUS = "gpus"
    """Machines with one to eight GPUs: a confusion of whole machines with their parts shows."""
    SIZES = "sizes"
    """Checkpoints from 1 kB to 10 TB."""
    TRAFFIC = "traffic"
    """Uploads and restores are billed."""
    ON_DEMAND = "on_demand"
    """A third provider, which sells on-demand only."""
    NOTICES = "notices"
    """A provider that announces what it takes back."""
    SPIKES = "spikes"
    """For minutes everything costs twenty times as much."""
    DUMB = "dumb"
    """Machines that run and bill, and never speak."""
    SILENCE = "silence"
    """All hosts of a provider, or all of them, fall silent at once."""
    ONE_SIDED = "one_sided"
    """Outages of the store in which only hosts cannot write, or only the daemon cannot read."""
    LISTS = "lists"
    """Lists call themselves complete and lack machines, for minutes."""
    MONTH_END = "month_end"
    SLEEP = "sleep"
    """The computer sleeps for hours."""
    NUMBERS = "numbers"
    """Hosts state numbers and instants that cannot be."""
    DEAD_ACCOUNT = "dead_account"
    """A provider refuses the key for hours."""
    LOST_AND_AWAY = "lost_and_away"
    """A provider is away for hours from the moment at which it lost an answer."""
    ROWS = "rows"
    """A plugin returns rows that break its contract."""
    NEVER_STARTS = "never_starts"
    """Jobs that fail the same way wherever they are started."""
    SECRETS = "secrets"
    """Jobs whose secrets are lost, so that nothing of theirs can be prepared."""
    BORN_LONG_AGO = "born_long_ago"
    """A provider that states 1970 as the birth of its machines."""
    RETRY_AFTER = "retry_after"
    """A provider that fails to end a machine asks to be left alone for a day."""
    OVERCHARGE = "overcharge"
    """A provider that bills more than was agreed."""
    CLOCK_STEPS = "clock_steps"
    """The wall clock of the computer is set, by seconds or hours, both ways, often around midnight."""
    FULL_DISK = "full_disk"
    """Nothing can be saved, for minutes or hours."""
    TWIN = "twin"
    """Another daemon with the same label, and the same ids of jobs, on the same accounts."""


READY: Final = frozenset(Hazard)
LATER: Final = frozenset({Hazard.CLOCK_STEPS, Hazard.FULL_DISK, Hazard.TWIN})
"""These are drawn by themselves, so that the worlds of older seeds stay as they were."""
