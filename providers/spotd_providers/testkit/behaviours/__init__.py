"""The behaviours by topic, all of them in `BEHAVIOURS`."""

from spotd_providers.testkit.behaviours import ending, launching, listing, losses, money, offers, powers, trouble
from spotd_providers.testkit.suite import registered

BEHAVIOURS = registered()

__all__ = ["BEHAVIOURS", "ending", "launching", "listing", "losses", "money", "offers", "powers", "trouble"]
