"""`copies.replace` does what `dataclasses.replace` does, for each class of row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from spotd.core.domain.copies import replace
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState
from tests.unit.core.builders import MINUTE, job, offer, world_with

WORLD = world_with(AttemptState.RUNNING)
[ITEM], [JOB] = WORLD.attempts.values(), WORLD.jobs.values()
ROWS = [WORLD, ITEM, ITEM.id, ITEM.meter, ITEM.quote, JOB, JOB.spec, JOB.spec.resources, WORLD.policy, offer(), Plan()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_copy_has_the_changed_fields_and_all_the_others(row: Any) -> None:
    assert replace(row) == row
    assert replace(row) is not row
    for field in dataclasses.fields(row):
        changed = replace(row, **{field.name: "another"})
        assert changed == dataclasses.replace(row, **{field.name: "another"})
        assert getattr(changed, field.name) == "another"


def test_the_copied_row_stays_as_it_was() -> None:
    before = job().stalls
    assert replace(JOB, stalls=before + 1).stalls == before + 1
    assert JOB.stalls == before
    assert ITEM.intended_at + MINUTE == replace(ITEM, intended_at=ITEM.intended_at + MINUTE).intended_at


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="Attempt has no field 'spelled_wrong'"):
        replace(ITEM, spelled_wrong=1)  # type: ignore[call-arg]  # mypy refuses it, too


def test_a_class_that_checks_its_values_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        value: int

        def __post_init__(self) -> None:
            assert self.value

    with pytest.raises(TypeError, match="what Checked checks of its values would be left out"):
        replace(Checked(1), value=0)
