"""What pydantic found wrong with a key is said in words, without the pattern and without the value."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import BaseModel, Field, ValidationError

from spotd.config.model import HubSection, StoreSection
from spotd.config.peers import ApiSection
from spotd.config.values import problems_of
from spotd_providers.googlecloud.wire import GoogleSettings
from spotd_providers.local.settings import LocalSettings
from spotd_providers.runpod.wire import RunpodSettings
from tests.cases import every


class Narrow(BaseModel):
    name: str = Field(pattern=r"^[a-z]{1,9}$")


@every("given", ["", "two words", "a" * 10_000, "\u202e"])
def test_a_text_that_a_key_does_not_take_is_refused_in_words(given: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Narrow(name=given)
    [problem] = problems_of(caught.value, ("providers", "x"), Narrow)
    assert problem.key == "providers.x.name"
    assert problem.message == "is empty, too long, or has a character that it does not take"
    assert "config example" in problem.hint


class Listed(BaseModel):
    types: tuple[str, ...] = Field(min_length=1, max_length=2)


@every(("given", "words"), [((), "has fewer entries than the 1 that it needs"), ("abc", "has more entries than 2")])
def test_a_list_that_is_too_short_or_too_long_is_refused_in_words(given: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Listed(types=tuple(given))
    [problem] = problems_of(caught.value, ("providers", "x"), Listed)
    assert problem.message == words


class Bounded(BaseModel):
    network: float = Field(default=0.0, ge=0, le=1000)
    share: float = Field(default=0.5, gt=0, lt=1)
    memory: int = Field(default=32, ge=8, le=512, multiple_of=8)
    least: int | None = Field(default=None, gt=0)
    free: float = 1.5
    span: timedelta = Field(default=timedelta(0), ge=timedelta(0))


@every(
    ("given", "hint"),
    [
        ({"network": -1}, "write a number from 0 up to 1000; the default is 0.0"),
        ({"network": "x"}, "write a number from 0 up to 1000; the default is 0.0"),
        ({"share": 1}, "write a number above 0 below 1; the default is 0.5"),
        ({"memory": 9}, "write a whole number from 8 up to 512 in steps of 8; the default is 32"),
        ({"least": 0}, "write a number above 0"),
        ({"free": "x"}, "the default is 1.5"),
        ({"span": "x"}, "see `spotd config example` for every key with its meaning"),
    ],
)
def test_a_number_that_a_key_does_not_take_is_refused_with_its_bounds(given: dict[str, object], hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Bounded.model_validate(given)
    [problem] = problems_of(caught.value, ("providers", "x"), Bounded)
    assert problem.hint == hint


def test_a_negative_price_of_the_network_of_clusters_is_refused_with_what_it_may_be() -> None:
    with pytest.raises(ValidationError) as caught:
        RunpodSettings.model_validate({"cluster_network": -0.12})
    [problem] = problems_of(caught.value, ("providers", "runpod"), RunpodSettings)
    assert problem.hint == "write a number from 0 up to 1000; the default is 0.0"


BROKEN = [
    "https://[2001:db8::7:7443",
    "https://2001:db8::7]:7443",
    "https://gpu:port",
    "https://gpu:99999",
    "https://[",
]


@every("url", BROKEN)
@every(
    ("section", "key", "example"),
    [
        (ApiSection, "url", "https://[2001:db8::7]:7443"),
        (StoreSection, "endpoint_url", "https://..."),
        (HubSection, "url", "https://..."),
        (RunpodSettings, "base_url", "https://api.runpod.io"),
        (LocalSettings, "base_url", "http://127.0.0.1:8000"),
    ],
)
def test_a_url_that_is_broken_is_refused_with_one_that_is_right(
    section: type[BaseModel], key: str, example: str, url: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        section.model_validate({key: url})
    [problem] = problems_of(caught.value, ("x",), section)
    assert example in problem.message + problem.hint
    assert "Invalid IPv6" not in problem.message


@every("url", ["https://[2001:db8::7]:7443", "https://gpu-a.example.org", "https://[::1]:7443/"])
def test_a_url_with_an_ipv6_address_in_brackets_is_taken(url: str) -> None:
    assert ApiSection(url=url).url == url


def test_no_default_is_shown_in_a_unit_that_the_key_is_not_written_in() -> None:
    """Google's price of a disk would read as $100,000."""
    with pytest.raises(ValidationError) as caught:
        GoogleSettings.model_validate({"disk_usd_per_gb_month": []})
    [problem] = problems_of(caught.value, ("providers", "gcp"), GoogleSettings)
    assert "100000" not in problem.hint
