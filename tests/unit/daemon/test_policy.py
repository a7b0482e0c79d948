"""The policy from the settings, what a reload changes, and settings from a config."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.policy import UserLimits, names_in_config
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.install import BadConfig
from spotd.daemon.policy import Settings, build_policy, changes, may_be_own
from spotd.service.accelerated import AcceleratedClock, ClockParameters, paced
from spotd.service.main import load_settings
from spotd_providers.contract.provider import ProviderTraits
from spotd_providers.contract.values import ProviderName

LOCAL = ProviderName("local")
NETWORKED = ProviderTraits(start_script_bytes_max=4096)
CONFIG = """
[daemon]
install = "lab"
poll_every = "30s"
machines_every = "20s"
silence_limit = "50m"
save_limit = "90m"
[ceilings]
default = 1.00
RTX_4090 = 0.40
[budget]
day = 5.0
machines = 3
[providers.local]
fee_multiplier = 1.25
"""


def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "STATE_DIRECTORY": str(tmp_path / "state"),
        "SPOTD_SOCKET": str(tmp_path / "run" / "spotd.sock"),
        "SPOTD_CONFIG": "",
        "XDG_CONFIG_HOME": str(tmp_path / "nothing"),
    }


def loaded(tmp_path: Path, text: str = CONFIG, **more: str) -> Settings:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_settings(path, {**environ(tmp_path), **more})


def test_settings_say_what_the_config_says(tmp_path: Path) -> None:
    settings = loaded(tmp_path)
    (local,) = settings.providers
    assert (settings.install, settings.machines_max, settings.budget_day) == ("lab", 3, 5_000_000)
    assert (settings.ceiling_default, settings.ceilings["RTX_4090"]) == (1_000_000, 400_000)
    assert (local.name, local.fee_ppm, local.poll_every) == ("local", 1_250_000, timedelta(seconds=30))
    assert local.machines_every == timedelta(seconds=20)
    assert settings.state_dir == tmp_path / "state"
    policy = build_policy(settings, {LOCAL: NETWORKED}, store_shared_by="network")
    assert (policy.silence_limit, policy.save_limit) == (timedelta(minutes=50), timedelta(minutes=90))


def test_the_environment_goes_over_the_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, SPOTD_BUDGET__MACHINES="7").machines_max == 7


def test_without_any_config_there_is_the_local_market_and_an_install_of_our_own(tmp_path: Path) -> None:
    first = load_settings(None, environ(tmp_path))
    second = load_settings(None, environ(tmp_path))
    assert [p.name for p in first.providers] == ["local"]
    assert first.install == second.install
    assert len(first.install) == 8


def test_a_bad_config_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"config\.toml:2"):
        loaded(tmp_path, "[budget]\nmachines = -1\n")


def test_a_missing_key_disables_its_provider_and_nothing_else(tmp_path: Path) -> None:
    settings = loaded(tmp_path, '[providers.local]\napi_key = { env = "NOT_SET_ANYWHERE" }\n')
    assert "NOT_SET_ANYWHERE" in settings.providers[0].last_error


def test_a_key_is_known_to_the_redactor_and_not_shown(tmp_path: Path) -> None:
    settings = loaded(tmp_path, '[providers.local]\napi_key = { env = "A_KEY" }\n', A_KEY="canary-value")
    assert settings.secrets == ("canary-value",)
    assert "canary-value" not in repr(settings)


def test_a_folder_store_serves_only_hosts_that_see_this_computer(tmp_path: Path) -> None:
    settings = loaded(tmp_path)
    policy = build_policy(settings, {LOCAL: NETWORKED}, store_shared_by="filesystem")
    assert "cannot reach" in policy.providers[LOCAL].unusable
    policy = build_policy(settings, {LOCAL: NETWORKED}, store_shared_by="network")
    assert policy.providers[LOCAL].unusable == ""


def test_a_disabled_provider_is_known_and_not_used(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[providers.local]\nenabled = false\n")
    policy = build_policy(settings, {LOCAL: NETWORKED}, store_shared_by="network")
    assert "disabled" in policy.providers[LOCAL].unusable


def test_a_provider_that_only_states_prices_is_read_and_not_used(tmp_path: Path) -> None:
    traits = replace(NETWORKED, no_launches="a list of prices")
    policy = build_policy(loaded(tmp_path), {LOCAL: traits}, store_shared_by="network")
    assert policy.providers[LOCAL].unusable == "a list of prices"


def test_in_accelerated_time_every_wait_for_a_process_keeps_its_real_seconds(tmp_path: Path) -> None:
    clock = AcceleratedClock(ClockParameters(real0=0, virtual0=datetime(2026, 1, 1, tzinfo=UTC), scale=3600))
    policy = paced(build_policy(loaded(tmp_path), {LOCAL: NETWORKED}, store_shared_by="network"), clock)
    rules = policy.providers[LOCAL]
    for span, least_s in (
        (policy.silence_max, 10),
        (policy.save_allowance, 8),
        (policy.commit_horizon, 5),
        (policy.lease, 30),
        (rules.reconcile_window, 5),
        (rules.provision_timeout, 30),
        (rules.quote_ttl, 5),
    ):
        assert clock.real_seconds(span) >= least_s


def test_a_reload_says_what_it_changes_and_what_it_cannot(tmp_path: Path) -> None:
    old = loaded(tmp_path)
    new = loaded(tmp_path, CONFIG.replace("day = 5.0", "day = 9.0").replace('"lab"', '"den"').replace("1.25", "1.30"))
    assert changes(old, new) == (["[budget] day", "[providers.local]"], ["[daemon] install"])
    assert changes(old, replace(old)) == ([], [])


EVERY_LIMIT = """
[daemon]
install = "lab"
silence_limit = "50m"
save_limit = "90m"
[store]
url = "s3://lab/spotd"
egress_per_gb = 0.5
[ceilings]
default = 1.00
RTX_4090 = 0.40
[budget]
day = 5.0
month = 50.0
machines = 3
[bids]
raise_running = false
hold = "3m"
[moves]
most = 7
[mcp]
job_budget = 1.0
day_budget = 2.0
[registries.hub]
server = "ghcr.io"
username = "lab"
password = { env = "HUB_PASSWORD" }
[own]
rent_after = "3m"
[reuse]
wait = "3m"
[canary]
time = "3m"
"""


def test_each_limit_is_read_under_its_name_in_the_config_and_a_reload_changes_it_at_once(tmp_path: Path) -> None:
    before, after = loaded(tmp_path, '[daemon]\ninstall = "lab"\n'), loaded(tmp_path, EVERY_LIMIT, HUB_PASSWORD="p")
    names = names_in_config()
    assert names.keys() == {one.name for one in fields(UserLimits)}
    assert {name for name in names if getattr(before, name) == getattr(after, name)} == set()
    assert set(names.values()) <= set(changes(before, after)[0])
    assert (after.hold_max, after.moves_max, after.raise_bids) == (timedelta(minutes=3), 7, False)


def test_how_much_a_machine_may_write_is_set_for_every_store(tmp_path: Path) -> None:
    assert loaded(tmp_path).flood == FloodLimits(), "what the example shows is what the daemon does"
    limits = 'flood_objects = 5000\nflood_bytes = "300GB"\nflood_logs = "50MB"\n'
    new = loaded(tmp_path, f"{CONFIG}[store]\n{limits}")
    assert new.flood == FloodLimits(objects_day=5000, bytes_day=300 * 10**9, log_bytes_day=50 * 10**6)
    assert changes(loaded(tmp_path), new) == ([], ["[store] flood limits"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("flood_objects = 10", "greater than or equal to 1000"),
        ('flood_bytes = "10MB"', 'flood_bytes: "10MB" is not between 1GB and 1PB'),
        ('flood_logs = "2TB"', 'flood_logs: "2TB" is not between 1MB and 1TB'),
        ("flood_logs = 1000000000", 'write "1000000000GB" for gigabytes'),
    ],
)
def test_limits_that_would_end_every_machine_or_none_are_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        loaded(tmp_path, f"[store]\n{line}\n")
    assert words in str(caught.value)


def test_a_provider_that_appears_needs_a_restart(tmp_path: Path) -> None:
    old = loaded(tmp_path)
    assert changes(replace(old, providers=()), old)[1] == ["[providers.local]"]


@pytest.mark.parametrize(
    ("by_kind", "stated", "may_be"), [(True, "", 1), (True, "false", 1), (False, "", 0), (False, "true", 1)]
)
def test_what_was_on_offer_is_recalled_of_each_provider_that_a_reload_can_make_one_of_own_machines(
    tmp_path: Path, by_kind: bool, stated: str, may_be: int
) -> None:
    """A daemon that began while its owner had `owned = false` rented at once when that was taken back."""
    settings = loaded(tmp_path, CONFIG + (f"owned = {stated}\n" if stated else ""))
    traits = {LOCAL: replace(NETWORKED, owned=by_kind)}
    policy = build_policy(settings, traits, store_shared_by="network")
    assert may_be_own(policy, traits) == (LOCAL,) * may_be
