"""Several machines of one RunInstances: one order, one reservation, one row.

`MinCount` is how many are wanted, so EC2 starts all or none, on spot and on demand, and one client token makes it once.
All of them get the same reservation, which is the reference of the whole: it is in every row, whichever are left. Each
learns its rank from its own metadata, where EC2 states which of the launch it is, from 0. An EC2 fleet would state 0 to
all of them, so ranks would need a second call for each machine; it tags no spot requests, which announce interruptions;
and its launch template would be left behind by what ends in the middle.

They are placed near each other in a cluster placement group: one of an install in a zone, made once, which costs
nothing and stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.aws.answers import contract_errors
from spotd_providers.aws.doctor import POLICY_HINT, client_token, tags_of
from spotd_providers.aws.offers import state_of
from spotd_providers.aws.region import Region
from spotd_providers.aws.sdk import Sdk
from spotd_providers.aws.wire import KEY_TAG, NODES_TAG, AwsInstanceRow, SpotRequestRow, interfaces, rows_of
from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    MicroUsdPerHour,
    Rejected,
)
from spotd_providers.kit.calls import ask_each
from spotd_providers.kit.gangs import as_one
from spotd_providers.kit.shapes import readable_rows
from spotd_providers.kit.template import ProviderTemplate, bound

NODES_MAX: Final = 64
SHOWN_WITHIN: Final = timedelta(minutes=5)
"""The worst lag of a list."""
_RESERVATION: Final = "r-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsMachine:
    """A row of a region with what else EC2 says of its machine; no key: it may be anybody's."""

    region: str
    row: AwsInstanceRow
    key: AttemptKey | None
    said: SpotRequestRow | None = None
    past: tuple[tuple[datetime, MicroUsdPerHour], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsGang:
    """The machines of one launch that are known, by rank.

    Attributes:
        is_ordered: whether EC2 states another rank of each, so that each knows its own.
        absent_since: since when a rank is not shown: a list may be late, or leave one out.
        ids: of every machine of it that was ever shown.
    """

    key: AttemptKey
    instance_id: InstanceId
    nodes: int
    members: Mapping[int, AwsMachine]
    is_ordered: bool
    absent_since: Mapping[int, datetime]
    ids: frozenset[str]

    def unsure(self, now: datetime) -> list[int]:
        """Return the ranks that are not shown, and have not been absent for long enough to be gone."""
        return [rank for rank, since in self.absent_since.items() if now - since < SHOWN_WITHIN]


def is_gang(ref: InstanceRef) -> bool:
    return str(ref.instance_id).startswith(_RESERVATION)


def nodes_of(row: AwsInstanceRow) -> int:
    """Return how many machines the launch of this one was for, as its client token says, which nothing changes later.

    Its tag, which all that may tag machines can change, counts only where the token is none of ours.
    """
    token, key = row.ClientToken or "", AttemptKey(row.tags.get(KEY_TAG, ""))
    first, mark, digits = token.partition("/")
    is_ours = bool(mark) or first.startswith("spotd-") or first == client_token(key)
    said = digits if is_ours else row.tags.get(NODES_TAG, "")
    return max(1, int(said)) if said.isdecimal() and len(said) < 4 else 1


def as_gangs(rows: Iterable[Any], now: datetime, nodes: int = 1) -> list[Any]:
    """Return the rows with the machines of each launch of several as one; others stay as they are.

    Without the name of their launch they stay apart, unreadable, since nothing would name the whole.
    """
    found: list[Any] = []
    gangs: dict[tuple[str, str], list[AwsMachine]] = {}
    for row in rows:
        if not isinstance(row, AwsMachine) or row.key is None or max(nodes, nodes_of(row.row)) == 1:
            found.append(row)
        elif (reservation := row.row.ReservationId or "").startswith(_RESERVATION):
            gangs.setdefault((row.region, reservation), []).append(row)
        else:
            found.append(row.row)
    return [*found, *(_gang(reservation, own, now, nodes) for (_, reservation), own in gangs.items())]


def _gang(reservation: str, machines: Sequence[AwsMachine], now: datetime, nodes: int) -> AwsGang:
    nodes = max(nodes, len(machines), *(nodes_of(one.row) for one in machines))
    indexes = [one.row.AmiLaunchIndex for one in machines]
    is_ordered = len(set(indexes)) == len(indexes) and all(index in range(nodes) for index in indexes)
    members: dict[int, AwsMachine] = {}
    for one in sorted(machines, key=lambda one: one.row.InstanceId):
        rank = one.row.AmiLaunchIndex if is_ordered else None
        # None of them is left out, whatever is said of its rank.
        members[rank if rank is not None else len(members)] = one
    key = next(one.key for one in machines if one.key is not None)
    return AwsGang(
        key=key,
        instance_id=InstanceId(reservation),
        nodes=nodes,
        members=members,
        is_ordered=is_ordered,
        absent_since={rank: now for rank in range(nodes) if rank not in members},
        ids=frozenset(one.row.InstanceId for one in machines),
    )


def whole_of(gang: AwsGang, parts: Mapping[int, Instance], now: datetime) -> Instance:
    """Return what the machines are together, at the price of all."""
    first = parts[min(parts)]
    names = [f"({parts[rank].ref.instance_id})" if rank in parts else "" for rank in range(gang.nodes)]
    ref = replace(first.ref, instance_id=gang.instance_id)
    hidden = gang.unsure(now)
    ended = replace(first, state=InstanceState.GONE, billing=Billing.NOTHING, loss=None, notice_at=None, ended_at=None)
    missing = {rank: ended for rank in range(gang.nodes) if rank not in parts and rank not in hidden}
    whole = as_one({**parts, **missing}, names, ref, now, hidden=hidden)
    price = None if whole.price is None else MicroUsdPerHour(whole.price * gang.nodes)
    past = tuple((at, MicroUsdPerHour(one * gang.nodes)) for at, one in whole.past_prices)
    return replace(whole, price=price, past_prices=past)


def launched_rows(answer: Mapping[str, Any]) -> list[AwsInstanceRow] | None:
    """Return the rows of launched machines, each with the name of its launch; `None` if one cannot be read."""
    raw = answer.get("Instances")
    if not isinstance(raw, list) or not raw:
        return None
    with_launch = ({**one, "ReservationId": answer.get("ReservationId")} for one in raw if isinstance(one, Mapping))
    rows = readable_rows(AwsInstanceRow, with_launch)
    return rows if len(rows) == len(raw) else None


def as_gang_refusal(failure: ProviderError) -> ProviderError:
    """Return the refusal of several machines as one that stops no launch of a single machine."""
    return NoCapacity(f"{failure}; {POLICY_HINT}") if isinstance(failure, AuthFailed) else failure


async def require_placement_group(region: Region, sdk: Sdk, services: Services, zone: str) -> str:
    """Return the name of this install's placement group in a zone, made if there is none.

    Raises:
        AuthFailed, RateLimited, Unavailable: it cannot be made.
    """
    name = f"spotd-{services.install}-{zone}"
    filters = [{"Name": "group-name", "Values": [name]}]
    if not rows_of(await region.ask("ec2", "describe_placement_groups", Filters=filters), "PlacementGroups"):
        with contract_errors("create_placement_group", services.rng, unless="InvalidPlacementGroup.Duplicate"):
            await sdk.call(
                "ec2",
                region.name,
                "create_placement_group",
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": tags_of(services.install)}],
            )
    return name


class AwsGangs(ProviderTemplate):
    """`Power.GANG` for a provider with regions."""

    _sdk: Sdk
    _gangs: dict[InstanceId, AwsGang]
    """By reservation, as each was shown last: the end of all needs no list."""
    _unseen_since: dict[InstanceId, datetime]
    """Since when one is to end that no list has shown since this process began."""

    @property
    def nodes_max(self) -> int:
        """How many machines one launch starts at most."""
        return NODES_MAX

    @abstractmethod
    def _as_machine(self, raw: AwsMachine, key: AttemptKey) -> Instance:
        """Translate the row of one machine."""

    @abstractmethod
    async def _ask_end_of_one(self, ref: InstanceRef) -> bool:
        """Ask for the end of one machine, as `_ask_end`."""

    async def _beside(self, region: Region, request: LaunchRequest, subnet: str) -> Mapping[str, Any]:
        """Return what RunInstances is sent besides for several machines: near each other, with EFA where that works.

        Raises:
            NoCapacity: they would not reach each other, or the policy does not allow to place them.
        """
        if request.offer.nodes == 1:
            return {}
        kind = (await region.kinds()).usable.get(request.offer.extra["type"])
        ground = (await region.grounds.get()).get(subnet)
        if ground is None or ground.fault:
            unknown = f"AWS does not say whether machines in {request.offer.extra['zone']} reach each other"
            raise NoCapacity(ground.fault if ground is not None else f"{unknown}: {region.grounds.last_error}")
        beside: dict[str, Any] = {}
        if kind is None or kind.is_clustered:
            try:
                group = await require_placement_group(region, self._sdk, self._services, request.offer.extra["zone"])
            except AuthFailed as exc:
                raise as_gang_refusal(exc) from None
            beside["Placement"] = {"GroupName": group}
        if cards := interfaces(subnet, ground, kind.efa_max if kind is not None else 0):
            beside["NetworkInterfaces"] = cards
        return beside

    async def _require_whole(self, request: LaunchRequest, machines: Sequence[AwsMachine]) -> Instance:
        """Return several new machines as one; what is not as many as were asked for is ended again.

        Raises:
            OutcomeUnknown: EC2 shows fewer than it says that it starts, so there may be others.
            ContractViolation: all were ended, since each of them would not know which one it is.
        """
        wanted = request.offer.nodes
        gangs = [one for one in as_gangs(machines, self._services.clock.now(), wanted) if isinstance(one, AwsGang)]
        if len(gangs) != 1:
            raise OutcomeUnknown(f"AWS's answer to the launch of {request.offer.pool} is unreadable", key=request.key)
        gang = self._remember(gangs[0])
        whole = self._whole(gang, request.key)
        if len(machines) == gang.nodes == wanted and gang.is_ordered:
            return whole
        what = f"AWS answered the launch of {wanted} machines with {len(machines)}"
        self._own(whole)
        await self._undo(whole.ref, request.key, what)
        if len(machines) < wanted:
            raise OutcomeUnknown(f"{what}, which were ended", key=request.key)
        raise ContractViolation(f"{what}, and not with an order among as many; they were ended")

    def _whole(self, gang: AwsGang, key: AttemptKey) -> Instance:
        parts = {rank: self._as_machine(one, key) for rank, one in gang.members.items()}
        return whole_of(gang, parts, self._services.clock.now())

    def _with_gangs(self, rows: Sequence[Any]) -> list[Any]:
        """Return the rows with those of each gang as one; one that may not be whole makes the list incomplete."""
        now = self._services.clock.now()
        found = [self._remember(one) if isinstance(one, AwsGang) else one for one in as_gangs(rows, now)]
        unsure = [one for one in found if isinstance(one, AwsGang) and one.unsure(now)]
        for gang in unsure:
            shown = f"AWS shows {len(gang.members)} of {gang.nodes} machines of one launch"
            found.append(Rejected(offer_id=str(gang.key), reason=shown))
        return found

    def _remember(self, gang: AwsGang) -> AwsGang:
        """Return the gang with what was known of it before."""
        before = self._gangs.get(gang.instance_id)
        if before is not None:
            # EC2 lists what has ended for an hour: some of them a little longer than others.
            over = {rank for rank, one in before.members.items() if state_of(one.row) is InstanceState.GONE}
            since = {
                rank: at - SHOWN_WITHIN if rank in over else before.absent_since.get(rank, at)
                for rank, at in gang.absent_since.items()
            }
            gang = replace(gang, absent_since=since, ids=gang.ids | before.ids)
        self._gangs[gang.instance_id] = gang
        bound(self._gangs)
        return gang

    async def _ask_end_of_gang(self, ref: InstanceRef) -> bool:
        """Order each machine to end, whether or not the order of another one is accepted.

        Raises:
            Unavailable: a part of them may live on.
        """
        gang = self._gangs.get(ref.instance_id)
        if gang is None or len(gang.ids) < gang.nodes:
            await self._row(ref)
            gang = self._gangs.get(ref.instance_id)
        if gang is None:
            return self._is_unseen(ref)
        refs = [replace(ref, instance_id=InstanceId(one)) for one in sorted(gang.ids)]
        known, errors = await ask_each(refs, lambda one: str(one.instance_id), self._ask_end_of_one)
        why = [f"{name}: {exc}" for name, exc in errors.items()]
        if (lacking := gang.nodes - len(gang.ids)) > 0 and gang.unsure(self._services.clock.now()):
            why.append(f"{lacking} are not shown yet")
        if why:
            raise Unavailable(f"a part of the {gang.nodes} machines of {gang.key} may live on: {'; '.join(why)}")
        return all(known.values())

    def _is_unseen(self, ref: InstanceRef) -> bool:
        """Return `False` for what no list has shown for so long that it does not exist.

        Raises:
            Unavailable: it may be too new for a list. One machine is ended by its id all the same; these have none.
        """
        now = self._services.clock.now()
        since = self._unseen_since.setdefault(ref.instance_id, now)
        bound(self._unseen_since)
        if now - since < SHOWN_WITHIN:
            raise Unavailable(f"AWS does not show the machines of {ref.instance_id} yet")
        return False

    async def _first_of(self, ref: InstanceRef) -> str:
        """Return the id of the first machine that is shown.

        Raises:
            Unavailable: none is.
        """
        raw = await self._row(ref)
        if not isinstance(raw, AwsGang):
            raise Unavailable(f"AWS does not show the machines of {ref.instance_id}")
        return raw.members[min(raw.members)].row.InstanceId
