"""The estimate beside published measurements, and the error that `spotctl size` states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from spotd.estimates.machines import rule_of_thumb
from spotd.estimates.memory import memory_parts, outside_allocator
from spotd.estimates.workload import KNOWN_ERRORS, KnownError, Layout, WorkKind, Workload, work_kind
from tests.cases import every
from tests.unit.estimates.models import model
from tests.unit.estimates.published import GIB, PUBLISHED, Published


def rule_error_percent(row: Published) -> float:
    return 100 * (rule_of_thumb(model(row.model), row.work).total / row.layout.cards / row.measured - 1)


def error_percent(row: Published) -> float:
    unseen = 0 if row.context else outside_allocator(row.layout)
    estimate = memory_parts(model(row.model), row.work, row.layout).total - unseen
    return 100 * (estimate / row.measured - 1)


@every("row", PUBLISHED, ids=lambda row: row.name)
def test_the_estimate_is_within_half_of_what_was_measured(row: Published) -> None:
    assert abs(error_percent(row)) < 50


def test_the_stated_errors_are_those_of_the_published_figures() -> None:
    by_kind: defaultdict[WorkKind, list[Published]] = defaultdict(list)
    for row in PUBLISHED:
        by_kind[work_kind(row.work, row.layout)].append(row)
    assert {kind: known_error(rows) for kind, rows in by_kind.items()} == KNOWN_ERRORS


def known_error(rows: Sequence[Published]) -> KnownError:
    errors = [error_percent(row) for row in rows]
    return KnownError(
        low=math.floor(min(errors)),
        high=math.ceil(max(errors)),
        mean=math.ceil(sum(map(abs, errors)) / len(errors)),
        rule_mean=math.ceil(sum(abs(rule_error_percent(row)) for row in rows) / len(rows)),
        figures=len(rows),
    )


def test_the_estimate_is_nearer_than_the_rule_of_thumb_in_every_kind_of_work() -> None:
    assert all(2 * known.mean <= known.rule_mean + 2 for known in KNOWN_ERRORS.values())


@every(("name", "cards", "gib"), [("llama-3.1-8b", 1, 14.96), ("llama-3.1-8b", 2, 7.48)])
def test_weights_on_tensor_parallel_cards_are_what_vllm_prints(name: str, cards: int, gib: float) -> None:
    """github.com/vllm-project/vllm pull 10511: "model weights take" 14.96GiB, with two cards 7.48GiB each."""
    parts = memory_parts(model(name), Workload(training=False), Layout(tensor=cards))
    assert round(parts.weights / GIB, 2) == gib


def test_inference_is_estimated_closely() -> None:
    assert KNOWN_ERRORS[WorkKind.INFERENCE].mean <= 5
    assert KNOWN_ERRORS[WorkKind.INFERENCE].figures >= 60


def test_there_are_figures_of_every_source_and_each_names_its_place() -> None:
    assert len({row.source for row in PUBLISHED}) == 8
    assert all(row.source.startswith("github.com/") for row in PUBLISHED)
