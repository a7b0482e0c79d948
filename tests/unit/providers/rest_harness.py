"""The part of a harness that is the same for every fake built on `tests.fakes.rest`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.values import AttemptKey, Market
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine
from spotd_providers.testkit.serve import Call, Canned, Faults, Served
from tests.fakes.rest import RestCloud, RestRefusal


class RestHarness(Harness):
    """One plain market on the wire."""

    cloud: RestCloud[Any, Any]
    runs: ClassVar[str] = "running"
    ends: ClassVar[str] = "deleting"
    who: ClassVar[str]

    def __init__(
        self, cloud: RestCloud[Any, Any], faults: Faults, served: Served, folder: Path, clock: FakeClock, **more: Any
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=CANARY)
        self.cloud = cloud
        self.fake_clock = clock
        self.more = more

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        return [
            WorldMachine(
                machine_id=one.machine_id,
                label=one.label,
                exists=one.exists and one.status != self.ends,
                running=one.exists and one.status == self.runs,
                market=Market.SPOT if one.is_spot else Market.ON_DEMAND,
                price=one.price,
                start_script=one.script,
            )
            for one in self.cloud.rented.values()
        ]

    def edit_price(self, raw: str, place: Callable[[Any, str], None]) -> None:
        """Let `place` put a mark into the next answers about offers, which then is this raw text."""
        mark = "raw-price-goes-here"

        def write_price(true: Canned) -> Canned:
            answer = json.loads(true.body)
            place(answer, mark)
            body = json.dumps(answer).encode().replace(json.dumps(mark).encode(), raw.encode())
            return Canned(status=true.status, body=body, headers=true.headers)

        self.faults.edit(Call.OFFERS, write_price, times=1000)

    def refuse_launches(self, refusal: RestRefusal) -> None:
        self.cloud.quirks.refusals[Call.LAUNCH] = refusal

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = self.cloud.quirks.show_lag = lag

    def list_only_part(self) -> None:
        raise NotApplicable(f"{self.who} lists all machines in one answer, which is whole or is none")

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_row[machine_id] = "not a row"

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.add_foreign(key)

    def add_foreign_machines(self) -> Sequence[str]:
        return [self.add_foreign(name) for name in ("gpu1", f"spotd-{self.install}2-j0b1-1", "my-notebook")]

    def add_foreign(self, name: str) -> str:
        raise NotImplementedError

    def pause(self, machine_id: str) -> None:
        raise NotApplicable(f"{self.who} does not outbid machines: it takes them away for good")

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable(f"{self.who} gives no notice")

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable(f"{self.who} shows no machine whose host it cannot reach")

    def set_state(self, machine_id: str, state: OddState) -> None:
        match state:
            case OddState.UNHEARD_OF:
                self.cloud.rename(machine_id, "meditating")
            case OddState.PROVISION_FAILED:
                self.cloud.rented[machine_id].boot_no += 1
                self.cloud.rename(machine_id, "error")
            case OddState.ENDED_BY_ITSELF:
                self.cloud.advance()
                self.cloud._power_off(self.cloud.rented[machine_id], self.clock.now())

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(machine_id)
