"""What a killed upload leaves behind does not stay for ever."""

from __future__ import annotations

from pathlib import Path

from spotd.service import lifecycle


def test_archives_of_killed_uploads_are_gone_after_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "code-1").write_bytes(b"half an archive")
    (tmp_path / "code-2").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    outside = tmp_path.parent / "outside"
    outside.write_bytes(b"kept")
    (tmp_path / "link").symlink_to(outside)
    assert lifecycle.clear(tmp_path) == 2
    assert (outside.read_bytes(), (tmp_path / "folder").is_dir()) == (b"kept", True)
