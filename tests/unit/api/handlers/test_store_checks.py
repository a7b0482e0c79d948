"""What `doctor` says of the checkpoint store."""

from __future__ import annotations

from datetime import datetime

import pytest

from spotd_jobs.objects.api import GrantsRefused, UploadGrant
from spotd_jobs.objects.folder import FolderStore
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


class Gullible(FolderStore):
    """A store that would enforce nothing, and therefore gives no grants."""

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> UploadGrant:
        raise GrantsRefused("it accepts an upload outside the prefix that was granted")


async def store_rows(rig: Rig) -> dict[str, tuple[bool, str]]:
    report = await rig.handlers().doctor.report()
    return {row["name"]: (row["ok"], row["detail"]) for row in report["checks"] if row["area"] == "store"}


async def test_a_folder_works_for_hosts_that_see_it(rig: Rig) -> None:
    async with rig.running():
        rows = await store_rows(rig)
    assert rows["write and read"][0]
    assert rows["grants"] == (True, "serve hosts that see this computer's files")


async def test_a_store_that_gets_no_grants_is_named_with_the_reason(rig: Rig) -> None:
    rig.objects = Gullible(rig.folder / "objects")
    async with rig.running():
        rows = await store_rows(rig)
    assert rows["write and read"][0]
    assert rows["grants"] == (False, "it accepts an upload outside the prefix that was granted")
