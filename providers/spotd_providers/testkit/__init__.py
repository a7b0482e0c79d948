"""The conformance suite for providers, and the tools to build a fake cloud.

    from spotd_providers.testkit import BEHAVIOURS, Behaviour, run

    @pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
    def test_my_provider(behaviour: Behaviour, tmp_path: Path) -> None:
        run(behaviour, open_harness, tmp_path)

or, for a provider and a harness that are registered as entry points, `python -m spotd_providers.testkit NAME`.
`harness` says what to write; `serve`, `faults` and `clock` help with the fake cloud. Needs no test runner.
"""

from spotd_providers.testkit.behaviours import BEHAVIOURS
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import (
    CANARY,
    Harness,
    HarnessFactory,
    NotApplicable,
    OddState,
    WorldMachine,
    WorldOffer,
)
from spotd_providers.testkit.serve import Call, Canned, Faults, Served, serving
from spotd_providers.testkit.suite import Behaviour, run

__all__ = [
    "BEHAVIOURS",
    "CANARY",
    "Behaviour",
    "Call",
    "Canned",
    "FakeClock",
    "Faults",
    "Harness",
    "HarnessFactory",
    "NotApplicable",
    "OddState",
    "Served",
    "WorldMachine",
    "WorldOffer",
    "run",
    "serving",
]
