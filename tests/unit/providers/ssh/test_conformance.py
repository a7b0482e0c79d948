"""The ssh provider does what every provider must do, on hosts whose scripts and processes are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from spotd_providers.testkit.behaviours import BEHAVIOURS
from spotd_providers.testkit.suite import Behaviour, run
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.ssh.harness import SshHarness, open_harness


@pytest.mark.parametrize("behaviour", stories(costly=True))
def test_ssh_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


@contextmanager
def _free_harness(folder: Path) -> Iterator[SshHarness]:
    with open_harness(folder) as h:
        h.prices = dict.fromkeys(h.prices, 0.0)
        yield h


@pytest.mark.parametrize("behaviour", [one for one in BEHAVIOURS if one.check.__module__.endswith(".gangs")], ids=str)
def test_hosts_of_one_pool_start_several_machines_as_one(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, partial(open_harness, pool=True), tmp_path)


@pytest.mark.parametrize(
    "behaviour",
    [one for one in BEHAVIOURS if one.name.startswith(("offers_are", "a_launch", "price_max", "a_machine_is_bought"))],
    ids=str,
)
def test_hosts_that_cost_nothing_behave_alike(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, _free_harness, tmp_path)
