"""What pydantic found wrong with a key is said in words, without the pattern and without the value."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from spotd.config.values import problems_of


class Narrow(BaseModel):
    name: str = Field(pattern=r"^[a-z]{1,9}$")


@pytest.mark.parametrize("given", ["", "two words", "a" * 10_000, "\u202e"])
def test_a_text_that_a_key_does_not_take_is_refused_in_words(given: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Narrow(name=given)
    [problem] = problems_of(caught.value, ("providers", "x"), Narrow)
    assert problem.key == "providers.x.name"
    assert problem.message == "is empty, too long, or has a character that it does not take"
    assert "config example" in problem.hint
