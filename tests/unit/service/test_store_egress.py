"""What reading a store costs is recognised by its endpoint, and what the config states comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotd.config.credentials import InstalledPlugins
from spotd.config.load import understand
from spotd.config.model import StoreSection
from spotd.config.values import ConfigError
from spotd.core.domain.market import StoreEgress
from spotd.daemon.policy import build_policy, changes
from spotd.service.main import load_settings, store_egress
from spotd_providers.contract.values import ProviderName
from tests.cases import every
from tests.unit.core.builders import offer

AWS, VAST = ProviderName("aws"), ProviderName("vast")


def price(provider: ProviderName = VAST, host_region: str = "", /, **section: Any) -> float:
    sold = offer(provider=provider, region=host_region)
    return store_egress(StoreSection(url="s3://bucket", **section)).price_for(sold) / 1_000_000


@every(
    ("endpoint", "dollars"),
    [
        (None, 0.09),
        ("https://s3.eu-west-1.amazonaws.com", 0.09),
        ("https://s3.cn-north-1.amazonaws.com.cn", 0.09),
        ("https://0123456789abcdef.r2.cloudflarestorage.com", 0),
        ("https://0123456789abcdef.eu.r2.cloudflarestorage.com", 0),
        ("https://s3.us-west-004.backblazeb2.com", 0.01),
        ("https://storage.googleapis.com", 0.12),
        ("https://STORAGE.googleapis.com:443/", 0.12),
        ("https://minio.example.org", 0),
        ("https://notamazonaws.com", 0),
        ("http://127.0.0.1:8333", 0),
    ],
)
def test_the_list_price_is_that_of_the_endpoint(endpoint: str | None, dollars: float) -> None:
    assert price(endpoint_url=endpoint) == dollars


def test_a_folder_is_read_for_nothing() -> None:
    assert store_egress(StoreSection()) == store_egress(StoreSection(url="file:///srv/store")) == StoreEgress()


@every(
    ("section", "region", "dollars"),
    [
        ({"region": "eu-west-1"}, "eu-west-1", 0),
        ({"region": "eu-west-1"}, "us-west-2", 0.02),
        ({"region": "us-east-1"}, "us-east-2", 0.01),
        ({"region": "us-east-2"}, "us-east-1", 0.01),
        ({"region": "us-east-2"}, "us-east-2", 0),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, "eu-west-1", 0),
        ({"endpoint_url": "https://s3.dualstack.eu-west-1.amazonaws.com"}, "eu-west-1", 0),
        ({}, "eu-west-1", 0.02),
        ({"region": "eu-west-1", "egress_per_gb": 0.05}, "eu-west-1", 0),
        ({"region": "eu-west-1", "egress_per_gb": 0.005}, "us-west-2", 0.005),
        ({"endpoint_url": "https://storage.googleapis.com", "region": "eu-west-1"}, "eu-west-1", 0.12),
    ],
)
def test_hosts_of_the_same_cloud_pay_less(section: dict[str, Any], region: str, dollars: float) -> None:
    assert price(AWS, region, **section) == dollars


def test_what_the_config_states_comes_first() -> None:
    assert price(egress_per_gb=0.05) == 0.05
    assert price(egress_per_gb=0) == 0
    assert price(egress_per_gb="0.007", endpoint_url="https://minio.example.org") == 0.007


@every("value", ["-0.09", "-1", "nan", "inf", "1.01", "true", '"nine cents"', '"0,09"'])
def test_what_is_no_price_is_refused_with_a_way_out(value: str) -> None:
    written: Any = {"true": True}.get(value, value.strip('"') if value.startswith('"') else None)
    written = float(value) if written is None or written == value else written
    with pytest.raises(ConfigError, match=r"store\.egress_per_gb: .* \(write "):
        understand({"store": {"url": "s3://bucket", "egress_per_gb": written}}, "x", plugins=InstalledPlugins())


def test_a_folder_takes_no_price() -> None:
    with pytest.raises(ConfigError, match="egress_per_gb belongs to a store in a bucket"):
        understand({"store": {"egress_per_gb": 0.09}}, "x", plugins=InstalledPlugins())


def test_a_reload_changes_the_price_at_once(tmp_path: Path) -> None:
    def loaded(line: str) -> Any:
        path = tmp_path / "config.toml"
        path.write_text(f'[store]\nurl = "s3://bucket"\n{line}\n')
        return load_settings(path, {"STATE_DIRECTORY": str(tmp_path), "RUNTIME_DIRECTORY": str(tmp_path)})

    before, after = loaded(""), loaded("egress_per_gb = 0.03")
    assert changes(before, after) == (["[store] egress_per_gb"], [])
    policy = build_policy(after, {}, store_shared_by="")
    assert policy.egress.per_gb == 30_000
