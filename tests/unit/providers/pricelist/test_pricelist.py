"""A price list: rows to offers, and machines by commands whose every way to fail is played."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spotd.config.load import load, out_of_reach
from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    NotSupported,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Market,
    Offer,
    OfferQuery,
    Power,
)
from spotd_providers.kit.http import AnswerLost
from spotd_providers.pricelist.plugin import NO_COMMAND, PLUGIN, Commands, PricelistProvider
from spotd_providers.pricelist.rows import PROVIDER, PricelistSettings, offer_of, rows_of
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import RecordingLog
from tests.cases import every
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged

LIST = """name,gpu,gpus,price,market,region,disk_gb_month,fee,until
deepinfra-1xB200,B200,1,3.69,on-demand,,,,
deepinfra-8xB200,B200,8,29.52,,,,,
contract,H100 SXM,8,14,on-demand,fra,0.08,1.10,2099-03-31
night,RTX 4090,1,0.25,spot,,,,
over,RTX 4090,1,0.20,,,,,2020-01-01
"""
WITH_COMMANDS = {"launch": "seller launch", "list": "seller list", "end": "seller end"}


class Seller(Commands):
    """A seller's program: it rents, lists and ends, or does with its next answer what the test says."""

    def __init__(self) -> None:
        super().__init__(timedelta(minutes=1))
        self.machines: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.given: list[tuple[Mapping[str, str], str]] = []
        self.answers: dict[str, Callable[[tuple[int, bytes]], tuple[int, bytes]]] = {}
        self.ends = True

    async def run(self, command: Sequence[str], *, about: Mapping[str, str], given: str = "") -> tuple[int, bytes]:
        name = command[1]
        self.calls.append(name)
        self.given.append((about, given))
        true = self._act(name, command, about) if name not in self.answers or name != "launch" else None
        if name in self.answers:
            return self.answers[name](true or self._act(name, command, about))
        assert true is not None
        return true

    def _act(self, name: str, command: Sequence[str], about: Mapping[str, str]) -> tuple[int, bytes]:
        if name == "launch":
            number = f"m-{len(self.machines)}"
            self.machines[number] = {"id": number, "key": about["SPOTD_KEY"], "state": "pending"}
            return 0, json.dumps({"id": number}).encode()
        if name == "end":
            if self.ends:
                self.machines.pop(command[2], None)
            return 0, b""
        return 0, json.dumps(list(self.machines.values())).encode()


Story = Callable[[PricelistProvider, Seller], Awaitable[None]]


def play(folder: Path, story: Story, *, text: str = LIST, credential: str | None = None, **more: Any) -> None:
    file = folder / "prices.csv"
    file.write_text(text, encoding="utf-8")
    services = Services(
        install=InstallId("lab"), clock=FakeClock(), rng=Random(7), log=RecordingLog(), state_dir=folder,
        credential=credential,
    )  # fmt: skip
    seller = Seller()
    chosen = PricelistSettings(**{"file": file, **WITH_COMMANDS, **more})

    async def main() -> None:
        await story(PricelistProvider(chosen, services, seller, None), seller)

    run_virtually(main)


async def _request(provider: PricelistProvider, number: int = 1) -> LaunchRequest:
    offer = next(one for one in (await provider.offers(OfferQuery())).offers if one.offer_id == "deepinfra-1xB200")
    return LaunchRequest(
        key=AttemptKey(f"spotd-lab-j0b-{number}"), install=InstallId("lab"), offer=offer, price_max=offer.gpu_price,
        image="pytorch/pytorch:2.9.0", disk_gb=20, start_script="#!/bin/sh\nexec sleep 600\n",
    )  # fmt: skip


def test_rows_become_offers_with_fee_disk_and_dates(tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, _seller: Seller) -> None:
        page = await provider.offers(OfferQuery())
        found = {str(one.offer_id): one for one in page.offers}
        assert {name: (one.gpu, one.gpu_count, one.gpu_price, one.market) for name, one in found.items()} == {
            "deepinfra-1xB200": ("B200_SXM", 1, 3_690_000, Market.ON_DEMAND),
            "deepinfra-8xB200": ("B200_SXM", 8, 29_520_000, Market.ON_DEMAND),
            "contract": ("H100_SXM", 8, 15_400_000, Market.ON_DEMAND),
            "night": ("RTX_4090", 1, 250_000, Market.SPOT),
        }
        assert found["contract"].storage_price == 88_000
        assert [one.offer_id for one in page.rejected] == ["over"]
        assert page.complete
        assert [one.offer_id for one in (await provider.offers(OfferQuery(markets=(Market.SPOT,)))).offers] == ["night"]

    play(tmp_path, story)


