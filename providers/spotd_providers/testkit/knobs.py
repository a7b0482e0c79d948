"""What a market can do to its customers, as knobs a fake cloud turns: empty shelves, moved prices, machines taken away.

Every knob has to be decided on. A harness either overrides it, or overrides it to raise `NotApplicable` with the
sentence that says why this market knows no such thing. A knob that was not decided on fails the behaviours that
need it: what was forgotten must not be taken for what does not apply.
"""
# ruff: noqa: ARG002 - the undecided knobs take what their overrides will use

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum

from spotd_providers.contract.values import AttemptKey, Balance, Offer


class Undecided(NotImplementedError):
    """A harness neither implements this knob nor says why it does not apply."""

    def __init__(self) -> None:
        super().__init__("implement this knob in your harness, or raise NotApplicable with the reason")


class NotApplicable(Exception):
    """This cloud has no such thing; the message is the reason a reader of the report gets."""


class OddState(StrEnum):
    """States a machine can be put into for `set_state`."""

    UNHEARD_OF = "unheard of"
    """A word the provider has never documented."""
    PROVISION_FAILED = "provision failed"
    """The machine will never come up (image cannot be pulled, container cannot be created)."""
    ENDED_BY_ITSELF = "ended by itself"


class MarketKnobs:
    """One method per thing that a market may do. They take effect at once and last until the harness is closed."""

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        """In the cloud's next offer answers, this offer's price is the raw text `raw` (JSON clouds: `NaN`, `1e999`,
        `-1`, `"abc"`, `true`, `null`, `[]`)."""
        raise Undecided

    def sell_nothing(self) -> None:
        """The market is empty."""
        raise Undecided

    def vanish_offer(self, offer: Offer) -> None:
        """The offer was listed a moment ago and cannot be bought any more."""
        raise Undecided

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        """What the offer stands for now costs `factor` times as much."""
        raise Undecided

    def exhaust_capacity(self, offer: Offer) -> None:
        """The cloud is out of this kind of machine."""
        raise Undecided

    def empty_balance(self) -> None:
        """The account has no money left."""
        raise Undecided

    def exhaust_quota(self) -> None:
        """An account limit is used up."""
        raise Undecided

    def break_auth(self) -> None:
        """The key is not accepted any more."""
        raise Undecided

    def sell_on_demand_instead(self) -> None:
        """The next launch buys an on-demand machine although an interruptible one was asked for."""
        raise Undecided

    def refuse_but_leave_machine(self) -> None:
        """The next launch is refused and nevertheless leaves a machine behind that bills."""
        raise Undecided

    def set_list_lag(self, lag: timedelta) -> None:
        """A new machine is missing from listings for so long."""
        raise Undecided

    def list_only_part(self) -> None:
        """The next listing ends early although there is more (a page fails, a region does not answer)."""
        raise Undecided

    def spoil_listed_row(self, machine_id: str) -> None:
        """One machine's row in listings is malformed beyond reading."""
        raise Undecided

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        """Machines exist under these keys, as if launched long ago."""
        raise Undecided

    def add_foreign_machines(self) -> Sequence[str]:
        """Running machines that are not ours exist: one without a label, one of another install whose name begins with
        ours (`spotd-lab2-...`), one with a label of a person's own. Their ids are returned."""
        raise Undecided

    def preempt(self, machine_id: str) -> None:
        """The cloud takes this machine away, without notice where it knows notices too."""
        raise Undecided

    def pause(self, machine_id: str) -> None:
        """The machine is outbid: stopped, kept, billing storage."""
        raise Undecided

    def give_notice(self, machine_id: str) -> None:
        """The cloud announces that it will take this machine away."""
        raise Undecided

    def set_state(self, machine_id: str, state: OddState) -> None:
        """The cloud reports this state of the machine."""
        raise Undecided

    def true_balance(self) -> Balance:
        """What the account really holds."""
        raise Undecided

    def billed(self, machine_id: str) -> int:
        """Micro-dollars the cloud's own ledger holds for this machine."""
        raise Undecided
