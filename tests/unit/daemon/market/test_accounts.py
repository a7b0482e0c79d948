"""A key of another account: its lists never held the machine, and its "not found" ends nothing."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.states import AttemptState
from spotd.daemon.install import other_account_words
from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.values import InstanceRef, Listing, ProviderName
from tests.unit.daemon.rig import SHOP, Rig
from tests.unit.daemon.shop import Shop
from tests.unit.store.reads import intents_of

pytestmark = pytest.mark.anyio


class Accounts(Shop):
    """A marketplace with two accounts; everything there is belongs to the first."""

    used = "first"
    tells: str | None = None

    async def account(self) -> str:
        if self.tells is not None:
            raise AuthFailed(self.tells)
        return self.used

    async def instances(self) -> Listing:
        listing = await super().instances()
        if self.used == "first":
            return listing
        return Listing(instances=(), complete=True, at=listing.at)

    async def terminate(self, ref: InstanceRef) -> None:
        if self.used == "first":
            await super().terminate(ref)
        else:
            self.counts["terminate"] += 1


def learning(rig: Rig) -> Rig:
    """The rig's daemon learns the account, as its composition makes it."""

    def known(name: ProviderName, account: str) -> None:
        rig.policy.accounts[name] = account

    for poller in rig.pollers.values():
        poller._account_known = known
    return rig


async def test_a_machine_of_a_former_account_is_not_forgotten_and_is_named(tmp_path: Path) -> None:
    rig = learning(Rig(tmp_path))
    shop = Accounts(rig.clock)
    rig = learning(Rig(tmp_path, clock=rig.clock, shops=[shop]))
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await rig.until(lambda: rig.attempts(name)[0].account == "first")
    shop.used = "second"
    again = learning(rig.reborn())
    async with again.running():
        await again.cancel(name)
        again.host(name, 1).exit("stopped", code=143)
        await again.clock.sleep(timedelta(hours=1))
        (item,) = again.attempts(name)
        assert item.state is AttemptState.ENDING
        assert len(shop.alive()) == 1
        assert shop.counts["terminate"] == 0
        words = other_account_words(again.control_loop.state.world, again.policy.current, SHOP)  # type: ignore[union-attr]  # it runs
        assert "m1 (spotd-lab-j1-1) to first" in words
        intents = again.store.read(lambda reads: intents_of(reads, name))
        assert any("belongs to the account first" in intent.error for intent in intents)
    shop.used = "first"
    back = learning(again.reborn())
    async with back.running():
        await back.until(lambda: back.attempts(name)[0].state is AttemptState.ENDED)
    assert not shop.alive()


async def test_a_key_that_may_not_ask_for_its_account_is_used_all_the_same(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    shop = Accounts(rig.clock)
    shop.tells = "not permitted"
    rig = learning(Rig(tmp_path, clock=rig.clock, shops=[shop]))
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        assert rig.attempts(name)[0].account == ""
        await rig.cancel(name)
        rig.host(name, 1).exit("stopped", code=143)
        await rig.until(lambda: not shop.alive())
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
