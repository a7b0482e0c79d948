"""The estimate beside published measurements, and the error that `spotctl size` states."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from spotd.estimates.accuracy import KNOWN_ERRORS, KnownError, WorkKind, work_kind
from spotd.estimates.memory import CONTEXT_BYTES, memory_parts
from tests.unit.estimates.models import model
from tests.unit.estimates.published import PUBLISHED, Published


def error_percent(row: Published) -> float:
    estimate = memory_parts(model(row.model), row.work, row.layout).total - (0 if row.context else CONTEXT_BYTES)
    return 100 * (estimate / row.measured - 1)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_the_estimate_is_within_half_of_what_was_measured(row: Published) -> None:
    assert abs(error_percent(row)) < 50


def test_the_stated_errors_are_those_of_the_published_figures() -> None:
    errors: defaultdict[WorkKind, list[float]] = defaultdict(list)
    for row in PUBLISHED:
        errors[work_kind(row.work, row.layout)].append(error_percent(row))
    assert {
        kind: KnownError(
            low=math.floor(min(found)),
            high=math.ceil(max(found)),
            mean=math.ceil(sum(map(abs, found)) / len(found)),
            figures=len(found),
        )
        for kind, found in errors.items()
    } == KNOWN_ERRORS


def test_inference_is_estimated_closely() -> None:
    assert KNOWN_ERRORS[WorkKind.INFERENCE].mean <= 5
    assert KNOWN_ERRORS[WorkKind.INFERENCE].figures >= 60


def test_there_are_figures_of_every_source_and_each_names_its_place() -> None:
    assert len({row.source for row in PUBLISHED}) == 7
    assert all(row.source.startswith("github.com/") for row in PUBLISHED)
