from __future__ import annotations

import pytest

from spotd.api.responses import Ambiguous, JobHead, NotFound, resolve
from tests.cases import every

HEADS = [
    JobHead(id="aa11", name="train", is_final=True, order=1),
    JobHead(id="aa22", name="train", is_final=True, order=2),
    JobHead(id="ab33", name="prep", is_final=False, order=3),
    JobHead(id="prep", name="odd", is_final=False, order=4),
    JobHead(id="cc55", name="twice", is_final=False, order=5),
    JobHead(id="cc66", name="twice", is_final=False, order=6),
    JobHead(id="dd77", name="again", is_final=False, order=7),
    JobHead(id="dd88", name="again", is_final=True, order=8),
]


@every(
    ("ref", "found"),
    [
        pytest.param("aa11", "aa11", id="exact id"),
        pytest.param("ab", "ab33", id="prefix"),
        pytest.param("train", "aa22", id="newest of the ended"),
        pytest.param("again", "dd77", id="unfinished before newer ended"),
        pytest.param("prep", "prep", id="id before name"),
        pytest.param("odd", "prep", id="name"),
    ],
)
def test_a_reference_means_one_job(ref: str, found: str) -> None:
    assert resolve(ref, HEADS) == found


@every("ref", ["aa", "twice"])
def test_a_reference_that_means_several_lists_them(ref: str) -> None:
    with pytest.raises(Ambiguous) as caught:
        resolve(ref, HEADS)
    assert len([head for head in HEADS if head.id in caught.value.hint]) == 2


@every("ref", ["", "zz", "TRAIN", "rain"])
def test_a_reference_to_nothing_is_not_found(ref: str) -> None:
    with pytest.raises(NotFound):
        resolve(ref, HEADS)
