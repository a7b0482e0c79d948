"""The descriptor of AWS. AWS's client is not imported before the provider is opened."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

import anyio

from spotd_providers.aws import doctor
from spotd_providers.aws.answers import FULL_FOR, SUBNET_FULL, contract_errors, launch_failure
from spotd_providers.aws.doctor import SCRIPT_BYTES_MAX, Volumes, client_token, run_parameters
from spotd_providers.aws.gangs import (
    NODES_MAX,
    SHOWN_WITHIN,
    AwsGang,
    AwsGangs,
    AwsMachine,
    as_gang_refusal,
    is_gang,
    launched_rows,
    nodes_of,
)
from spotd_providers.aws.offers import (
    PROVIDER,
    AwsPriceHistory,
    PastPrices,
    as_instance,
    current_prices,
    is_announced,
    key_in,
    offers_of,
    on_demand_prices,
    pool_of,
)
from spotd_providers.aws.prices import Band, read_advisor
from spotd_providers.aws.region import Pool, Region
from spotd_providers.aws.sdk import IMDS, AwsRefused, AwsSettings, Sdk
from spotd_providers.aws.wire import INSTALL_TAG, KEY_TAG, WHO, AwsInstanceRow, SpotRequestRow
from spotd_providers.contract.errors import (
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceId,
    InstanceRef,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities, is_loopback
from spotd_providers.kit.calls import Page, RequestPace, ask_each, judge_apart
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.template import require_launchable
from spotd_providers.kit.text import last_lines

# EC2 as a spotd provider: every configured region as one market.
#
# A region that does not answer costs its own offers and makes listings incomplete; it hides no other region's machines.


AT_ONCE: Final = timedelta(seconds=1)
"""After a refusal that the next try does not meet again."""
T = TypeVar("T")

CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.SPOT,
    Power.NOTICES,
    Power.LOGS,
    Power.SELF_TERMINATE,
    Power.CAPACITY_SCORES,
    Power.PRICE_HISTORY,
    Power.GANG,
    missing={
        Power.BID_CHANGE: "the price limit of an AWS spot machine is fixed at its launch; you pay the market price",
        Power.BALANCE: "an AWS account has no balance, it is billed each month",
        Power.BILLING: "AWS's own bill is a day late and not per machine, so prices and seconds are multiplied",
        Power.HOST_IDENTITY: "AWS does not show which computer a machine runs on",
        Power.SHELL: "spotd opens no port of an AWS machine and gives it no key pair, so there is none to log in with",
        Power.PORTS: (
            "spotd opens no port of an AWS machine; it would need a security group and a key pair of yours, or Session"
            " Manager's agent and role"
        ),
        Power.REPLACE: "several instances are started by one call, and a job begins anew where one is lost",
        Power.STOP_RESUME: "a stopped spot machine may never get its GPU back, so interruption terminates it",
    },
)


NO_LOGIN: Final = Capability(
    available=False,
    reason=(
        "AWS takes a login only in the user data, which every process of the machine can read, so spotd sends none"
    ),
)
"""EC2 documents that `/latest/user-data` is open to the whole machine, and to all who may DescribeInstanceAttribute. An
instance profile for ECR is no better: the job shares the machine's network, and would have the rights of the role."""


