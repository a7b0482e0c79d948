"""The fake does what Nova's sources say, asked by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Served, serving
from tests.fakes.openstack import OpenstackApi, OpenstackCloud, some_flavors

NOVA = "/GRA11/compute/v2.1"


class Asking:
    """Requests with a token, in one microversion."""

    def __init__(self, cloud: OpenstackCloud, clock: FakeClock, served: Served) -> None:
        self.cloud, self.clock, self._served = cloud, clock, served
        self.version = "2.74"
        said = {"id": cloud.credential_id, "secret": cloud.secret}
        identity = {"methods": ["application_credential"], "application_credential": said}
        _, headers, _ = self.raw("POST", "/identity/v3/auth/tokens", {"auth": {"identity": identity}}, token="")
        self.token = headers["x-subject-token"]

    def raw(self, method: str, path: str, body: Any, *, token: str) -> tuple[int, dict[str, str], Any]:
        connection = HTTPConnection("127.0.0.1", self._served.port, timeout=10)
        headers = {"x-auth-token": token, "openstack-api-version": f"compute {self.version}"}
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        decoded = json.loads(text) if text.startswith("{") else text
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, decoded

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, _, answer = self.raw(method, path, body, token=self.token)
        return status, answer

    def create(self, flavor: str = "l4-90", **more: Any) -> tuple[int, Any]:
        image, kind = self.cloud.image("Ubuntu 24.04").image_id, self.cloud.flavors[flavor].id_in("GRA11")
        wish = {"name": "a", "flavorRef": kind, "imageRef": image, "networks": "auto", **more}
        return self("POST", f"{NOVA}/servers", {"server": {key: one for key, one in wish.items() if one is not None}})

    def ids(self, query: str = "") -> list[str]:
        status, answer = self("GET", f"{NOVA}/servers/detail{query}")
        assert status == 200, answer
        return [row["id"] for row in answer["servers"]]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Asking]:
    clock = FakeClock()
    cloud = OpenstackCloud(tmp_path / "cloud", clock=clock)
    cloud.quirks.token_lives = timedelta(days=1)
    cloud.stock(*some_flavors())
    try:
        with serving(OpenstackApi(cloud)) as served:
            yield Asking(cloud, clock, served)
    finally:
        cloud.shut_down()


def test_a_version_is_answered_in_kind_and_an_unknown_one_refused(ask: Asking) -> None:
    for version, status in (("2.1", 200), ("2.96", 200), ("latest", 200), ("2.97", 406), ("2", 400)):
        ask.version = version
        assert ask("GET", f"{NOVA}/flavors/detail")[0] == status
    ask.version = "2.60"
    _, headers, answer = ask.raw("GET", f"{NOVA}/flavors/detail", None, token=ask.token)
    assert headers["openstack-api-version"] == "compute 2.60"
    assert "extra_specs" not in answer["flavors"][0]


def test_what_a_version_does_not_know_is_an_additional_property(ask: Asking) -> None:
    ask.version = "2.51"
    status, answer = ask.create(tags=["a"])
    assert (status, list(answer)) == (400, ["badRequest"])
    ask.version = "2.36"
    assert ask.create()[0] == 400  # "auto" came with 2.37
    assert ask.create(networks=None)[0] == 202


def test_pages_follow_markers_and_the_last_whole_page_has_a_link_too(ask: Asking) -> None:
    made = [ask.cloud.add_foreign(f"x{number}").machine_id for number in range(4)]
    first, second = ask.ids("?limit=2"), ask("GET", f"{NOVA}/servers?limit=2&marker={ask.ids('?limit=2')[-1]}")[1]
    assert sorted([*first, *(row["id"] for row in second["servers"])]) == sorted(made)
    assert second["servers_links"][0]["rel"] == "next"
    assert ask.ids(f"?marker={second['servers'][-1]['id']}") == []
    assert ask("GET", f"{NOVA}/servers?marker=none")[0] == 400


def test_a_cell_that_is_down_shows_bare_rows_and_only_without_limits_and_filters(ask: Asking) -> None:
    hidden, shown = ask.cloud.add_foreign("a").machine_id, ask.cloud.add_foreign("b").machine_id
    ask.cloud.quirks.down.add(hidden)
    status, answer = ask("GET", f"{NOVA}/servers/detail")
    (row,) = [row for row in answer["servers"] if row["id"] == hidden]
    assert (status, row["status"], "name" in row, "metadata" in row) == (200, "UNKNOWN", False, False)
    for query in ("?limit=9", "?name=a", "?tags=x", "?sort_key=created_at"):
        assert hidden not in ask.ids(query)
    assert ask("GET", f"{NOVA}/servers/{hidden}")[1]["server"]["status"] == "UNKNOWN"
    ask.version = "2.68"
    assert ask.ids() == [shown]
    assert ask("GET", f"{NOVA}/servers/{hidden}")[0] == 500


def test_a_server_is_made_in_steps_and_its_end_is_one(ask: Asking) -> None:
    status, answer = ask.create("hm.v100s", imageRef=None, block_device_mapping_v2=[DISK | {"uuid": _image(ask)}])
    assert status == 202
    number, path = answer["server"]["id"], f"{NOVA}/servers/{answer['server']['id']}"
    rows = []
    for _ in range(4):
        rows.append(ask("GET", path)[1]["server"])
        ask.clock.advance(timedelta(seconds=44))
    assert [(row["status"], row["OS-EXT-STS:task_state"]) for row in rows] == [
        ("BUILD", "scheduling"), ("BUILD", "block_device_mapping"), ("BUILD", "spawning"), ("ACTIVE", None),
    ]  # fmt: skip
    assert len(rows[-1]["os-extended-volumes:volumes_attached"]) == len(ask.cloud.volumes) == 1
    assert (rows[-1]["image"], ask("DELETE", path)[0]) == ("", 204)
    row = ask("GET", path)[1]["server"]
    assert (row["status"], row["OS-EXT-STS:task_state"]) == ("ACTIVE", "deleting")
    ask.clock.advance(timedelta(minutes=2))
    status, answer = ask("GET", path)
    assert (status, answer["itemNotFound"]["code"], ask.cloud.volumes) == (404, 404, {})
    assert not ask.cloud.ledger.is_open(number)
    (gone,) = ask("GET", f"{NOVA}/servers/detail?changes-since=2020-01-01T00:00:00Z")[1]["servers"]
    assert gone["status"] == "DELETED"


DISK = {
    "boot_index": 0, "source_type": "image", "destination_type": "volume", "volume_size": 20,
    "delete_on_termination": True,
}  # fmt: skip


def _image(ask: Asking) -> str:
    return ask.cloud.image("Ubuntu 24.04").image_id


def test_a_server_without_a_host_is_in_error_and_not_billed(ask: Asking) -> None:
    ask.cloud.sell_out("l4-90")
    number = ask.create()[1]["server"]["id"]
    ask.clock.advance(timedelta(hours=1))
    row = ask("GET", f"{NOVA}/servers/{number}")[1]["server"]
    assert (row["status"], row["OS-SRV-USG:launched_at"], row["hostId"]) == ("ERROR", None, "")
    assert row["fault"]["message"].startswith("No valid host was found")
    assert ask.cloud.billed(number) == 0
    assert ask("DELETE", f"{NOVA}/servers/{number}")[0] == 204
    assert ask("GET", f"{NOVA}/servers/{number}")[0] == 404


@pytest.mark.parametrize(
    ("action", "is_billed"), [("os-stop", True), ("pause", True), ("suspend", True), ("shelve", False)]
)
def test_a_server_that_rests_is_billed_on_until_its_host_is_free(action: str, is_billed: bool, ask: Asking) -> None:
    number = ask.cloud.add_foreign("a").machine_id
    assert ask("POST", f"{NOVA}/servers/{number}/action", {action: None})[0] == 202
    ask.clock.advance(timedelta(hours=1))
    assert (ask.cloud.billed(number) > 100_000) is is_billed
    assert ask("POST", f"{NOVA}/servers/{number}/action", {action: None})[0] == 409


def test_a_soft_deletion_hides_a_server_from_lists_until_it_is_reclaimed(ask: Asking) -> None:
    ask.cloud.quirks.reclaim = timedelta(hours=1)
    number = ask.cloud.add_foreign("a").machine_id
    for minutes in (0, 10, 49):
        ask.clock.advance(timedelta(minutes=minutes))
        assert ask("DELETE", f"{NOVA}/servers/{number}")[0] == 204  # another changes nothing
        assert ask("GET", f"{NOVA}/servers/{number}")[1]["server"]["status"] == "SOFT_DELETED"
        assert ask.ids() == []
    ask.clock.advance(timedelta(minutes=1))
    assert ask("GET", f"{NOVA}/servers/{number}")[0] == 404


def test_refusals_have_the_form_of_their_service(ask: Asking) -> None:
    number = ask.cloud.add_foreign("a").machine_id
    ask.cloud.lock_server(number)
    asked = {
        "conflictingRequest": ("DELETE", f"{NOVA}/servers/{number}", 409),
        "itemNotFound": ("DELETE", "/GRA11/volume/v3/p/volumes/none", 404),
        "<html>": ("GET", "/GRA11/image/v2/images/none", 404),
        "<html><head>": ("GET", f"{NOVA}/nothing", 404),
    }
    for code, (method, path, status) in asked.items():
        found, answer = ask(method, path)
        assert (found, next(iter(answer)) if isinstance(answer, dict) else answer[: len(code)]) == (status, code)
    ask.token = "void"
    assert ask("GET", f"{NOVA}/servers")[1]["error"]["code"] == 401


def test_creates_are_refused_in_novas_words(ask: Asking) -> None:
    ask.cloud.quirks.external_ports = False
    ask.cloud.quirks.metadata_max = 1
    net = ask.cloud.network("Ext-Net").network_id
    refused = {
        "Can not find requested image": ask.create(imageRef="none"),
        "Flavor none could not be found.": ask.create(flavorRef="none"),
        "Only volume-backed servers": ask.create("hm.v100s"),
        "It is not allowed to create an interface on external network": ask.create(networks=[{"uuid": net}]),
        "Maximum number of metadata items exceeds 1": ask.create(metadata={"a": "b", "c": "d"}),
        "Invalid key_name provided.": ask.create(key_name="none"),
    }
    for text, (status, answer) in refused.items():
        said = next(iter(answer.values()))
        assert (status, said["message"][: len(text)]) == (said["code"], text)
    assert ask.cloud.rented == {}
