"""Files of a history, line by line, with bounds: plain or gzip, however large and however broken."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spotd.backtest.refusals import BacktestRefused

BYTES_MAX: Final = 4_000_000_000
"""Of all files of a history together, unpacked."""
_BLANK_BYTES_MAX: Final = 64
LINE_MAX: Final = 1_000_000
DOCUMENT_MAX: Final = 200_000_000
"""Of one trace, which is a single JSON document."""
EMPTY_LINES_MAX: Final = 100_000
"""Of all files together: two hundred million of them are two hundred kilobytes of gzip and a minute of work."""


class Reader:
    """Opens the files of one history and counts what is read of them."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.empty_lines = 0

    def lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line.

        Raises:
            BacktestRefused: naming the file, and the line where there is one.
        """
        number = 0
        try:
            with _opened(path) as file:
                while True:
                    number += 1
                    line = file.readline(LINE_MAX + 1)
                    if not line:
                        return
                    size = len(line)
                    self.bytes_read += size
                    if self.bytes_read > BYTES_MAX:
                        self._count(path, 0)
                    if size <= _BLANK_BYTES_MAX and not line.strip():
                        self._count_empty(path, number)
                    if size > LINE_MAX:
                        raise BacktestRefused(
                            f"{path}:{number}: the line is longer than {LINE_MAX:,} bytes", hint="check the file"
                        )
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as exc:
            raise BacktestRefused(f"{path}:{number}: not UTF-8 text", hint="save the file as UTF-8") from exc
        except (OSError, EOFError, zlib.error) as exc:
            raise _unreadable(path, exc) from exc

    def document(self, path: Path) -> str:
        """Return the whole text of a file.

        Raises:
            BacktestRefused: naming the file.
        """
        try:
            with _opened(path) as file:
                data = file.read(DOCUMENT_MAX + 1)
            if len(data) > DOCUMENT_MAX:
                raise BacktestRefused(f"{path} is longer than {DOCUMENT_MAX:,} bytes", hint="cut the trace into parts")
            self._count(path, len(data))
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise BacktestRefused(f"{path}: not UTF-8 text", hint="save the file as UTF-8") from exc
        except (OSError, EOFError, zlib.error) as exc:
            raise _unreadable(path, exc) from exc

    def _count_empty(self, path: Path, number: int) -> None:
        self.empty_lines += 1
        if self.empty_lines > EMPTY_LINES_MAX:
            raise BacktestRefused(
                f"{path}:{number}: more than {EMPTY_LINES_MAX:,} empty lines", hint="delete the empty lines"
            )

    def _count(self, path: Path, size: int) -> None:
        self.bytes_read += size
        if self.bytes_read > BYTES_MAX:
            raise BacktestRefused(
                f"{path}: the history holds more than {BYTES_MAX // 10**9} GB, which is more than is read",
                hint="give a folder with fewer files, such as the last month",
            )


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _unreadable(path: Path, exc: Exception) -> BacktestRefused:
    if isinstance(exc, OSError) and exc.strerror:
        return BacktestRefused(f"{path}: {exc.strerror}", hint="check the file and its permissions")
    return BacktestRefused(f"{path}: the file is damaged or cut off ({exc})", hint="copy it again, or unpack it")
