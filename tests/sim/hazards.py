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
    DEADLINES = "deadlines"
    """Jobs that are due, some of them too early, and that may use on-demand for it."""
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
    """Hosts state numbers and instants that cannot be, as the parsers let them through.

    What hosts write is not parsed here: `tests/unit/jobs/test_stated_numbers.py` holds the parsers to their ranges.
    """
    DEAD_ACCOUNT = "dead_account"
    """A provider refuses the key for hours."""
    LOST_AND_AWAY = "lost_and_away"
    """A provider is away for hours from the moment at which it lost an answer."""
    ROWS = "rows"
    """The plugin of one provider returns machines and offers that break its contract."""
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
    RESTORED = "restored"
    """The state is put back to a copy that is minutes or hours old, while machines and what they saved live on."""
    REVOKED = "revoked"
    """An account that is refused for ever from some moment on, with machines in it that its owner gives up later."""
    HASTY = "hasty"
    """One launch at a time at each provider, and a user who cancels jobs whose launch waits for its turn."""
    REFUSALS = "refusals"
    """A provider refuses every launch, each for the same reason, without end."""
    DEAR_EVERYWHERE = "dear_everywhere"
    """For minutes everything costs twenty times as much, at every provider at once."""
    READ_ONLY = "read_only"
    """The store takes no writes from anybody, and can be read."""
    BIDS = "bids"
    """Bids are raised, and outbid machines are kept for a while."""
    MOVES = "moves"
    """Jobs move to cheaper machines."""
    WATCHDOG = "watchdog"
    """Jobs are watched, and some of them hang, or leave their GPUs idle, on the first machines or on all."""
    WINDOWS = "windows"
    """Jobs run in weekly windows only, of zones whose clocks are changed meanwhile."""
    CHAINS = "chains"
    """Jobs come after others, and read their outputs."""
    ARRAYS = "arrays"
    """Some of the jobs are an array, of which so many run at once."""
    PREEMPT = "preempt"
    """Jobs of higher priority may stop others, and there are few machines for all."""
    CPUS = "cpus"
    """Machines without a GPU, and jobs for them."""
    BAIT = "bait"
    """Some of the cheapest offers refuse each launch without end."""
    NO_ON_DEMAND = "no_on_demand"
    """On-demand machines are listed and refused to each buyer."""
    LEAPS = "leaps"
    """One page of a provider states a hundredth, or a hundred times, of its prices; the next one is right again."""
    WRONG_STATES = "wrong_states"
    """One list calls a machine paused, or gone, that runs on."""
    LAPSES = "lapses"
    """Provider's notices that do not come true."""
    VANISHING = "vanishing"
    """Outbid machines that their provider destroys and lists no more."""
    RELOADS = "reloads"
    """Fee, ceiling, budget or the right to use a provider change while a bid, a hold, a move or a launch is open."""
    AWAY_AT_BARGAINS = "away_at_bargains"
    """The store, or the provider of what runs, is away exactly when another machine becomes cheap."""
    HOURLY = "hourly"
    """A market as EC2's: a minute is billed at least, prices change by the hour, losses are announced."""
    BILLS = "bills"
    """Providers bill by day, late, with credits, nothing at first, each row twice, or in another currency."""
    CEILINGS = "ceilings"
    """Jobs state no price of their own, and the ceilings of the config change while their machines run."""
    OWN = "own"
    """Own computers beside the rented ones, for which jobs may wait; each of the hazards below is one of theirs."""
    OWNERS_HOURS = "owners_hours"
    """Their owner wants them back for hours, which is announced."""
    OWNERS_JOBS = "owners_jobs"
    """A job of somebody else takes the place of ours, announced or not, and processes of theirs come and go."""
    QUEUE = "queue"
    """A cluster takes every job, and lets it wait until a place is free."""
    NODES = "nodes"
    """An own computer stops answering, so that lists are incomplete, and is silent besides or not."""
    REBOOTS = "reboots"
    """An own computer is started again."""
    OWN_RELOADS = "own_reloads"
    """The wait for own machines, the right to use them and whose they are change in the config."""
    OWN_REMOVED = "own_removed"
    """The daemon is started without the provider of own machines, on which jobs run, and later with it again."""
    REUSE = "reuse"
    """Machines of jobs that are done wait for the next one. Drawn in worlds of its own, beside all others."""
    GANGS = "gangs"
    """Jobs of several machines: some are lost or fall silent alone, start in part, or are listed in part."""
    LATE_CAUSES = "late_causes"
    """Lists say only minutes after a machine is gone that it was taken back. Drawn in worlds of its own."""
    UNABLE = "unable"
    """Hosts answer each launch with what they cannot do, for hours or until the calm. Drawn with the former."""
    UNFIT = "unfit"
    """Hosts that are less than they offer, and a canary that finds it. Drawn in worlds of its own."""
    REPLACE = "replace"
    """Healthy ones of several machines are kept while lost ones are replaced, or left out."""
    FIRST = "first"
    """Of these the first one is lost, too, and the others go on as the next attempt."""
    RANGES = "ranges"
    """Some of these accept a range of machines, and hosts give fewer at once than they offer, changing by the hour."""


