"""The knobs of a fake cloud: an empty market, moved prices, machines taken away.

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
    """A knob that the harness neither implements nor declares as not applicable."""

    def __init__(self) -> None:
        super().__init__("implement this knob in your harness, or raise NotApplicable with the reason")


class NotApplicable(Exception):
    """An error for what this cloud does not have; its message is the reason that the report shows."""


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
        """Put the raw text `raw` in place of this offer's price in the cloud's next offer answers.

        For clouds that answer in JSON it is `NaN`, `1e999`, `-1`, `"abc"`, `true`, `null` or `[]`.
        """
        raise Undecided

    def sell_nothing(self) -> None:
        """Empty the market."""
        raise Undecided

    def vanish_offer(self, offer: Offer) -> None:
        """Remove an offer that was listed a moment ago."""
        raise Undecided

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        """Multiply the price of what the offer stands for by `factor`."""
        raise Undecided

    def exhaust_capacity(self, offer: Offer) -> None:
        """Use up this kind of machine."""
        raise Undecided

    def empty_balance(self) -> None:
        """Take all money from the account."""
        raise Undecided

    def exhaust_quota(self) -> None:
        """Use up an account limit."""
        raise Undecided

    def break_auth(self) -> None:
        """Invalidate the key."""
        raise Undecided

    def sell_on_demand_instead(self) -> None:
        """Sell an on-demand machine to the next launch although it asks for an interruptible one."""
        raise Undecided

    def refuse_but_leave_machine(self) -> None:
        """Refuse the next launch and nevertheless leave a machine behind that bills."""
        raise Undecided

    def set_list_lag(self, lag: timedelta) -> None:
        """Hide a new machine from listings for this long."""
        raise Undecided

    def list_only_part(self) -> None:
        """End the next listing early although there is more (a page fails, a region does not answer)."""
        raise Undecided

    def spoil_listed_row(self, machine_id: str) -> None:
        """Make one machine's row in listings unreadable."""
        raise Undecided

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        """Add machines under these keys, as if launched long ago."""
        raise Undecided

    def add_foreign_machines(self) -> Sequence[str]:
        """Add running machines that are not ours, and return their ids.

        One has no label, one is of another install whose name begins with ours (`spotd-lab2-...`), one has a label of
        a person's own. Where the cloud takes bids they are machines with a bid, and where it keeps logs they have one:
        the cloud itself would do all that is asked of it with them.
        """
        raise Undecided

    def preempt(self, machine_id: str) -> None:
        """Take this machine away, without notice where the cloud knows notices too."""
        raise Undecided

    def pause(self, machine_id: str) -> None:
        """Outbid the machine: stopped, kept, billing storage."""
        raise Undecided

    def give_notice(self, machine_id: str) -> None:
        """Announce that this machine will be taken away."""
        raise Undecided

    def set_state(self, machine_id: str, state: OddState) -> None:
        """Report this state of the machine."""
        raise Undecided

    def lose_contact(self, machine_id: str) -> None:
        """Make the host of this machine unreachable for the provider, which lists the machine all the same."""
        raise Undecided

    def true_balance(self) -> Balance:
        """Return what the account really holds."""
        raise Undecided

    def billed(self, machine_id: str) -> int:
        """Return the micro-dollars in the cloud's own ledger for this machine."""
        raise Undecided
