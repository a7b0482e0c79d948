"""What pydantic found wrong with a key is said in words, without the pattern and without the value."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from spotd.config.values import problems_of
from spotd_providers.googlecloud.wire import GoogleSettings
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


def test_no_default_is_shown_in_a_unit_that_the_key_is_not_written_in() -> None:
    """Google's price of a disk would read as $100,000."""
    with pytest.raises(ValidationError) as caught:
        GoogleSettings.model_validate({"disk_usd_per_gb_month": []})
    [problem] = problems_of(caught.value, ("providers", "gcp"), GoogleSettings)
    assert "100000" not in problem.hint
