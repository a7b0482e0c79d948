"""What `make test` leaves to `make lengthy` is never the only case of a promise."""

from __future__ import annotations

from _pytest.mark.structures import ParameterSet

from spotd_providers.testkit.behaviours import BEHAVIOURS
from tests.unit.providers.conformance.tiers import CALLS_THAT_COST, READINGS, WHOLE, family, stories


def test_every_behaviour_is_asked_in_make_test_and_each_case_of_it_somewhere() -> None:
    params = stories()
    assert [param.id for param in params] == [str(behaviour) for behaviour in BEHAVIOURS]
    kept = {str(param.id) for param in params if not param.marks}
    assert {family(one) for one in BEHAVIOURS if str(one) in kept} == {family(one) for one in BEHAVIOURS}
    assert {family(one) for one in BEHAVIOURS} >= WHOLE


def test_a_costly_provider_is_asked_in_make_test_all_but_readings() -> None:
    kept = {family_of(param) for param in stories(costly=True) if not param.marks}
    assert kept == {family(one) for one in BEHAVIOURS} - READINGS
    assert not WHOLE & READINGS


def family_of(param: ParameterSet) -> str:
    return str(param.id).partition("[")[0]


def test_each_case_that_may_cost_a_machine_is_asked_in_make_test() -> None:
    left = [str(param.id) for param in stories() if param.marks]
    assert left, "or the tiers are of no use"
    assert [name for name in left if name.endswith(CALLS_THAT_COST) or name.partition("[")[0] in WHOLE] == []
