"""Until when the certificate of the API is valid, and who says so in time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from spotd.certificates import certificate_in, expiry_words, valid_until
from spotd.config.peers import ApiSection, team_warnings
from tests.integration.team.certificates import Authority

CENTURY = 36_500
"""Beyond 2050 an instant is written in another form."""


@pytest.mark.parametrize("days", [-1, 29, CENTURY])
def test_the_end_of_a_certificate_is_read_as_a_library_for_them_reads_it(tmp_path: Path, days: int) -> None:
    certificate, _ = Authority(tmp_path).issue("api", "127.0.0.1", "localhost", days=days)
    read = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    assert valid_until(certificate_in(certificate)) == read


@pytest.mark.parametrize(
    ("days", "words"),
    [(-1, "has expired at"), (29, "expires in 28 days"), (32, ""), (CENTURY, "")],
    ids=["expired", "soon", "later", "in a century"],
)
def test_one_that_ends_within_a_month_is_warned_of(tmp_path: Path, days: int, words: str) -> None:
    certificate, key = Authority(tmp_path).issue("api", "127.0.0.1", days=days)
    said = expiry_words(certificate, datetime.now(UTC))
    assert words in said
    assert bool(words) == bool(said)
    api = ApiSection(listen="127.0.0.1:1", certificate=str(certificate), key=str(key))
    warnings = [one for one in team_warnings(api, {}) if one.key == "api.certificate"]
    assert [one.message for one in warnings] == ([said] if said else [])


def test_what_is_no_certificate_is_said_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "api.crt"
    now = datetime.now(UTC) + timedelta(days=CENTURY)
    assert expiry_words(path, now) == ""
    for text in ("", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no PEM"):
        path.write_text(text)
        assert expiry_words(path, now) == ""
    for data in (b"", b"0", b"\x30\x84", b"\x30\x02\x30\x00", bytes(range(256))):
        with pytest.raises(ValueError, match=r".+"):
            valid_until(data)
