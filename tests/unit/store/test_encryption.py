"""Secrets of jobs in a shared state: what its database holds, and whose key reads it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import replace

import pytest

from spotd.core.domain.intents import JobId
from spotd.store import NotDecrypted, SecretsKey, SecretsKeys
from spotd.store.place import Leader

CANARY = "canary-value-of-a-token"
VALUES = {"TOKEN": CANARY, "EMPTY": "", "ODD": "\ud800 ü\n"}
JOB = JobId("j1")
KEY, OTHER = SecretsKey.of(bytes(range(32))), SecretsKey.of(bytes(range(1, 33)))


def test_values_are_the_same_again_and_stand_nowhere_in_the_row() -> None:
    row = KEY.encrypt(JOB, VALUES)
    assert KEY.decrypt(row) == VALUES
    assert CANARY.encode() not in b64decode(row.data)
    assert "TOKEN" not in b64decode(row.data).decode("latin-1")
    assert row.data not in repr(row)
    assert KEY.encrypt(JOB, VALUES).data != row.data


def test_a_leader_is_believed_by_the_former_key_as_well_and_by_no_other() -> None:
    proofs = SecretsKeys(current=KEY).proofs_of("term", "https://here", "c" * 64)
    leader = Leader(term="term", words="a process", url="https://here", certificate="c" * 64, proofs=proofs)
    assert SecretsKeys(current=OTHER, former=KEY).key_of(leader) is KEY
    assert SecretsKeys(current=OTHER).key_of(leader) is None
    assert SecretsKeys(current=KEY).key_of(replace(leader, url="https://elsewhere")) is None


def test_rows_of_short_values_have_one_size() -> None:
    sizes = {len(KEY.encrypt(JOB, {"TOKEN": "x" * length}).data) for length in range(200)}
    assert len(sizes) == 1


def test_a_row_is_of_no_other_job() -> None:
    row = KEY.encrypt(JOB, VALUES)
    with pytest.raises(NotDecrypted, match="job j2 are not what was stored"):
        KEY.decrypt(replace(row, job=JobId("j2")))


@pytest.mark.parametrize("place", [0, 13, -1])
def test_a_changed_row_is_refused(place: int) -> None:
    row = KEY.encrypt(JOB, VALUES)
    data = bytearray(b64decode(row.data))
    data[place] ^= 1
    with pytest.raises(NotDecrypted) as caught:
        KEY.decrypt(replace(row, data=b64encode(bytes(data)).decode()))
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("data", ["", "AAAA", "no base64 at all", "ü"])
def test_a_row_that_is_none_is_refused(data: str) -> None:
    with pytest.raises(NotDecrypted):
        KEY.decrypt(replace(KEY.encrypt(JOB, VALUES), data=data))


def test_a_row_that_claims_another_key_is_not_read_with_it() -> None:
    row = replace(KEY.encrypt(JOB, VALUES), key_id=OTHER.id)
    with pytest.raises(NotDecrypted):
        SecretsKeys(current=OTHER).decrypt(row)


def test_the_former_key_still_reads() -> None:
    keys = SecretsKeys(current=OTHER, former=KEY)
    assert keys.decrypt(KEY.encrypt(JOB, VALUES)) == VALUES
    assert keys.words_against(KEY.id) == keys.words_against(OTHER.id) == ""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (SecretsKeys(), "secrets_key is not set here"),
        (SecretsKeys(current=OTHER), f"secrets_key is {OTHER.id} here"),
        (SecretsKeys(error="no such file"), "secrets_key cannot be used here: no such file"),
    ],
)
def test_what_is_missing_is_said(keys: SecretsKeys, words: str) -> None:
    found = keys.words_against(KEY.id)
    assert found == f"its secrets were encrypted with key {KEY.id}, and [daemon] {words}"
    with pytest.raises(NotDecrypted, match=KEY.id):
        keys.decrypt(KEY.encrypt(JOB, VALUES))


def test_a_key_shows_nothing_of_itself() -> None:
    key = bytes(range(32))
    shown = repr(SecretsKeys(current=SecretsKey.of(key), former=OTHER))
    assert key.hex() not in shown
    assert "AESGCM" not in shown
    assert KEY.id not in key.hex()
    assert SecretsKey.of(key) == KEY != OTHER
