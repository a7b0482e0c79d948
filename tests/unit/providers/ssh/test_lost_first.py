"""Own hosts of which the first one is lost, with what it kept: the others go on, and another one has its place."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotd_providers.contract.errors import NoCapacity, ProviderError, RequestRejected, Unavailable
from spotd_providers.contract.values import Instance, InstanceState, LaunchRequest, Offer
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.ssh import Lines
from spotd_providers.ssh.answers import Part, Places
from spotd_providers.ssh.gangs import union_of
from spotd_providers.ssh.plugin import SshProvider
from spotd_providers.ssh.settings import SshHost
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.clock import run_virtually
from tests.cases import every
from tests.fakes.ssh.host import FakeHost
from tests.unit.providers.ssh.harness import SshHarness, open_harness, wait_for

OFF = "exec 2>/dev/null; exit 3"
NO_FOLDER = "#!/bin/sh\ncase $* in *machines/spotd*) exit 1 ;; esac\nexec /bin/mkdir $*\n"
NUMBER = 3
RUNNING = InstanceState.RUNNING


class Gang:
    """One attempt on titan and twin, and a spare host that is like them."""

    def __init__(self, h: SshHarness, provider: SshProvider, request: LaunchRequest, made: Instance) -> None:
        self.h = h
        self.hosts = h.hosts
        self.provider = provider
        self.request = request
        self.made = made
        self.key = str(request.key)
        self.fresh = f"{self.key}.{NUMBER}"

    async def replace(self, *ranks: int, number: int = NUMBER) -> None:
        await self.provider.replace_members(self.request, self.made.ref, ranks, number)

    async def drop(self, *ranks: int) -> None:
        await self.provider.drop_members(self.made.ref, ranks)

    async def end(self) -> None:
        await self.provider.terminate(self.made.ref)

    async def row(self) -> Instance:
        (found,) = [one for one in (await self.provider.instances()).instances if one.key == self.request.key]
        assert found.ref == self.made.ref
        return found

    def alive(self) -> dict[str, tuple[int, str]]:
        """By host and folder: the rank and the round that each machine that lives was given."""
        found = {}
        for name, host in self.hosts.items():
            for one in host.machines():
                folder = one.machine_id.partition(":")[2]
                if one.running:
                    found[f"{name}{folder.removeprefix(self.key)}"] = _place(host, folder)
        return found

    def kill(self, name: str, folder: str) -> None:
        host = self.hosts[name]
        host.kill(folder)
        wait_for(lambda: host.leader(folder) is None and not host.members(folder))

    def meta(self, name: str, folder: str = "") -> Path:
        return self.hosts[name].folder(folder or self.key) / "meta"


Story = Callable[[Gang], Awaitable[None]]


def _place(host: FakeHost, folder: str) -> tuple[int, str]:
    for pid in host.members(folder):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found = {name: value for name, _, value in (word.partition(b"=") for word in words)}
        return int(found[b"SPOTD_NODE_RANK"]), found.get(b"SPOTD_NODE_ROUND", b"").decode()
    return -1, ""


def play(folder: Path, story: Story, *, nodes: int = 2) -> None:
    with open_harness(folder, pool=True, spare=True) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                page = await provider.offers(h.query())
                one: Offer = next(one for one in page.offers if one.offer_id == "titan:RTX_4090:2")
                if nodes == 2:
                    h.hosts["spare"].use(*(gpu.uuid for gpu in h.hosts["spare"].gpus))
                request = h.request(gang_of(one, nodes), start_script="#!/bin/sh\nexec sleep 600\n")
                made = (await provider.launch(request)).instance
                h.hosts["spare"].use()
                gang = Gang(h, provider, request, made)
                assert sorted(gang.alive().values()) == [(rank, "") for rank in range(nodes)]
                await story(gang)

        run_virtually(main)


async def require_end(gang: Gang) -> None:
    """All end, nothing of them is left on any host, and none of them can be replaced any more."""
    await gang.end()
    assert gang.alive() == {}
    assert (await gang.row()).state is InstanceState.GONE
    assert not any(one.exists for one in gang.h.machines())
    for host in gang.hosts.values():
        assert not list(host.state.glob("machines/*/job"))
    with pytest.raises(ProviderError):
        await gang.replace(0, number=99)
    assert gang.alive() == {}


def test_the_first_one_is_replaced_again_and_again_and_the_others_are_not_touched(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        found = await gang.row()
        assert (found.state, found.detail) == (RUNNING, "machine 1 of 2 on titan is lost")
        leader = gang.hosts["twin"].leader(gang.key)
        for _ in range(2):
            await gang.replace(0)
        assert gang.alive() == {f"spare.{NUMBER}": (0, "3"), "twin": (1, "")}
        found = await gang.row()
        assert (found.state, found.price, found.detail) == (RUNNING, 800_000, "")
        assert [one.ref for one in await gang.provider.find(gang.request.key)] == [gang.made.ref]
        gang.kill("spare", gang.fresh)
        await gang.replace(0, number=5)
        assert gang.alive() == {"titan.5": (0, "5"), "twin": (1, "")}
        assert gang.hosts["twin"].leader(gang.key) == leader
        # Now the one that kept who takes part since the first loss.
        gang.kill("twin", gang.key)
        await gang.replace(1, number=6)
        assert gang.alive() == {"titan.5": (0, "5"), "spare.6": (1, "6")}
        assert (await gang.row()).detail == ""
        await require_end(gang)

    play(tmp_path, story)


def test_a_silent_first_one_that_is_back_is_ended_by_the_next_list(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        assert (await _listed(gang)).detail == "machine 1 of 2 on titan is not shown now"
        await gang.replace(0)
        listing = await gang.provider.instances()
        assert not listing.complete
        assert gang.alive() == {"titan": (0, ""), f"spare.{NUMBER}": (0, "3"), "twin": (1, "")}
        gang.hosts["titan"].profile = ""
        found = await gang.row()
        assert (found.state, found.detail) == (RUNNING, "")
        assert gang.alive() == {f"spare.{NUMBER}": (0, "3"), "twin": (1, "")}
        assert not (gang.hosts["titan"].folder(gang.key) / "job").exists()
        await require_end(gang)

    play(tmp_path, story)


async def _listed(gang: Gang) -> Instance:
    return next(one for one in (await gang.provider.instances()).instances if one.key == gang.request.key)


def test_a_first_one_whose_host_was_powered_off_is_cleared_away_once_it_is_back(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        await gang.replace(0)
        gang.kill("titan", gang.key)
        for name in ("started", "child"):
            file = gang.hosts["titan"].folder(gang.key) / name
            words = file.read_text().split()
            words[2] = "another-boot"
            file.write_text(" ".join(words) + "\n")
        gang.hosts["titan"].profile = ""
        assert (await gang.row()).detail == ""
        assert not (gang.hosts["titan"].folder(gang.key) / "job").exists()
        assert (await gang.row()).state is RUNNING
        await require_end(gang)

    play(tmp_path, story)


def test_all_are_gone_only_once_a_former_first_one_has_answered(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        await gang.replace(0)
        with pytest.raises(Unavailable, match="titan"):
            await gang.end()
        assert gang.alive() == {"titan": (0, "")}
        found = await _listed(gang)
        assert (found.state, found.detail) == (InstanceState.UNKNOWN, "its machine on titan is not shown now")
        gang.hosts["titan"].profile = ""
        await require_end(gang)

    play(tmp_path, story)


def test_the_others_keep_their_name_and_get_on_where_its_host_left_the_config(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        await gang.replace(0)
        titan = gang.h.hosts.pop("titan")
        async with gang.h.opened() as provider:
            assert isinstance(provider, SshProvider)
            gang.provider = provider
            assert ((await gang.row()).state, (await gang.row()).detail) == (RUNNING, "")
            gang.kill("spare", gang.fresh)
            await gang.replace(0, number=5)
            assert gang.alive() == {"spare.5": (0, "5"), "twin": (1, "")}
            await require_end(gang)
        gang.h.hosts["titan"] = titan

    play(tmp_path, story)


def test_an_old_record_alone_ends_nothing_and_its_host_names_what_it_knows(tmp_path: Path) -> None:
    """The former first one is back while all that know better are silent."""

    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        await gang.replace(0)
        gang.hosts["titan"].profile = ""
        gang.hosts["twin"].profile = gang.hosts["spare"].profile = OFF
        assert (await _listed(gang)).state is RUNNING
        assert len(gang.alive()) == 3
        with pytest.raises(Unavailable, match="twin"):
            await gang.replace(0, number=4)
        with pytest.raises(Unavailable, match="twin"):
            await gang.end()
        assert gang.alive() == {f"spare.{NUMBER}": (0, "3"), "twin": (1, "")}
        assert (await _listed(gang)).state is InstanceState.UNKNOWN
        # It answers, and so does what it names.
        gang.hosts["twin"].profile = gang.hosts["spare"].profile = ""
        await require_end(gang)

    play(tmp_path, story)


def test_the_end_of_all_finds_what_only_the_answers_of_their_hosts_name(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        row = await gang.provider.gang(gang.made.ref)
        assert row is not None
        await gang.replace(0)  # after that was read
        await gang.provider._gangs.end(row)
        assert gang.alive() == {}
        await require_end(gang)

    play(tmp_path, story)


def test_an_end_that_is_marked_on_the_old_host_hides_no_machine_that_lives(tmp_path: Path) -> None:
    """The former first one lost its disk, so what is marked there has the words of the new one."""

    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        await gang.replace(0)
        gang.kill("titan", gang.key)
        shutil.rmtree(gang.hosts["titan"].folder(gang.key))
        gang.hosts["titan"].profile = ""
        row = await gang.provider.gang(gang.made.ref)
        assert row is not None
        assert row.former == (("titan", 0),)
        gang.hosts["spare"].profile = OFF
        with pytest.raises(Unavailable, match="spare"):
            await gang.end()
        gang.hosts["spare"].profile = ""
        assert gang.alive() == {f"spare.{NUMBER}": (0, "3")}
        assert (await gang.row()).state is RUNNING
        await require_end(gang)

    play(tmp_path, story)


def test_two_first_ones_by_records_that_differ_are_one_row_and_end_together(tmp_path: Path) -> None:
    """Two calls that knew nothing of each other: each host that was asked keeps another one in the other's place."""

    async def story(gang: Gang) -> None:
        words = {name: gang.meta(name).read_text().split() for name in ("titan", "twin")}
        gang.meta("titan").write_text(f"{' '.join(words['titan'][:4])} titan,spare@4 1 titan\n")
        gang.meta("twin").write_text(f"{' '.join(words['twin'][:4])} spare@5,twin 1 titan\n")
        found = await gang.row()
        assert (found.state, found.detail) == (InstanceState.PAUSED, "none of its machines that are seen has a place")
        with pytest.raises(RequestRejected, match="none of the machines"):
            await gang.replace(0, number=6)
        await require_end(gang)

    play(tmp_path, story)