class AwsProvider(AwsPriceHistory, AwsGangs):
    """The Protocol over one open client and some regions."""

    name = PROVIDER
    who = WHO
    machine = "machine"
    mark = "tags"
    no_login = NO_LOGIN.reason
    judged_prices = frozenset()
    """EC2 shows no price of a machine: on spot it keeps to the limit that is sent, or the price is read before."""
    confirms_ends = False
    shown_within = SHOWN_WITHIN

    def __init__(
        self,
        sdk: Sdk,
        settings: AwsSettings,
        services: Services,
        bands: Mapping[tuple[str, str], Band] | None = None,
    ) -> None:
        super().__init__(services, sdk)
        self._sdk = sdk
        self._settings = settings
        self._pace = RequestPace(services.clock)
        self._regions = {name: self._region(name) for name in settings.regions}
        self._volumes = {name: Volumes(region, sdk, services) for name, region in self._regions.items()}
        self._past_prices = {name: PastPrices(region, services) for name, region in self._regions.items()}
        self._bands = bands or {}
        self._prices: dict[tuple[str, str], MicroUsdPerHour] = {}
        self._announced: dict[str, datetime] = {}
        self._gangs: dict[InstanceId, AwsGang] = {}
        self._unseen_since: dict[InstanceId, datetime] = {}

    @property
    def capabilities(self) -> Mapping[Power, Capability]:  # type: ignore[override]  # read only, since it follows from what AWS refused
        reasons: dict[Power, str] = {}
        for region in self._regions.values():
            if region.scores.is_refused:
                reason = f"in {region.name} {region.scores.last_error}; allow ec2:GetSpotPlacementScores"
                reasons.setdefault(Power.CAPACITY_SCORES, reason)
        faults = [region.gang_fault() for region in self._regions.values()]
        if all(faults):
            reasons[Power.GANG] = faults[0]
        missing = {power: Capability(available=False, reason=reason) for power, reason in reasons.items()}
        return {**CAPABILITIES, **missing} if missing else CAPABILITIES

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type with GPUs in every zone that has a subnet, on the markets asked for."""

        async def of(region: Region) -> tuple[list[Offer], list[Rejected]]:
            return await self._offers_of(region, query)

        answers, failed = await self._everywhere(of)
        offers = [offer for good, _ in answers.values() for offer in good]
        rejected = [row for _, bad in answers.values() for row in bad]
        return OfferPage(
            offers=tuple(offers), rejected=tuple(rejected), complete=not failed, at=self._services.clock.now()
        )

    async def _buy(self, request: LaunchRequest) -> Instance:
        """Buy a machine, or several at once, by one RunInstances; its answer holds their rows."""
        region = self._regions.get(request.offer.extra.get("region", ""))
        if region is None:
            raise RequestRejected("the offer's region is not configured", field="offer", reason="unknown region")
        limits = {"script_bytes_max": SCRIPT_BYTES_MAX, "key_chars_max": doctor.TAG_CHARS_MAX}
        require_launchable(request, who=WHO, extra=("zone", "type"), **limits)
        if request.offer.nodes > NODES_MAX:
            raise RequestRejected(f"{NODES_MAX} machines at once are the most", field="offer", reason="too many nodes")
        subnet = await self._subnet(region, request.offer)
        beside = await self._beside(region, request, subnet)
        parameters = run_parameters(request, await region.image(), subnet, self._settings, beside)
        if request.offer.market is Market.SPOT and self._settings.max_price == "none":
            await self._check_price(region, request)
        try:
            answer = await self._sdk.call("ec2", region.name, "run_instances", **parameters)
        except AwsRefused as exc:
            if exc.code == SUBNET_FULL:
                region.subnet_is_full(subnet)
                other = await self._subnet(region, request.offer)
                raise OfferGone(f"the subnet {subnet} is full, {other} is next", lasts=AT_ONCE) from None
            failure = launch_failure(exc, request, rng=self._services.rng)
            raise as_gang_refusal(failure) if request.offer.nodes > 1 else failure from None
        except AnswerLost as exc:
            raise OutcomeUnknown(f"{exc}; {request.offer.pool}", key=request.key) from None
        rows = launched_rows(answer)
        if rows is None:
            raise OutcomeUnknown(
                f"AWS's answer to the launch of {request.offer.pool} names no machine", key=request.key
            )
        machines = [AwsMachine(region=region.name, row=row, key=request.key) for row in rows]
        if request.offer.nodes == 1 and len(rows) == 1:
            return self._as_machine(machines[0], request.key)
        return await self._require_whole(request, machines)

    async def _rows(self, key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
        """Return the rows of a key by its launch's token or its tag, else all of our install tag."""
        if key is None:
            return await super()._rows(None)
        tokens = [client_token(key, nodes) for nodes in range(1, NODES_MAX + 1)]

        async def of(region: Region) -> Sequence[Any]:
            for name, values in (("client-token", tokens), (f"tag:{KEY_TAG}", [str(key)])):
                if found := await self._machines(region, name, *values, expected=key):
                    return found
            return ()

        answers, failed = await self._everywhere(of)
        found = [raw for own in answers.values() for raw in own]
        if failed and not found:
            raise Unavailable(f"{', '.join(failed)} did not answer, so {key} is not proved absent")
        return found, not failed

    async def _page(self, _token: str | None) -> Page:
        """Return the machines of all regions; where one does not answer, another page is missing."""

        async def of(region: Region) -> Sequence[Any]:
            found = await self._machines(region, f"tag:{INSTALL_TAG}", str(self._services.install))
            await self._volumes[region.name].sweep()
            return found

        answers, failed = await self._everywhere(of)
        return [raw for own in answers.values() for raw in own], "" if failed else None

    async def _row(self, ref: InstanceRef) -> Any | None:
        region = self._region_of(ref)
        name = "reservation-id" if is_gang(ref) else "instance-id"
        rows = await region.machine_rows(name, str(ref.instance_id))
        found = self._with_gangs([self._attributed(region, raw, None) or raw for raw in rows])
        return next((one for one in found if isinstance(one, AwsGang)), found[0] if found else None)

    def _label(self, raw: Any) -> str | None:
        return raw.key if isinstance(raw, AwsMachine | AwsGang) else None

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        return self._whole(raw, key) if isinstance(raw, AwsGang) else self._as_machine(raw, key)

    def _as_machine(self, raw: AwsMachine, key: AttemptKey) -> Instance:
        return as_instance(
            raw.row,
            key,
            region=raw.region,
            request=raw.said,
            prices=self._prices,
            announced_at=self._announced_at(raw.row, raw.said),
            past_prices=raw.past,
        )

    async def _ask_end(self, ref: InstanceRef) -> bool:
        return await (self._ask_end_of_gang(ref) if is_gang(ref) else self._ask_end_of_one(ref))

    async def _ask_end_of_one(self, ref: InstanceRef) -> bool:
        region, what = self._region_of(ref).name, "terminate_instances"
        with contract_errors(what, self._services.rng, unless="InvalidInstanceID.NotFound") as refused:
            answer = await self._sdk.call("ec2", region, what, InstanceIds=[str(ref.instance_id)])
        if refused:
            return False
        if not answer.get("TerminatingInstances"):
            raise Unavailable(f"AWS's answer does not say that {ref.instance_id} ends")
        return True

    def _require_shown_before(self, ref: InstanceRef) -> None:
        """Require that it was not launched a moment ago: it may not be known everywhere yet, though it was listed."""
        launched_at = self._ours.get(ref.instance_id)
        if launched_at is not None and self._services.clock.now() - launched_at < self.shown_within:
            raise Unavailable(f"AWS does not know its new machine {ref.instance_id} yet")

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the machine's console as AWS kept it, minutes late, without anything that resembles a secret."""
        await self._require_ours(ref)
        machine = await self._first_of(ref) if is_gang(ref) else str(ref.instance_id)
        answer = await self._region_of(ref).ask("ec2", "get_console_output", InstanceId=machine)
        encoded = answer.get("Output")
        try:
            text = base64.b64decode(encoded).decode("utf-8", "replace") if isinstance(encoded, str) else ""
        except (binascii.Error, ValueError):
            text = ""
        return last_lines(text.splitlines(), lines)

    async def account(self) -> str:
        """Return the number of the AWS account; empty where AWS does not state it."""
        answer = await doctor.identity(self._sdk, tuple(self._regions.values()), self._services)
        return str(answer.get("Account") or "")

    async def check(self) -> Sequence[CheckLine]:
        """Check key and clock, and in each region reads, the permission to launch, and quotas."""
        return await doctor.examine(
            self._sdk, tuple(self._regions.values()), self._volumes, self._settings, self._services
        )

    def _region_of(self, ref: InstanceRef) -> Region:
        return self._regions.get(ref.scope) or self._region(ref.scope or self._settings.regions[0])

    def _region(self, name: str) -> Region:
        return Region(name, self._sdk, self._settings, self._services, self._pace)

    async def _everywhere(self, ask: Callable[[Region], Awaitable[T]]) -> tuple[dict[str, T], list[str]]:
        """Ask every region at once; return the answers, and the names of the regions that failed."""
        answers, failed = await ask_each(self._regions.values(), lambda region: region.name, ask)
        for name, exc in failed.items():
            self._services.log.warning("aws.region_failed", region=name, error=type(exc).__name__, detail=str(exc))
        return answers, sorted(failed)

    async def _check_price(self, region: Region, request: LaunchRequest) -> None:
        """Read the price once more: without a limit AWS sells at the price of the moment.

        Raises:
            PriceMoved: it is above what may be paid.
        """
        pool = (request.offer.extra["type"], request.offer.extra["zone"])
        prices, _ = current_prices(await region.price_rows(pool))
        self._prices.update(prices)
        if pool not in prices:
            raise OfferGone(f"AWS states no spot price of {request.offer.pool} any more")
        if prices[pool] * request.offer.nodes > request.price_max:
            raise PriceMoved(f"the spot price of {request.offer.pool} is above what was agreed")

    async def _subnet(self, region: Region, offer: Offer) -> str:
        """Return the subnet to launch this offer in now.

        Raises:
            OfferGone: every one of its zone is full.
        """
        zone = offer.extra.get("zone", "")
        subnet = (await region.subnets()).get(zone)
        if subnet is None:
            raise OfferGone(f"no subnet in {zone} has a free address", lasts=FULL_FOR)
        return subnet

    async def _offers_of(self, region: Region, query: OfferQuery) -> tuple[list[Offer], list[Rejected]]:
        kinds, subnets, on_demand = await region.kinds(), await region.subnets(), await region.on_demand()
        image_gb = await region.image_gb()
        await region.grounds.get()
        offers: list[Offer] = []
        rejected = list(kinds.rejected)
        for market in (one for one in Market if one in query.markets):
            is_spot = market is Market.SPOT
            if is_spot:
                rows = await region.price_rows()
                prices, odd = await judge_apart(partial(current_prices, rows), rows=len(rows))
                self._prices.update(prices)
            else:
                pools = [pool for pool in await region.pools() if pool[0] in kinds.usable]
                prices, odd = on_demand_prices(pools, on_demand)
            good, bad = offers_of(
                prices,
                market,
                kinds.usable,
                subnets,
                on_demand,
                self._settings,
                scores=await region.scores.get() if is_spot else {},
                bands=self._bands if is_spot else {},
                image_gb=image_gb,
            )
            offers += good
            rejected += [*odd, *bad]
        return offers, rejected

    async def _machines(
        self, region: Region, name: str, *values: str, expected: AttemptKey | None = None
    ) -> Sequence[Any]:
        """Return our machines that match this filter, and as they are the rows whose machine cannot be read.

        What matched our tag is ours; without a key the attempt is unknown. Several machines of one launch are one row.
        """
        rows = await region.machine_rows(name, *values)
        found = [self._attributed(region, raw, expected) for raw in rows]
        ours = [one for one in found if one is not None and one.key is not None]
        requests = await self._spot_requests(region, ours)
        past = {} if expected is not None else await self._past_prices[region.name].of(_pools(ours), self._prices)
        return self._with_gangs(
            [
                raw
                if one is None or one.key is None
                else replace(
                    one,
                    said=requests.get(one.row.InstanceId),
                    past=past.get(pool_of(one.row), ()) if one.row.InstanceLifecycle == "spot" else (),
                )
                for raw, one in zip(rows, found, strict=True)
            ]
        )

    def _attributed(self, region: Region, raw: Any, expected: AttemptKey | None) -> AwsMachine | None:
        """Return the machine of a row with its key, also by the token of a launch that is searched for."""
        row = row_or_none(AwsInstanceRow, raw)
        if row is None:
            return None
        key = key_in(row, self._services.install)
        if key is None and expected is not None and row.ClientToken == client_token(expected, nodes_of(row)):
            key = expected
        return AwsMachine(region=region.name, row=row, key=key)

    def _announced_at(self, row: AwsInstanceRow, request: SpotRequestRow | None) -> datetime | None:
        """Return when an interruption without a time of its own was observed first."""
        if not is_announced(row, request):
            self._announced.pop(row.InstanceId, None)
            return None
        if request is None or request.Status.UpdateTime is not None:
            return None
        if row.InstanceId not in self._announced:
            self._announced[row.InstanceId] = self._services.clock.now()
            self._services.log.warning("aws.notice_without_time", machine=row.InstanceId, code=request.Status.Code)
        return self._announced[row.InstanceId]

    async def _spot_requests(self, region: Region, ours: Sequence[AwsMachine]) -> Mapping[str, SpotRequestRow]:
        """Return each machine's spot request; none where AWS does not list them, which costs only the warning."""
        if not any(one.row.InstanceLifecycle == "spot" for one in ours):
            return {}
        try:
            raw = await region.spot_request_rows(f"tag:{INSTALL_TAG}", str(self._services.install))
        except ProviderError as exc:
            self._services.log.warning("aws.notices_unknown", region=region.name, detail=str(exc))
            return {}
        rows = (row_or_none(SpotRequestRow, row) for row in raw)
        return {row.InstanceId: row for row in rows if row is not None}


