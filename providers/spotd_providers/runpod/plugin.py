"""The descriptor of RunPod."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

from spotd_providers.contract.errors import (
    AuthFailed,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    MICRO,
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    Market,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
    ShellAddress,
    micro_usd,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities, is_loopback
from spotd_providers.kit.calls import check_line, clock_line
from spotd_providers.kit.http import AnswerLost, HttpAnswer, open_http
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.text import clean, key_of
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.listing import PodKeys, PodListing, StoredLogins, as_instance, charges_between, ref_of
from spotd_providers.runpod.offers import (
    DISK_GB_MIN,
    DISK_PRICE,
    PROVIDER,
    SCRIPT_BYTES_MAX,
    GpuCatalogue,
    UnexplainedRefusals,
    refusal_of_create,
    request_body,
)
from spotd_providers.runpod.wire import PodRow, RunpodRefused, RunpodSettings

# The checks of `spotctl doctor` at RunPod, one line for each finding.


_KEY: Final = "create a key with read and write access at console.runpod.io/user/settings and put it in api_key"
_ANSWERS: Final = "check the network, at base_url and at RunPod's status page; the key was not judged"
_CATALOGUE: Final = "RunPod's catalogue does not answer; see its status page"
_SCOPES: Final = "give the key read and write access to pods and read access to billing"
NO_BALANCE: Final = "RunPod's REST API states no balance and no spend limit; see console.runpod.io/user/billing"


async def examine(client: RunpodClient, settings: RunpodSettings, services: Services) -> Sequence[CheckLine]:
    """Check key, clock, catalogue and billing. A failed check is a line, never an exception."""
    lines: list[CheckLine] = []
    answers: list[HttpAnswer] = []

    async def key() -> str:
        answers.append(await client.greeting())
        return "accepted, can list pods"

    async def market() -> str:
        found = await client.gpus(
            cloud=settings.clouds[0] if settings.clouds else "SECURE", count=1, cuda_min=settings.cuda_min
        )
        return f"{len(found.rows)} kinds of GPU in the catalogue"

    async def billing() -> str:
        now = services.clock.now()
        await client.billing(now - timedelta(days=1), now)
        return "can read charges"

    lines.append(await check_line("key", key, hint=_ANSWERS, refused=_KEY))
    if not answers:
        return tuple(lines)  # whatever is wrong would only be found again and again, each time after its time-out
    if answers[0].date is not None:
        lines.append(clock_line(abs(answers[0].date - services.clock.now()), who="RunPod"))
    lines.extend(await _creates(client))
    lines.append(await check_line("market", market, hint=_CATALOGUE, refused=_SCOPES))
    lines.append(await check_line("billing", billing, hint=_SCOPES))
    lines.append(CheckLine(name="balance", ok=True, detail=NO_BALANCE))
    return tuple(lines)


async def _creates(client: RunpodClient) -> list[CheckLine]:
    """Check that the key may create: a create that is refused for the key reads like one of a forbidden pool."""
    try:
        await client.may_create()
    except AuthFailed as exc:
        return [CheckLine(name="create", ok=False, detail=str(exc), hint=_KEY)]
    except (ProviderError, AnswerLost):
        pass  # nothing was found out about it, and whatever is wrong is found by the next line
    return []


# RunPod as a spotd provider, on REST v2 alone: catalogue, pods and billing. What v2 cannot do is declared missing.


READS_AFTER_DELETION: Final = 3
READ_WAIT: Final = timedelta(seconds=2)
KEY_NAME_DIGITS: Final = 12
"""Enough to tell keys from each other, and far too little to find one."""
_POD_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.LOGS,
    Power.BILLING,
    Power.SELF_TERMINATE,
    Power.SHELL,
    missing={
        Power.SPOT: "RunPod withdrew its spot pods in 2026 and sells on-demand only",
        Power.BID_CHANGE: "RunPod sells at list price, so there is no bid to change",
        Power.BALANCE: "RunPod's REST API does not state the account's balance; its website shows it",
        Power.CAPACITY_SCORES: "RunPod says whether a pod can be had now, not how likely a launch is to succeed",
        Power.HOST_IDENTITY: "RunPod does not say on which host a pod runs",
        Power.NOTICES: "RunPod stops pods without warning, so checkpoint regularly",
        Power.STOP_RESUME: (
            "a stopped RunPod pod keeps its host but not its GPU and may never start again, so spotd deletes it"
        ),
    },
)


class RunpodProvider:
    """The Protocol over one open client."""

    name = PROVIDER
    capabilities = CAPABILITIES

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._catalogue = GpuCatalogue(client, settings, services)
        self._unexplained = UnexplainedRefusals()
        self._pod_keys = PodKeys(services.state_dir, services.log)
        self._listing = PodListing(client, services, self._pod_keys)
        self._logins = StoredLogins(client, services)

    async def account(self) -> str:
        """Return a name of the key: REST v2 states no account, and what another key does not list may still run."""
        digest = hashlib.sha256((self._services.credential or "").encode()).hexdigest()
        return f"key {digest[:KEY_NAME_DIGITS]}"

    @property
    def requests_sent(self) -> int:
        return self._client.requests_sent

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every size on every cloud, priced or rejected; a failure after the first answer makes it incomplete.

        The parts that failed are filled in from an earlier poll, if that is recent.
        """
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), rejected=(), complete=True, at=self._services.clock.now())
        await self._logins.drop_unused()
        failure = await self._catalogue.refresh()
        if failure is not None:
            self._services.log.warning("runpod.offers_incomplete", reason=str(failure))
        offers, rejected = self._catalogue.recent()
        return OfferPage(
            offers=tuple(offers), rejected=tuple(rejected), complete=failure is None, at=self._services.clock.now()
        )

    async def launch(self, request: LaunchRequest) -> Launched:
        """Create a pod by one request, at no more than the agreed price."""
        body = request_body(request, self._settings)
        if request.offer.gpu_price > request.price_max:
            raise PriceMoved("RunPod sells at list price only, and that is above what was agreed")
        if request.login is not None:
            body["registry"] = await self._logins.id_of(request.login)
        row = await self._create(request, body)
        instance = as_instance(row, request.key)
        self._listing.own(instance)
        await self._require_price(row, request)
        return Launched(instance=instance)

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key; only a complete list proves that there is none."""
        if key_of(key, self._services.install) is None:
            return ()
        listing = await self._listing.read()
        found = tuple(i for i in listing.instances if i.key == key and i.state is not InstanceState.GONE)
        if not found and not listing.complete:
            raise Unavailable(f"RunPod's list of pods is incomplete, so it does not prove that {key} is absent")
        return found

    async def instances(self) -> Listing:
        return await self._listing.read()

    async def terminate(self, ref: InstanceRef) -> None:
        """Delete this pod; an absent one is a success, and one that is not ours is refused."""
        await self._delete(await self._our_pod(ref))

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the container's last lines, or the host's where the container printed nothing; no secrets."""
        pod_id = await self._our_pod(ref)
        found = await self._client.log_lines(pod_id, source="container", lines=lines)
        if not found:
            found = await self._client.log_lines(pod_id, source="system", lines=lines)
        return tuple(clean(line, chars_max=4096) for line in found)

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return RunPod's own door to the pod, which needs nothing in the image; else the pod's mapped port."""
        pod_id = _pod_id(ref)
        row = row_or_none(PodRow, await self._client.pod(pod_id))
        if row is None or key_of(row.name, self._services.install) is None:
            raise Unavailable(f"RunPod does not show pod {pod_id} as ours")
        if row.status != "RUNNING":
            raise Unavailable(f"pod {pod_id} does not run yet")
        door = None if row.ssh is None else row.ssh.proxy or row.ssh.direct
        if door is None:
            raise Unavailable(
                f"RunPod names no shell of pod {pod_id}; it needs a public key at console.runpod.io/user/settings, "
                "which only pods that start afterwards get"
            )
        return ShellAddress(host=door.host, port=door.port, user=door.username)

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return the charges of our pods, hour by hour."""
        return await charges_between(self._client, self._pod_keys, self._services.log, since, until)

    async def check(self) -> Sequence[CheckLine]:
        """Check key, clock, catalogue and billing, one line each."""
        return await examine(self._client, self._settings, self._services)

    async def _our_pod(self, ref: InstanceRef) -> str:
        """Return the id of a pod of ours, or of one that RunPod does not list.

        Raises:
            RequestRejected: the pod is another's.
        """
        pod_id = _pod_id(ref)
        if ref.instance_id not in self._listing.ours:
            raw = await self._client.pod(pod_id)
            if raw is not None and (
                not isinstance(raw, dict) or key_of(raw.get("name"), self._services.install) is None
            ):
                raise RequestRejected(
                    f"RunPod pod {pod_id} does not carry the name of this installation", field="ref", reason="not ours"
                )
        return pod_id

    async def _create(self, request: LaunchRequest, body: Mapping[str, object]) -> PodRow:
        try:
            row = await self._client.create(body, key=request.key)
        except RunpodRefused as exc:
            raise refusal_of_create(exc, request, self._unexplained) from exc
        self._unexplained.forget()
        return row

    async def _require_price(self, row: PodRow, request: LaunchRequest) -> None:
        """Delete the new pod if it costs more than agreed: a create names no price, so it is checked afterwards.

        Whether `cost` holds the container disk is not documented, so that much more is allowed.

        Raises:
            PriceMoved: the pod costs more and was deleted. OutcomeUnknown: deleting it failed.
        """
        if row.cost is None:
            return
        disk = DISK_PRICE * max(request.disk_gb, DISK_GB_MIN) // HOURS_PER_STORAGE_MONTH
        if micro_usd(row.cost) <= request.price_max + disk + request.offer.gpu_count:
            return
        moved = f"RunPod charges ${row.cost:.4f}/h where ${request.price_max / MICRO:.4f}/h was agreed"
        await self._undo(row.id, request.key, moved)
        raise PriceMoved(moved)

    async def _undo(self, pod_id: str, key: AttemptKey, reason: str) -> None:
        self._services.log.error("runpod.wrong_purchase", key=key, pod=pod_id, reason=reason)
        try:
            await self._delete(pod_id)
        except ProviderError as exc:
            raise OutcomeUnknown(f"{reason}; deleting pod {pod_id} failed", key=key) from exc

    async def _delete(self, pod_id: str) -> None:
        """Delete the pod and see that RunPod no longer shows it as alive.

        Pods were seen to run and bill on after an accepted deletion, so it is verified, and asked for once more.
        """
        for _ in range(2):
            await self._client.delete(pod_id)
            for read in range(READS_AFTER_DELETION):
                if read:
                    await self._services.clock.sleep(READ_WAIT)
                try:
                    raw = await self._client.pod(pod_id)
                except ProviderError:
                    return  # accepted; the next listing shows whether it took
                row = row_or_none(PodRow, raw)
                if raw is None or (row is not None and row.status == "TERMINATED"):
                    return
        raise Unavailable(f"RunPod accepted the end of pod {pod_id} and still shows it")