def test_a_record_that_cannot_be_read_makes_the_list_incomplete_and_ends_nothing(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        true = gang.meta("twin").read_text()
        for text in ("spare@99999999,twin 1 titan", "spare@5,twin x titan", "spare@5,twin 1 ../titan", "-"):
            gang.meta("twin").write_text(f"{' '.join(true.split()[:4])} {text}\n")
            await gang.provider.instances()
            assert gang.alive() == {"titan": (0, ""), "twin": (1, "")}, text
        gang.meta("twin").write_text(f"{' '.join(true.split()[:4])} spare@7000000,twin 1 titan\n")
        with pytest.raises(Unavailable, match="the machine on spare is of a later round than 3"):
            await gang.replace(0)
        gang.meta("twin").write_text(true)
        assert (await gang.row()).detail == ""
        await require_end(gang)

    play(tmp_path, story)


def test_a_full_disk_of_the_new_first_one_or_of_one_that_stays_starts_nothing(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        gang.hosts["twin"].program("sync", "#!/bin/sh\nexit 1\n")
        with pytest.raises(Unavailable, match="twin: the folder of the machine cannot be written"):
            await gang.replace(0)
        assert gang.alive() == {"twin": (1, "")}
        assert not gang.hosts["spare"].folder(gang.fresh).exists()
        (gang.hosts["twin"].bin / "sync").unlink()
        gang.hosts["spare"].program("mkdir", NO_FOLDER)
        gang.hosts["titan"].use(*(gpu.uuid for gpu in gang.hosts["titan"].gpus))
        with pytest.raises(NoCapacity, match="spare"):
            await gang.replace(0)
        found = await gang.row()
        assert (found.state, found.notice_at) == (RUNNING, None)
        assert found.detail == "machine 1 of 2 on spare has not begun"
        (gang.hosts["spare"].bin / "mkdir").unlink()
        await gang.replace(0)
        assert gang.alive() == {f"spare.{NUMBER}": (0, "3"), "twin": (1, "")}
        await require_end(gang)

    play(tmp_path, story)


def test_of_hosts_that_refuse_the_next_one_gets_the_place_by_the_same_call(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        gang.hosts["spare"].program("mkdir", NO_FOLDER)
        for _ in range(2):
            await gang.replace(0)
        assert gang.alive() == {f"titan.{NUMBER}": (0, "3"), "twin": (1, "")}
        assert (await gang.row()).detail == ""
        (gang.hosts["spare"].bin / "mkdir").unlink()
        await gang.replace(0)
        assert gang.alive() == {f"titan.{NUMBER}": (0, "3"), "twin": (1, "")}
        await require_end(gang)

    play(tmp_path, story)


def test_each_that_stays_keeps_who_takes_part_and_a_change_that_broke_off_is_completed(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        third = next(name for name, place in gang.alive().items() if place == (2, ""))
        second = next(name for name, place in gang.alive().items() if place == (1, ""))
        gang.hosts[third].program("sync", "#!/bin/sh\nexit 1\n")
        for _ in range(2):
            with pytest.raises(Unavailable, match=third):
                await gang.drop(0)
        (gang.hosts[third].bin / "sync").unlink()
        await gang.drop(0)
        assert (await _listed(gang)).price == 800_000
        for name in (second, third):
            words = gang.meta(name).read_text().split()
            assert (words[0], words[4]) == ("800000", f"-,{second},{third}"), name
        # Each alone is enough to know it, whatever becomes of the other.
        gang.hosts["titan"].profile, gang.hosts[third].profile = "", OFF
        assert (await _listed(gang)).state is RUNNING
        assert gang.alive() == {second: (1, ""), third: (2, "")}
        gang.hosts[third].profile, gang.hosts[second].profile = "", OFF
        found = await _listed(gang)
        assert (found.state, found.price) == (RUNNING, 800_000)
        gang.hosts[second].profile = ""
        await require_end(gang)

    play(tmp_path, story, nodes=3)


def test_a_first_one_that_is_left_out_ends_and_the_rest_cost_their_part(tmp_path: Path) -> None:
    async def story(gang: Gang) -> None:
        gang.hosts["titan"].profile = OFF
        for _ in range(2):
            await gang.drop(0)
        found = await _listed(gang)
        assert (found.state, found.price, found.notice_at) == (RUNNING, 400_000, None)
        with pytest.raises(RequestRejected, match="none of the machines"):
            await gang.drop(1)
        gang.hosts["titan"].profile = ""
        assert (await gang.row()).state is RUNNING
        assert gang.alive() == {"twin": (1, "")}
        with pytest.raises(ProviderError, match="left out"):
            await gang.replace(0)
        assert not await gang.provider.logs(gang.made.ref, lines=5)
        assert (await gang.provider.shell(gang.made.ref)).user == "twin"
        await require_end(gang)

    play(tmp_path, story)


@pytest.mark.parametrize("then", ["again", "end"])
@pytest.mark.parametrize("how", ["lost before", "lost after", "twice", "half"])
@pytest.mark.parametrize("operation", ["end", "record", "launch"])
def test_a_call_that_breaks_off_at_any_step_is_made_again_or_all_end(
    tmp_path: Path, operation: str, how: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host answers late, twice or not, or its shell is killed; what began is ended or used, and is there once."""

    async def story(gang: Gang) -> None:
        gang.kill("titan", gang.key)
        struck: list[str] = []
        ask = gang.provider._ask

        async def broken(host: SshHost, what: str, *words: object, boot: str = "") -> Lines:
            if what != operation or struck:
                return await ask(host, what, *words, boot=boot)
            struck.append(host.name)
            if how == "lost before":
                raise AnswerLost("no answer")
            if how == "half":
                gang.hosts[host.name].program(*HALF[operation])
                try:
                    return await ask(host, what, *words, boot=boot)
                finally:
                    (gang.hosts[host.name].bin / HALF[operation][0]).unlink()
            await ask(host, what, *words, boot=boot)
            if how == "twice":
                return await ask(host, what, *words, boot=boot)
            raise AnswerLost("no answer")

        monkeypatch.setattr(gang.provider, "_ask", broken)
        try:
            await gang.replace(0)
        except ProviderError:
            assert how != "twice"
        assert struck
        assert sum(rank == 0 for rank, _ in gang.alive().values()) <= 1
        if then == "again":
            await gang.replace(0)
            ranks = {name: place for name, place in gang.alive().items() if name != "twin"}
            assert list(ranks.values()) == [(0, "3")]
            assert gang.alive()["twin"] == (1, "")
            assert (await gang.row()).detail == ""
        await require_end(gang)

    play(tmp_path, story)


KILLS_ITS_SHELL = "#!/bin/sh\nkill -9 $PPID\n"
HALF = {"end": ("rm", KILLS_ITS_SHELL), "record": ("sync", KILLS_ITS_SHELL), "launch": ("sync", KILLS_ITS_SHELL)}


@every(
    ("records", "expected"),
    [
        (["titan,twin 0", "spare@3,twin 1"], "spare@3,twin"),
        (["spare@3,twin 1", "titan,twin 0", "titan,spare@2 4"], "spare@3,spare@2"),
        (["-,twin 1", "spare@9,twin 2"], "-,twin"),
        (["titan,spare@3 1", "titan,third@3 2"], "titan,third@3"),
        (["titan,twin 0", "titan,twin,third 0"], "titan,twin,third"),
    ],
    ids=["a later first one", "of each place the last", "left out for good", "chosen anew", "one that names more"],
)
def test_of_each_place_the_newest_machine_counts_whichever_host_says_it(records: list[str], expected: str) -> None:
    found = [_record(one) for one in records]
    for order in (found, found[::-1]):
        assert union_of(order).parts == _record(f"{expected} 0").parts


def _record(text: str) -> Places:
    words, changes = text.split()
    parts: list[Part] = []
    for word in words.split(","):
        name, _, came = word.partition("@")
        parts.append((name.replace("-", ""), int(came or 0)))
    return Places(parts=tuple(parts), origin="titan", changes=int(changes))
