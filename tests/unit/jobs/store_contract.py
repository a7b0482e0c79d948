"""What every object store must do. A store's test module subclasses `StoreContract` and gives the `store` fixture."""

from __future__ import annotations

import hashlib
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd_jobs.objects.api import Conflict, ObjectMissing, ObjectStore, StoreError
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.grant import LIVENESS_PREFIX, attempt_of_marker, attempt_prefix, liveness_marker_name

MUCH = 10_000_000

BAD_KEYS = [
    pytest.param("", id="empty"),
    pytest.param("/etc/passwd", id="absolute"),
    pytest.param("a//b", id="empty part"),
    pytest.param("a/", id="trailing slash"),
    pytest.param("../x", id="parent"),
    pytest.param("a/../../x", id="parent inside"),
    pytest.param("a/./b", id="dot"),
    pytest.param("a\nb", id="line break"),
    pytest.param("a\0b", id="nul"),
    pytest.param("a\\b", id="backslash"),
    pytest.param("a" * 1025, id="too long"),
]


class StoreContract:
    """Behaviours; each test gets an empty store."""

    def test_what_was_put_is_read_back(self, store: ObjectStore) -> None:
        store.put("jobs/j1/spec.json", b'{"a": 1}')
        assert store.get("jobs/j1/spec.json", bytes_max=MUCH) == b'{"a": 1}'

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.put("empty", b"")
        assert store.get("empty", bytes_max=0) == b""
        found = store.head("empty")
        assert found is not None
        assert found.size == 0

    def test_a_second_put_replaces_the_first(self, store: ObjectStore) -> None:
        store.put("k", b"a much longer first content")
        store.put("k", b"second")
        assert store.get("k", bytes_max=MUCH) == b"second"

    def test_put_tells_size_and_key_as_head_does(self, store: ObjectStore) -> None:
        info = store.put("a/b", b"12345")
        found = store.head("a/b")
        assert found is not None
        assert (info.key, info.size, info.etag) == (found.key, found.size, found.etag) == ("a/b", 5, found.etag)

    def test_modified_is_aware_utc_and_recent(self, store: ObjectStore) -> None:
        modified = store.put("k", b"x").modified
        assert modified.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - modified) < timedelta(minutes=5)

    def test_the_etag_changes_with_every_content_of_the_same_size(self, store: ObjectStore) -> None:
        etags = {store.put("k", bytes([number])).etag for number in range(20)}
        assert len(etags) == 20

    def test_create_only_refuses_an_existing_object_and_keeps_it(self, store: ObjectStore) -> None:
        store.put("k", b"first", create_only=True)
        with pytest.raises(Conflict, match="exists already"):
            store.put("k", b"second", create_only=True)
        assert store.get("k", bytes_max=MUCH) == b"first"

    def test_one_of_many_racing_creators_wins(self, store: ObjectStore) -> None:
        outcomes: list[bytes] = []
        gate = threading.Barrier(8)

        def create(content: bytes) -> None:
            gate.wait()
            try:
                store.put("race", content, create_only=True)
            except Conflict:
                return
            outcomes.append(content)

        threads = [threading.Thread(target=create, args=(bytes([number]),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert len(outcomes) == 1
        assert store.get("race", bytes_max=MUCH) == outcomes[0]

    def test_a_reader_never_sees_half_an_overwrite(self, store: ObjectStore) -> None:
        contents = [bytes([number]) * 200_000 for number in (1, 2)]
        store.put("k", contents[0])
        done = threading.Event()

        def overwrite() -> None:
            for turn in range(20):
                store.put("k", contents[turn % 2])
            done.set()

        writer = threading.Thread(target=overwrite)
        writer.start()
        seen = set()
        while not done.is_set():
            seen.add(store.get("k", bytes_max=MUCH))
        writer.join(timeout=30)
        assert seen <= set(contents)

    def test_reading_what_is_not_there_says_so(self, store: ObjectStore) -> None:
        with pytest.raises(ObjectMissing, match="no object jobs/none"):
            store.get("jobs/none", bytes_max=MUCH)
        assert store.head("jobs/none") is None

    def test_a_prefix_is_no_object(self, store: ObjectStore) -> None:
        store.put("a/b", b"x")
        assert store.head("a") is None
        with pytest.raises(ObjectMissing):
            store.get("a", bytes_max=MUCH)

    def test_an_object_larger_than_asked_for_is_refused(self, store: ObjectStore) -> None:
        store.put("k", b"123456")
        assert store.get("k", bytes_max=6) == b"123456"
        with pytest.raises(StoreError, match="larger than the 5 bytes"):
            store.get("k", bytes_max=5)

    def test_a_file_goes_in_and_comes_out_unchanged(self, store: ObjectStore, tmp_path: Path) -> None:
        content = hashlib.sha256(b"seed").digest() * 100_000
        source = tmp_path / "source"
        source.write_bytes(content)
        info = store.put_file("big/file", source)
        assert info.size == len(content)
        assert info.sha256 in (None, hashlib.sha256(content).hexdigest())
        assert store.get("big/file", bytes_max=len(content)) == content

    def test_putting_a_missing_file_names_it(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="absent cannot be read"):
            store.put_file("k", tmp_path / "absent")

    def test_a_listing_is_in_key_order_across_folders(self, store: ObjectStore) -> None:
        keys = ["a-b/x", "a.b", "a/x", "a/y/z", "a0", "b", "a/y-1", "ä/ö"]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list(""))
        assert [info.key for info in listed] == sorted(keys, key=str.encode)
        assert [info.size for info in listed] == [len(key.encode()) for key in sorted(keys, key=str.encode)]

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            pytest.param("jobs/1/", ["jobs/1/a", "jobs/1/b/c"], id="folder"),
            pytest.param("jobs/1", ["jobs/1/a", "jobs/1/b/c", "jobs/10/a"], id="beginning of a name"),
            pytest.param("jobs/1/b/c", ["jobs/1/b/c"], id="whole key"),
            pytest.param("jobs/2/", [], id="absent"),
            pytest.param("jobs/1/a/", [], id="below an object"),
            pytest.param("other", ["other"], id="at the top"),
        ],
    )
    def test_a_listing_keeps_to_its_prefix(self, store: ObjectStore, prefix: str, expected: list[str]) -> None:
        for key in ("jobs/1/a", "jobs/1/b/c", "jobs/10/a", "other"):
            store.put(key, b"x")
        assert [info.key for info in store.list(prefix)] == expected

    def test_deleted_objects_are_gone_and_absent_ones_do_not_matter(self, store: ObjectStore) -> None:
        store.put("a/1", b"x")
        store.put("a/2", b"x")
        store.delete(["a/1", "a/absent", "nowhere/at/all"])
        assert [info.key for info in store.list("")] == ["a/2"]
        store.delete([])

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_refused_by_every_method(self, store: ObjectStore, key: str) -> None:
        soon = datetime.now(UTC) + timedelta(hours=1)
        for call in (
            lambda: store.put(key, b"x"),
            lambda: store.get(key, bytes_max=1),
            lambda: store.head(key),
            lambda: store.delete([key]),
            lambda: store.presign_get(key, expires=soon),
            lambda: store.grant_upload(f"{key}/", expires=soon, size_max=1),
        ):
            with pytest.raises(StoreError, match="object key"):
                call()
        assert list(store.list("")) == []

    def test_a_grant_names_its_prefix_expiry_and_size(self, store: ObjectStore) -> None:
        soon = datetime.now(UTC) + timedelta(hours=1)
        grant = store.grant_upload("jobs/1/attempts/2/", expires=soon, size_max=1000)
        assert (grant.prefix, grant.expires, grant.size_max) == ("jobs/1/attempts/2/", soon, 1000)
        assert grant.method in ("folder", "post", "sigv4")

    def test_a_beat_beside_the_prefix_is_written_by_its_own_leave_and_listed_with_all_others(
        self, store: ObjectStore
    ) -> None:
        soon = datetime.now(UTC) + timedelta(hours=1)
        for job, number in (("j1", 1), ("j1", 2), ("j.2", 1)):
            name = liveness_marker_name(job, number)
            grant = store.grant_upload(
                attempt_prefix(job, number), expires=soon, size_max=1000, marker_key=LIVENESS_PREFIX + name
            )
            assert grant.liveness_marker is not None
            beat = {"method": grant.method, "fields": dict(grant.liveness_marker)}
            for news in (5, 6):
                sink_of(beat, fleeting=True).put(name, b"+" * news)
        listed = {attempt_of_marker(info.key): info.size for info in store.list(LIVENESS_PREFIX)}
        assert listed == {("j1", 1): 6, ("j1", 2): 6, ("j.2", 1): 6}

    def test_a_beat_that_is_written_again_shows_in_a_listing_though_it_says_the_same(self, store: ObjectStore) -> None:
        soon = datetime.now(UTC) + timedelta(hours=1)
        key = LIVENESS_PREFIX + liveness_marker_name("j1", 1)
        grant = store.grant_upload(attempt_prefix("j1", 1), expires=soon, size_max=1000, marker_key=key)
        beat = {"method": grant.method, "fields": dict(grant.liveness_marker or {})}
        seen: set[tuple[datetime, str, int]] = set()
        give_up_at = time.monotonic() + 60
        while len(seen) < 2:
            assert time.monotonic() < give_up_at, "its time never changes"
            sink_of(beat).put(liveness_marker_name("j1", 1), b"+++")
            (info,) = store.list(LIVENESS_PREFIX)
            assert info.size == 3
            seen.add((info.modified, info.etag, info.size))
            time.sleep(0.05)

    def test_a_grant_without_a_beat_gives_leave_for_none(self, store: ObjectStore) -> None:
        grant = store.grant_upload("jobs/1/attempts/2/", expires=datetime.now(UTC) + timedelta(hours=1), size_max=1)
        assert grant.liveness_marker is None

    def test_a_grant_for_half_a_name_is_refused(self, store: ObjectStore) -> None:
        with pytest.raises(StoreError, match="must end in '/'"):
            store.grant_upload("jobs/1", expires=datetime.now(UTC) + timedelta(hours=1), size_max=1)

    # Both stores inherit it, which is what a contract is for, and it keeps nothing of the class it runs in.
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        objects=st.dictionaries(
            st.lists(
                st.text("ab.-_é ", min_size=1, max_size=4).filter(lambda part: part.strip(".")), min_size=2, max_size=2
            ).map("/".join),
            st.binary(max_size=64),
            max_size=6,
        )
    )
    def test_any_objects_are_listed_and_read_as_they_were_put(
        self, store: ObjectStore, objects: dict[str, bytes]
    ) -> None:
        store.delete([info.key for info in store.list("")])
        for key, data in objects.items():
            store.put(key, data)
        listed = [info.key for info in store.list("")]
        assert listed == sorted(objects, key=str.encode)
        assert {key: store.get(key, bytes_max=64) for key in listed} == objects
