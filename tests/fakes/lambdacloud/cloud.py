"""The state of the fake: instances and their processes, belongings of the account, and the bill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour, cost, micro_usd
from spotd_providers.local.hosts import HostClock, HostMachineState, Segment, read_ledger, segments
from tests.fakes.cloud import NOTHING, POWERED_OFF, FakeCloud, path_with_shutdown
from tests.fakes.lambdacloud.records import (
    ACCOUNT_KEY,
    Failure,
    FileSystem,
    Kind,
    LambdaInstance,
    Phase,
    Quirks,
    Refusal,
    no_such,
)

FILE_SYSTEM_USD_PER_GIB_MONTH: Final = 0.20
HOURS_PER_MONTH: Final = 720
_MINUTE: Final = timedelta(minutes=1)
_FIRST_ID: Final = 0x0920582C7FF041399E34823A0BE62549


class LambdaCloud(FakeCloud):
    """One account at a fake Lambda Cloud."""

    def __init__(
        self, root: Path, *, clock: HostClock, quirks: Quirks | None = None, api_key: str = ACCOUNT_KEY
    ) -> None:
        super().__init__(root, clock=clock, path=path_with_shutdown(root))
        self.quirks = quirks or Quirks()
        self.api_key = api_key
        self.kinds: dict[str, Kind] = {}
        self.instances: dict[str, LambdaInstance] = {}
        self.ssh_keys: dict[str, dict[str, str]] = {}
        self.file_systems: dict[str, FileSystem] = {}
        self.rulesets: dict[str, str] = {}
        self._failures: dict[str, Failure] = {}
        self._ids = count(_FIRST_ID)

    # --- what the market and the faults do ------------------------------------------------------------------------

    def stock(self, *kinds: Kind) -> None:
        """Put these types on the price list."""
        with self.lock:
            self.kinds.update({kind.name: kind for kind in kinds})

    def sell_out(self, kind: str, region: str | None = None) -> None:
        """Use up the type's capacity, in one region or in all."""
        with self.lock:
            free = self.kinds[kind].free
            free.update(dict.fromkeys([region] if region else list(free), 0))

    def set_price(self, kind: str, cents: int) -> None:
        """Change the type's price; running instances pay it only under `price_follows`."""
        with self.lock:
            self.kinds[kind].cents = cents
            for instance in self.instances.values():
                if self.quirks.price_follows and instance.kind.name == kind and instance.phase.exists:
                    instance.cents = cents
                    if instance.healthy_at is not None:
                        self.ledger.price(instance.instance_id, at=self.clock.now(), compute=instance.price)

    def fail_next_boot(self, kind: str, failure: Failure) -> None:
        """The next instance of this type does not come up."""
        with self.lock:
            self._failures[kind] = failure

    def make_unhealthy(self, instance_id: str) -> None:
        """The instance's health checks fail; it is billed on, and what runs in it is killed with its host."""
        with self.lock:
            self.machines.kill(instance_id)
            self.instances[instance_id].phase = Phase.UNHEALTHY

    def recover(self, instance_id: str) -> None:
        """An unhealthy instance passes its health checks again."""
        with self.lock:
            self._activate(self.instances[instance_id], self.clock.now())

    def preempt(self, instance_id: str) -> None:
        """The instance is taken away, in the one word of the enumeration that no page explains."""
        with self.lock:
            self._take(self.instances[instance_id], Phase.PREEMPTED, bills=self.quirks.bills_preempted)

    def end_by_itself(self, instance_id: str) -> None:
        """The instance is `terminated` although no customer asked for it."""
        with self.lock:
            self._take(self.instances[instance_id], Phase.TERMINATED)

    def vanish(self, instance_id: str) -> None:
        """The instance has ended and is shown nowhere."""
        with self.lock:
            self._take(self.instances[instance_id], Phase.TERMINATED)
            self.instances[instance_id].vanished = True

    def add_foreign(self, name: str | None, tags: Mapping[str, str] | None = None) -> LambdaInstance:
        """Somebody's running instance in the same account, without a process."""
        with self.lock:
            rows = [{"key": key, "value": value} for key, value in (tags or {}).items()]
            kind = next(iter(self.kinds.values()))
            instance = self._new(kind, "us-west-1", {"name": name, "tags": rows, "ssh_key_names": ["laptop"]})
            instance.is_ours = False
            instance.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._activate(instance, self.clock.now())
            return instance

    def fill_file_system(self, file_system_id: str, gib: float) -> None:
        """So much is stored from now on."""
        with self.lock:
            system, now = self.file_systems[file_system_id], self.clock.now()
            system.gib = gib
            monthly = FILE_SYSTEM_USD_PER_GIB_MONTH * gib
            storage = MicroUsdPerHour(micro_usd(round(monthly / HOURS_PER_MONTH, 9)))
            self.ledger.open(file_system_id, system.name, at=now, compute=NOTHING, storage=storage)

    # --- what time does -------------------------------------------------------------------------------------------

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for instance in list(self.instances.values()):
            if instance.phase is not Phase.ACTIVE or instance.instance_id not in known or instance.is_off:
                continue
            status = self.machines.status(instance.instance_id)
            if (self.machines.home(instance.instance_id) / POWERED_OFF).exists():
                self._shut_down(instance, status.ended_at or now)
            elif status.state is HostMachineState.LOST:
                # A script that ends leaves its machine running; processes that are gone without an end do not.
                instance.phase = Phase.UNHEALTHY

    def _shut_down(self, instance: LambdaInstance, at: datetime) -> None:
        self.machines.kill(instance.instance_id)
        instance.is_off = True
        if self.quirks.after_shutdown is Phase.TERMINATED:
            self._take(instance, Phase.TERMINATED, at=at)
        else:
            instance.phase = self.quirks.after_shutdown

    # --- what the customer does -----------------------------------------------------------------------------------

    def launch(self, body: Mapping[str, Any]) -> list[LambdaInstance]:
        """Start as many instances as a checked body asks for.

        Raises:
            Refusal: none was started.
        """
        with self.lock:
            quirks = self.quirks
            kind = self.kinds.get(body["instance_type_name"])
            if kind is None:
                raise no_such("instance type")
            region, number = body["region_name"], int(body.get("quantity", 1))
            self._check_belongings(body, region)
            gpus = sum(one.kind.gpus for one in self.instances.values() if one.phase.exists)
            if quirks.quota_gpus is not None and gpus + kind.gpus * number > quirks.quota_gpus:
                raise Refusal("global/quota-exceeded", "Quota exceeded.")
            if quirks.sells_nothing or kind.free.get(region, 0) < number:
                text = "Not enough capacity to fulfill launch request."
                raise Refusal("instance-operations/launch/insufficient-capacity", text)
            kind.cents = quirks.price_at_next_launch.pop(kind.name, kind.cents)
            kind.free[region] -= number
            started = [self._new(kind, region, body) for _ in range(number)]
            for instance in started:
                instance.failure = self._failures.pop(kind.name, None)
                instance.deaths_left = quirks.undead
                self._boot(instance, instance.launched_at)
            if quirks.fail_after_launch is not None:
                code, quirks.fail_after_launch = quirks.fail_after_launch, None
                raise Refusal(code, "The request could not be completed.")
            return started

    def visible(self) -> list[LambdaInstance]:
        """The instances that a listing shows, oldest first."""
        with self.lock:
            found = [one for one in self.instances.values() if self._is_shown(one, self.quirks.list_lag)]
            return [one for one in found if one.instance_id not in self.quirks.hidden]

    def shown(self, instance_id: str) -> LambdaInstance:
        """The instance behind its own route.

        Raises:
            Refusal: unknown, gone, or too young to be seen.
        """
        with self.lock:
            instance = self.instances.get(instance_id)
            if instance is None or not self._is_shown(instance, self.quirks.show_lag):
                raise no_such("instance")
            return instance

    def terminate(self, instance_ids: Sequence[str]) -> list[LambdaInstance]:
        """End the instances and their bills; one unknown id and none ends.

        Raises:
            Refusal: an id is unknown or gone, or (by a quirk) is ending already.
        """
        with self.lock:
            found = self._all(instance_ids)
            if self.quirks.terminate_again_conflicts and any(one.phase is Phase.TERMINATING for one in found):
                raise Refusal("global/conflict", "The instance is already being terminated.")
            for instance in found:
                if instance.deaths_left > 0:
                    instance.deaths_left -= 1
                elif instance.phase is not Phase.TERMINATING:
                    self._terminate(instance, self.clock.now())
            return found

    def restart(self, instance_ids: Sequence[str]) -> list[LambdaInstance]:
        """Boot the instances again; they are billed on, and cloud-init runs user data at the first boot only.

        Raises:
            Refusal: an id is unknown or gone, or its instance cannot be restarted now.
        """
        with self.lock:
            found = self._all(instance_ids)
            if any(one.phase not in (Phase.ACTIVE, Phase.UNHEALTHY) for one in found):
                raise Refusal("global/conflict", "The instance cannot be restarted in its present state.")
            for instance in found:
                self.machines.kill(instance.instance_id)
                instance.phase, instance.is_off = Phase.BOOTING, True
                instance.boot_no += 1
                self._boot(instance, self.clock.now())
            return found

    def is_in_use(self, system: FileSystem) -> bool:
        """Whether an instance mounts the file system, or did a moment ago."""
        now = self.clock.now()
        return any(
            self._mounts(one, system) and (one.ended_at is None or now < one.ended_at + self.quirks.file_system_release)
            for one in self.instances.values()
        )

    def delete_file_system(self, file_system_id: str) -> None:
        """Delete the file system and end its bill.

        Raises:
            Refusal: there is none, or it is in use.
        """
        with self.lock:
            system = self.file_systems.get(file_system_id)
            if system is None:
                raise no_such("file system")
            if self.is_in_use(system):
                raise Refusal("filesystems/filesystem-in-use", "The file system is in use.")
            if self.ledger.is_open(file_system_id):
                self.ledger.end(file_system_id, at=self.clock.now(), note="deleted")
            del self.file_systems[file_system_id]

    # --- money ----------------------------------------------------------------------------------------------------

    def billed(self, machine_id: str, until: datetime | None = None) -> int:
        """Micro-dollars of one instance or file system: an instance in whole minutes from passing its health checks."""
        return self._bill([one for one in self._spans() if one.machine_id == machine_id], until or self.clock.now())

    def spent_usd(self) -> float:
        """Sum of the ledger in whole minutes per instance, $."""
        spans: dict[str, list[Segment]] = {}
        for span in self._spans():
            spans.setdefault(span.machine_id, []).append(span)
        return sum(self._bill(own, self.clock.now()) for own in spans.values()) / MICRO

    def _spans(self) -> Iterable[Segment]:
        return segments(read_ledger(self.ledger_path))

    def _bill(self, spans: Sequence[Segment], now: datetime) -> int:
        total = sum(int(cost(one.storage, max(timedelta(0), min(one.end or now, now) - one.start))) for one in spans)
        paid = [one for one in spans if one.compute and one.start < now]
        if not paid:
            return total
        began, ended = paid[0].start, min(paid[-1].end or now, now)
        minutes = -((began - ended) // _MINUTE) if self.quirks.minute_rounds_up else (ended - began) // _MINUTE
        until = began + minutes * _MINUTE
        for span, end in zip(paid, [*(one.start for one in paid[1:]), until], strict=True):
            total += int(cost(span.compute, max(timedelta(0), min(end, until) - span.start)))
        return total

    # --- inside ---------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        return f"{next(self._ids):032x}"

    def _check_belongings(self, body: Mapping[str, Any], region: str) -> None:
        """
        Raises:
            Refusal: a key, file system or ruleset that the body names does not exist, or is in another region.
        """
        names = {row["name"] for row in self.ssh_keys.values()}
        if any(name not in names for name in body["ssh_key_names"]):
            raise no_such("SSH key")
        if any(row["id"] not in self.rulesets for row in body.get("firewall_rulesets") or []):
            raise no_such("firewall ruleset")
        by_name = {system.name: system for system in self.file_systems.values()}
        wanted = [by_name.get(name) for name in body.get("file_system_names") or []]
        wanted += [self.file_systems.get(row["file_system_id"]) for row in body.get("file_system_mounts") or []]
        for system in wanted:
            if system is None:
                raise no_such("file system")
            if system.region != region:
                text = f"File system {system.name} is not in region {region}."
                raise Refusal("instance-operations/launch/file-system-in-wrong-region", text)

    def _all(self, instance_ids: Sequence[str]) -> list[LambdaInstance]:
        found = [self.instances.get(instance_id) for instance_id in instance_ids]
        known = [one for one in found if one is not None and (one.phase.exists or self._is_ending(one))]
        if len(known) != len(found):
            raise no_such("instance")
        return known

    def _is_ending(self, instance: LambdaInstance) -> bool:
        bills = instance.phase is Phase.PREEMPTED and self.ledger.is_open(instance.instance_id)
        return instance.phase is Phase.TERMINATING or bills

    def _is_shown(self, instance: LambdaInstance, lag: timedelta) -> bool:
        now, over = self.clock.now(), instance.phase in (Phase.TERMINATED, Phase.PREEMPTED)
        if instance.vanished or now < instance.launched_at + lag:
            return False
        ended_at = instance.ended_at if over and not self._is_ending(instance) else None
        return ended_at is None or now < ended_at + self.quirks.lingers

    @staticmethod
    def _mounts(instance: LambdaInstance, system: FileSystem) -> bool:
        mounts = [row["file_system_id"] for row in instance.body.get("file_system_mounts") or []]
        return system.name in (instance.body.get("file_system_names") or []) or system.file_system_id in mounts

    def _new(self, kind: Kind, region: str, body: Mapping[str, Any]) -> LambdaInstance:
        instance = LambdaInstance(
            instance_id=self.new_id(),
            kind=kind,
            region=region,
            body=dict(body),
            cents=kind.cents,
            launched_at=self.clock.now(),
            name=body.get("name"),
            tags=list(body.get("tags") or []),
        )
        self.instances[instance.instance_id] = instance
        self.ledger.open(instance.instance_id, instance.label or "", at=instance.launched_at, compute=NOTHING)
        return instance

    def _boot(self, instance: LambdaInstance, at: datetime) -> None:
        takes = self.quirks.boot_eight_gpus if instance.kind.gpus >= 8 else self.quirks.boot
        self.at(at + takes, partial(self._come_up, instance, instance.boot_no))

    def _come_up(self, instance: LambdaInstance, boot_no: int, at: datetime) -> None:
        if instance.phase is not Phase.BOOTING or instance.boot_no != boot_no or instance.failure is Failure.STUCK:
            return
        if instance.failure is Failure.UNHEALTHY:
            instance.phase = Phase.UNHEALTHY
            return
        is_first = instance.healthy_at is None
        self._activate(instance, at)
        if is_first and str(instance.body.get("user_data") or "").startswith("#!"):
            self.machines.start(instance.instance_id, instance.body["user_data"])

    def _activate(self, instance: LambdaInstance, at: datetime) -> None:
        instance.phase = Phase.ACTIVE
        if instance.healthy_at is None:
            instance.healthy_at = at
            self.ledger.price(instance.instance_id, at=at, compute=instance.price)

    def _terminate(self, instance: LambdaInstance, at: datetime) -> None:
        self.machines.kill(instance.instance_id)
        if instance.ended_at is None and instance.is_ours:
            instance.kind.free[instance.region] = instance.kind.free.get(instance.region, 0) + 1
        instance.phase, instance.ended_at = Phase.TERMINATING, at
        if not self.quirks.bills_terminating:
            self.ledger.end(instance.instance_id, at=at, note="terminated by its owner")
        self.at(at + self.quirks.terminating, partial(self._gone, instance))

    def _gone(self, instance: LambdaInstance, at: datetime) -> None:
        if instance.phase is Phase.TERMINATING:
            instance.phase, instance.ended_at = Phase.TERMINATED, at
            self.ledger.end(instance.instance_id, at=at, note="terminated by its owner")

    def _take(self, instance: LambdaInstance, phase: Phase, *, bills: bool = False, at: datetime | None = None) -> None:
        now = at or self.clock.now()
        self.machines.kill(instance.instance_id)
        if instance.ended_at is None and instance.is_ours:
            instance.kind.free[instance.region] = instance.kind.free.get(instance.region, 0) + 1
        instance.phase, instance.ended_at = phase, now
        if not bills:
            self.ledger.end(instance.instance_id, at=now, note=f"{phase.value} by Lambda")
