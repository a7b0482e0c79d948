"""The tables of states, and the page drawn from them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import spotd
from spotd.core.domain.states import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    AttemptState,
    EndEvidence,
    EndKind,
    EndReason,
    EndTraits,
    IllegalTransition,
    InvariantBroken,
    JobState,
    check_attempt_transition,
    check_job_transition,
    require_rows,
)
from spotd.words import LOSSES
from tests.cases import every
from tests.unit.core.diagram import page


def test_the_page_in_docs_is_what_the_tables_say() -> None:
    committed = Path(__file__).parents[4] / "docs" / "states.md"
    assert committed.read_text(encoding="utf-8") == page(), "python -m tests.unit.core.diagram > docs/states.md"


def test_every_state_has_a_row_and_every_final_job_state_leads_only_back_to_the_queue() -> None:
    assert set(JOB_TRANSITIONS) == set(JobState)
    assert set(ATTEMPT_TRANSITIONS) == set(AttemptState)
    for state in JobState:
        if state.is_final:
            assert JOB_TRANSITIONS[state] <= {JobState.QUEUED}


@every("before", JobState)
@every("after", JobState)
def test_a_job_moves_only_along_the_table(before: JobState, after: JobState) -> None:
    if before is after or after in JOB_TRANSITIONS[before]:
        check_job_transition(before, after)
    else:
        with pytest.raises(IllegalTransition, match=f"{before} cannot become {after}"):
            check_job_transition(before, after)


def test_an_ended_attempt_never_comes_back() -> None:
    for after in AttemptState:
        if after is not AttemptState.ENDED:
            with pytest.raises(IllegalTransition):
                check_attempt_transition(AttemptState.ENDED, after)


def test_every_reason_knows_its_sentence_and_leads_where_a_job_may_go() -> None:
    for reason in EndReason:
        traits = reason.traits
        assert traits.sentence.format(detail="x")
        if traits.next_state is not None:
            assert traits.next_state in JOB_TRANSITIONS[JobState.RUNNING]


def test_a_reason_without_one_fact_cannot_be_stated() -> None:
    whole = {one.name: getattr(EndReason.DONE.traits, one.name) for one in fields(EndTraits)}
    assert EndTraits(**whole) == EndReason.DONE.traits
    for name in whole:
        with pytest.raises(TypeError, match=f"argument: '{name}'"):
            EndTraits(**{key: value for key, value in whole.items() if key != name})


def test_a_table_without_a_row_for_each_member_is_refused_by_name() -> None:
    table = dict.fromkeys(EndReason, 1)
    require_rows(EndReason, table)
    del table[EndReason.OUTBID]
    with pytest.raises(InvariantBroken, match="no row for OUTBID of EndReason"):
        require_rows(EndReason, table)


def test_only_a_machine_that_may_exist_teaches_and_is_recovered_from() -> None:
    for reason in EndReason:
        if reason.traits.kind is EndKind.UNBOUGHT:
            assert not reason.traits.is_recovery, reason
            assert reason.traits.evidence is EndEvidence.NONE, reason


def test_the_clients_losses_are_the_recoveries_of_the_table() -> None:
    assert {reason.value for reason in EndReason if reason.traits.is_recovery} == LOSSES


OTHER_SETS = {
    "a set": "X = frozenset({EndReason.DONE, EndReason.OUTBID})",
    "a tuple": "X = (EndReason.DONE, EndReason.OUTBID)",
    "a list": "X = [states.EndReason.DONE, states.EndReason.OUTBID]",
    "keys": "X = {EndReason.DONE: 1, EndReason.OUTBID: 2}",
    "or": "X = reason is EndReason.DONE or reason is EndReason.OUTBID",
    "and not": "X = reason is not EndReason.DONE and reason is not EndReason.OUTBID",
    "a pattern": "match reason:\n    case EndReason.DONE | EndReason.OUTBID:\n        pass",
}


@every("source", [pytest.param(source, id=name) for name, source in OTHER_SETS.items()])
def test_the_search_for_sets_of_reasons_finds_each_form(source: str) -> None:
    assert sets_of_reasons(source)


def test_no_module_but_the_table_keeps_a_set_of_reasons() -> None:
    root = Path(spotd.__file__).parent
    modules = [path for path in sorted(root.rglob("*.py")) if path != root / "core" / "domain" / "states.py"]
    assert len(modules) > 100
    found = [f"{path}:{line}" for path in modules for line in sets_of_reasons(path.read_text(encoding="utf-8"))]
    assert not found, "state it in the table of states.py"


def sets_of_reasons(source: str) -> list[int]:
    """Return the lines where two or more reasons are named for one purpose: a display, a choice or a pattern."""
    if "EndReason" not in source:
        return []
    found: list[int] = []
    named: Sequence[ast.AST | None]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                named = [part for part in parts if _is_reason(part)]
            case ast.Dict(keys=keys):
                named = [key for key in keys if _is_reason(key)]
            case ast.BoolOp(values=values):
                named = [v for v in values if isinstance(v, ast.Compare) and any(map(_is_reason, v.comparators))]
            case ast.MatchOr(patterns=patterns):
                named = [p for p in patterns if isinstance(p, ast.MatchValue) and _is_reason(p.value)]
            case _:
                continue
        if len(named) > 1:
            found.append(node.lineno)
    return found


def _is_reason(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "EndReason"
