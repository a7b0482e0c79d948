"""Private images: which registry an image is of, where it cannot be pulled, and what to mend when it was refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotd.core.decide import decide
from spotd.core.domain.market import NOTHING_KNOWN
from spotd.core.domain.policy import Policy, RegistryRules, registry_server
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.todays_terms import words_against_launch
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, market, offer, shop_policy, world_with

PRIVATE = "ghcr.io/lab/train:1"
NO_LOGIN = "it takes no login"


@every(
    ("image", "server"),
    [
        ("python:3.12", "docker.io"),
        ("lab/train", "docker.io"),
        ("docker.io/lab/train", "docker.io"),
        ("index.docker.io/lab/train", "docker.io"),
        ("ghcr.io/lab/train:1", "ghcr.io"),
        ("GHCR.io/lab/train", "ghcr.io"),
        ("localhost/train", "localhost"),
        ("localhost:5000/train@sha256:00", "localhost:5000"),
        ("registry:5000/train", "registry:5000"),
        ("ghcr.io", "docker.io"),
        ("python:3.12-slim/", "python:3.12-slim"),
        ("", "docker.io"),
        ("/", "docker.io"),
    ],
)
def test_the_server_of_an_image_is_what_docker_takes_it_for(image: str, server: str) -> None:
    assert registry_server(image) == server


def policy(*, no_login: str = "", runs_images: bool = True, error: str = "", registries: bool = True) -> Policy:
    base = shop_policy()
    rules = replace(base.providers[SHOP], no_login=no_login, runs_images=runs_images)
    known = {"ghcr.io": RegistryRules(name="mine", error=error)} if registries else {}
    return replace(base, providers={SHOP: rules}, registries=known)


def verdict(rules: Policy, image: str = PRIVATE) -> Verdict:
    one = job()
    one = replace(one, spec=replace(one.spec, image=image))
    stage = World(policy=rules, jobs={one.id: one}, attempts={}, intents={})
    return decide(stage, market(offer()), NOW).verdicts[one.id]


def test_offers_of_a_provider_that_takes_no_login_are_refused_with_its_sentence() -> None:
    found = verdict(policy(no_login=NO_LOGIN))
    assert found.kind is VerdictKind.NO_MATCH
    assert found.passed_over == ((f"shop: {NO_LOGIN}", 1),)


def test_a_password_that_is_not_there_keeps_everything_from_being_bought() -> None:
    found = verdict(policy(error="[registries.mine] password: TOKEN is not set"))
    assert found.kind is VerdictKind.NO_MATCH
    assert "TOKEN is not set" in found.sentence


@every(
    ("rules", "image"),
    [
        pytest.param(policy(), PRIVATE, id="the login is taken"),
        pytest.param(policy(no_login=NO_LOGIN), "python:3.12", id="another registry"),
        pytest.param(policy(no_login=NO_LOGIN, runs_images=False), PRIVATE, id="no image is pulled there"),
        pytest.param(policy(no_login=NO_LOGIN, registries=False), PRIVATE, id="no login is configured"),
    ],
)
def test_every_other_offer_is_taken(rules: Policy, image: str) -> None:
    assert verdict(rules, image).kind is VerdictKind.PLACED


def test_two_jobs_that_differ_by_their_registry_alone_are_not_given_one_list() -> None:
    public, private = job(1), job(2)
    private = replace(private, spec=replace(private.spec, image=PRIVATE))
    jobs = {one.id: one for one in (public, private)}
    stage = World(policy=policy(no_login=NO_LOGIN), jobs=jobs, attempts={}, intents={})
    found = decide(stage, market(offer(), offer("o2")), NOW).verdicts
    assert found[public.id].kind is VerdictKind.PLACED
    assert found[private.id].kind is VerdictKind.NO_MATCH


def test_a_launch_that_waits_for_its_turn_is_not_made_once_its_login_is_gone() -> None:
    stage = world_with(AttemptState.INTENDED)
    (item,) = stage.attempts.values()
    owner = stage.jobs[item.id.job]
    stage = replace(stage, jobs={owner.id: replace(owner, spec=replace(owner.spec, image=PRIVATE))})
    assert words_against_launch(replace(stage, policy=policy()), NOTHING_KNOWN, item, NOW) == ""
    words = words_against_launch(replace(stage, policy=policy(error="gone")), NOTHING_KNOWN, item, NOW)
    assert words == "gone"


def ended(rules: Policy, detail: str, *, before: int = 0, image: str = PRIVATE) -> tuple[JobState, str, str]:
    stage = world_with(AttemptState.STARTING)
    (owner,) = stage.jobs.values()
    owner = replace(owner, spec=replace(owner.spec, image=image), image_errors=before)
    stage = replace(stage, policy=rules, jobs={owner.id: owner})
    builder = PlanBuilder(stage, NOW)
    (attempt,) = stage.attempts
    builder.end_attempt(attempt, EndReason.IMAGE_ERROR, detail)
    plan = builder.plan()
    return plan.jobs[owner.id].state, plan.jobs[owner.id].reason, plan.attempts[attempt].end_detail


@every(
    "said",
    [
        "unauthorized: authentication required",
        "pull access denied for lab",
        "no basic auth credentials",
        "DENIED",
    ],
)
def test_a_refused_login_names_the_registry_and_the_keys_to_mend(said: str) -> None:
    state, reason, detail = ended(policy(), said)
    assert state is JobState.RECOVERING
    assert detail.endswith("ghcr.io refused it: mend username and password of [registries.mine], or the image's name")
    assert detail in reason


def test_a_refusal_without_a_login_says_how_to_add_one() -> None:
    _, reason, _ = ended(policy(registries=False), "unauthorized")
    assert 'add a login with server = "ghcr.io" as [registries.NAME]' in reason


@every("said", ["manifest unknown", "exec /bin/sh: Permission denied", ""])
def test_another_error_of_an_image_says_nothing_of_logins(said: str) -> None:
    assert ended(policy(), said)[2] == said


def test_a_login_that_is_refused_three_times_in_a_row_fails_the_job() -> None:
    state, reason, _ = ended(policy(), "unauthorized", before=2)
    assert state is JobState.FAILED
    assert "[registries.mine]" in reason
    assert reason.endswith("it failed on 3 machines in a row")
