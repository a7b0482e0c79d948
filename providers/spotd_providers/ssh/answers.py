"""What a host says, in the words of the contract: its GPUs, what is free of them, and its machines. Pure.

A host is its owner's, but what it says went through login shells, drivers and full disks: each line is read alone, a
GPU that is not understood is not offered, and a machine that is not understood makes the list incomplete.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.values import (
    NO_GPU,
    AttemptKey,
    Billing,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.host_gpus import CUDA, DEVICES_MAX, Device, amd_devices, number, nvidia_devices
from spotd_providers.kit.text import clean, start_complaint
from spotd_providers.ssh.settings import HOST_NAME, SshHost, SshSettings

PROVIDER: Final = ProviderName("ssh")
PRICE_DIGITS_MAX: Final = 13
SHORT_STAY: Final = timedelta(minutes=15)
"""No job is sent to a host whose owner wants it back so soon after the notice."""
_NOT_PULLED: Final = "the image cannot be pulled"


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """What a host is and has, as far as it says so."""

    boot: str = ""
    uptime_s: int = 0
    clock_s: int | None = None
    user: str = ""
    identity: str = ""
    cpus: int | None = None
    memory_mb: int | None = None
    disk_gb: int | None = None
    has: set[str] = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def facts_of(lines: Sequence[Sequence[str]], host: SshHost) -> HostFacts:
    """Read a probe."""
    facts = HostFacts()
    by_tag: defaultdict[str, list[list[str]]] = defaultdict(list)
    for tag, *words in lines:
        by_tag[tag].append([*words, "", "", "", "", ""])
    for boot, uptime, clock, user, identity, *_ in by_tag["host"][:1]:
        facts.boot, facts.uptime_s, facts.clock_s = boot, number(uptime) or 0, number(clock)
        facts.user, facts.identity = clean(user), identity if re.fullmatch(r"[0-9a-f]{16}", identity) else ""
    facts.cpus = _first(by_tag["cpus"])
    memory, disk = _first(by_tag["memory"]), _first(by_tag["disk"])
    facts.memory_mb = None if memory is None else memory // 1024
    facts.disk_gb = 0 if disk is None else disk * 1024 // 1_000_000_000
    facts.has = {words[0] for words in by_tag["has"]}
    facts.held = {words[0]: words[1] for words in by_tag["held"]}
    own = {words[0] for words in by_tag["own"]}
    nvidia, nvidia_faults = nvidia_devices(by_tag, own, facts.held)
    amd, amd_faults = amd_devices(by_tag)
    found, facts.faults = [*nvidia, *amd], [*nvidia_faults, *amd_faults]
    if not found and not facts.faults:
        found = [Device(id=f"cpu-{place}", gpu=NO_GPU, vram_mb=None, variable=CUDA) for place in range(host.cpu_jobs)]
    elif host.gpus:
        found = [one for one in found if one.id in host.gpus]
    distinct = {one.id: one for one in found[:DEVICES_MAX]}
    facts.devices = list(distinct.values())
    return facts


def _first(rows: Iterable[Sequence[str]]) -> int | None:
    return next((number(words[0]) for words in rows), None)


# Offers: of each kind of GPU that is free, one to all; of MIG slices one, since a process sees a single one.


def offers_of(
    host: SshHost, facts: HostFacts, settings: SshSettings, now: datetime
) -> tuple[list[Offer], list[Rejected]]:
    """Return what can be started on a host now, and why not what cannot."""
    bad = [Rejected(offer_id=host.name, reason=fault) for fault in facts.faults]
    bad += [Rejected(offer_id=f"{host.name}:{one.id}", reason=one.fault) for one in facts.devices if one.fault]
    begins = host.hours.next_begin(now)
    if begins is not None and begins - now < settings.grace + SHORT_STAY:
        words = "it is its owner's now" if begins <= now else f"its owner's hours begin at {begins:%H:%M} UTC"
        return [], [Rejected(offer_id=host.name, reason=words)]
    # A GPU that is cut counts by its slices.
    cut = {one.whole for one in facts.devices if one.whole}
    parts = Counter(one.whole for one in facts.devices if one.whole)
    whole = sum(one.id not in cut for one in facts.devices if not one.whole) + len(cut)
    free: defaultdict[tuple[str, str, int | None], list[Device]] = defaultdict(list)
    for one in facts.devices:
        if not one.fault and one.id not in facts.held:
            free[one.gpu, one.variable, one.vram_mb].append(one)
    offers: dict[str, Offer] = {}
    for (gpu, variable, vram), devices in sorted(free.items(), key=repr):
        most = 1 if devices[0].whole or gpu == NO_GPU else len(devices)
        share = whole * max((parts[one.whole] for one in devices), default=0) if devices[0].whole else whole
        for count in range(1, most + 1):
            offer_id = f"{host.name}:{gpu}:{count}"
            offers.setdefault(
                offer_id,
                Offer(
                    provider=PROVIDER,
                    offer_id=OfferId(offer_id),
                    host_id=HostId(f"ssh-{facts.identity}" if facts.identity else f"ssh-{host.name}"),
                    pool=PoolId(f"{host.name}:{gpu}"),
                    market=Market.ON_DEMAND,
                    interruption=Interruption.NOTICE if host.owner_hours else Interruption.NEVER,
                    gpu=gpu,
                    gpu_count=0 if gpu == NO_GPU else count,
                    gpu_vram_mb=vram,
                    gpu_price=settings.price_of(host, count, share),
                    on_demand_price=settings.price_of(host, count, share),
                    region=host.name,
                    cpus=None if facts.cpus is None else facts.cpus * count / share,
                    memory_mb=None if facts.memory_mb is None else facts.memory_mb * count // share,
                    disk_gb_max=facts.disk_gb,
                    duration_max=None if begins is None else begins - now,
                    extra={
                        "host": host.name,
                        "variable": variable,
                        "count": str(count),
                        "devices": " ".join(one.id for one in devices),
                    },
                ),
            )
    return list(offers.values()), bad


# Machines.


Part = tuple[str, int]
"""A machine of several: its host's name, empty where it is no part any more, and the round in which it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which machines carry one attempt together, as one of them says.

    Attributes:
        parts: by rank.
        origin: the host that was the first one at their launch, by which all of them are named.
        former: machines whose place another one has, or none, and whose end is not proved.
        changes: how often this was changed.
    """

    parts: tuple[Part, ...]
    origin: str
    former: tuple[Part, ...] = ()
    changes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def words(self) -> str:
        """What every host keeps of it."""
        word = ",".join(map(_part_word, self.parts))
        if not self.changes:
            return word
        return f"{word} {','.join((str(self.changes), *map(_part_word, self.former)))} {self.origin}"


def _part_word(part: Part) -> str:
    name, came = part
    return f"{name}@{came}" if came else name or "-"


def _parts_of(words: Sequence[str]) -> tuple[Part, ...] | None:
    found = []
    for word in words:
        read = re.fullmatch(rf"(-|{HOST_NAME})(?:@([1-9][0-9]{{0,6}}))?", word)
        if read is None:
            return None
        found.append(("" if read[1] == "-" else read[1], int(read[2] or 0)))
    return tuple(found)


def _places_of(word: str, changed: str = "0", origin: str = "") -> Places | None:
    changes, *former = changed.split(",")
    count, parts, others = number(changes, digits=7), _parts_of(word.split(",")), _parts_of(former)
    if count is None or parts is None or others is None:
        return None
    name = origin or parts[0][0]
    return Places(parts=parts, origin=name, former=others, changes=count) if re.fullmatch(HOST_NAME, name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """One machine on one host, with the host's own time beside it.

    Attributes:
        folder: its name there: its key, and for one that came in a later round of several that round.
    """

    host: SshHost
    key: str
    folder: str
    words: tuple[str, ...]
    boot: str
    uptime_s: int

    @property
    def _meta(self) -> list[str]:
        return self.words[2].split(" ") if len(self.words) == 7 else []

    @property
    def place(self) -> tuple[int, Places] | None:
        """Its rank and the places of all, where it is one of several machines."""
        if len(self._meta) not in (5, 6, 7):
            return None
        rank, places = number(self._meta[3], digits=4), _places_of(*self._meta[4:])
        return None if rank is None or places is None or rank >= len(places.parts) else (rank, places)

    @property
    def part(self) -> Part:
        """Which of several machines it is, also where another one has its place now."""
        return self._meta[2], int(self.folder.removeprefix(self.key).removeprefix(".") or 0)

    @property
    def meta(self) -> str:
        """What its host keeps of it."""
        return " ".join(self._meta)

    @property
    def lives(self) -> bool:
        """Whether a process of it is there."""
        return "1" in self.words[:2]

    @property
    def is_ended(self) -> bool:
        """Whether its end was ordered."""
        return self.words[5:6] == ("1",)

    @property
    def runs(self) -> bool:
        """Whether its first process is there, which nothing starts again."""
        return self.words[:1] == ("1",) and not self.is_ended

    @property
    def ref(self) -> InstanceRef:
        """Its name for good: by the name that the config had for its host, or the first of several, at its launch."""
        if self.place is not None:
            return ref_of(self.place[1].origin, self.key)
        name = self._meta[2] if len(self._meta) == 3 and re.fullmatch(HOST_NAME, self._meta[2]) else self.host.name
        return ref_of(name, self.key)


def rows_of(lines: Sequence[Sequence[str]], host: SshHost) -> list[MachineRow]:
    """Return the machines of an answer; what they say of themselves is read later."""
    boot, uptime = next(((one[1], number(one[2]) or 0) for one in lines if one[0] == "host" and len(one) > 2), ("", 0))
    return [
        MachineRow(host=host, key=key_in(one[1]), folder=one[1], words=tuple(one[2:]), boot=boot, uptime_s=uptime)
        for one in lines
        if one[0] == "machine" and len(one) > 1
    ]


def folder_of(key: str, came: int) -> str:
    """Return the name of a machine on its host."""
    return f"{key}.{came}" if came else key


def key_in(folder: str) -> str:
    read = re.fullmatch(r"(.+-[0-9]+)\.[1-9][0-9]{0,6}", folder)
    return read[1] if read is not None else folder


def distinct_machines(rows: Iterable[MachineRow]) -> list[MachineRow]:
    """Return each machine once: a host that the config names twice shows it twice, and an end of one is that of both.

    It is one machine where key and first process are the same: its pid with start time, boot and uptime. Of two rows of
    one machine's name the one from the host of that name is believed.
    """
    found: dict[tuple[str, ...], MachineRow] = {}
    for number_, row in enumerate(rows):
        process = row.words[3] if len(row.words) == 7 else ""
        found.setdefault((row.key, process) if process else (str(number_),), row)
    named: dict[tuple[InstanceRef, object], MachineRow] = {}
    for row in sorted(found.values(), key=lambda row: row.ref != ref_of(row.host.name, row.key)):
        named.setdefault((row.ref, None if row.place is None else row.part), row)
    return list(named.values())


def without_doubles(facts: Mapping[str, HostFacts]) -> None:
    """Offer each GPU by the first host that shows it; its UUID is the same wherever it is seen from."""
    owners: dict[str, str] = {}
    for name, one in facts.items():
        for place, device in enumerate(one.devices):
            if not device.id.startswith(("GPU-", "MIG-")) or owners.setdefault(device.id, name) == name:
                continue
            words = f"it is a GPU of {owners[device.id]}, so this is the same host under another name"
            one.devices[place] = replace(device, fault=words)


def ref_of(name: str, key: str) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(f"{name}:{key}"))


def as_instance(row: MachineRow, key: AttemptKey, now: datetime) -> Instance | None:
    """Return a machine; `None` where what its host keeps of it cannot be read."""
    if len(row.words) != 7:
        return None
    leads, lives, meta, started, ended, is_ended, last = row.words
    price = number(meta.split(" ")[0], digits=PRICE_DIGITS_MAX) if meta else None
    if (meta and price is None) or {leads, lives, is_ended} - {"0", "1"}:
        return None
    begin, end = started.split(" "), ended.split(" ")
    if started and (len(begin) != 4 or number(begin[3]) is None):
        return None
    if ended and (len(end) != 3 or number(end[0]) is None or number(end[1]) is None):
        return None
    is_alive = "1" in (leads, lives)
    is_same_boot = bool(started) and begin[2] == row.boot
    machine = Instance(
        ref=row.ref,
        key=key,
        state=InstanceState.RUNNING,
        market=Market.ON_DEMAND,
        price=None if price is None else MicroUsdPerHour(price),
        created_at=_at(now, row, begin[3]) if is_same_boot else None,
        billing=Billing.FULL,
    )
    if is_ended == "1" and is_alive:  # nothing but another order will end what is left
        return replace(machine, detail="its end was ordered, and processes of it live on")
    if is_ended == "1":
        return replace(machine, state=InstanceState.GONE, billing=Billing.NOTHING)
    stopped = replace(machine, state=InstanceState.PAUSED, billing=Billing.NOTHING)
    if not started:
        words = "the launch broke off before its first process"
        return replace(stopped, loss=Loss.PROVISION_FAILED, detail=words)
    if not is_same_boot:
        rebooted_at = now - timedelta(seconds=row.uptime_s)
        return replace(stopped, loss=Loss.HOST_LOST, detail="the host was started again", ended_at=rebooted_at)
    if ended and end[2] not in ("itself", "owner"):
        unknown = f"{row.host.name} ended it for a reason that this spotd does not know"
        return replace(machine, state=InstanceState.UNKNOWN, billing=Billing.UNKNOWN, detail=unknown)
    if ended:
        return replace(stopped, ended_at=_at(now, row, end[1]), **_end_of(end, last))
    if leads == "0":
        return replace(stopped, loss=Loss.HOST_LOST, detail="its first process was killed")
    return machine


def _end_of(end: Sequence[str], last: str) -> dict[str, Any]:
    if end[2] == "owner":
        return {"loss": Loss.PREEMPTED, "detail": "its owner's hours began"}
    if complaint := start_complaint([last]) or (clean(last) if _NOT_PULLED in last else ""):
        return {"loss": Loss.IMAGE_ERROR, "detail": complaint}
    return {"loss": Loss.SELF, "detail": f"its start script ended with {end[0]}"}


def _at(now: datetime, row: MachineRow, uptime: str) -> datetime:
    """Return the instant of an uptime of the host: ages by a clock that is never set."""
    return now - timedelta(seconds=max(0, row.uptime_s - (number(uptime) or 0)))