def _pod_id(ref: InstanceRef) -> str:
    text = str(ref.instance_id)
    if _POD_ID.fullmatch(text) is None:
        raise RequestRejected(f"{clean(text)!r} is no RunPod pod id", field="ref", reason="not a pod id")
    return ref_of(text).instance_id


REQUEST_TIMEOUT_S: Final = 30.0
USER_AGENT: Final = "spotd/0.1 (+runpod)"
"""RunPod's edge answers 403 to the default agents of scripting libraries."""


PRIVATE_IMAGES: Final = Capability(
    available=True,
    reason="RunPod keeps the password in your account, and does not say whether the owner of a host can read it",
)
"""Pods name a stored credential by its id (`registry`), and RunPod's list of credentials shows no password."""


def _traits(settings: RunpodSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=is_loopback(settings.base_url),
        ends_itself_by="runpod",
        ends_itself_at=settings.base_url,
        private_images=PRIVATE_IMAGES,
    )


@asynccontextmanager
async def _open(settings: RunpodSettings, services: Services) -> AsyncIterator[Provider]:
    if not services.credential:
        raise AuthFailed('RunPod needs an API key: api_key = { env = "RUNPOD_API_KEY" } under [providers.runpod]')
    headers = {
        "authorization": f"Bearer {services.credential}",
        "accept": "application/json",
        "user-agent": USER_AGENT,
    }
    async with open_http(settings.base_url, headers=headers, timeout_s=REQUEST_TIMEOUT_S) as http:
        client = RunpodClient(http, clock=services.clock, rng=services.rng)
        yield RunpodProvider(client, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="RunPod",
    settings_model=RunpodSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
)
