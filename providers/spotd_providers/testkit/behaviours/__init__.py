"""The behaviours by topic, all of them in `BEHAVIOURS`."""

from spotd_providers.testkit.behaviours import (
    ending,
    failures,
    foreign,
    launching,
    listing,
    losses,
    money,
    offers,
    powers,
)
from spotd_providers.testkit.suite import all_behaviours

BEHAVIOURS = all_behaviours()

__all__ = ["BEHAVIOURS", "ending", "failures", "foreign", "launching", "listing", "losses", "money", "offers", "powers"]
