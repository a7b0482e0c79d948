"""The tables of states, and the page drawn from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd.core.domain.states import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    AttemptState,
    EndReason,
    IllegalTransition,
    JobState,
    check_attempt_transition,
    check_job_transition,
)
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


@pytest.mark.parametrize("before", JobState)
@pytest.mark.parametrize("after", JobState)
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