def _pools(ours: Sequence[AwsMachine]) -> Mapping[Pool, datetime]:
    """Return the pools of our spot machines and the first launch in each."""
    found: dict[Pool, datetime] = {}
    for row in (one.row for one in ours):
        if row.InstanceLifecycle == "spot" and row.LaunchTime is not None and all(pool_of(row)):
            found[pool_of(row)] = min(row.LaunchTime, found.get(pool_of(row), row.LaunchTime))
    return found


def _traits(settings: AwsSettings) -> ProviderTraits:
    local = bool(settings.endpoint_url) and is_loopback(settings.endpoint_url)
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        # A launch's time-out, and the five minutes after which AWS's lists are taken for true.
        reconcile_window=timedelta(minutes=6),
        # Loading an image of 10 GB onto a fresh disk takes up to ten minutes.
        provision_timeout=timedelta(minutes=25),
        hosts_share_filesystem=local,
        ends_itself_by="file",
        # Counted by EC2 from `running`, by us from the launch before it: never too long.
        free_if_taken_within=timedelta(hours=1),
        bills_from_running=True,
        bills_at_least=timedelta(minutes=1),
        bills_by=timedelta(seconds=1),
        # A fake cloud puts its own address into the environment of each machine.
        notice_imds="" if local else IMDS,
        private_images=NO_LOGIN,
    )


@asynccontextmanager
async def _open(settings: AwsSettings, services: Services) -> AsyncIterator[Provider]:
    sdk = Sdk(settings, services.credential)
    try:
        yield AwsProvider(sdk, settings, services, await _bands(settings, services))
    finally:
        sdk.close()


async def _bands(settings: AwsSettings, services: Services) -> Mapping[tuple[str, str], Band]:
    """Read the saved Spot Advisor. It is only a prior, so a missing or invalid file is logged and ignored."""
    if not settings.spot_advisor:
        return {}
    file = await anyio.Path(settings.spot_advisor).expanduser()
    try:
        return read_advisor(await file.read_bytes())
    except (OSError, ValueError) as exc:
        detail = exc.strerror if isinstance(exc, OSError) else str(exc)
        services.log.warning("aws.spot_advisor_unreadable", file=str(file), detail=detail)
        return {}


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="AWS EC2",
    settings_model=AwsSettings,
    # Without api_key, AWS's client reads what AWS's own tools read: environment, config files, the host's role.
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
    powers=CAPABILITIES,
)
