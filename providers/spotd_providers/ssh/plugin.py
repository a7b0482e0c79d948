"""Own machines as a spotd provider: each call is one script on one host, and this adapter is the scheduler of them all.

There is no market and no API. What must be true at once on a host (a key is used once, a GPU is one job's, two daemons
agree) is settled there under one lock, by `host.sh`; what its answers mean is in `answers.py`, how a host is reached in
`kit/ssh.py`. A host that does not answer makes the list of machines incomplete, and offers nothing. Several
hosts of one pool carry one attempt together: `gangs.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import Final

import anyio

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    NotSupported,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.provider import PortConnection, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Market,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but
from spotd_providers.kit.calls import Page, ask_each, rejected
from spotd_providers.kit.host_gpus import ROCM
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.port_relay import open_relay
from spotd_providers.kit.scripted import (
    LAUNCH_WITHIN_S,
    SCRIPT_BYTES_MAX,
    clock_finding,
    job_script,
    operate,
    script_of,
    shell_opener,
)
from spotd_providers.kit.shapes import listed_reasons
from spotd_providers.kit.ssh import Lines, SshLink, SshTarget, own_key
from spotd_providers.kit.template import ProviderTemplate
from spotd_providers.kit.text import clean, key_of, last_lines
from spotd_providers.kit.vm_boot import DockerRun
from spotd_providers.ssh.answers import (
    PROVIDER,
    HostFacts,
    MachineRow,
    as_instance,
    distinct_machines,
    facts_of,
    folder_of,
    offers_of,
    rows_of,
    without_doubles,
)
from spotd_providers.ssh.gang_calls import WHO, GangCalls, Place
from spotd_providers.ssh.gangs import GangRow, whole_of, with_gangs
from spotd_providers.ssh.settings import SshHost, SshSettings

HOST_REST: Final = timedelta(minutes=1)
TIMEOUT_S: Final = {
    "greet": 15.0, "probe": 90.0, "list": 30.0, "show": 30.0, "log": 30.0, "launch": 60.0, "end": 90.0, "reach": 60.0,
    "record": 30.0,
}  # fmt: skip
NO_LOGIN: Final = "own hosts take no login of a registry: log docker in on the host"
HOST_SCRIPT: Final = Path(__file__).with_name("host.sh").read_text(encoding="utf-8")
_SUPERVISE: Final = 'spotd_run "$SPOTD_DIR" "$PATH" supervise "$SPOTD_GRACE" "$SPOTD_DEVICES" "$SPOTD_KEY"\n'
_MISSING: Final[Mapping[Power, str]] = {
    Power.SPOT: "own hosts have no spot market",
    Power.BID_CHANGE: "own hosts take no bids",
    Power.BALANCE: "own hosts have no account",
    Power.BILLING: "own hosts send no bill: what is booked is your price by time",
    Power.PRICE_HISTORY: "own hosts have no prices of a market",
    Power.STOP_RESUME: "a machine on an own host runs or has ended",
    Power.CAPACITY_SCORES: "what an own host offers is free at that moment",
}
NO_POOL: Final = "no two own hosts have one `pool` in the config, which says that they reach each other"


class SshProvider(ProviderTemplate):
    """The hosts of the config."""

    name = PROVIDER
    who = WHO
    machine = "machine"
    no_login = NO_LOGIN
    ids = re.compile(r"[a-z0-9-]{1,31}:[A-Za-z0-9._-]{1,128}")
    capabilities: Mapping[Power, Capability] = all_but(_MISSING)

    def __init__(self, settings: SshSettings, services: Services) -> None:
        self._settings = settings
        self._key_file = settings.key_file or services.state_dir / "id_ed25519"
        self._known_hosts = settings.known_hosts or services.state_dir / "known_hosts"
        self._hosts = {host.name: host for host in settings.hosts}
        self._links = {host.name: self._link(host, services) for host in settings.hosts}
        super().__init__(services, *self._links.values())
        self._renamed: dict[InstanceRef, SshHost] = {}
        if self.nodes_max < 2:
            self.capabilities = all_but({**_MISSING, Power.GANG: NO_POOL, Power.REPLACE: NO_POOL})
        self._gangs = GangCalls(self, settings, services.clock)

    @property
    def nodes_max(self) -> int:
        """How many hosts one job gets at most: those of the largest pool."""
        return self._settings.nodes_max

    def _link(self, host: SshHost, services: Services) -> SshLink:
        target = SshTarget(name=host.name, address=host.address, port=host.port, user=host.user)
        return SshLink(target, key_file=self._key_file, known_hosts=self._known_hosts, clock=services.clock)

    async def aclose(self) -> None:
        for link in self._links.values():
            await link.aclose()

    async def account(self) -> str:
        """Return a name of the set of hosts: a list of other hosts proves nothing of machines on the former ones."""
        hosts = sorted((one.name, one.address, one.port, one.user) for one in self._hosts.values())
        return f"hosts {hashlib.sha256(repr(hosts).encode()).hexdigest()[:12]}"

    # Calls of hosts.

    async def _ask(self, host: SshHost, operation: str, *words: object, boot: str = "") -> Lines:
        """Run one operation of `host.sh`, the key first where it has one.

        Raises:
            AnswerLost: a launch or an end may have happened.
        """
        if not self._key_file.exists():
            own_key(self._key_file)
        script = script_for(host, operation, *words, boot=boot)
        return await operate(self._links[host.name], operation, script, timeout_s=TIMEOUT_S[operation])

    async def _read(self, host: SshHost, operation: str, *words: object) -> Lines:
        try:
            lines = await self._ask(host, operation, *words)
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc
        if not any(line[0] == "host" and len(line) > 1 for line in lines):
            said = next((clean(line[-1]) for line in lines if line[0] == "refused"), "it says nothing of itself")
            raise Unavailable(f"{host.name}: {said}")
        return lines

    # The market.

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return what is free on every host; one that does not answer has nothing, and the page says why."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets or not self._hosts:
            return OfferPage(offers=(), at=at)
        answers, errors = await ask_each(self._settings.hosts, lambda host: host.name, self.facts)
        answers = {name: answers[name] for name in self._hosts if name in answers}
        without_doubles(answers)
        found = [offers_of(self._hosts[name], facts, self._settings, at) for name, facts in sorted(answers.items())]
        return OfferPage(
            offers=tuple(offer for offers, _ in found for offer in offers),
            rejected=listed_reasons([*(row for _, bad in found for row in bad), *_reasons(errors)]),
            at=at,
        )

    async def facts(self, host: SshHost) -> HostFacts:
        """Return what a host is and has now."""
        return facts_of(await self._read(host, "probe"), host)

    # Machines.

    async def _page(self, _token: str | None) -> Page:
        async def machines_on(host: SshHost) -> list[MachineRow]:
            return rows_of(await self._read(host, "list", self._services.install, *self._leave(host)), host)

        answers, errors = await ask_each(self._settings.hosts, lambda host: host.name, machines_on)
        found = distinct_machines(row for name in self._hosts for row in answers.get(name, ()))
        rows = with_gangs(found, errors)
        self._renamed = {row.ref: row.host for row in rows if not self._is_named(row.ref)}
        ours = [row for row in rows if key_of(self._label(row), self._services.install) is not None]
        await self._gangs.end_old_machines(row for row in ours if isinstance(row, GangRow))
        return [*rows, *_reasons(errors)], None

    async def _row(self, ref: InstanceRef) -> MachineRow | GangRow | None:
        host, key = await self._place_of(ref)
        pool = self._settings.pool_of(host)
        if len(pool) == 1:
            return next(iter(await self._rows_on(host, ref, key)), None)
        shown, errors = await ask_each(pool, lambda one: one.name, lambda one: self._rows_on(one, ref, key))
        rows = with_gangs(distinct_machines(row for found in shown.values() for row in found if row.ref == ref), errors)
        gang = next((row for row in rows if isinstance(row, GangRow)), None)
        if gang is None and host.name in errors:
            raise errors[host.name]
        return gang or next((row for row in rows if row.host.name == host.name), None)

    async def _rows_on(self, host: SshHost, ref: InstanceRef, key: str) -> list[MachineRow]:
        rows = rows_of(await self._read(host, "show", key), host)
        return [row for row in rows if row.key == key and (self._is_named(ref) or row.ref == ref)]

    async def _place_of(self, ref: InstanceRef) -> tuple[SshHost, str]:
        """Return the host of a machine, and its key there.

        A host may have another name now than when it was launched: then the one that shows it is its host.

        Raises:
            Unavailable: no host of the config is called so, and none shows the machine.
        """
        name, _, key = str(ref.instance_id).partition(":")
        host = self._hosts.get(name) or self._renamed.get(ref)
        if host is not None:
            return host, key
        answers, _ = await ask_each(
            self._settings.hosts, lambda host: host.name, lambda host: self._rows_on(host, ref, key)
        )
        host = next((row.host for rows in answers.values() for row in rows), None)
        if host is None:
            raise Unavailable(
                f"the host {clean(name)} is not in the config, and no host there shows its machine {clean(key)}, so it "
                "can be neither seen nor ended: name it again in providers.ssh.hosts"
            )
        self._renamed[ref] = host
        return host, key

    def _is_named(self, ref: InstanceRef) -> bool:
        return str(ref.instance_id).partition(":")[0] in self._hosts

    def _label(self, raw: MachineRow | GangRow) -> str:
        return raw.key

    def state_of(self, row: GangRow) -> Instance | None:
        """Return what the parts of a row are together."""
        return self._machine(row, AttemptKey(row.key))

    def _machine(self, raw: MachineRow | GangRow, key: AttemptKey) -> Instance | None:
        now = self._services.clock.now()
        if isinstance(raw, GangRow):
            parts = {rank: self._machine(part, key) for rank, part in raw.parts.items()}
            known = {rank: part for rank, part in parts.items() if part is not None}
            former = [one for one in (self._machine(row, key) for row in raw.outdated) if one is not None]
            is_read = (len(known), len(former)) == (len(parts), len(raw.outdated))
            return whole_of(raw, known, former, now) if is_read else None
        found = as_instance(raw, AttemptKey(key or raw.key), now)
        if found is None or found.state is not InstanceState.RUNNING:
            return found
        begin = raw.host.hours.next_begin(now)
        is_near = begin is not None and begin - now <= self._settings.grace
        return replace(found, notice_at=begin) if is_near else found

    def _leave(self, host: SshHost) -> tuple[str, str]:
        """Return in how many seconds the owner wants the host, and when, in the host's words."""
        now = self._services.clock.now()
        begin = host.hours.next_begin(now)
        if begin is None:
            return "never", "-"
        left_s = int(self._services.clock.real_seconds(begin - now))
        return str(left_s), begin.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def _buy(self, request: LaunchRequest) -> Instance:
        name = request.offer.extra.get("host", "without a name")
        host = self._hosts.get(name)
        if host is None:
            raise OfferGone(f"the host {clean(name)} is not in the config")
        if request.offer.nodes > 1:
            return await self._gangs.buy(request, host)
        row = await self.begin(request, host, request.offer)
        found = self._machine(row, request.key)
        if found is None:
            raise OutcomeUnknown(f"the answer of {host.name} cannot be read", key=request.key)
        if found.state is InstanceState.GONE:
            raise rejected(WHO, "key", f"{host.name} ended a machine of this key before")
        return found

    async def begin(
        self, request: LaunchRequest, host: SshHost, offer: Offer, place: Place | None = None
    ) -> MachineRow:
        """Start the machine of this host, and return its row.

        Args:
            offer: the host's own.
        """
        rank, places, near = place or (0, None, "-")
        came = 0 if places is None else places.parts[rank][1]
        folder = folder_of(request.key, came)
        extra = ("host", "variable", "count", "devices")
        boot = job_script(request, who=WHO, extra=extra, container=host.container, docker=container_of(request, folder))
        try:
            greeted = await self._read(host, "greet")
        except (AuthFailed, Unavailable) as exc:
            raise self._of_one(host, exc) from exc
        facts = facts_of(greeted, host)
        # Each part states the price of all, so that whichever is seen says what is billed.
        price = request.offer.gpu_price
        words = (folder, facts.boot, facts.uptime_s + LAUNCH_WITHIN_S, price, offer.extra["count"])
        grace_s = int(self._services.clock.real_seconds(self._settings.grace))
        how = (
            host.container,
            offer.extra["variable"],
            *self._leave(host),
            grace_s,
            host.name,
            *(rank, came, "-" if places is None else places.words, near),
            *offer.extra["devices"].split(" "),
        )
        try:
            lines = await self._ask(host, "launch", *words, *how, boot=boot)
        except AnswerLost as exc:
            raise OutcomeUnknown(f"{exc}, so the machine may run", key=request.key) from exc
        except (AuthFailed, Unavailable) as exc:
            raise self._of_one(host, exc) from exc
        for _, why, *said in (line for line in lines if line[0] == "refused" and len(line) > 1):
            sentence = f"{host.name}: {offer.gpu} {clean(' '.join(said))}"
            raise OfferGone(sentence) if why in ("taken", "late") else NoCapacity(sentence)
        row = next((row for row in rows_of(lines, host) if row.folder == folder), None)
        if row is None:
            raise OutcomeUnknown(f"the answer of {host.name} names no machine", key=request.key)
        return row

    def _of_one(self, host: SshHost, exc: AuthFailed | Unavailable) -> ProviderError:
        """Return the error of one host as what it is for the others: no outage where another one is connected."""
        if any(link.is_connected for name, link in self._links.items() if name != host.name):
            return OfferGone(str(exc), lasts=HOST_REST)
        return exc

    async def _ask_end(self, ref: InstanceRef) -> None:
        host, key = await self._place_of(ref)
        row = await self._row(ref) if len(self._settings.pool_of(host)) > 1 else None
        if not isinstance(row, GangRow):
            await self.end_on(host, key)
            return
        await self._gangs.end(row)

    async def end_on(self, host: SshHost, folder: str, meta: str = "") -> Sequence[MachineRow]:
        """End one machine; with `meta` one that is still on its way as well."""
        lines = await self._read(host, "end", folder, *([meta] if meta else []))
        for line in lines:
            if line[0] == "refused":
                raise Unavailable(f"{host.name}: {clean(line[-1])}")
        return rows_of(lines, host)

    async def record(self, host: SshHost, folder: str, before: str, meta: str) -> None:
        """Change what a host keeps of a machine that runs, if it is what it was."""
        for line in await self._read(host, "record", folder, before, meta):
            if line[0] == "refused":
                raise Unavailable(f"{host.name}: {clean(line[-1])}")

    async def gang(self, ref: InstanceRef) -> GangRow | None:
        """Return the parts of a machine of ours, where it is several."""
        await self._require_ours(ref)
        row = await self._row(ref)
        return row if isinstance(row, GangRow) else None

    async def replace_members(
        self, request: LaunchRequest, ref: InstanceRef, ranks: Sequence[int], number: int
    ) -> None:
        """Start others in the places of these, on hosts of the pool that have room, or on their own hosts again."""
        self._require_replaces()
        await self._gangs.replace(request, ref, ranks, number)

    async def drop_members(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        """End these; the others go on."""
        self._require_replaces()
        await self._gangs.drop(ref, ranks)

    def _require_replaces(self) -> None:
        if not self.capabilities[Power.REPLACE].available:
            raise NotSupported(self.capabilities[Power.REPLACE].reason)

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        await self._require_ours(ref)
        host, folder = await self._place_of(ref)
        if (row := await self._row(ref)) is not None:
            host, folder = row.host, row.folder
        answer = await self._read(host, "log", folder, max(0, min(lines, 10_000)))
        return last_lines([line[-1] for line in answer if line[0] == "log"], lines)

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return the host's own ssh server, for a key that its user has there."""
        host = (await self._running_row(ref)).host
        return ShellAddress(host=host.address, port=host.port, user=host.user)

    async def open_port(self, ref: InstanceRef, port: int) -> PortConnection:
        """Connect to a port of the job by a program on the host, or in its container."""
        row: MachineRow | GangRow = await self._running_row(ref)
        host = row.host
        through = ("docker", "exec", "-i", row.folder) if host.container == "docker" else ()
        return await open_relay(self._links[host.name].run, port, who=host.name, path=host.path, through=through)

    # The doctor.

    async def check(self) -> Sequence[CheckLine]:
        """Check spotd's key, and of each host whether it answers, what it has and its clock."""
        try:
            public = own_key(self._key_file)
        except ProviderError as exc:
            return (CheckLine(name="key", ok=False, detail=str(exc), hint="name a key in providers.ssh.key_file"),)
        hint = f"append to ~/.ssh/authorized_keys of its user: restrict {public}"
        lines = [CheckLine(name="key", ok=True, detail=f"on each host: {hint}")]
        if not self._hosts:
            lines.append(
                CheckLine(name="hosts", ok=False, detail="none is in the config", hint="see docs/providers/ssh.md")
            )
        results: dict[str, list[CheckLine]] = {}

        async def one(host: SshHost) -> None:
            results[host.name] = await self._check_host(host, hint)

        async with anyio.create_task_group() as group:
            for host in self._hosts.values():
                group.start_soon(one, host)
        pools = [
            await self._check_pool(name, [one for one in self._settings.hosts if one.pool == name])
            for name in sorted({one.pool for one in self._settings.hosts if one.pool})
        ]
        return (*lines, *(line for name in self._hosts for line in results[name]), *pools)

    async def _check_pool(self, name: str, hosts: Sequence[SshHost]) -> CheckLine:
        """Let each host of a pool reach for the others, at ports that nothing listens on."""
        places = {one.name: one.pool_address or one.address for one in hosts}

        async def reach(host: SshHost) -> list[str]:
            others = {place: other for other, place in places.items() if other != host.name}
            said = {line[1]: line[2] for line in await self._read(host, "reach", *others) if line[0] == "reached"}
            return [
                f"{host.name} does not reach {other} at {place}: {clean(said.get(place) or 'no answer')}"
                for place, other in others.items()
                if said.get(place) != "yes"
            ]

        try:
            answers, errors = await ask_each(hosts, lambda one: one.name, reach)
        except ProviderError as exc:
            answers, errors = {}, {name: exc}
        faults = [*(fault for row in answers.values() for fault in row), *(str(one) for one in errors.values())]
        words = "; ".join(faults) or f"{', '.join(places)} reach each other"
        hint = "let them reach each other on every port, or set pool_address" if faults else ""
        return CheckLine(name=f"pool {name}", ok=not faults, detail=words, hint=hint)

    async def _check_host(self, host: SshHost, hint: str) -> list[CheckLine]:
        try:
            facts = await self.facts(host)
        except AuthFailed as exc:
            return [CheckLine(name=host.name, ok=False, detail=str(exc), hint=hint)]
        except ProviderError as exc:
            return [
                CheckLine(
                    name=host.name, ok=False, detail=str(exc), hint="is it on, and is its sshd reached from here?"
                )
            ]
        needed = ("flock", "timeout", "setsid", "docker" if host.container == "docker" else "python3")
        lacks = [name for name in needed if name not in facts.has]
        free = sum(not one.fault and one.id not in facts.held for one in facts.devices)
        by = "systemd" if "manager" in facts.has else "setsid; `loginctl enable-linger` lets systemd hold them"
        words = f"{free} of {len(facts.devices)} places free, {facts.disk_gb} GB of disk, as {facts.user}, jobs by {by}"
        faults = [*facts.faults, *(f"it lacks {name}" for name in lacks)]
        lines = [
            CheckLine(
                name=host.name,
                ok=not faults,
                detail="; ".join([*faults, words]),
                hint="mend it on the host" if faults else "",
            )
        ]
        if facts.clock_s is not None:
            lines.append(clock_finding(facts.clock_s, self._services, who=host.name))
        return lines


def _reasons(errors: Mapping[str, ProviderError]) -> list[Rejected]:
    return [Rejected(offer_id=name, reason=str(exc)) for name, exc in sorted(errors.items())]


def container_of(request: LaunchRequest, name: str) -> DockerRun:
    """Return how docker starts the job: as the host's user, with the GPUs that the machine was given."""
    gpus = '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""'
    if request.offer.extra.get("variable") == ROCM:
        gpus = "--device /dev/kfd --device /dev/dri -e ROCR_VISIBLE_DEVICES"
    place = " -e SPOTD_NODE_RANK -e SPOTD_NODE_ADDRESS -e SPOTD_NODE_ROUND" if request.offer.nodes > 1 else ""
    own = f"{gpus if request.offer.gpu_count else ''} -e SPOTD_HOME=/spotd/work -e SPOTD_MACHINE{place}"
    return DockerRun(name=name, user='"$(id -u):$(id -g)"', flags=f" {own} --stop-timeout 20")


def script_for(host: SshHost, operation: str, *words: object, boot: str) -> str:
    """Return what a shell on the host runs: the library, what a launch writes, and one call of it."""
    files = {"payload": boot, "library": f"{HOST_SCRIPT}{_SUPERVISE}"} if boot else {}
    return script_of(HOST_SCRIPT, host.folder, host.path, operation, *words, files=files)


def _traits(settings: SshSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=settings.are_local,
        runs_images=bool(settings.hosts) and all(host.container == "docker" for host in settings.hosts),
        private_images=Capability(available=False, reason=NO_LOGIN),
        ends_itself_by="file",
        bill_open_for=timedelta(0),
        replaces_first=True,
        owned=True,
    )


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="own machines over SSH",
    settings_model=SshSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=shell_opener(SshProvider),
    powers=SshProvider.capabilities,
    tried="a real ssh server on one computer",
)
