"""No disk outlives its machine unseen: each goes along with it, and what stays all the same is found and deleted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from spotd_providers.aws.doctor import AGE_MIN, SWEEP_EVERY
from spotd_providers.aws.plugin import AwsProvider
from tests.fakes.aws import Quirks
from tests.fakes.aws.catalog import ZONES
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play

KEEPS_A_DISK = {"/dev/sdb": (120, False)}


def disks(h: AwsHarness) -> dict[str, str]:
    return {volume.volume_id: volume.instance_id for volume in h.cloud.volumes.all.values()}


def tags(install: str, key: str) -> dict[str, str]:
    return {"spotd:install": install, "spotd:key": key}


def events(h: AwsHarness, name: str) -> int:
    return [line.event for line in h.log.lines].count(name)


def test_every_disk_that_the_image_brings_goes_with_its_machine(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        launched = (await provider.launch(h.request(await cheapest(h, provider)))).instance
        assert list(disks(h).values()) == [launched.ref.instance_id] * 2
        assert sorted(volume.gb for volume in h.cloud.volumes.all.values()) == [55, 120]
        await provider.terminate(launched.ref)
        assert not disks(h)

    play(tmp_path, story, Quirks(image_disks=KEEPS_A_DISK))


def test_a_disk_that_stayed_is_deleted_once_nothing_of_its_attempt_lives(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        launched = (await provider.launch(h.request(await cheapest(h, provider)))).instance
        (volume,) = h.cloud.volumes.all.values()
        volume.goes_along = False  # as somebody may change it on the running machine
        assert (await provider.instances()).complete
        await h.advance(SWEEP_EVERY)
        assert (await provider.instances()).complete
        assert list(disks(h)) == [volume.volume_id], "its machine lives"
        await provider.terminate(launched.ref)
        assert disks(h) == {volume.volume_id: ""}
        line = next(line for line in await provider.check() if line.name == "us-east-1 disks")
        assert not line.ok
        assert volume.volume_id in line.detail
        assert "55 GB" in line.detail
        assert (await provider.instances()).complete
        assert disks(h), "it is looked for once an hour only"
        await h.advance(SWEEP_EVERY)
        assert (await provider.instances()).complete
        assert not disks(h)
        assert events(h, "aws.stray_volume_deleted") == 1
        assert all(line.ok for line in await provider.check() if line.name.endswith("disks"))

    play(tmp_path, story)


def test_nobody_elses_disk_nor_a_young_one_is_touched(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        now = h.clock.now()
        key = h.key()
        old = now - timedelta(days=1)
        ours = h.cloud.volumes.add(ZONES[3], 10, tags("lab", key), old, goes_along=False)
        kept = [
            h.cloud.volumes.add(ZONES[0], 10, {}, old, goes_along=False),
            h.cloud.volumes.add(ZONES[0], 10, tags("lab2", "spotd-lab2-j-1"), old, goes_along=False),
            h.cloud.volumes.add(ZONES[0], 10, tags("lab", "my backup"), old, goes_along=False),
            h.cloud.volumes.add(ZONES[0], 10, tags("lab", key), old, instance_id="i-1", goes_along=False),
            h.cloud.volumes.add(ZONES[0], 10, tags("lab", key), now - AGE_MIN / 2, goes_along=False),
        ]
        assert ours.volume_id in disks(h)
        await provider.instances()
        assert list(disks(h)) == [volume.volume_id for volume in kept]

    play(tmp_path, story)


def test_a_disk_whose_attempt_still_has_a_machine_stays(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = h.request(await cheapest(h, provider))
        await provider.launch(request)
        old = h.clock.now() - timedelta(days=1)
        detached = h.cloud.volumes.add(ZONES[0], 10, tags("lab", request.key), old, goes_along=False)
        await provider.instances()
        assert detached.volume_id in disks(h)

    play(tmp_path, story)


def test_without_the_permission_listings_go_on_and_the_log_says_it_once(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        old = h.clock.now() - timedelta(days=1)
        stray = h.cloud.volumes.add(ZONES[0], 10, tags("lab", h.key()), old, goes_along=False)
        for _ in range(3):
            assert (await provider.instances()).complete
            await h.advance(SWEEP_EVERY)
        assert stray.volume_id in disks(h)
        assert events(h, "aws.volumes_not_swept") == 1

    play(tmp_path, story, Quirks(allowed=lambda action: action != "ec2:DeleteVolume"))
