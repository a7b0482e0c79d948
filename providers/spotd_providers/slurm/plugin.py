"""Slurm as a spotd provider: an attempt is one batch job, and what happens to it is the cluster's decision.

Each call is one script on a login node, or on this computer, by `cluster.sh`; what its answers mean is in `answers.py`.
Names of jobs are not unique in Slurm, so a key is used once by a folder of its name, and what became of a launch is
settled by a search. A job is ours if name and comment are one key of ours and its user is who asks. Slurm must not
start it again by itself: that would be a second machine for an attempt that spotd has given up. Several nodes are one
job, too: Slurm starts it on all of them or none, and ends it with the loss of one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
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
    Loss,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, judge_apart, rejected
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
from spotd_providers.kit.ssh import LocalShell, SshLink, SshTarget, own_key
from spotd_providers.kit.template import ProviderTemplate
from spotd_providers.kit.text import clean, key_of, last_lines, quote_safely
from spotd_providers.slurm.answers import (
    PROVIDER,
    WHO,
    JobRow,
    Said,
    answer_of,
    as_instance,
    config_of,
    free_nodes,
    jobs_of,
    offers_of,
    ref_of,
    rooms_of,
)
from spotd_providers.slurm.settings import SlurmPartition, SlurmSettings

GANG_MAX: Final = 64
"""Nodes of one job."""
TIMEOUT_S: Final = {
    "greet": 15.0, "offers": 75.0, "list": 45.0, "find": 60.0, "show": 35.0, "log": 30.0, "launch": 90.0, "end": 45.0,
    "check": 240.0,
}  # fmt: skip
_FOLDER: Final = Path(__file__).parent
CLUSTER_SCRIPT: Final = (_FOLDER / "cluster.sh").read_text(encoding="utf-8")
SUPERVISOR: Final = (_FOLDER / "supervisor.sh").read_text(encoding="utf-8")
NO_LOGIN: Final = "jobs run on the node itself, without an image"
_MISSING: Final[Mapping[Power, str]] = {
    Power.BID_CHANGE: "a cluster takes no bids",
    Power.BALANCE: "a cluster has no balance",
    Power.BILLING: "Slurm sends no bill: what is booked is your price by time",
    Power.PRICE_HISTORY: "a cluster has no prices of a market",
    Power.STOP_RESUME: "a job cannot be stopped and resumed by its user",
    Power.CAPACITY_SCORES: "what a partition offers is free at that moment, or waits in its queue",
    Power.REPLACE: "Slurm ends a job of several nodes with the loss of one; --no-kill keeps the rest, and adds no node",
    Power.HOST_IDENTITY: "the cluster decides on which node a job runs",
}
REFUSALS: Final[tuple[tuple[str, type[ProviderError]], ...]] = (
    ("time limit is invalid", RequestRejected),
    ("[Ii]nvalid partition|[Rr]equired partition|[Rr]equired node", OfferGone),
    (
        "[Rr]equested node configuration|[Gg]eneric resource|[Mm]ore processors requested|[Mm]emory specification",
        NoCapacity,
    ),
    ("[Rr]equested nodes? (are|is) busy|[Nn]ode count specification", NoCapacity),
    ("QOS|limit|[Ll]imits", QuotaExceeded),
    ("[Aa]uthentication", AuthFailed),
    ("[Ii]nvalid|[Pp]ermission|not permitted|not allowed|disabled", RequestRejected),
)
"""What `sbatch` says of a job that it certainly did not queue. Whatever else it says, the job may be there."""
DEFINITE: Final = (
    f"(job submission failed|sbatch: error|[Uu]nable to allocate).*({'|'.join(one for one, _ in REFUSALS)})"
)
_UNSURE: Final = re.compile(
    "(?i)timed out|unable to contact|transport endpoint|zero bytes|message (send|receive)|connect"
)
_KEY_HINT: Final = "append to ~/.ssh/authorized_keys of the user there: restrict "


class SlurmProvider(ProviderTemplate):
    """The jobs of one user of one cluster."""

    name = PROVIDER
    who = WHO
    machine = "job"
    mark = "name and comment"
    no_login = NO_LOGIN
    ids: ClassVar[re.Pattern[str]] = re.compile(r"[0-9]{1,18}:[A-Za-z0-9._-]{1,128}")
    capabilities: Mapping[Power, Capability] = all_but(_MISSING)

    def __init__(self, settings: SlurmSettings, services: Services) -> None:
        self._settings = settings
        # The ssh provider's key and pinned keys, unless others are named: one of each is enough.
        own = services.state_dir.parent / "ssh"
        self._key_file = settings.key_file or own / "id_ed25519"
        self._partitions = {one.name: one for one in settings.partitions}
        self._names = ",".join(self._partitions) or "none"
        self._nodes_max = GANG_MAX
        self._shell: SshLink | LocalShell = LocalShell()
        if settings.host is not None:
            target = SshTarget(name=settings.host, address=settings.host, port=settings.port, user=settings.user)
            known = settings.known_hosts or own / "known_hosts"
            self._shell = SshLink(target, key_file=self._key_file, known_hosts=known, clock=services.clock)
        super().__init__(services, self._shell)

    async def aclose(self) -> None:
        await self._shell.aclose()

    @property
    def nodes_max(self) -> int:
        """How many nodes one job gets at most: what the largest partition has."""
        return self._nodes_max

    async def account(self) -> str:
        """Return a name of the user of this cluster: another one's list says nothing of our jobs."""
        one = self._settings
        return "this computer" if one.host is None else f"{one.user}@{one.host}:{one.port}"

    async def _ask(self, operation: str, *words: object, files: Mapping[str, str] | None = None) -> Said:
        """Run one operation of `cluster.sh`.

        Raises:
            AnswerLost: a launch or an end may have happened.
        """
        if self._settings.host is not None and not self._key_file.exists():
            own_key(self._key_file)
        one, mark = self._settings, f"@{secrets.token_hex(8)}@"
        where = (one.folder, one.path, one.slurm_conf, mark)
        script = script_of(CLUSTER_SCRIPT, *where, operation, *words, files=files or {})
        said = answer_of(await operate(self._shell, operation, script, timeout_s=TIMEOUT_S[operation]))
        if said is None:
            raise AnswerLost(f"{WHO}'s login node says nothing of itself")
        return said

    async def _read(self, operation: str, *words: object) -> Said:
        try:
            return await self._ask(operation, *words)
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc

    # The market.

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return what is free in the configured partitions, or may be queued for; the page says why not what is not."""
        at = self._services.clock.now()
        if not self._partitions:
            return OfferPage(offers=(), at=at)
        said = await self._read("offers", self._names)
        for what in ("node", "partition"):
            if what not in said.by_tag:
                raise Unavailable(
                    f"{WHO} says nothing of its {what}s: {said.failures.get(what, 'the answer is empty')}"
                )
        rows = len(said.by_tag["node"])
        offers, bad = await judge_apart(partial(offers_of, said, self._settings), rows=rows)
        bad += [Rejected(offer_id=tag, reason=words) for tag, words in said.failures.items()]
        sizes = (sum(map(len, kinds.values())) for kinds in rooms_of(said)[0].values())
        self._nodes_max = min(GANG_MAX, max(sizes, default=1))
        asked = tuple(one for one in offers if one.market in query.markets)
        return OfferPage(offers=asked, rejected=listed_reasons(bad), complete=not said.failures, at=at)

    # Jobs.

    async def _rows(self, key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
        if key is None:
            said = await self._read("list", self._services.install)
        else:
            said = await self._read("find", self._services.install, key)
        rows: list[Any] = list(jobs_of(said))
        if "job" in said.failures:
            if not rows:
                raise Unavailable(f"{WHO}'s queue cannot be read: {said.failures['job']}")
            rows.append(Rejected(offer_id="squeue", reason=said.failures["job"]))
        if said.by_tag.get("begun"):
            rows.append(Rejected(offer_id=str(key), reason="its sbatch is under way"))
        queued = {row.id for row in rows if isinstance(row, JobRow)}
        for number, state in (line[0].split()[:2] for line in said.by_tag.get("past", []) if len(line[0].split()) > 1):
            # Without accounting there are only words here; with it, the two must agree about what lives.
            if number.isdecimal() and number not in queued and state in ("PENDING", "RUNNING", "SUSPENDED"):
                words = f"accounting has job {number} as {clean(state)}, and the controller does not know it"
                rows.append(Rejected(offer_id=str(key), reason=words))
        return rows, True

    async def _page(self, _token: str | None) -> Page:
        return (await self._rows(None))[0], None

    async def _row(self, ref: InstanceRef) -> JobRow | None:
        number, _, key = ref.instance_id.partition(":")
        said = await self._read("show", number, key)
        why = said.failures.get("job", "")
        if re.search("(?i)invalid job id", why):
            return None
        if why:
            raise Unavailable(f"{WHO}'s job {number} cannot be read: {why}")
        rows = jobs_of(said)
        if None in rows:
            raise Unavailable(f"{WHO}'s answer about job {number} cannot be read")
        # Another job may have this number by now. An answer about none is no word that it does not exist.
        if not rows:
            raise Unavailable(f"{WHO} says neither that job {number} is there nor that it is not")
        found = (row for row in rows if row is not None)
        return next((row for row in found if (row.id, row.name, row.user) == (number, key, said.user)), None)

    def _label(self, raw: Any) -> str | None:
        if not isinstance(raw, JobRow):
            return None
        if raw.user != raw.said.user:
            return ""
        if raw.name == raw.comment:
            return raw.name
        # One of the two was changed: neither certainly ours, nor certainly not.
        return None if any(key_of(one, self._services.install) for one in (raw.name, raw.comment)) else ""

    def _machine(self, raw: JobRow, key: AttemptKey) -> Instance | None:
        return as_instance(raw, AttemptKey(key or raw.name), self._settings, self._services.clock.now())

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return them with the complaint of their own start script, where the log of one that ended holds one."""
        found = []
        for one in instances:
            is_short = one.loss is Loss.SELF and one.state is InstanceState.GONE
            said = await self._complaint(one.ref, partial(self._log, one.ref, 1)) if is_short else ""
            found.append(replace(one, loss=Loss.IMAGE_ERROR, detail=said) if said else one)
        return tuple(found)

    async def _buy(self, request: LaunchRequest) -> Instance:
        payload = job_script(request, who=WHO, extra=("partition", "gres", "cpus", "memory_mb", "limit_s"))
        partition = self._partitions.get(request.offer.extra["partition"])
        if partition is None:
            raise OfferGone(f"the partition {clean(request.offer.extra['partition'])} is not in the config")
        if request.offer.nodes > 1 and not partition.queue:
            await self._require_free(request.offer)
        greeted = await self._read("greet")
        home = f"{greeted.folder}/{request.key}"
        limit_s, grace_s = int(request.offer.extra["limit_s"]), self._grace_s(request)
        nodes = request.offer.nodes
        words = {"@HOME@": home, "@LIMIT@": str(limit_s), "@GRACE@": str(grace_s), "@NODES@": str(nodes)}
        files = {
            "payload": payload,
            "supervisor": re.sub("@[A-Z]+@", lambda found: words[found[0]], SUPERVISOR),
        }
        meta = f"{request.offer.gpu_price} {request.offer.market.value}"
        bound = (greeted.boot, greeted.uptime_s + LAUNCH_WITHIN_S, meta, DEFINITE)
        options = options_of(request, partition, grace_s)
        try:
            said = await self._ask("launch", request.key, *bound, *options, files=files)
        except AnswerLost as exc:
            raise OutcomeUnknown(f"{exc}, so the job may be queued", key=request.key) from exc
        return self._new_job(said, request)

    async def _require_free(self, offer: Offer) -> None:
        """Check that so many nodes are free at once: an offer says that of one, and Slurm would let the job wait.

        Raises:
            NoCapacity: they are not.
        """
        free = free_nodes(await self._read("offers", offer.extra["partition"]), offer)
        if free < offer.nodes:
            where = f"{WHO}'s partition {offer.extra['partition']}"
            raise NoCapacity(f"{free} nodes of {where} are free, not {offer.nodes}")

    def _grace_s(self, request: LaunchRequest) -> int:
        limit_s = int(request.offer.extra["limit_s"])
        grace_s = int(self._services.clock.real_seconds(self._settings.grace))
        return min(grace_s, limit_s // 2) if limit_s else grace_s

    def _new_job(self, said: Said, request: LaunchRequest) -> Instance:
        """Return the job that a launch made, or raise what its answer says."""
        for why in (line[0] for line in said.by_tag.get("refused", []) if line):
            if why == "late":
                raise OfferGone(f"{WHO}: the request came too late, or another login node answered")
            if why == "disk":
                raise NoCapacity(f"{WHO}: {said.folder} cannot be written: is its disk full?")
            raise OutcomeUnknown(f"{WHO} was given this key before", key=request.key)
        code, number, words, *_ = (*next(iter(said.by_tag.get("sbatch", [])), ()), "", "", "")
        if code != "0":
            raise refusal_of(words, request.key)
        if not number.isdecimal():
            raise OutcomeUnknown(f"{WHO}'s answer to a launch names no job: {quote_safely(words)}", key=request.key)
        row = next((row for row in jobs_of(said) if row is not None and row.id == number), None)
        if row is not None and self._label(row) != request.key:
            raise OutcomeUnknown(f"{WHO} changed name or comment of job {number}, its marks", key=request.key)
        made = None if row is None else self._machine(row, request.key)
        return made or Instance(ref=ref_of(number, request.key), key=request.key, state=InstanceState.PENDING)

    async def _ask_end(self, ref: InstanceRef) -> None:
        said = await self._read("end", *ref.instance_id.split(":", 1))
        why = said.failures.get("end", "" if said.by_tag.get("ran") else "the answer is empty")
        if why and not re.search("(?i)invalid job id|already complet", why):
            raise Unavailable(f"{WHO} does not end job {ref.instance_id}: {why}")

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        await self._require_ours(ref)
        return await self._log(ref, max(0, min(lines, 10_000)))

    async def _log(self, ref: InstanceRef, lines: int) -> Sequence[str]:
        said = await self._read("log", ref.instance_id.partition(":")[2], lines)
        return last_lines([line[0] for line in said.by_tag.get("log", []) if line], lines)

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return the login node, or this computer, and what leads from there to the job's node."""
        number = await self._running(ref)
        command = ("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--jobid={number}", "--pty", "bash")
        one = self._settings
        words = "ssh leads to the login node; spotd's own way leads on"
        if one.host is None:
            return ShellAddress(host="", port=22, user=one.user, command=command, no_ports=words)
        return ShellAddress(host=one.host, port=one.port, user=one.user, command=command, no_ports=words)

    async def open_port(self, ref: InstanceRef, port: int) -> PortConnection:
        """Connect to a port of the job by a step of it on its first node, whose loopback address is the job's own."""
        number = await self._running(ref)
        conf = (f"SLURM_CONF={self._settings.slurm_conf}",) if self._settings.slurm_conf else ()
        step = (
            "srun",
            "--overlap",
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            "--relative=0",
            "--mem=0",
            "--gres=none",
            f"--jobid={number}",
        )
        path = self._settings.path
        return await open_relay(self._shell.run, port, who="the job's node", path=path, through=(*conf, *step))

    async def _running(self, ref: InstanceRef) -> str:
        """Return the number of a job of ours that runs.

        Raises:
            Unavailable: it does not.
        """
        row: JobRow = await self._running_row(ref)
        return row.id

    # The doctor.

    async def check(self) -> Sequence[CheckLine]:
        """Check the way in, Slurm's commands, each partition with the right to use it, accounting and the clock."""
        lines: list[CheckLine] = []
        hint = "are Slurm's commands in providers.slurm.path of this computer?"
        if self._settings.host is not None:
            try:
                hint = f"{_KEY_HINT}{own_key(self._key_file)}"
            except ProviderError as exc:
                return [CheckLine(name="key", ok=False, detail=str(exc), hint="name one in providers.slurm.key_file")]
        try:
            said = await self._read("check", self._names)
        except ProviderError as exc:
            return [CheckLine(name="login node", ok=False, detail=str(exc), hint=hint)]
        lacks = [one[0] for one in said.by_tag.get("lacks", []) if one]
        version = next((clean(one[0]) for one in said.by_tag.get("version", []) if one), "an unknown version")
        faults = [f"it lacks {clean(one)}" for one in lacks]
        faults += [f"{tag}: {why}" for tag, why in said.failures.items() if tag in ("node", "partition", "version")]
        where = f"{config_of(said, 'ClusterName') or 'a cluster'}, {version}, as {said.user}, jobs in {said.folder}"
        ok = not faults and "node" in said.by_tag
        lines.append(
            CheckLine(name="login node", ok=ok, detail=clean("; ".join([*faults, where])), hint="" if ok else hint)
        )
        if not self._partitions:
            lines.append(
                CheckLine(
                    name="partitions", ok=False, detail="none is in the config", hint="see docs/providers/slurm.md"
                )
            )
        rooms, _ = rooms_of(said)
        offers, bad = offers_of(said, self._settings)
        for name in self._partitions:
            nodes = [room for rows in rooms.get(name, {}).values() for room in rows]
            free = f"{sum(one.free for one in nodes)} of {sum(one.gpus for one in nodes)} places free"
            reasons = [one.reason for one in bad if one.offer_id.partition(":")[0] == name]
            refused = said.failures.get(f"may {name}", "")
            markets = " and ".join(sorted({one.market.value for one in offers if one.region == name}))
            words = [
                *([f"a job is refused: {refused}"] if refused else []),
                *reasons,
                free,
                *([markets] if markets else []),
            ]
            fine = bool(nodes) and not refused
            lines.append(
                CheckLine(
                    name=f"partition {name}",
                    ok=fine,
                    detail=clean("; ".join(words)),
                    hint="" if fine else "check its name, account and qos in providers.slurm.partitions",
                )
            )
        accounting = "off: nothing is known of a job five minutes after its end" if "past" in said.failures else "on"
        lines.append(CheckLine(name="accounting", ok=True, detail=accounting))
        return [*lines, clock_finding(said.now_s, self._services, who="the login node")]


def refusal_of(words: str, key: AttemptKey) -> ProviderError:
    """Return what an `sbatch` that failed means."""
    said = quote_safely(re.sub(r"sbatch: (error: )?", "", words)) or "it says nothing"
    if _UNSURE.search(words) is None and re.search(DEFINITE, words):
        kind = next((kind for pattern, kind in REFUSALS if re.search(pattern, words)), None)
        if kind is RequestRejected:
            return rejected(WHO, "job", said)
        if kind is not None:
            return kind(f"{WHO} does not take the job: {said}")
    return OutcomeUnknown(f"{WHO} did not say whether it took the job: {said}", key=key)


def options_of(request: LaunchRequest, partition: SlurmPartition, grace_s: int) -> list[str]:
    """Return what a job asks for, as words for `sbatch`."""
    extra = request.offer.extra
    limit_s = int(extra["limit_s"])
    found = {
        "partition": partition.name,
        "nodes": str(request.offer.nodes),
        "ntasks": str(request.offer.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": extra["cpus"],
        "mem": f"{extra['memory_mb']}M",
        "gres": extra["gres"],
        "time": str(max(1, limit_s // 60)) if limit_s else None,
        "signal": f"B:USR1@{grace_s}",
        "account": partition.account,
        "qos": partition.qos,
        "reservation": partition.reservation,
        "constraint": partition.constraint,
    }
    return [f"--{name}={value}" for name, value in found.items() if value is not None]


def _traits(settings: SlurmSettings) -> ProviderTraits:
    is_here = settings.host is None or is_loopback(f"x://{settings.host}")
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        # A node that was switched off to save power takes minutes to start.
        provision_timeout=settings.queue_wait + timedelta(minutes=20),
        offers_every_min=timedelta(seconds=60),
        machines_every_min=timedelta(seconds=30),
        hosts_share_filesystem=settings.shares_files or is_here,
        runs_images=False,
        private_images=Capability(available=False, reason=NO_LOGIN),
        bills_from_running=True,
        ends_itself_by="file",
        bill_open_for=timedelta(0),
        owned=True,
    )


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Slurm",
    settings_model=SlurmSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=shell_opener(SlurmProvider),
    powers=SlurmProvider.capabilities,
    tried="a real Slurm on one computer",
)