@every("cell", ["NaN", "inf", "-1", "0", "1e308", "abc", "", "true", "9" * 400, "1e-99999", "\x00"], ids=repr)
def test_a_price_that_is_none_costs_its_row(cell: str) -> None:
    rows = rows_of(f"name,gpu,price\na,H100,{cell}\nb,H100,2\n".encode(), is_json=False)
    assert [row.id for row in rows.rows] == (["b"] if cell != "1e-99999" else ["a", "b"])
    assert all(row.price >= 1 for row in rows.rows)


@every("body", [b"", b"<html/>", b"\xff\xfe", b"{}", b"[", b"price\n1\n", b'name,price\n"a,1\n'])
def test_what_is_no_list_is_never_an_empty_market(body: bytes) -> None:
    for is_json in (True, False):
        with pytest.raises(Unavailable):
            rows_of(body, is_json=is_json)


def test_an_unknown_column_and_a_name_that_is_there_twice_are_named() -> None:
    rows = rows_of(b"name,gpu,price,pirce\na,H100,2,\na,H100,3,\nb,H100,2,1\n", is_json=False)
    assert [row.price for row in rows.rows] == [2_000_000]
    assert {one.offer_id: one.reason for one in rows.rejected} == {
        "a": "the same name twice in one answer",
        "b": "pirce: Extra inputs are not permitted",
    }


ROWS = [
    {
        "name": "a",
        "gpu": "H100 SXM",
        "gpus": 8,
        "price": 14.0,
        "fee": "1.1",
        "disk_gb_month": 0.08,
        "until": "2099-01-01",
    },
    {"name": "b", "gpu": "RTX 4090", "gpus": 1, "price": "0.25", "market": "spot", "vram_gb": 24, "upload_gb": 0.01},
]


def judge(data: Any) -> None:
    try:
        rows = rows_of(json.dumps(data).encode(), is_json=True)
    except Unavailable:
        assert not isinstance(data, list)
        return
    now = FakeClock().now()
    for one in [offer_of(row, now) for row in rows.rows]:
        if isinstance(one, Offer):
            amounts = (one.gpu_price, one.storage_price, one.upload_price, one.download_price)
            assert all(type(amount) is int and 0 <= amount <= 10**14 for amount in amounts)
            assert one.gpu_price > 0


