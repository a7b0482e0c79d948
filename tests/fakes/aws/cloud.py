"""The state of the fake: spot prices, instances and their processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from spotd_providers.contract.values import MicroUsdPerHour, cost, micro_usd
from spotd_providers.local.hosts import HostClock, HostMachineState, read_ledger, segments
from tests.fakes.aws.catalog import KINDS, ZONES, Kind, Zone
from tests.fakes.aws.networks import Networks
from tests.fakes.aws.quirks import Quirks
from tests.fakes.aws.records import FakeInstance, Phase, SpotRequest
from tests.fakes.aws.volumes import Volumes
from tests.fakes.aws.wire import Refusal
from tests.fakes.cloud import NOTHING, POWERED_OFF, FakeCloud, path_with_shutdown

ACCESS_KEY: Final = "AKIAFAKEFAKEFAKEFAKE"
NOTICE: Final = timedelta(minutes=2)
GP3_MICRO_USD_PER_GB_MONTH: Final = 80_000
GP3_MICRO_USD_PER_MB_PER_S_MONTH: Final = 40_000
ADDRESS_MICRO_USD_PER_HOUR: Final = 5_000


class Ec2Cloud(FakeCloud):
    """One account at a fake AWS.

    Attributes:
        prices: by pool (`type:zone`), every change of the spot price, oldest first; an unlisted pool is not sold.
        offered: pools that exist on-demand.
        quotas: vCPUs by Service Quotas code; `quotas_in` where a region has others.
    """

    def __init__(
        self, root: Path, *, clock: HostClock, quirks: Quirks | None = None, access_key: str = ACCESS_KEY
    ) -> None:
        super().__init__(root, clock=clock, path=path_with_shutdown(root))
        self.quirks = quirks or Quirks()
        self.access_key = access_key
        self.kinds: dict[str, Kind] = {}
        self.zones: dict[str, Zone] = {}
        self.prices: dict[str, list[tuple[datetime, str]]] = {}
        self.offered: set[str] = set()
        self.instances: dict[str, FakeInstance] = {}
        self.quotas = {
            "L-3819A6DF": 64.0,
            "L-7212CCBC": 96.0,
            "L-C4BD4855": 192.0,
            "L-DB2E81BA": 64.0,
            "L-417A185B": 0.0,
            "L-34B43A08": 64.0,
            "L-1216C47A": 64.0,
        }
        self.quotas_in: dict[tuple[str, str], float] = {}
        self.volumes = Volumes()
        self.networks = Networks()
        self.tokens: dict[tuple[str, str], tuple[object, list[str]]] = {}
        self._ids = count(0x0A1B2C3D4E5F60001)

    # --- what the market does -------------------------------------------------------------------------------------

    def stock_usual(self) -> None:
        """Every kind of the catalogue is sold in every zone; a little dearer in each next one."""
        since = self.clock.now() - timedelta(hours=5)
        for zone_no, zone in enumerate(ZONES):
            for kind in KINDS:
                usd = float(kind.spot) * (1 + zone_no / 50)
                self.stock(kind, zone, f"{usd:.6f}", since=since)

    def stock(self, kind: Kind, zone: Zone, usd: str, *, since: datetime) -> None:
        """This kind is sold in this zone, on spot at this price since then."""
        with self.lock:
            self.kinds[kind.name] = kind
            self.zones[zone.name] = zone
            self.offered.add(f"{kind.name}:{zone.name}")
            self.prices[f"{kind.name}:{zone.name}"] = [(since, usd)]

    def set_price(self, pool: str, usd: str, *, at: datetime | None = None) -> None:
        """The spot price moves: running machines pay it, and those capped below it are taken away."""
        with self.lock:
            now = at or self.clock.now()
            self.prices[pool].append((now, usd))
            price = MicroUsdPerHour(micro_usd(usd))
            for instance in list(self.instances.values()):
                if instance.pool != pool or instance.spot is None or not instance.phase.exists:
                    continue
                if instance.max_price is not None and instance.max_price < price:
                    self._take(instance, now, code="instance-terminated-by-price")
                elif instance.phase is Phase.RUNNING:
                    self.ledger.price(instance.instance_id, at=now, compute=price)

    def price_now(self, pool: str, at: datetime | None = None) -> MicroUsdPerHour | None:
        """What the pool costs on spot; `None` where it is not sold."""
        now = at or self.clock.now()
        changes = [usd for since, usd in self.prices.get(pool, ()) if since <= now]
        return MicroUsdPerHour(micro_usd(changes[-1])) if changes else None

    def costs(self, instance: FakeInstance, at: datetime | None = None) -> MicroUsdPerHour:
        """What the instance costs per hour while it runs."""
        if instance.spot is None:
            return MicroUsdPerHour(micro_usd(self.on_demand_usd(instance.kind, instance.zone.region)))
        return self.price_now(instance.pool, at) or NOTHING

    def on_demand_usd(self, kind: Kind, region: str) -> Decimal:
        """The list price per hour: a tenth dearer outside us-east-1."""
        usd = Decimal(kind.on_demand)
        return usd if region == "us-east-1" else usd * Decimal("1.1")

    def interrupt(self, instance_id: str, *, notice: bool = True, rebalance: bool = False) -> None:
        """EC2 wants the machine back: its request says so at once, the machine has two minutes, or none."""
        with self.lock:
            instance, now = self.instances[instance_id], self.clock.now()
            if instance.spot is None:
                raise ValueError(f"{instance_id} is no spot instance")
            if not notice:
                self._take(instance, now, code="instance-terminated-no-capacity")
                return
            if rebalance:
                instance.rebalance_at = now
            instance.action_at = now + NOTICE
            self._mark(instance.spot, "instance-terminated-no-capacity", now, state="closed")
            self.at(instance.action_at, partial(self._take_announced, instance))
        self.advance()

    def recommend_rebalance(self, instance_id: str) -> None:
        """The machine's metadata service says that it is at risk."""
        self.instances[instance_id].rebalance_at = self.clock.now()

    def fail_at_launch(self, instance_id: str) -> None:
        """The machine that was `pending` never comes up."""
        with self.lock:
            reason = ("Server.InternalError", "Server.InternalError: Internal error on launch")
            self._end(self.instances[instance_id], self.clock.now(), reason)

    def add_foreign(self, tags: Mapping[str, str], *, spot: bool = True) -> FakeInstance:
        """Somebody's running machine in the same account, without a process."""
        with self.lock:
            kind, zone = KINDS[0], ZONES[0]
            instance = self._new(kind, zone, image="ami-0foreign", token="", tags=tags, user_data="", volume_gb=8)
            instance.runs, instance.phase, instance.running_at = False, Phase.RUNNING, instance.launched_at
            if spot:
                instance.spot = self._request(tags, instance.launched_at)
            return instance

    # --- what time does -------------------------------------------------------------------------------------------

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for instance in list(self.instances.values()):
            if instance.phase is Phase.RUNNING and instance.instance_id in known:
                status = self.machines.status(instance.instance_id)
                # A script that ends leaves its machine running, unless it shut the machine down.
                off = (self.machines.home(instance.instance_id) / POWERED_OFF).exists()
                if off or status.state is HostMachineState.LOST:
                    self.shut_down_from_inside(instance.instance_id, at=status.ended_at or now)

    def shut_down_from_inside(self, instance_id: str, *, at: datetime | None = None) -> None:
        """The machine's own `shutdown` was called."""
        reason = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
        with self.lock:
            instance = self.instances[instance_id]
            if instance.behaviour == "stop":
                self.machines.kill(instance_id)
                instance.phase, instance.reason = Phase.STOPPED, reason
                self.ledger.paused(instance_id, at=at or self.clock.now(), note="stopped")
                return
            self._end(instance, at or self.clock.now(), reason, request_code="instance-terminated-by-user")

    # --- what the customer does -----------------------------------------------------------------------------------

    def launch(
        self,
        kind: Kind,
        zone: Zone,
        *,
        image: str,
        token: str,
        tags: Mapping[str, str],
        request_tags: Mapping[str, str],
        user_data: str,
        volume_gb: int,
        spot: bool,
        max_price: MicroUsdPerHour | None,
        behaviour: str,
        volume_mb_per_s: int = 125,
        count_min: int = 1,
        count_max: int = 1,
        placement_group: str = "",
    ) -> list[FakeInstance]:
        """As many machines as there is room for are `pending`, in one reservation.

        Raises:
            Refusal: there are fewer than `count_min`; nothing was launched.
        """
        with self.lock:
            pool = f"{kind.name}:{zone.name}"
            refusal = self.quirks.refuse_launch or self.quirks.pool_refusals.get(pool)
            if refusal is not None:
                raise Refusal(refusal[0], refusal[2], refusal[1])
            if pool not in self.offered:
                raise Refusal(
                    "Unsupported", f"Your requested instance type ({kind.name}) is not supported in {zone.name}."
                )
            spot = spot and not self.quirks.sells_on_demand
            if self.quirks.enforce_quotas:
                self._check_quota(kind, zone, spot=spot, machines=count_min)
            number = min(count_max, self.quirks.room.get(pool, count_max))
            if number < count_min:
                raise no_capacity(kind.name, zone.name)
            price = self.price_now(pool)
            if spot and price is None:
                raise no_capacity(kind.name, zone.name)
            if spot and price is not None and max_price is not None and max_price < price:
                raise Refusal("SpotMaxPriceTooLow", "Your Spot request price is lower than the minimum required.")
            launched: list[FakeInstance] = []
            for index in range(number):
                instance = self._new(
                    kind,
                    zone,
                    image=image,
                    token=token,
                    tags=tags,
                    user_data=user_data,
                    volume_gb=volume_gb,
                    volume_mb_per_s=volume_mb_per_s,
                )
                instance.behaviour, instance.placement_group = behaviour, placement_group
                instance.launch_index = index
                instance.reservation = launched[0].reservation if launched else instance.reservation
                if spot:
                    instance.spot, instance.max_price = self._request(request_tags, instance.launched_at), max_price
                self.at(instance.launched_at + self.quirks.boot, partial(self._come_up, instance))
                launched.append(instance)
            if pool in self.quirks.room:
                self.quirks.room[pool] -= number
            return launched

    def visible(self, region: str) -> list[FakeInstance]:
        """The instances that a listing of this region shows, oldest first."""
        with self.lock:
            now, quirks = self.clock.now(), self.quirks
            return [
                instance
                for instance in self.instances.values()
                if instance.zone.region == region
                and instance.launched_at + quirks.list_lag <= now
                and instance.instance_id not in quirks.unlisted
                and (instance.ended_at is None or now < instance.ended_at + quirks.lingers)
            ]

    def terminate(self, instance_ids: Iterable[str], region: str) -> list[tuple[FakeInstance, Phase]]:
        """The instances end, each with its phase before; one unknown id and none does.

        Raises:
            Refusal: an id is unknown.
        """
        with self.lock:
            found = [self.instances.get(instance_id) for instance_id in instance_ids]
            ended = []
            for instance_id, instance in zip(instance_ids, found, strict=True):
                if instance is None or instance.zone.region != region:
                    raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist")
            for instance in found:
                if instance is not None:
                    ended.append((instance, instance.phase))
                    reason = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
                    self._end(instance, self.clock.now(), reason, request_code="instance-terminated-by-user")
            return ended

    def billed(self, instance_id: str, until: datetime | None = None) -> int:
        """Micro-dollars: per second from `running`, 60 s at least, and free where EC2 interrupts in the first hour.

        The disk costs in every case.
        """
        now = until or self.clock.now()
        instance = self.instances[instance_id]
        own = [span for span in segments(read_ledger(self.ledger_path)) if span.machine_id == instance_id]
        disk = sum(cost(span.storage, min(span.end or now, now) - span.start) for span in own)
        began, ended = instance.running_at, instance.ended_at
        if began is None or (instance.interrupted and ended is not None and ended - began < timedelta(hours=1)):
            return int(disk)
        compute = sum(cost(span.compute, min(span.end or now, now) - span.start) for span in own)
        return int(disk + max(compute, cost(self.costs(instance, began), timedelta(seconds=60))))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _check_quota(self, kind: Kind, zone: Zone, *, spot: bool, machines: int) -> None:
        """
        Raises:
            Refusal: with these machines the account would have more vCPUs of the family in the region than it may.
        """
        code = kind.quota(spot=spot)
        used = sum(
            i.kind.vcpus
            for i in self.instances.values()
            if i.phase.exists and i.zone.region == zone.region and i.kind.quota(spot=i.spot is not None) == code
        )
        if used + kind.vcpus * machines <= self.quotas_in.get((zone.region, code), self.quotas[code]):
            return
        if spot:
            raise Refusal("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise Refusal("VcpuLimitExceeded", "You have requested more vCPU capacity than your current vCPU limit.")

    def _new(
        self,
        kind: Kind,
        zone: Zone,
        *,
        image: str,
        token: str,
        tags: Mapping[str, str],
        user_data: str,
        volume_gb: int,
        volume_mb_per_s: int = 125,
    ) -> FakeInstance:
        number = next(self._ids)
        instance = FakeInstance(
            instance_id=f"i-{number:017x}",
            reservation=f"r-{number:017x}",
            address=f"127.77.{number % 65_536 // 256}.{number % 256}",
            kind=kind,
            zone=zone,
            image=image,
            token=token,
            tags=dict(tags),
            user_data=user_data,
            volume_gb=volume_gb,
            launched_at=self.clock.now(),
        )
        self.instances[instance.instance_id] = instance
        throughput = max(0, volume_mb_per_s - 125) * GP3_MICRO_USD_PER_MB_PER_S_MONTH
        monthly = volume_gb * GP3_MICRO_USD_PER_GB_MONTH + throughput
        disk = MicroUsdPerHour(-(-monthly // 720) + ADDRESS_MICRO_USD_PER_HOUR)
        label = instance.label or ""
        self.ledger.open(instance.instance_id, label, at=instance.launched_at, compute=NOTHING, storage=disk)
        return instance

    def _request(self, tags: Mapping[str, str], at: datetime) -> SpotRequest:
        return SpotRequest(
            request_id=f"sir-{next(self._order):08x}",
            state="active",
            code="fulfilled",
            message="Your spot request is fulfilled.",
            updated_at=at,
            tags=dict(tags),
        )

    def _mark(self, spot: SpotRequest, code: str, at: datetime, *, state: str) -> None:
        spot.code, spot.state, spot.updated_at = code, state, at
        spot.message = f"The request is {state}: {code}."

    def _come_up(self, instance: FakeInstance, at: datetime) -> None:
        if instance.phase is not Phase.PENDING:
            return
        instance.phase, instance.running_at = Phase.RUNNING, at
        self.ledger.price(instance.instance_id, at=at, compute=self.costs(instance, at))
        if instance.user_data:
            env = {
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self.base_url}/imds/{instance.instance_id}",
                "FAKE_EC2_INSTANCE": instance.instance_id,
            }
            self.machines.start(instance.instance_id, instance.user_data, env)

    def _take_announced(self, instance: FakeInstance, at: datetime) -> None:
        self._take(instance, at, code="instance-terminated-no-capacity")

    def _take(self, instance: FakeInstance, at: datetime, *, code: str) -> None:
        if instance.phase.exists:
            instance.interrupted = True
            reason = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")
            self._end(instance, at, reason, request_code=code)

    def _end(
        self, instance: FakeInstance, at: datetime, reason: tuple[str, str], *, request_code: str | None = None
    ) -> None:
        if not instance.phase.exists:
            return
        self.machines.kill(instance.instance_id)
        self.volumes.machine_ended(instance.instance_id)
        instance.phase, instance.reason, instance.ended_at = Phase.SHUTTING_DOWN, reason, at
        self.ledger.end(instance.instance_id, at=at, note=reason[0])
        if instance.spot is not None and request_code is not None:
            self._mark(instance.spot, request_code, at, state="closed")
        self.at(at + self.quirks.shutting_down, partial(self._gone, instance))

    def _gone(self, instance: FakeInstance, _: datetime) -> None:
        instance.phase = Phase.TERMINATED


def no_capacity(kind: str, zone: str) -> Refusal:
    """How EC2 says that a pool is empty: a *server* error, which SDKs retry by themselves."""
    text = f"We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone})."
    return Refusal("InsufficientInstanceCapacity", text, 500)
