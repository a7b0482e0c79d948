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

READINGS: Final = frozenset(
    {
        "a_flood_of_empty_rows_is_bounded",
        "a_single_hiccup_is_survived_or_reported",
        "a_slow_answer_times_out",
        "a_storm_of_rate_limits_is_not_answered_by_a_storm",
        "a_wrong_content_type_is_survived_or_reported",
        "an_empty_market_is_no_error",
        "asking_for_a_gpu_loses_none_of_its_offers",
        "asking_for_a_market_gives_only_that",
        "check_finds_failures_and_never_raises",
        "check_names_a_refused_key_with_a_way_out",
        "check_of_an_unreachable_cloud_says_so",
        "closing_leaves_nothing_behind",
        "gpu_names_are_canonical_or_kept",
        "logs_are_lines_of_text",
        "offers_are_sound",
        "pages_and_listings_carry_aware_times",
        "the_same_thing_keeps_its_offer_id",
    }
)
"""What neither buys nor ends nor forgets a machine. Of costly ones a story takes half a second of processor time."""


def family(behaviour: Behaviour) -> str:
    """Return the name without the case."""
    return behaviour.name.partition("[")[0]


def stories(*, costly: bool = False) -> list[ParameterSet]:
    """Return every behaviour, some cases of some marked as `lengthy`; of a costly provider, `READINGS` as well."""
    met: Counter[str] = Counter()
    params = []
    for behaviour in BEHAVIOURS:
        name = family(behaviour)
        met[name] += 1
        is_kept = met[name] <= CASES or name in WHOLE or behaviour.name.endswith(CALLS_THAT_COST)
        is_kept = is_kept and not (costly and name in READINGS)
        params.append(pytest.param(behaviour, id=str(behaviour), marks=() if is_kept else pytest.mark.lengthy))
    return params