def test_a_damaged_list_never_becomes_a_price_that_is_not_finite() -> None:
    judge_damaged(judge, ROWS, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_lists_never_become_a_price_that_is_not_finite() -> None:
    judge_damaged(judge, ROWS, count=ALL)


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_rows_or_unavailable(body: bytes) -> None:
    for is_json in (True, False):
        with suppress(Unavailable):
            rows_of(body, is_json=is_json)


def test_without_commands_nothing_is_launched_and_it_is_said(tmp_path: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(WITH_COMMANDS)

    async def story(provider: PricelistProvider, seller: Seller) -> None:
        with pytest.raises(NotSupported, match="names no command"):
            await provider.launch(await _request(provider))
        assert (await provider.instances()).complete
        assert NO_COMMAND in str(await provider.check())
        assert not seller.calls

    play(tmp_path, story, **nothing)
    assert PLUGIN.traits({"file": "x"}).no_launches == NO_COMMAND
    assert PLUGIN.traits({"file": "x", **WITH_COMMANDS}).no_launches == ""


def test_a_config_with_a_list_and_no_commands_says_what_that_can_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[providers.pricelist]\nfile = "prices.csv"\n[providers.local]\n')
    loaded = load(file, environ={})
    assert [(one.key, one.message) for one in loaded.warnings] == [("providers.pricelist", NO_COMMAND)]
    assert out_of_reach(loaded.config) == []  # no machine of it has to reach the store
    file.write_text(file.read_text().replace("[providers.local]", 'launch = "a"\nlist = "b"\nend = "c"\n'))
    loaded = load(file, environ={})
    assert loaded.warnings == ()
    assert out_of_reach(loaded.config) == ["pricelist"]


@every(
    ("keys", "says"),
    [
        ({"launch": "a"}, "launch needs list and end"),
        ({"launch": "a", "list": "b"}, "launch needs end"),
        ({"launch": "  ", "list": "b", "end": "c"}, "names no program"),
        ({"launch": '"', "list": "b", "end": "c"}, "quotation"),
        ({"file": "a", "url": "https://b"}, "either file or url"),
        ({"url": "http://prices.example/a.csv"}, "https"),
    ],
)
def test_settings_that_cannot_be_safe_are_refused_with_the_reason(keys: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PricelistSettings(**keys)


def test_a_machine_is_launched_found_listed_and_ended(tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        request = await _request(provider)
        made = await provider.launch(request)
        about, script = seller.given[0]
        assert about["SPOTD_KEY"] == request.key
        assert about["SPOTD_NAME"] == "deepinfra-1xB200"
        assert about["SPOTD_PRICE_MAX"] == "3.690000"
        assert about["SPOTD_API_KEY"] == "secret"
        assert "exec sleep 600" in script
        seller.machines["theirs"] = {"id": "theirs", "key": "spotd-lab2-j0b-1", "state": "running"}
        seller.machines["m-0"]["state"] = "running"
        assert [one.state for one in await provider.find(request.key)] == [InstanceState.RUNNING]
        assert [one.ref for one in (await provider.instances()).instances] == [made.instance.ref]
        with pytest.raises(RequestRejected):
            await provider.terminate(InstanceRef(provider=PROVIDER, instance_id=InstanceId("theirs")))
        await provider.terminate(made.instance.ref)
        await provider.terminate(made.instance.ref)
        assert list(seller.machines) == ["theirs"]

    play(tmp_path, story, credential="secret")


def _lose(_true: tuple[int, bytes]) -> tuple[int, bytes]:
    raise AnswerLost("killed")


UNKNOWN: dict[str, Callable[[tuple[int, bytes]], tuple[int, bytes]]] = {
    "lost": _lose,
    "another code": lambda _: (1, b""),
    "killed": lambda _: (-9, b""),
    "no id": lambda _: (0, b"{}"),
    "garbage": lambda _: (0, b"\xff"),
    "an odd id": lambda _: (0, b'{"id": "../x y"}'),
    "nothing": lambda _: (0, b""),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_answer_that_does_not_settle_a_launch_is_unknown_and_found_by_its_key(name: str, tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        request = await _request(provider)
        seller.answers["launch"] = UNKNOWN[name]
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert seller.calls.count("launch") == 1
        assert len(await provider.find(request.key)) == 1

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("code", "leaf"),
    [(10, NoCapacity), (11, QuotaExceeded), (12, NoBalance), (13, AuthFailed), (14, RequestRejected)],
)
def test_the_exit_code_says_why_nothing_happened(code: int, leaf: type[ProviderError], tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        seller.answers["launch"] = lambda _: (code, b'{"error": "sold out"}')
        with pytest.raises(leaf, match="sold out"):
            await provider.launch(await _request(provider))

    play(tmp_path, story)


@pytest.mark.parametrize(
    "answer",
    [(1, b"[]"), (0, b""), (0, b"{}"), (0, b"null"), (0, b'"ok"')],
    ids=["code", "none", "object", "null", "text"],
)
def test_a_list_that_failed_hides_no_machine(answer: tuple[int, bytes], tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        request = await _request(provider)
        await provider.launch(request)
        seller.answers["list"] = lambda _: answer
        for call in (provider.instances(), provider.find(request.key)):
            with pytest.raises(Unavailable):
                await call

    play(tmp_path, story)


def test_a_row_that_names_no_machine_makes_the_list_incomplete(tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        seller.machines["odd"] = {"id": 7, "key": "spotd-lab-j0b-1"}
        assert not (await provider.instances()).complete

    play(tmp_path, story)


def test_an_end_that_has_no_effect_is_not_taken_for_one(tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, seller: Seller) -> None:
        made = await provider.launch(await _request(provider))
        seller.ends = False
        with pytest.raises(Unavailable):
            await provider.terminate(made.instance.ref)
        seller.answers["end"] = lambda _: (13, b"")
        with pytest.raises(AuthFailed):
            await provider.terminate(made.instance.ref)

    play(tmp_path, story)


def test_every_power_is_stated_as_the_provider_has_it(tmp_path: Path) -> None:
    async def story(provider: PricelistProvider, _seller: Seller) -> None:
        assert provider.capabilities == PLUGIN.powers
        assert set(provider.capabilities) == set(Power)

    play(tmp_path, story)


# The real thing: a program, its exit code, and its end when it takes too long.


@pytest.mark.process
@pytest.mark.anyio
async def test_a_program_is_run_without_a_shell_and_ended_with_its_children(tmp_path: Path) -> None:
    program = tmp_path / "seller"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "if sys.argv[1] == 'sleep': print('begun', flush=True); os.fork(); time.sleep(600)\n"
        "print(json.dumps([sys.argv[1:], sys.stdin.read(), sorted(os.environ)])); sys.exit(7)\n"
    )
    program.chmod(0o755)
    code, text = await Commands(timedelta(seconds=60)).run(
        [str(program), "a b;$HOME"], about={"SPOTD_KEY": "k"}, given="in"
    )
    said = json.loads(text)
    assert (code, said[0], said[1]) == (7, ["a b;$HOME"], "in")
    assert {name for name in said[2] if name not in ("LC_CTYPE", "__CF_USER_TEXT_ENCODING")} == {
        "HOME", "LANG", "PATH", "SPOTD_KEY",
    }  # fmt: skip
    with pytest.raises(AnswerLost):
        await Commands(timedelta(milliseconds=300)).run([str(program), "sleep"], about={})
    with pytest.raises(Unavailable):
        await Commands(timedelta(seconds=1)).run([str(tmp_path / "absent")], about={})
