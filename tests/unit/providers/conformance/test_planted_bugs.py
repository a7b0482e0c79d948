"""The suite against providers that are wrong on purpose: each mistake a real adapter made is caught by name.

A suite that passes everything proves nothing. Every case plants one bug into the example provider, checks that the
named behaviour fails with it, and that the same behaviour passes without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract import provider as contract_of_providers
from spotd_providers.contract.errors import OutcomeUnknown, ProviderError, RequestRejected, Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    MicroUsdPerHour,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
    ShellAddress,
)
from spotd_providers.kit.calls import retry_read
from spotd_providers.kit.http import AnswerLost, HttpAnswer
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit import BEHAVIOURS, Behaviour, run
from spotd_providers.testkit.behaviours import launching
from spotd_providers.testkit.harness import HarnessFactory
from spotd_providers.vastai.plugin import VastProvider
from tests.unit.providers.conformance.shelf import client, open_harness, provider, translate, wire
from tests.unit.providers.runpod.harness import open_harness as runpod_harness
from tests.unit.providers.vastai.harness import open_harness as vast_harness

ShelfClient = client.ShelfClient
ShelfProvider = provider.ShelfProvider
Plant = Callable[[pytest.MonkeyPatch], None]


def _launch_repeats(patch: pytest.MonkeyPatch) -> None:
    once = ShelfClient.rent

    async def rent(self: Any, order: dict[str, Any], *, key: str) -> Any:
        try:
            return await once(self, order, key=key)
        except OutcomeUnknown:
            return await once(self, order, key=key)

    patch.setattr(ShelfClient, "rent", rent)


def _lost_means_failed(patch: pytest.MonkeyPatch) -> None:
    once = ShelfClient.rent

    async def rent(self: Any, order: dict[str, Any], *, key: str) -> Any:
        try:
            return await once(self, order, key=key)
        except OutcomeUnknown as exc:
            raise Unavailable("the shop does not answer") from exc

    patch.setattr(ShelfClient, "rent", rent)


def _foreign_errors_escape(patch: pytest.MonkeyPatch) -> None:
    async def rentals(self: Any, name: str | None = None) -> Any:
        return (await self._http.read("GET", "/v1/rentals")).json()["rentals"]

    patch.setattr(ShelfClient, "rentals", rentals)


def _price_of_one_gpu(patch: pytest.MonkeyPatch) -> None:
    true = translate.offer_of

    def offer_of(raw: Any) -> Offer | Rejected:
        offer = true(raw)
        if isinstance(offer, Rejected):
            return offer
        return replace(offer, gpu_price=MicroUsdPerHour(-(-offer.gpu_price // offer.gpu_count)))

    patch.setattr(provider, "offer_of", offer_of)


def _bad_rows_are_dropped_silently(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.offers

    async def offers(self: Any, query: OfferQuery) -> OfferPage:
        return replace(await true(self, query), rejected=())

    patch.setattr(ShelfProvider, "offers", offers)


def _any_price_will_do(patch: pytest.MonkeyPatch) -> None:
    true = translate.offer_of

    def offer_of(raw: Any) -> Offer | Rejected:
        price = raw["usd_per_gpu_hour"]
        try:
            micro = MicroUsdPerHour(int(abs(float(price)) * 1_000_000))
        except (TypeError, ValueError, OverflowError):
            return true(raw)
        sound = true({**raw, "usd_per_gpu_hour": 1.0})
        return sound if isinstance(sound, Rejected) else replace(sound, gpu_price=micro)

    patch.setattr(provider, "offer_of", offer_of)


def _others_are_shown(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.__init__

    def init(self: Any, *args: Any) -> None:
        true(self, *args)
        self._prefix = self._prefix.rstrip("-")

    patch.setattr(ShelfProvider, "__init__", init)


def _first_page_only(patch: pytest.MonkeyPatch) -> None:
    async def rentals(self: Any, name: str | None = None) -> list[Any]:
        page = await self._read("/v1/rentals" + (f"?name={name}" if name else ""), wire.RentalPage)
        return list(page.rentals)

    patch.setattr(ShelfClient, "rentals", rentals)


def _always_complete(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.instances

    async def instances(self: Any) -> Listing:
        return replace(await true(self), complete=True)

    patch.setattr(ShelfProvider, "instances", instances)


def _trouble_is_no_machines(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.find

    async def find(self: Any, key: AttemptKey) -> tuple[Instance, ...]:
        try:
            return await true(self, key)
        except Unavailable:
            return ()

    patch.setattr(ShelfProvider, "find", find)


def _unknown_is_gone(patch: pytest.MonkeyPatch) -> None:
    true = translate.instance_of

    def instance_of(row: Any) -> Instance:
        instance = true(row)
        return replace(instance, state=InstanceState.GONE) if instance.state is InstanceState.UNKNOWN else instance

    patch.setattr(provider, "instance_of", instance_of)


def _find_by_prefix(patch: pytest.MonkeyPatch) -> None:
    async def find(self: Any, key: AttemptKey) -> tuple[Instance, ...]:
        rows, _ = self._ours(await self._client.rentals())
        return tuple(instance for instance in rows if instance.key.startswith(key))

    patch.setattr(ShelfProvider, "find", find)


def _end_never_fails(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.terminate

    async def terminate(self: Any, ref: InstanceRef) -> None:
        try:
            await true(self, ref)
        except Unavailable:
            return

    patch.setattr(ShelfProvider, "terminate", terminate)


def _absent_is_an_error(patch: pytest.MonkeyPatch) -> None:
    async def give_back(self: Any, number: str) -> None:
        self._judge(await self._http.read("DELETE", f"/v1/rentals/{number}"))

    patch.setattr(ShelfClient, "give_back", give_back)


def _refused_key_means_absent(patch: pytest.MonkeyPatch) -> None:
    async def give_back(self: Any, number: str) -> None:
        answer = await self._http.read("DELETE", f"/v1/rentals/{number}")
        if answer.status in (401, 404):
            return
        self._judge(answer)

    patch.setattr(ShelfClient, "give_back", give_back)


def _errors_quote_the_answer(patch: pytest.MonkeyPatch) -> None:
    true = ShelfClient._refusal

    def refusal(self: Any, answer: HttpAnswer) -> Any:
        if answer.status in (400, 404, 422):
            return RequestRejected(f"refused: {answer.text}", field="request", reason=answer.text)
        return true(self, answer)

    patch.setattr(ShelfClient, "_refusal", refusal)


def _key_in_the_url(patch: pytest.MonkeyPatch) -> None:
    true = ShelfClient._read

    async def read(self: Any, path: str, shape: Any) -> Any:
        key = self._http._client.headers["authorization"].removeprefix("Bearer ")
        return await true(self, f"{path}{'&' if '?' in path else '?'}api_key={key}", shape)

    patch.setattr(ShelfClient, "_read", read)


def _order_is_logged(patch: pytest.MonkeyPatch) -> None:
    true_init = ShelfClient.__init__
    true_rent = ShelfClient.rent

    def init(self: Any, http: Any, services: Any) -> None:
        true_init(self, http, services)
        self.log = services.log

    async def rent(self: Any, order: dict[str, Any], *, key: str) -> Any:
        self.log.info("shelf.rent", order=order)
        return await true_rent(self, order, key=key)

    patch.setattr(ShelfClient, "__init__", init)
    patch.setattr(ShelfClient, "rent", rent)


def _no_deadline(patch: pytest.MonkeyPatch) -> None:
    async def rent(self: Any, order: dict[str, Any], *, key: str) -> Any:
        try:
            answer = await self._http.send("POST", "/v1/rentals", json_body=order, timeout_s=1e6)
        except AnswerLost as exc:
            raise OutcomeUnknown("lost", key=key) from exc
        return wire.RentalReply.model_validate(answer.json()).rental

    patch.setattr(ShelfClient, "rent", rent)


def _retries_without_end(patch: pytest.MonkeyPatch) -> None:
    async def repeated(self: Any, call: Callable[[], Any]) -> Any:
        return await retry_read(call, clock=self._clock, rng=self._rng, attempts=50, wait_max=timedelta(hours=2))

    patch.setattr(ShelfClient, "_repeated", repeated)


def _own_price_is_sent(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.launch

    async def launch(self: Any, request: LaunchRequest) -> Launched:
        return await true(self, replace(request, price_max=MicroUsdPerHour(request.price_max * 10)))

    patch.setattr(ShelfProvider, "launch", launch)


def _another_label(patch: pytest.MonkeyPatch) -> None:
    true = ShelfClient.rent

    async def rent(self: Any, order: dict[str, Any], *, key: str) -> Any:
        row = await true(self, {**order, "name": key[:12]}, key=key)
        return row.model_copy(update={"name": key})

    patch.setattr(ShelfClient, "rent", rent)


def _check_raises(patch: pytest.MonkeyPatch) -> None:
    async def check(self: Any) -> Sequence[Any]:
        await self._client.account()
        return (CheckLine(name="key", ok=True, detail="accepted"),)

    patch.setattr(ShelfProvider, "check", check)


def _silent_capability(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        provider, "CAPABILITIES", {**provider.CAPABILITIES, Power.LOGS: Capability(available=False, reason="")}
    )


def _naive_times(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.instances

    async def instances(self: Any) -> Listing:
        return replace(await true(self), at=datetime(2026, 3, 2, 12))  # noqa: DTZ001 - naive is the bug

    patch.setattr(ShelfProvider, "instances", instances)


def _script_is_cut(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.launch

    async def launch(self: Any, request: LaunchRequest) -> Launched:
        return await true(self, replace(request, start_script=request.start_script[:4096]))

    patch.setattr(ShelfProvider, "launch", launch)


def _ends_anyones_machine(patch: pytest.MonkeyPatch) -> None:
    async def terminate(self: Any, ref: InstanceRef) -> None:
        await self._client.give_back(ref.instance_id)

    patch.setattr(ShelfProvider, "terminate", terminate)


def _takes_what_was_listed_for_its_own(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider._ours

    def ours(self: Any, rows: Sequence[Any]) -> Any:
        self._known.update(row["number"] for row in rows)
        return true(self, rows)

    patch.setattr(ShelfProvider, "_ours", ours)


def _ends_all_of_the_label(patch: pytest.MonkeyPatch) -> None:
    async def terminate(self: Any, _ref: InstanceRef) -> None:
        for row in await self._client.rentals():
            if row["name"].startswith(self._prefix):
                await self._client.give_back(row["number"])

    patch.setattr(ShelfProvider, "terminate", terminate)


def _vast_asks_not_whose_it_is(patch: pytest.MonkeyPatch) -> None:
    async def require_ours(_self: Any, _ref: InstanceRef) -> None:
        return

    patch.setattr(VastProvider, "_require_ours", require_ours)


def _vast_changes_every_bid(patch: pytest.MonkeyPatch) -> None:
    true = VastProvider.change_bid

    async def change_bid(self: Any, _ref: InstanceRef, price: MicroUsdPerHour) -> None:
        for machine in (await self.instances()).instances:
            await true(self, machine.ref, price)

    patch.setattr(VastProvider, "change_bid", change_bid)


def _runpod_asks_not_whose_it_is(patch: pytest.MonkeyPatch) -> None:
    async def require_ours(_self: Any, _ref: InstanceRef) -> None:
        return

    async def shell(_self: Any, _ref: InstanceRef) -> ShellAddress:
        return ShellAddress(host="host", port=22, user="root")

    patch.setattr(RunpodProvider, "_require_ours", require_ours)
    patch.setattr(RunpodProvider, "shell", shell)


BUGS_ELSEWHERE: list[tuple[HarnessFactory, Plant, str]] = [
    (vast_harness, _vast_asks_not_whose_it_is, "a_reference_to_a_foreign_machine_is_not_acted_on[terminate]"),
    (vast_harness, _vast_asks_not_whose_it_is, "a_reference_to_a_foreign_machine_is_not_acted_on[change_bid]"),
    (vast_harness, _vast_asks_not_whose_it_is, "a_reference_to_a_foreign_machine_is_not_acted_on[logs]"),
    (vast_harness, _vast_changes_every_bid, "a_change_of_one_machine_changes_no_other[change_bid]"),
    (runpod_harness, _runpod_asks_not_whose_it_is, "a_reference_to_a_foreign_machine_is_not_acted_on[logs]"),
    (runpod_harness, _runpod_asks_not_whose_it_is, "a_reference_to_a_foreign_machine_is_not_acted_on[shell]"),
]
"""Bugs of powers that the example provider lacks."""


def _reasons_without_end(patch: pytest.MonkeyPatch) -> None:
    true = ShelfProvider.offers

    async def offers(self: Any, query: OfferQuery) -> OfferPage:
        page = await true(self, query)
        odd = not page.offers
        many = tuple(Rejected(offer_id="x", reason="odd") for _ in range(25_000 if odd else 0))
        return replace(page, rejected=page.rejected + many)

    patch.setattr(ShelfProvider, "offers", offers)


BUGS: list[tuple[Plant, str]] = [
    (_ends_anyones_machine, "a_reference_to_a_foreign_machine_is_not_acted_on[terminate]"),
    (_takes_what_was_listed_for_its_own, "a_reference_to_a_foreign_machine_is_not_acted_on[terminate]"),
    (_ends_all_of_the_label, "a_change_of_one_machine_changes_no_other[terminate]"),
    (_launch_repeats, "a_lost_answer_means_unknown_and_one_machine[connection lost]"),
    (_lost_means_failed, "a_lost_answer_means_unknown_and_one_machine[gateway error]"),
    (_lost_means_failed, "a_purchase_that_never_happened_is_unknown_until_find_says_so[no answer]"),
    (_foreign_errors_escape, "a_failed_read_is_a_leaf_and_never_a_false_none[find]"),
    (_price_of_one_gpu, "offers_are_priced_for_the_whole_machine"),
    (_bad_rows_are_dropped_silently, "a_bad_price_never_becomes_an_offer[-1]"),
    (_any_price_will_do, 'a_bad_price_never_becomes_an_offer["0.001"]'),
    (_any_price_will_do, "a_bad_price_never_becomes_an_offer[-1]"),
    (_any_price_will_do, "a_bad_price_never_becomes_an_offer[true]"),
    (_others_are_shown, "foreign_machines_are_never_shown_or_touched"),
    (_first_page_only, "every_machine_is_listed_however_many"),
    (_always_complete, "a_malformed_row_costs_only_itself_and_completeness"),
    (_trouble_is_no_machines, "a_failed_read_is_a_leaf_and_never_a_false_none[find]"),
    (_trouble_is_no_machines, "a_listing_that_cannot_be_had_is_an_error"),
    (_unknown_is_gone, "an_unheard_of_state_is_unknown_and_not_gone"),
    (_find_by_prefix, "keys_that_begin_alike_are_distinguished"),
    (_end_never_fails, "an_end_that_did_not_happen_is_no_success[gateway error]"),
    (_absent_is_an_error, "terminating_an_absent_machine_succeeds"),
    (_refused_key_means_absent, "a_refused_key_is_not_taken_for_an_absent_machine"),
    (_errors_quote_the_answer, "a_cloud_that_echoes_secrets_is_not_quoted[launch]"),
    (_key_in_the_url, "the_key_travels_in_headers_only"),
    (_key_in_the_url, "an_unknown_key_finds_nothing"),
    (_order_is_logged, "a_launch_makes_one_machine_that_carries_the_key"),
    (_no_deadline, "a_lost_answer_means_unknown_and_one_machine[no answer]"),
    (_no_deadline, "a_rate_limited_launch_is_refused_and_not_repeated[with advice]"),
    (_retries_without_end, "a_storm_of_rate_limits_is_not_answered_by_a_storm[instances]"),
    (_own_price_is_sent, "a_price_that_moved_is_not_paid[spot]"),
    (_own_price_is_sent, "price_max_is_respected[on-demand]"),
    (_another_label, "a_launch_makes_one_machine_that_carries_the_key"),
    (_check_raises, "check_finds_failures_and_never_raises[gateway error]"),
    (_silent_capability, "every_power_is_declared"),
    (_naive_times, "pages_and_listings_carry_aware_times"),
    (_foreign_errors_escape, "whatever_the_cloud_answers_only_the_contract_is_raised[instances]"),
    (_reasons_without_end, "a_flood_of_empty_rows_is_bounded[offers]"),
    (_script_is_cut, "a_start_script_of_the_full_limit_is_accepted"),
]
BY_NAME = {one.name: one for one in BEHAVIOURS}


def _passes(one: Behaviour, folder: Path, harness: HarnessFactory = open_harness) -> bool:
    try:
        run(one, harness, folder)
    except (AssertionError, ProviderError):
        return False
    return True


@pytest.mark.parametrize(("plant", "name"), BUGS, ids=[f"{plant.__name__[1:]}: {name}" for plant, name in BUGS])
def test_a_planted_bug_is_caught(plant: Plant, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _passes(BY_NAME[name], tmp_path / "sound")
    plant(monkeypatch)
    assert not _passes(BY_NAME[name], tmp_path / "planted")


@pytest.mark.parametrize(
    ("harness", "plant", "name"),
    BUGS_ELSEWHERE,
    ids=[f"{plant.__name__[1:]}: {name}" for _, plant, name in BUGS_ELSEWHERE],
)
def test_a_planted_bug_of_a_bundled_provider_is_caught(
    harness: HarnessFactory, plant: Plant, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _passes(BY_NAME[name], tmp_path / "sound", harness)
    plant(monkeypatch)
    assert not _passes(BY_NAME[name], tmp_path / "planted", harness)


def test_every_call_of_the_contract_that_names_a_machine_is_made_on_foreign_ones() -> None:
    taking = {
        name
        for protocol in vars(contract_of_providers).values()
        if inspect.isclass(protocol) and protocol.__module__ == contract_of_providers.__name__
        for name, method in inspect.getmembers(protocol, inspect.isfunction)
        if "InstanceRef" in {str(kind) for kind in method.__annotations__.values()}
    }
    assert taking == set(launching.CALLS), "a new call that takes a reference needs a case here"
    assert {"terminate", "change_bid"} <= taking


def test_the_suite_holds_thirty_behaviours_and_each_says_what_it_is() -> None:
    assert len({one.name.partition("[")[0] for one in BEHAVIOURS}) >= 30
    assert len({one.name for one in BEHAVIOURS}) == len(BEHAVIOURS)
    assert all(one.says.endswith(".") for one in BEHAVIOURS)
