from __future__ import annotations

import json
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec.codec import SpecDocumentError, spec_from_json, spec_to_json
from spotd_jobs.spec.model import (
    CheckpointPolicy,
    Deadline,
    GpuAlternative,
    GpuSpeed,
    JobSpec,
    MarketChoice,
    PolicyName,
    PriceLimit,
    Resources,
    Schedule,
    Work,
)
from tests.cases import every

WORDS = st.text(min_size=1, max_size=10)
COUNTS = st.integers(0, 10**9)
DURATIONS = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=30))


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(of, max_size=3).map(tuple)


SPECS = st.builds(
    JobSpec,
    name=WORDS,
    run=tuples(WORDS),
    setup=st.none() | WORDS,
    image=WORDS,
    workdir=st.none() | WORDS,
    env=tuples(st.tuples(WORDS, WORDS)),
    secrets=tuples(WORDS),
    outputs=tuples(WORDS),
    resources=st.builds(
        Resources,
        gpu=tuples(st.builds(GpuAlternative, name=WORDS, count=COUNTS)),
        min_vram_mb=st.none() | COUNTS,
        min_reliability=st.none() | st.floats(0, 1),
        regions=tuples(WORDS),
        market=st.none() | st.sampled_from(MarketChoice),
    ),
    price=st.none() | st.builds(PriceLimit, machine_hour=COUNTS),
    job_budget=st.none() | COUNTS,
    retry_starts=COUNTS,
    checkpoint=st.builds(CheckpointPolicy, every=st.none() | DURATIONS, settle=DURATIONS, stop_grace=DURATIONS),
    priority=st.integers(-1000, 1000),
    schedule=st.builds(
        Schedule,
        deadline=st.none()
        | st.builds(Deadline, span=DURATIONS)
        | st.builds(Deadline, at=st.datetimes(timezones=st.just(UTC))),
        max_duration=st.none() | DURATIONS,
        policy=st.none() | st.sampled_from(PolicyName),
    ),
    work=st.builds(Work, time=st.none() | DURATIONS, steps=st.none() | COUNTS),
    speed=tuples(st.builds(GpuSpeed, name=WORDS, ppm=COUNTS)),
)
SPEC = JobSpec(name="j", run=("true",), image="busybox", env=(("A", "1"),), price=PriceLimit(per_gpu_hour=1))


@given(SPECS)
def test_every_spec_survives_the_trip_through_json_text(spec: JobSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_the_document_is_readable() -> None:
    document = spec_to_json(SPEC)
    assert document["schema"] == 1
    assert document["checkpoint"]["stop_grace"] == "1m30s"
    assert document["env"] == [["A", "1"]]
    assert document["resources"]["market"] is None


def test_equal_parts_of_two_specs_are_one_value_and_others_are_not() -> None:
    documents = [
        {**spec_to_json(SPEC), "name": name, "price": {"per_gpu_hour": price, "machine_hour": None}}
        for name, price in (("a", 1), ("b", 2))
    ]
    first, second = map(spec_from_json, documents)
    assert first.resources is second.resources
    assert first.checkpoint is second.checkpoint
    assert (first.price, second.price) == (PriceLimit(per_gpu_hour=1), PriceLimit(per_gpu_hour=2))


def test_a_field_that_an_old_document_lacks_takes_its_default() -> None:
    document = spec_to_json(SPEC)
    del document["retry_errors"]
    del document["checkpoint"]["settle"]
    assert spec_from_json(document) == SPEC


@every(
    ("change", "message"),
    [
        pytest.param({"schema": 2}, "job spec of schema 2; this spotd understands 1", id="newer"),
        pytest.param(
            {"future": 1}, "spec.future: unknown field; a newer spotd wrote this job spec", id="unknown field"
        ),
        pytest.param({"priority": "0"}, "spec.priority: cannot understand '0'", id="text for number"),
        pytest.param({"priority": True}, "spec.priority: cannot understand True", id="bool for number"),
        pytest.param({"run": "true"}, "spec.run: not a list", id="text for list"),
        pytest.param({"run": [1]}, "spec.run[0]: cannot understand 1", id="element"),
        pytest.param({"env": [["A"]]}, "spec.env[0]: not a list of 2", id="pair"),
        pytest.param({"resources": {"market": "black"}}, "spec.resources.market: cannot understand 'black'", id="enum"),
        pytest.param({"resources": []}, "spec.resources: not an object", id="list for object"),
        pytest.param({"checkpoint": {"settle": []}}, "spec.checkpoint.settle: cannot understand []", id="duration"),
        pytest.param({"checkpoint": {"settle": "soon"}}, 'spec.checkpoint.settle: "soon" is not a duration', id="time"),
        pytest.param({"resources": {"min_reliability": float("nan")}}, "min_reliability: cannot", id="nan"),
        pytest.param({"image": None}, "spec.image: cannot understand None", id="null"),
    ],
)
def test_a_damaged_document_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecDocumentError) as caught:
        spec_from_json({**spec_to_json(SPEC), **change})
    assert message in str(caught.value)


def test_a_document_without_a_required_field_is_refused() -> None:
    document = spec_to_json(SPEC)
    del document["run"]
    with pytest.raises(SpecDocumentError, match="spec: a required field is missing"):
        spec_from_json(document)
