"""The state of the fake: asks, contracts and their processes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour, micro_usd
from spotd_providers.local.hosts import HostClock, HostMachineState
from tests.fakes.cloud import FOR_EVER, NOTHING, FakeCloud
from tests.fakes.vastai.asks import Ask
from tests.fakes.vastai.contracts import Contract, Failure, Phase
from tests.fakes.vastai.quirks import Quirks
from tests.fakes.vastai.refusal import no_such_ask, no_such_instance, said

ACCOUNT_KEY: Final = "fake-vast-account-key"
ARGUMENTS_CHARS_MAX: Final = 4096
BID_USD_MAX: Final = 128.0


class VastCloud(FakeCloud):
    """One account at a fake vast.ai.

    Attributes:
        credit_usd: what the account was charged with.
    """

    def __init__(
        self,
        root: Path,
        *,
        clock: HostClock,
        quirks: Quirks | None = None,
        credit_usd: float = 100.0,
        api_key: str = ACCOUNT_KEY,
    ) -> None:
        super().__init__(root, clock=clock)
        self.quirks = quirks or Quirks()
        self.credit_usd = credit_usd
        self.api_key = api_key
        self.asks: dict[int, Ask] = {}
        self.past_usd: dict[str, float] = {"RTX 4090": 0.31, "H100 SXM": 1.9}
        """What a GPU-hour has cost, by the names of GPUs."""
        self.contracts: dict[int, Contract] = {}
        self.price_increases: list[object] = []
        self.benchmarks: list[dict[str, Any]] = []
        self._failures: dict[int, Failure] = {}
        self._contract_ids = count(27_000_001)

    # --- what the market does -------------------------------------------------------------------------------------

    def stock(self, *asks: Ask) -> None:
        """These asks are for sale."""
        with self.lock:
            self.asks.update({ask.ask_id: ask for ask in asks})

    def withdraw(self, ask_id: int) -> None:
        """The ask is no longer for sale."""
        with self.lock:
            self.asks.pop(ask_id, None)

    def set_min_bid(self, ask_id: int, usd: float, *, at: datetime | None = None) -> None:
        """The lowest winning bid of an ask moves: contracts below it lose their GPU, those above may get it back."""
        with self.lock:
            self._ask_of(ask_id).min_bid = usd
            self._settle_bids(at or self.clock.now())

    def set_on_demand(self, ask_id: int, usd: float) -> None:
        """The on-demand price of an ask moves; contracts keep theirs."""
        with self.lock:
            self._ask_of(ask_id).dph_base = usd

    def outbid(self, contract_id: int, *, at: datetime | None = None) -> None:
        """Somebody bids a tenth more than this contract."""
        contract = self.contracts[contract_id]
        self.set_min_bid(contract.ask.ask_id, contract.price / MICRO * 1.1, at=at)

    def fail_next_boot(self, ask_id: int, failure: Failure) -> None:
        """The next machine bought from this ask does not come up."""
        with self.lock:
            self._failures[ask_id] = failure

    def lose_contact(self, contract_id: int, word: str | None) -> None:
        """The host is `offline` or `unknown`, or answers again; its container goes on meanwhile.

        Nothing of it is billed while it is offline, not even its disk.
        """
        with self.lock:
            contract = self.contracts[contract_id]
            contract.lost_contact = word
            self._bill_running(contract, self.clock.now())

    def lose_host(self, contract_id: int) -> None:
        """The host is offline for good, and its container with it."""
        self.lose_contact(contract_id, "offline")
        self.machines.kill(self.contracts[contract_id].machine)

    def _bill_running(self, contract: Contract, at: datetime) -> None:
        """Bill the GPU while the container is up and the disk while it exists, both only while the host is online."""
        if contract.lost_contact == "offline":
            self.ledger.price(contract.machine, at=at, compute=NOTHING, storage=NOTHING)
            return
        up = contract.phase in (Phase.RUNNING, Phase.FROZEN)
        storage = contract.ask.storage_per_hour(contract.disk_gb)
        self.ledger.price(contract.machine, at=at, compute=contract.price if up else NOTHING, storage=storage)

    def fail(self, contract_id: int) -> None:
        """The container cannot run."""
        self._end_container(contract_id, Phase.FAILED)

    def exit_container(self, contract_id: int) -> None:
        """The container's own process ended, be it before it was seen to run."""
        self._end_container(contract_id, Phase.EXITED)

    def _end_container(self, contract_id: int, phase: Phase) -> None:
        with self.lock:
            contract = self.contracts[contract_id]
            self.machines.kill(contract.machine)
            contract.phase = phase
            self._bill_running(contract, self.clock.now())

    def freeze(self, contract_id: int) -> None:
        """The host froze the container."""
        self.contracts[contract_id].phase = Phase.FROZEN

    def spend_everything(self) -> None:
        """The account has no credit left: every contract is stopped."""
        with self.lock:
            self.credit_usd = 0.0
            for contract in self._existing():
                self._halt(contract, Phase.STOPPED, self.clock.now(), "no credit")

    def add_foreign(self, label: str | None, *, ask: Ask | None = None, is_bid: bool = False) -> Contract:
        """Somebody's own machine in the same account, running without a process."""
        with self.lock:
            sold = ask or Ask(ask_id=0, machine_id=17_000 + len(self.contracts))
            contract = self._contract(
                sold, {"label": label, "image": "foreign", "disk": 10, "price": sold.min_bid}, is_bid=is_bid
            )
            contract.phase = Phase.RUNNING
            return contract

    # --- what time does -------------------------------------------------------------------------------------------

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for contract in self.contracts.values():
            offline = contract.lost_contact == "offline"  # how its container fares is seen when it is back
            if contract.phase is Phase.RUNNING and contract.machine in known and not offline:
                status = self.machines.status(contract.machine)
                if status.state is not HostMachineState.RUNNING:
                    contract.phase = Phase.EXITED
                    self.ledger.price(contract.machine, at=status.ended_at or now, compute=NOTHING)

    # --- what the customer does -----------------------------------------------------------------------------------

    def buy(self, ask_id: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a purchase.

        Raises:
            Refusal: nothing was bought, or (a bid too low) a stopped contract was left behind.
        """
        with self.lock:
            _check_purchase(body)
            if self.credit_left() <= 0:
                raise said(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
            if self.quirks.spend_rate_limit:
                raise said(400, "spend_rate_limit", "This account may not spend that fast yet.")
            ask = self.asks.get(ask_id)
            if ask is None or not self._is_free(ask):
                raise no_such_ask(ask_id, self.quirks.gone_status)
            bid = None if self.quirks.sells_on_demand else body.get("price")
            if bid is not None and bid < ask.min_bid - 1e-9:
                raise self._low_bid(ask, body)
            contract = self._contract(ask, body, is_bid=bid is not None)
            self._boot(contract, self.clock.now())
            return {"success": True, "new_contract": contract.contract_id, "instance_api_key": contract.api_key}

    def visible(self) -> list[Contract]:
        """The contracts a listing shows, oldest first."""
        with self.lock:
            now = self.clock.now()
            lag = self.quirks.list_lag
            return [contract for contract in self._existing() if contract.created_at + lag <= now]

    def shown(self, contract_id: int) -> Contract | None:
        """The contract behind its own route; `None` for a destroyed one.

        Raises:
            Refusal: unknown, or too young to be seen.
        """
        with self.lock:
            contract = self.contracts.get(contract_id)
            if contract is None or contract.created_at + self.quirks.list_lag > self.clock.now():
                raise no_such_instance(contract_id)
            if contract.shows_left > 0:
                contract.shows_left -= 1
                raise no_such_instance(contract_id)
            return None if contract.phase is Phase.GONE else contract

    def existing(self, contract_id: int) -> Contract:
        """The contract, if it was not destroyed.

        Raises:
            Refusal: there is none.
        """
        contract = self.contracts.get(contract_id)
        if contract is None or contract.phase is Phase.GONE:
            raise no_such_instance(contract_id)
        return contract

    def destroy(self, contract_id: int) -> None:
        """The contract, its processes and its bills have ended."""
        with self.lock:
            contract = self.existing(contract_id)
            self.machines.kill(contract.machine)
            contract.phase = Phase.GONE
            self.ledger.end(contract.machine, at=self.clock.now(), note="destroyed")

    def stop(self, contract_id: int) -> None:
        """The container is halted, its disk kept."""
        with self.lock:
            self._halt(self.existing(contract_id), Phase.STOPPED, self.clock.now(), "stopped by its owner")

    def start(self, contract_id: int) -> None:
        """The container boots again if its GPU can be had; else it waits as an outbid one."""
        with self.lock:
            contract = self.existing(contract_id)
            now = self.clock.now()
            if contract.phase in (Phase.STOPPED, Phase.EXITED) and contract.end_at > now:
                contract.phase = Phase.OUTBID
                self._settle_bids(now, forced=contract)

    def change_bid(self, contract_id: int, usd: float | None) -> None:
        """The contract bids this much; without a price, as much as wins now."""
        with self.lock:
            contract = self.existing(contract_id)
            if not contract.is_bid:
                raise said(400, "invalid_args", "error 400/3590: not an interruptible instance")
            price = (
                contract.ask.min_bid
                if usd is None
                else usd * (contract.ask.num_gpus if self.quirks.bid_is_per_gpu else 1)
            )
            if not 0.001 <= price <= 32 * contract.ask.num_gpus:
                raise said(400, "invalid_price", "error 400/3592: price out of range")
            contract.price = MicroUsdPerHour(micro_usd(price))
            if contract.phase is Phase.RUNNING:
                self._bill_running(contract, self.clock.now())
            self._settle_bids(self.clock.now())

    def credit_left(self) -> float:
        """What the account can still spend, $."""
        return self.credit_usd - self.spent_usd()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _ask_of(self, ask_id: int) -> Ask:
        rented = (contract.ask for contract in self.contracts.values() if contract.ask.ask_id == ask_id)
        return self.asks.get(ask_id) or next(rented)

    def _existing(self) -> list[Contract]:
        return [contract for contract in self.contracts.values() if contract.phase is not Phase.GONE]

    def is_for_sale(self, ask: Ask) -> bool:
        """Whether a search shows this ask."""
        with self.lock:
            return ask.ask_id in self.asks and self._is_free(ask)

    def _is_free(self, ask: Ask, *, but_for: Contract | None = None) -> bool:
        return ask.rentable and not any(
            contract is not but_for
            and contract.holds_gpu
            and contract.ask.machine_id == ask.machine_id
            and contract.ask.slots & ask.slots
            for contract in self.contracts.values()
        )

    def _contract(self, ask: Ask, body: Mapping[str, Any], *, is_bid: bool) -> Contract:
        contract_id = next(self._contract_ids)
        now = self.clock.now()
        usd = body["price"] if is_bid else ask.dph_base
        contract = Contract(
            contract_id=contract_id,
            ask=ask,
            label=body.get("label"),
            image=str(body.get("image") or ""),
            disk_gb=float(body.get("disk") or 10),
            is_bid=is_bid,
            price=MicroUsdPerHour(micro_usd(usd)),
            runtype=str(body.get("runtype") or "ssh"),
            onstart=body.get("onstart"),
            args=list(body.get("args") or []),
            env={str(name): str(value) for name, value in (body.get("env") or {}).items()},
            script=_script(body),
            api_key=f"fake-vast-instance-key-{contract_id}",
            created_at=now,
            end_at=now + timedelta(seconds=ask.duration_s),
            failure=self._failures.pop(ask.ask_id, None) or (None if self._may_pull(body) else Failure.LOGIN),
            shows_left=self.quirks.first_shows_missing,
        )
        self.contracts[contract_id] = contract
        storage = ask.storage_per_hour(contract.disk_gb)
        self.ledger.open(contract.machine, contract.label or "", at=now, compute=NOTHING, storage=storage)
        self.at(contract.end_at, partial(self._expire, contract))
        return contract

    def _may_pull(self, body: Mapping[str, Any]) -> bool:
        """Whether the image is public, or `image_login` is the login that its registry takes."""
        image = str(body.get("image") or "")
        user, password = self.private.get(image, (None, None))
        return user is None or shlex.split(str(body.get("image_login"))) == (
            ["-u", user, "-p", password, image.partition("/")[0]]
        )

    def _low_bid(self, ask: Ask, body: Mapping[str, Any]) -> Exception:
        text = f"error 400/3591: bid is below the current minimum of {ask.min_bid}"
        if not self.quirks.low_bid_leaves_contract:
            return said(400, "invalid_price", text)
        contract = self._contract(ask, body, is_bid=True)
        self._halt(contract, Phase.OUTBID, self.clock.now(), "bid too low")
        # The wording is not known; launchers go by `new_contract` alone.
        return said(self.quirks.low_bid_status, "bid_too_low", text, new_contract=contract.contract_id)

    def _boot(self, contract: Contract, at: datetime) -> None:
        contract.phase = Phase.BOOTING
        contract.boots_at = at + self.quirks.boot
        self.at(contract.boots_at, partial(self._come_up, contract, contract.boot_no))

    def _come_up(self, contract: Contract, boot_no: int, at: datetime) -> None:
        if contract.phase is not Phase.BOOTING or contract.boot_no != boot_no:
            return
        if contract.failure is not None:
            if contract.failure is not Failure.STUCK:
                contract.phase = Phase.FAILED
            return
        # Users' variables first: nobody can pretend to be another container. Ports are keys of `env`, too.
        env = {name: value for name, value in contract.env.items() if name.replace("_", "a").isalnum()}
        env |= {"CONTAINER_ID": contract.machine, "CONTAINER_API_KEY": contract.api_key, "VAST_URL": self.base_url}
        self.machines.start(contract.machine, contract.script, env)
        contract.phase = Phase.RUNNING
        if contract.boot_no == 1:
            self._bill_running(contract, at)
        else:
            self.ledger.resumed(contract.machine, at=at, compute=contract.price)

    def _halt(self, contract: Contract, phase: Phase, at: datetime, why: str) -> None:
        if contract.phase in (Phase.GONE, Phase.OUTBID, Phase.STOPPED):
            contract.phase = Phase.GONE if contract.phase is Phase.GONE else phase
            return
        self.machines.kill(contract.machine)
        contract.phase = phase
        contract.boot_no += 1
        self.ledger.paused(contract.machine, at=at, note=why)

    def _expire(self, contract: Contract, at: datetime) -> None:
        self._halt(contract, Phase.STOPPED, at, "contract ended")

    def _settle_bids(self, at: datetime, *, forced: Contract | None = None) -> None:
        """Every bid below its ask's minimum has lost its GPU; every outbid one that wins again boots again."""
        for contract in self._existing():
            wins = not contract.is_bid or contract.price >= micro_usd(contract.ask.min_bid)
            if contract.is_bid and not wins and contract.phase in (Phase.BOOTING, Phase.RUNNING, Phase.EXITED):
                self._halt(contract, Phase.OUTBID, at, "outbid")
            waits = contract.phase is Phase.OUTBID and (self.quirks.auto_resume or contract is forced)
            if waits and wins and self._is_free(contract.ask, but_for=contract):
                self._boot(contract, at)


def _check_purchase(body: Mapping[str, Any]) -> None:
    image, price, disk = body.get("image"), body.get("price"), body.get("disk", 10)
    if not isinstance(image, str) or not 0 < len(image) <= 1024:
        raise said(400, "invalid_args", "error 400/3467: image is required")
    if not isinstance(disk, int | float) or disk < 8:
        raise said(400, "invalid_args", "error 400/3467: disk must be at least 8")
    if len(body.get("label") or "") > 256:
        raise said(400, "invalid_args", "error 400/3467: label is too long")
    if not isinstance(body.get("env") or {}, Mapping):
        raise said(400, "invalid_args", "error 400/3467: env must be an object")
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float)):
        raise said(400, "invalid_price", "error 400/3468: price must be a number")
    if price is not None and not 0.001 <= price <= BID_USD_MAX:
        raise said(400, "invalid_price", "error 400/3468: price must be 0.001 to 128")
    arguments = [body.get("onstart") or "", body.get("args_str") or "", *(body.get("args") or [])]
    if sum(len(argument) for argument in arguments) > ARGUMENTS_CHARS_MAX:
        raise said(400, "invalid_args", "error 400/3467: args, args_str and onstart exceed 4096 characters")


def _script(body: Mapping[str, Any]) -> str:
    """What the container runs: in the `args` style `onstart` is the entrypoint, in the ssh styles a script."""
    onstart, args = body.get("onstart") or "", list(body.get("args") or [])
    if body.get("runtype") == "args" or args:
        return f"exec {shlex.join([onstart, *args])}" if onstart else FOR_EVER
    return f"(\n{onstart}\n)\n{FOR_EVER}"
