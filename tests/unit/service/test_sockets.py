"""The API's socket belongs to one user and one daemon."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from spotd.service import lifecycle
from spotd.service.lifecycle import SocketRefused, bind

pytestmark = pytest.mark.enable_socket


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_only_the_owner_may_enter_the_folder_and_use_the_socket(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        bound = bind(tmp_path / "run" / "spotd.sock")
    finally:
        os.umask(before)
    assert mode(bound.path) == 0o600
    assert mode(bound.path.parent) == 0o700
    bound.close()
    assert not bound.path.exists()


@pytest.mark.parametrize("bits", [0o755, 0o710, 0o701, 0o1777, 0o720])
def test_a_folder_that_others_may_enter_is_refused_and_never_changed(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(SocketRefused, match=f"mode {bits:04o}") as refused:
        bind(folder / "s.sock")
    assert mode(folder) == bits
    assert list(folder.iterdir()) == []
    assert f"SPOTD_SOCKET to {folder}/spotd/spotd.sock" in refused.value.hint
    bind(folder / "spotd" / "spotd.sock").close()


def test_a_socket_that_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "spotd.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    bind(path).close()


def test_a_live_daemon_is_not_pushed_aside(tmp_path: Path) -> None:
    path = tmp_path / "spotd.sock"
    first = bind(path)
    with pytest.raises(SocketRefused, match="another spotd daemon answers"):
        bind(path)
    assert path.exists()
    first.close()


def test_closing_leaves_a_socket_that_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "spotd.sock"
    first = bind(path)
    path.unlink()
    second = socket.socket(socket.AF_UNIX)
    second.bind(str(path))
    first.close()
    assert path.exists()
    second.close()


def test_of_two_starts_at_one_stale_socket_one_wins_and_keeps_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spotd.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    others: list[object] = []
    real = lifecycle._remove_stale

    def interrupted(stale: Path) -> None:
        # The other daemon starts after this one found the stale socket and before it binds its own.
        real(stale)
        monkeypatch.setattr(lifecycle, "_remove_stale", real)
        try:
            others.append(bind(path))
        except SocketRefused as exc:
            others.append(exc)

    monkeypatch.setattr(lifecycle, "_remove_stale", interrupted)
    first = bind(path)
    assert [type(one) for one in others] == [SocketRefused]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    first.close()
    bind(path).close()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "spotd.sock"
    path.write_text("precious")
    with pytest.raises(SocketRefused, match="not a socket"):
        bind(path)
    assert path.read_text() == "precious"


def test_a_path_that_the_kernel_cannot_take_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SocketRefused, match="SPOTD_SOCKET"):
        bind(tmp_path / ("x" * 120))


@pytest.mark.parametrize(("mode", "advised"), [(0o755, True), (0o775, False), (0o1777, False)])
def test_a_folder_that_others_write_to_is_not_advised_to_be_closed(tmp_path: Path, mode: int, advised: bool) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(lifecycle.SocketRefused) as refused:
        bind(folder / "s.sock")
    assert ("chmod 700" in refused.value.hint) is advised
    assert "SPOTD_SOCKET" in refused.value.hint
    assert folder.stat().st_mode & 0o7777 == mode
