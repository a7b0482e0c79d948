"""Which stories of the conformance suite `make test` runs for each provider.

A behaviour with cases is one promise that is asked of several calls or values. `make test` asks the first case of each
behaviour, each case of what buys or ends a machine, and each case that may double a machine or forget one;
`make lengthy` runs the rest.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest
from _pytest.mark.structures import ParameterSet

from spotd_providers.testkit.behaviours import BEHAVIOURS
from spotd_providers.testkit.suite import Behaviour

CASES: Final = 1
WHOLE: Final = frozenset(
    {
        "a_change_of_one_machine_changes_no_other",
        "a_lost_answer_means_unknown_and_one_machine",
        "a_lost_end_is_an_error_or_truly_the_end",
        "a_purchase_that_never_happened_is_unknown_until_find_says_so",
        "a_refused_launch_buys_nothing",
        "an_end_that_did_not_happen_is_no_success",
    }
)
"""Behaviours whose every case may double a machine, forget one or buy one in vain."""
CALLS_THAT_COST: Final = ("[launch]", "[terminate]", "[change_bid]")


def family(behaviour: Behaviour) -> str:
    """Return the name without the case."""
    return behaviour.name.partition("[")[0]


def stories() -> list[ParameterSet]:
    """Return every behaviour, some cases of some marked as `lengthy`."""
    met: Counter[str] = Counter()
    params = []
    for behaviour in BEHAVIOURS:
        name = family(behaviour)
        met[name] += 1
        is_kept = met[name] <= CASES or name in WHOLE or behaviour.name.endswith(CALLS_THAT_COST)
        params.append(pytest.param(behaviour, id=str(behaviour), marks=() if is_kept else pytest.mark.lengthy))
    return params
