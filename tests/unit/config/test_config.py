from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from spotd.config.credentials import InstalledPlugins, others_may_write, unknown_provider
from spotd.config.load import Loaded, find, load, understand
from spotd.config.model import SECTIONS
from spotd.config.values import ConfigError
from spotd.core.notifications import Topic
from spotd_jobs.spec.problems import BadValue, Problem
from spotd_providers.contract.provider import Provider, ProviderPlugin, ProviderTraits, Services
from spotd_providers.contract.values import ProviderName
from tests.cases import every

NOWHERE: Mapping[str, str] = {"HOME": "/nonexistent"}


class Zone(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    weight: int = 1


class MarketSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    base_url: str = "https://market.example"
    proxy: str = ""
    regions: tuple[str, ...] = ()
    zones: tuple[Zone, ...] = ()
    pages: int = Field(default=3, ge=1)


class MarketPlugin:
    """A plugin of a third party, which sells on the network and needs a key."""

    name = ProviderName("market")
    title = "A market"
    settings_model: type[Any] = MarketSettings
    needs_credential = True

    def traits(self, settings: Any) -> ProviderTraits:
        return ProviderTraits(start_script_bytes_max=4096)

    def open(self, settings: Any, services: Services) -> AbstractAsyncContextManager[Provider]:
        raise AssertionError("reading a config opens nothing")


class HomePlugin(MarketPlugin):
    name = ProviderName("local")
    needs_credential = False

    def traits(self, settings: Any) -> ProviderTraits:
        return ProviderTraits(start_script_bytes_max=4096, hosts_share_filesystem=True)


class TwoPlugins:
    def names(self) -> tuple[str, ...]:
        return ("local", "market")

    def bundled(self) -> tuple[str, ...]:
        return self.names()

    def load(self, name: str) -> ProviderPlugin:
        if name not in self.names():
            raise unknown_provider(name, self.names())
        return HomePlugin() if name == "local" else MarketPlugin()


def read(tmp_path: Path, text: str, environ: Mapping[str, str] = NOWHERE) -> Loaded:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return load(path, environ=environ, plugins=TwoPlugins())


def problems_of(tmp_path: Path, text: str, environ: Mapping[str, str] = NOWHERE) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environ)
    found = {problem.key: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "one problem a key"
    assert all(problem.hint and not problem.hint.endswith(" ") for problem in found.values())
    assert str(caught.value).startswith(str(tmp_path / "config.toml"))
    return found


def test_the_whole_config_is_understood(tmp_path: Path) -> None:
    loaded = read(
        tmp_path,
        """
        [daemon]
        install = "lab"
        state = "sqlite"
        poll_every = "30s"
        [store]
        url = "file:///srv/spotd"
        [ceilings]
        default = 1.00
        H100 = "2.60"
        H100_SXM = 2.80
        "A100-80GB" = 1.5
        [budget]
        day = 50.0
        month = "800"
        machines = 4
        [providers.market]
        api_key = { env = "MARKET_KEY" }
        fee_multiplier = 1.2000001
        poll_every = "2m"
        regions = ["us-east-1"]
        [providers.local]
        enabled = false
        [notify.phone]
        url = { env = "PHONE" }
        on = ["finished", "failed"]
        quiet = ["22:00-07:30"]
        timezone = "Europe/Kyiv"
        """,
        {**NOWHERE, "MARKET_KEY": "k", "PHONE": "ntfys://ntfy.example/topic"},
    )
    config = loaded.config
    assert loaded.warnings == ()
    assert (config.daemon.install, config.daemon.poll_every) == ("lab", timedelta(seconds=30))
    assert config.store.url == "file:///srv/spotd"
    phone = config.notify["phone"]
    assert phone.topics == {Topic.FINISHED, Topic.FAILED}
    assert phone.timezone == "Europe/Kyiv"
    assert config.ceiling_default == 1_000_000
    assert config.ceilings == {
        "H100_SXM": 2_800_000,
        "H100_PCIE": 2_600_000,
        "H100_NVL": 2_600_000,
        "A100_SXM_80": 1_500_000,
        "A100_PCIE_80": 1_500_000,
    }
    assert (config.budget.day, config.budget.month, config.budget.machines) == (50_000_000, 800_000_000, 4)
    local, market = config.providers
    assert (local.name, local.common.enabled) == ("local", False)
    assert (market.name, market.common.fee_multiplier) == ("market", 1_200_001)
    assert market.common.poll_every == timedelta(minutes=2)
    assert market.settings == MarketSettings(regions=("us-east-1",))


def test_no_config_at_all_is_a_local_market_with_defaults() -> None:
    loaded = load(environ=NOWHERE, plugins=TwoPlugins())
    assert loaded.path is None
    assert loaded.warnings == ()
    assert [provider.name for provider in loaded.config.providers] == ["local"]
    assert loaded.config.providers[0].common.enabled
    assert (loaded.config.daemon.state, loaded.config.store.url) == ("sqlite", "file")
    assert loaded.config.ceiling_default is None


def test_a_config_without_providers_opens_the_local_market_too(tmp_path: Path) -> None:
    assert [p.name for p in read(tmp_path, "[budget]\nmachines = 1\n").config.providers] == ["local"]


BAD = [
    pytest.param("[daemn]", "daemn", "unknown key", 'did you mean "daemon"?', id="table typo"),
    pytest.param('install = "x"', "install", "unknown key", 'did you mean "daemon.install"?', id="outside its table"),
    pytest.param("daemon = 3", "daemon", "must be a table", "write [daemon]", id="no table"),
    pytest.param('[daemon]\ninstal = "x"', "daemon.instal", "unknown key", 'did you mean "install"?', id="key typo"),
    pytest.param(
        '[daemon]\ninstall = "My Lab"', "daemon.install", '"My Lab" may hold only', 'install = "lab"', id="label"
    ),
    pytest.param(
        '[daemon]\ninstall = "lab-"', "daemon.install", "a - at either end", 'install = "lab"', id="label end"
    ),
    pytest.param(
        "[daemon]\ninstall = 3", "daemon.install", "must be text in quotes", "config example", id="label type"
    ),
    pytest.param("[daemon]\npoll_every = 60", "daemon.poll_every", "60 has no unit of time", '"60s"', id="no unit"),
    pytest.param('[daemon]\npoll_every = "0s"', "daemon.poll_every", "not between 50ms and 1d", '"60s"', id="no wait"),
    pytest.param('[daemon]\npoll_every = "fast"', "daemon.poll_every", '"fast" is not a duration', '"90s"', id="word"),
    pytest.param(
        '[daemon]\nstate = "postgresql://u:hunter2@h/db"',
        "daemon.state",
        "holds a password",
        "PGPASSFILE",
        id="postgresql with a password",
    ),
    pytest.param(
        '[daemon]\nstate = "postgresql://u@h/db?password=hunter2"', "daemon.state", "a password", ".pgpass", id="query"
    ),
    pytest.param('[daemon]\nstate = "postgresql://u@h"', "daemon.state", "no place for", "/database", id="no database"),
    pytest.param('[daemon]\nstate = "postgres://u@h/db"', "daemon.state", "another program", "postgresql", id="scheme"),
    pytest.param(
        '[daemon]\nstate = "postgresql://u@h/db"\n[store]\nurl = "s3://bkt/p"',
        "daemon.install",
        "is missing",
        'install = "lab"',
        id="postgresql without a label",
    ),
    pytest.param(
        '[daemon]\nstate = "postgresql://u@h/db"\ninstall = "lab"\n[store]\nurl = "file"',
        "store.url",
        "a folder of this computer",
        "s3://bucket/prefix",
        id="postgresql without a store",
    ),
    pytest.param('[daemon]\nstate = "mysql://u:hunter2@h"', "daemon.state", "no place for", '"sqlite"', id="mysql"),
    pytest.param("[daemon]\ntime_scale = 0.5", "daemon.time_scale", "0.5 is not a number from 1", "1.0", id="slow"),
    pytest.param("[daemon]\ntime_scale = nan", "daemon.time_scale", "nan is not a number", "1.0", id="nan"),
    pytest.param("[daemon]\ntime_scale = true", "daemon.time_scale", "True is not a number", "1.0", id="bool"),
    pytest.param('[daemon]\ntime_start = "today"', "daemon.time_start", "without quotes", "config", id="start"),
    pytest.param("[daemon]\ntime_start = 2026-01-01T00:00:00", "daemon.time_start", "time zone", "config", id="zone"),
    pytest.param('[store]\nurl = "s3:///p"', "store.url", "names no bucket", "s3://bucket/prefix", id="bucket"),
    pytest.param(
        '[store]\nurl = "s3://bkt/p"\nendpoint_url = "x"', "store.endpoint_url", "is no URL", "https://", id="endpoint"
    ),
    pytest.param(
        '[store]\nurl = "s3://bkt/p"\naccess_key = { env = "A" }', "store", "need each other", "both", id="half a key"
    ),
    pytest.param('[store]\nurl = "ftp://x"', "store.url", "is no place for a store", "file:///path", id="ftp"),
    pytest.param('[store]\nurl = "file://relative"', "store.url", "is no place for a store", "file:///", id="relative"),
    pytest.param('[store]\nregion = "eu"', "store", "region belongs to a store in a bucket", "remove it", id="region"),
    pytest.param("[ceilings]\ndefault = -1", "ceilings.default", "-1 is negative", "GPU-hour", id="negative ceiling"),
    pytest.param("[ceilings]\ndefault = 0", "ceilings.default", "must be above 0", "GPU-hour", id="zero ceiling"),
    pytest.param("[ceilings]\nH100 = nan", "ceilings.H100", "nan is not a figure", "GPU-hour", id="nan ceiling"),
    pytest.param("[ceilings]\nH100 = true", "ceilings.H100", "True is not a figure", "GPU-hour", id="bool ceiling"),
    pytest.param('[ceilings]\nH100 = "20/h"', "ceilings.H100", "per GPU-hour", "2.40", id="machine ceiling"),
    pytest.param(
        "[ceilings]\nH1000 = 1.0", "ceilings.H1000", "no GPU is known", "did you mean H100_SXM", id="GPU typo"
    ),
    pytest.param("[ceilings]\nwarpdrive = 1.0", "ceilings.warpdrive", "no GPU is known", "`default` is", id="no GPU"),
    pytest.param("[budget]\nday = -3", "budget.day", "-3 is negative", "write dollars", id="negative budget"),
    pytest.param("[budget]\nday = 0", "budget.day", "must be above 0", "leave the key out", id="zero budget"),
    pytest.param('[budget]\nday = "1,000"', "budget.day", "has a comma", "no comma", id="comma"),
    pytest.param('[budget]\nmachines = "8"', "budget.machines", "must be a whole number", "is 8", id="machines text"),
    pytest.param(
        "[budget]\nmachines = -1", "budget.machines", "must be greater than or equal to 0", "is 8", id="machines < 0"
    ),
    pytest.param("[budget]\nweek = 1", "budget.week", "unknown key", "known keys here", id="week"),
    pytest.param("providers = 3", "providers", "must hold a table for each", "[providers.vast]", id="providers"),
    pytest.param("[providers]\nmarket = 3", "providers.market", "must be a table", "[providers.market]", id="provider"),
    pytest.param(
        "[providers.markt]",
        "providers.markt",
        "no such provider",
        'did you mean "market"? installed: local, market',
        id="?",
    ),
    pytest.param("[providers.market]\npage = 1", "providers.market.page", "unknown key", '"pages"?', id="plugin typo"),
    pytest.param(
        "[providers.market]\nenable = true", "providers.market.enable", "unknown", '"enabled"?', id="common typo"
    ),
    pytest.param(
        "[providers.market]\npages = 0", "providers.market.pages", "greater than", "default is 3", id="plugin value"
    ),
    pytest.param(
        "[providers.market]\nzones = [{ name = 'x', wieght = 2 }]",
        "providers.market.zones[0].wieght",
        "unknown",
        '"weight"?',
        id="deep",
    ),
    pytest.param(
        "[providers.market]\nfee_multiplier = 20",
        "providers.market.fee_multiplier",
        "20 is not between",
        "1.20",
        id="fee",
    ),
    pytest.param(
        "[providers.market]\nfee_multiplier = 0.4",
        "providers.market.fee_multiplier",
        "0.4 is not between",
        "1.20",
        id="fee below the price",
    ),
    pytest.param(
        '[providers.market]\nfee_multiplier = "x"', "providers.market.fee_multiplier", "not a factor", "1.20", id="fee?"
    ),
    pytest.param(
        '[providers.market]\nenabled = "yes"', "providers.market.enabled", "true or false", "config", id="yes"
    ),
    pytest.param(
        "[providers.market]\napi_key = 5",
        "providers.market.api_key",
        "must be a table",
        "LoadCredential",
        id="key number",
    ),
    pytest.param(
        '[providers.market]\napi_key = { env = "A", file = "/b" }',
        "providers.market.api_key",
        "exactly one",
        "env",
        id="two",
    ),
    pytest.param(
        '[providers.market]\napi_key = { env = "hunter2-secret" }',
        "providers.market.api_key",
        "not the secret",
        'env = "NAME"',
        id="secret as name",
    ),
    pytest.param(
        '[providers.market]\napi_key = { credential = "../x" }',
        "providers.market.api_key",
        "without /",
        "env",
        id="path",
    ),
    pytest.param('[metrics]\nlisten = "9464"', "metrics.listen", "no address with a port", "127.0.0.1:9464", id="port"),
    pytest.param(
        '[metrics]\nlisten = "0.0.0.0:9464"', "metrics", "is reached from other computers", "remote = true", id="remote"
    ),
    pytest.param('[notify]\nurls = ["x"]', "notify.urls", "is no table of a channel", "[notify.phone]", id="notify"),
    pytest.param("notify = 3", "notify", "a table for each channel", "[notify.phone]", id="no channels"),
    pytest.param('[notify."a b"]\nurl = "x"', 'notify."a b"', "no name for a channel", "a-z", id="channel name"),
    pytest.param("[notify.a]", "notify.a.url", "is missing", "spotd config example", id="no url"),
    pytest.param('[notify.a]\nurl="x"\nurll = 1', "notify.a.urll", "unknown key", '"url"?', id="notify typo"),
    pytest.param(
        '[notify.a]\nurl="x"\non=["fail"]', "notify.a.on[0]", "nothing to be notified", '"failed"?', id="topic"
    ),
    pytest.param(
        '[notify.a]\nurl="x"\nquiet=["25:00-26:00"]', "notify.a.quiet[0]", "a time that no", "22:00", id="quiet"
    ),
    pytest.param(
        '[notify.a]\nurl="x"\nquiet=["Sat"]', "notify.a", "times of a zone's clocks", "timezone", id="no zone"
    ),
    pytest.param(
        "[daemon]\ntime_scale = 60\n[providers.market]",
        "daemon.time_scale",
        "beside market",
        "remove time_scale",
        id="real",
    ),
]


def test_a_key_that_is_empty_by_default_is_explained_and_no_empty_default_named(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "[providers.market]\nproxy = 5\n")
    assert "spotd config example" in found["providers.market.proxy"].hint


@every(("text", "key", "message", "hint"), BAD)
def test_a_bad_value_is_refused_with_line_key_and_way_out(
    tmp_path: Path, text: str, key: str, message: str, hint: str
) -> None:
    found = problems_of(tmp_path, text)
    assert list(found) == [key]
    assert message in found[key].message
    assert hint in found[key].hint
    assert found[key].line is not None
    assert "hunter2" not in str(found)


def test_every_problem_is_reported_with_its_own_line(tmp_path: Path) -> None:
    text = "[ceilings]\ndefault = -1\nH1000 = 1\nH100 = nan\n[daemon]\npoll_every = 3\n[providers.markt]\nx = 1\n"
    found = problems_of(tmp_path, text)
    assert [(problem.key, problem.line) for problem in found.values()] == [
        ("ceilings.default", 2),
        ("ceilings.H1000", 3),
        ("ceilings.H100", 4),
        ("daemon.poll_every", 6),
        ("providers.markt", 7),
    ]


def test_the_environment_goes_over_the_file(tmp_path: Path) -> None:
    environ = {
        **NOWHERE,
        "SPOTD_DAEMON__POLL_EVERY": "5s",
        "SPOTD_BUDGET__MACHINES": "2",
        "SPOTD_CEILINGS__H100": "3.10",
        "SPOTD_PROVIDERS__MARKET__ENABLED": "false",
        "SPOTD_PROVIDERS__MARKET__REGIONS": '["a", "b"]',
        "SPOTD_DAEMON__TIME_START": "2026-03-02T00:00:00Z",
        "SPOTD_SOCKET": "/run/x.sock",
        "SPOTD_DEBUG": "1",
    }
    config = read(tmp_path, '[daemon]\npoll_every = "30s"\n[providers.market]\npages = 7\n', environ).config
    assert config.daemon.poll_every == timedelta(seconds=5)
    assert config.daemon.time_start == datetime(2026, 3, 2, tzinfo=UTC)
    assert config.budget.machines == 2
    assert set(config.ceilings.values()) == {3_100_000}
    (market,) = config.providers
    assert not market.common.enabled
    assert market.settings == MarketSettings(regions=("a", "b"), pages=7)


def test_a_bad_value_from_the_environment_names_its_variable(tmp_path: Path) -> None:
    environ = {**NOWHERE, "SPOTD_DAEMON__POLL_EVERY": "5", "SPOTD_DAEMON__POL": "x"}
    found = problems_of(tmp_path, "[daemon]\n", environ)
    assert found["daemon.poll_every"].message == "5 has no unit of time (from $SPOTD_DAEMON__POLL_EVERY)"
    assert found["daemon.pol"].message == "unknown key (from $SPOTD_DAEMON__POL)"
    assert found["daemon.pol"].line is None


def test_a_file_asked_for_by_name_must_exist_and_others_are_looked_for_in_order(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    user = tmp_path / "xdg/spotd/config.toml"
    assert find(environ={**environ, "SPOTD_CONFIG": "/x/y.toml"}) == Path("/x/y.toml")
    assert find(Path("/z.toml"), environ={**environ, "SPOTD_CONFIG": "/x/y.toml"}) == Path("/z.toml")
    user.parent.mkdir(parents=True)
    user.write_text("")
    assert find(environ=environ) == user
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load(tmp_path / "absent.toml", environ=environ, plugins=TwoPlugins())
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        load(environ={**environ, "SPOTD_CONFIG": str(tmp_path / "gone.toml")}, plugins=TwoPlugins())


def test_a_config_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml:2: not valid TOML"):
        read(tmp_path, "[daemon]\ninstall = lab\n")


def test_a_former_key_that_is_the_key_itself_is_warned_of(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0f" * 32)
    key.chmod(0o600)
    text = f'[daemon]\nsecrets_key = {{ file = "{key}" }}\nformer_secrets_key = {{ file = "{key}" }}\n'
    (same,) = read(tmp_path, text).warnings
    assert (same.key, same.message) == ("daemon.former_secrets_key", "is the same key as secrets_key")


def test_an_enabled_provider_without_a_usable_key_is_warned_of_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    (missing,) = read(tmp_path, "[providers.market]\n").warnings
    assert (missing.key, missing.message) == (
        "providers.market.api_key",
        "is missing, so nothing can be launched there",
    )
    assert 'api_key = { env = "MARKET_API_KEY" }' in missing.hint
    (unset,) = read(tmp_path, '[providers.market]\napi_key = { env = "MARKET_KEY" }').warnings
    assert unset.message == "the environment variable MARKET_KEY is not set"
    assert read(tmp_path, "[providers.market]\nenabled = false\n").warnings == ()


def test_an_inline_secret_is_warned_of_where_others_can_read_it_and_never_shown(tmp_path: Path) -> None:
    text = '[providers.market]\napi_key = "hunter2"\n'
    loaded = read(tmp_path, text)
    assert loaded.warnings == ()
    assert "hunter2" not in repr(loaded)
    (tmp_path / "config.toml").chmod(0o644)
    (warning,) = load(tmp_path / "config.toml", environ=NOWHERE, plugins=TwoPlugins()).warnings
    assert warning.message == "is a secret in a file that other users can read"
    assert f"chmod 600 {tmp_path}/config.toml" in warning.hint
    assert "hunter2" not in repr(warning)


def test_every_secret_in_a_file_that_others_can_read_is_warned_of_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2")
    text = f"""
[store]
url = "s3://bucket/prefix"
access_key = "hunter2"
secret_key = "hunter2"
signer_access_key = {{ env = "A" }}
signer_secret_key = "hunter2"
[providers.market]
api_key = {{ file = "{tmp_path}/key" }}
"""
    (tmp_path / "key").chmod(0o600)
    assert read(tmp_path, text).warnings == ()
    (tmp_path / "key").chmod(0o640)
    (tmp_path / "config.toml").chmod(0o604)
    warnings = load(tmp_path / "config.toml", environ=NOWHERE, plugins=TwoPlugins()).warnings
    assert [warning.key for warning in warnings] == [
        "store.access_key",
        "store.secret_key",
        "store.signer_secret_key",
        "providers.market.api_key",
    ]
    assert "SPOTD_STORE_SECRET_KEY" in warnings[1].hint
    assert f"chmod 600 {tmp_path}/key" in warnings[3].hint
    assert "hunter2" not in repr(warnings)


@pytest.mark.parametrize("key", ["endpoint_url", "grants_endpoint_url"])
@pytest.mark.parametrize(
    "url", ["http://minio.lan:9000", "http://192.168.1.5:9000", "http://0.0.0.0:1", "http://127.0.0.1.evil.example"]
)
def test_a_store_by_plain_http_is_refused_since_job_secrets_travel_there(tmp_path: Path, key: str, url: str) -> None:
    with pytest.raises(ConfigError, match="secrets of every job") as refused:
        read(tmp_path, f'[store]\nurl = "s3://bucket/p"\n{key} = "{url}"\n')
    assert "https://" in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8333", "http://[::1]:8333", "http://localhost:9000", "https://x.lan"]
)
def test_a_store_with_tls_or_on_this_computer_is_in_order(tmp_path: Path, url: str) -> None:
    assert read(tmp_path, f'[store]\nurl = "s3://bucket/p"\nendpoint_url = "{url}"\n').config.store.endpoint_url == url


def test_installed_providers_are_found_by_entry_point_and_a_missing_one_lists_them() -> None:
    plugins = InstalledPlugins()
    assert "local" in plugins.bundled()
    assert plugins.load("local").name == "local"
    with pytest.raises(BadValue, match="no such provider is installed") as caught:
        plugins.load("locl")
    assert caught.value.hint.startswith('did you mean "local"? installed: ')


def test_a_plugin_that_does_not_load_is_one_problem_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "broken_market-1.0.dist-info").mkdir(parents=True)
    (site / "broken_market-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken-market\nVersion: 1.0\n"
    )
    (site / "broken_market-1.0.dist-info/entry_points.txt").write_text(
        "[spotd.providers]\nbroken = broken_market:PLUGIN\n"
    )
    (site / "broken_market.py").write_text("import a_library_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(site))
    path = tmp_path / "config.toml"
    path.write_text("[providers.broken]\n[providers.local]\nseeed = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path, environ=NOWHERE)
    broken, local = caught.value.problems
    assert "does not load: ModuleNotFoundError: No module named 'a_library_that_is_not_installed'" in broken.message
    assert "reinstall it" in broken.hint
    assert (local.key, local.hint) == ("providers.local.seeed", 'did you mean "seed"?')
    assert "broken" not in InstalledPlugins().bundled()


def test_reading_a_config_leaves_the_environment_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    read(tmp_path, "[daemon]\n")
    assert dict(os.environ) == before


JUNK = st.recursive(
    st.one_of(
        st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.datetimes(), st.just("5s"), st.just("sqlite")
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
KEYS = sorted({*SECTIONS, "providers", "notify"})
INNER = sorted({key for model in SECTIONS.values() for key in model.model_fields} | {"market", "local", "urls", "H100"})


@pytest.mark.long
@given(
    st.dictionaries(st.sampled_from(KEYS), st.one_of(JUNK, st.dictionaries(st.sampled_from(INNER), JUNK, max_size=4)))
)
def test_any_junk_is_a_config_or_a_list_of_problems(data: dict[str, Any]) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        config = understand(data, "junk", plugins=TwoPlugins())
    except ConfigError as exc:
        problems = exc.problems
    else:
        assert all(price > 0 for price in config.ceilings.values())
        return
    assert problems
    assert all(problem.hint for problem in problems)


class FailingModel:
    """Settings of a plugin that fails when it is asked for them."""

    @property
    def settings_model(self) -> object:
        raise RuntimeError("a bug")

    def traits(self, settings: object) -> object:
        raise RuntimeError("a bug")


class FailingPlugins(TwoPlugins):
    def load(self, name: str) -> ProviderPlugin:
        return FailingModel()  # type: ignore[return-value]  # the point


def test_a_plugin_that_fails_over_its_settings_is_a_refusal_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[providers.local]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="fails with RuntimeError, which is a bug in it"):
        load(path, environ=NOWHERE, plugins=FailingPlugins())


def test_a_machine_without_a_gpu_has_a_ceiling_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, "[ceilings]\nCPU = 0.2").config.ceilings == {"CPU": 200_000}


@pytest.mark.parametrize("mode", [0o602, 0o622, 0o666, 0o646])
def test_a_config_that_other_users_can_write_is_refused_with_a_way_out(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "config.toml"
    path.write_text("", encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="other users can write this file") as refused:
        load(path, environ=NOWHERE, plugins=TwoPlugins())
    assert f"chmod go-w {path}" in str(refused.value)
    path.chmod(0o644)
    assert load(path, environ=NOWHERE, plugins=TwoPlugins()).path == path


def test_a_group_that_holds_others_is_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("", encoding="utf-8")
    path.chmod(0o664)
    me = pwd.getpwuid(path.stat().st_uid).pw_name
    for name, members, refused in [(me, [], False), (me, [me], False), (me, [me, "eve"], True), ("lab", [], True)]:
        group = grp.struct_group((name, "x", 1, members))
        monkeypatch.setattr("spotd.config.credentials.grp.getgrgid", lambda _, group=group: group)
        assert others_may_write(path) is refused


@every(
    ("url", "warned"),
    [
        ("http://hooks.example/T0/hunter2", True),
        ("HTTP://192.168.1.5:8080/x", True),
        ("json://host/x", True),
        ("form://user:hunter2@host/x", True),
        ("http://127.0.0.1.evil.example/x", True),
        ("https://hooks.example/T0/hunter2", False),
        ("jsons://host/x", False),
        ("http://127.0.0.1:9/x", False),
        ("http://[::1]:9/x", False),
        ("http://localhost/x", False),
        ("ntfys://topic", False),
    ],
)
def test_a_webhook_in_the_clear_off_this_computer_is_warned_of(tmp_path: Path, url: str, warned: bool) -> None:
    text = '[notify.phone]\nurl = { env = "HOOK" }\n'
    warnings = read(tmp_path, text, {**NOWHERE, "HOOK": url}).warnings
    assert [one.key for one in warnings] == (["notify.phone.url"] if warned else [])
    assert all("in the clear" in one.message and "https://" in one.hint for one in warnings)
    assert "hunter2" not in repr(warnings)
