"""The password of a registry: hidden where it is printed and in errors, and sent to vast.ai whole or never."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown, RequestRejected
from spotd_providers.contract.values import AttemptKey, InstallId, LaunchRequest, MicroUsdPerHour, Secret
from spotd_providers.kit.boundary import keep_contract
from spotd_providers.testkit.harness import LOGIN
from spotd_providers.testkit.serve import Call
from spotd_providers.vastai.plugin import VastProvider
from tests.cases import every
from tests.unit.core.builders import offer
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play

PASSWORD = LOGIN.password.reveal()
REQUEST = LaunchRequest(
    key=AttemptKey("spotd-lab-j1-1"),
    install=InstallId("lab"),
    offer=offer(),
    price_max=MicroUsdPerHour(1),
    image="registry.example/lab/train",
    disk_gb=1,
    start_script="",
    login=LOGIN,
)


@every("show", [repr, str, "{}".format, "{!r}".format, "%s".__mod__], ids=range(5))
@every("what", [LOGIN.password, LOGIN, REQUEST, [LOGIN], {"a": LOGIN}], ids=range(5))
def test_a_secret_is_hidden_however_what_holds_it_is_printed(show: Callable[[Any], str], what: Any) -> None:
    if isinstance(what, dict) and show == "%s".__mod__:
        what = (what,)
    assert PASSWORD not in show(what)


@every("write", [pickle.dumps, copy.deepcopy, json.dumps])
def test_a_secret_is_not_written_anywhere(write: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        write(LOGIN.password)
    with pytest.raises(TypeError):
        asdict(LOGIN)


def test_two_secrets_are_equal_by_their_text_alone() -> None:
    assert replace(LOGIN, password=Secret(PASSWORD)) == LOGIN
    assert replace(LOGIN, password=Secret("another")) != LOGIN
    assert len({LOGIN.password, Secret(PASSWORD), Secret("another")}) == 2
    assert Secret("a") != "a"


class Quoting:
    """Raises what quotes the password: an error of the contract, its attributes and its causes, or a foreign one."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def launch(self, _request: LaunchRequest) -> None:
        try:
            raise ValueError({"body": PASSWORD}, f"sent -p {PASSWORD}")
        except ValueError as exc:
            raise self.error from exc


@every(
    "error",
    [
        NoCapacity(f"no {PASSWORD}"),
        RequestRejected("no", field="login", reason=f"odd: {PASSWORD}"),
        OutcomeUnknown(f"sent {PASSWORD}", key="k"),
        RuntimeError(PASSWORD),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_of_a_launch_quotes_the_password_in_its_texts_or_its_causes(error: Exception) -> None:
    keep_contract(Quoting)
    with pytest.raises(Exception) as raised:
        anyio.run(Quoting(error).launch, REQUEST)
    found: BaseException | None = raised.value
    texts = []
    while found is not None:
        texts += [repr(found), repr(vars(found))]
        found = found.__cause__
    assert len(texts) >= 2
    assert not [text for text in texts if PASSWORD in text]


def sent(h: VastHarness) -> Any:
    return json.loads(h.requests(Call.LAUNCH)[-1].body)


def test_vast_is_given_the_login_of_a_private_image_and_of_no_other(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        await provider.launch(h.request(await cheapest(h, provider), login=LOGIN))
        assert sent(h)["image_login"] == f"-u lab -p {PASSWORD} registry.example"
        await provider.launch(h.request(await cheapest(h, provider)))
        assert "image_login" not in sent(h)

    play(tmp_path, story)


@pytest.mark.parametrize("odd", ["two words", "a;b", "$HOME", "`id`", "'a'", '"a"', "-p", "a\\b", "", "a\nb", "\u00e9"])
@pytest.mark.parametrize("part", ["username", "password"])
def test_what_could_be_split_differently_by_vast_is_refused_and_not_quoted(tmp_path: Path, part: str, odd: str) -> None:
    login = replace(LOGIN, password=Secret(odd)) if part == "password" else replace(LOGIN, username=odd)

    async def story(h: VastHarness, provider: VastProvider) -> None:
        with pytest.raises(RequestRejected, match=f"the {part} of a registry holds only") as refused:
            await provider.launch(h.request(await cheapest(h, provider), login=login))
        assert refused.value.field == f"login.{part}"
        assert not h.live()
        assert h.launch_calls() == 0

    play(tmp_path, story)