HARSH: Final = frozenset(
    {
        Hazard.BAIT,
        Hazard.NO_ON_DEMAND,
        Hazard.LEAPS,
        Hazard.WRONG_STATES,
        Hazard.LAPSES,
        Hazard.VANISHING,
        Hazard.RELOADS,
        Hazard.AWAY_AT_BARGAINS,
        Hazard.HOURLY,
        Hazard.BILLS,
    }
)
"""What deceives a daemon into stopping machines that are well. Drawn in worlds of their own: see `harsh`."""
HARSH_LATER: Final = frozenset({Hazard.CEILINGS})
"""Of these each has a source of chance of its own, in worlds of later seeds: no older one changes."""
OWN_MACHINES: Final = frozenset(
    {
        Hazard.OWN,
        Hazard.OWNERS_HOURS,
        Hazard.OWNERS_JOBS,
        Hazard.QUEUE,
        Hazard.NODES,
        Hazard.REBOOTS,
        Hazard.OWN_RELOADS,
        Hazard.OWN_REMOVED,
    }
)
"""Drawn in worlds of their own, over all that other worlds may hold: see `own`."""
APART: Final = frozenset(
    {
        Hazard.REUSE,
        Hazard.GANGS,
        Hazard.RANGES,
        Hazard.REPLACE,
        Hazard.FIRST,
        Hazard.LATE_CAUSES,
        Hazard.UNABLE,
        Hazard.UNFIT,
    }
)
READY: Final = frozenset(Hazard) - HARSH - HARSH_LATER - OWN_MACHINES - APART
"""What a swarm draws of, in all other worlds."""
LATER: Final = frozenset({Hazard.CLOCK_STEPS, Hazard.FULL_DISK, Hazard.TWIN})
"""These are drawn by themselves, so that the worlds of older seeds stay as they were."""
ALONE: Final = frozenset(
    {
        Hazard.RESTORED,
        Hazard.REVOKED,
        Hazard.HASTY,
        Hazard.REFUSALS,
        Hazard.READ_ONLY,
        Hazard.DEAR_EVERYWHERE,
    }
)
"""Each of these has a source of chance of its own: another one changes no world that does not hold it."""
PLANNED: Final = frozenset(
    {
        Hazard.BIDS,
        Hazard.MOVES,
        Hazard.WATCHDOG,
        Hazard.WINDOWS,
        Hazard.CHAINS,
        Hazard.ARRAYS,
        Hazard.PREEMPT,
        Hazard.CPUS,
        Hazard.DEADLINES,
    }
)
"""What jobs ask for beside a machine under their ceiling. Drawn like the former, in worlds of later seeds."""
