"""Whose machines are the user's own: `[own] rent_after` waits for these alone."""

from __future__ import annotations

from spotd_providers.kubernetes.plugin import PLUGIN as KUBERNETES
from spotd_providers.runpod.plugin import PLUGIN as RUNPOD
from spotd_providers.slurm.plugin import PLUGIN as SLURM
from spotd_providers.ssh.plugin import PLUGIN as SSH
from spotd_providers.vastai.plugin import PLUGIN as VAST


def test_what_the_config_calls_own_machines_is_waited_for_and_a_market_is_not() -> None:
    plugins = (SSH, SLURM, KUBERNETES, VAST, RUNPOD)
    owned = {one.name for one in plugins if one.traits(one.settings_model()).owned}
    assert owned == {SSH.name, SLURM.name, KUBERNETES.name}
