"""The behaviours by topic, all of them in `BEHAVIOURS`."""

from spotd_providers.testkit.behaviours import failures, gangs, launching, listing, powers
from spotd_providers.testkit.suite import all_behaviours

BEHAVIOURS = all_behaviours()

__all__ = ["BEHAVIOURS", "failures", "gangs", "launching", "listing", "powers"]
