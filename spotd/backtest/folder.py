"""A folder or file with a history, in whichever of the formats it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotd.backtest.collecting import MarketCollector
from spotd.backtest.own import read_price_history
from spotd.backtest.recorded import RecordedMarket
from spotd.backtest.refusals import BacktestRefused
from spotd.backtest.rows import read_csv, read_json_lines
from spotd.backtest.texts import BYTES_MAX, Reader
from spotd.backtest.traces import TraceDefaults, read_trace

FILES_MAX: Final = 10_000
_FORMATS: Final = ".csv, .jsonl, .json (a trace), each also as .gz, or .sqlite (a price history of spotd)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRead:
    """A recorded market, and what a reader of its results must know of how it was read."""

    market: RecordedMarket
    notes: tuple[str, ...]


def read_history(place: Path, is_wanted: Callable[[str, int], bool], defaults: TraceDefaults) -> HistoryRead:
    """Read everything of one folder, or one file.

    Raises:
        BacktestRefused: naming what is wrong, its place and a way out.
    """
    found = MarketCollector(is_wanted)
    reader = Reader()
    notes: list[str] = []
    files = _files(place)
    traces = [path for path in files if _kind(path) == ".json"]
    for path in files:
        kind = _kind(path)
        if kind == ".csv":
            try:
                read_csv(path, reader, found)
            except BacktestRefused as exc:
                if not traces or ":1: the column" not in exc.message:
                    raise
                notes.append(f"{path.name} is left out: it has not the columns of a history")
        elif kind == ".jsonl":
            read_json_lines(path, reader, found)
        elif kind == ".sqlite":
            notes.extend(read_price_history(path, found))
        else:
            notes.extend(read_trace(path, reader, found, defaults))
    return HistoryRead(market=found.market(), notes=tuple(notes))


def _files(place: Path) -> list[Path]:
    try:
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if _kind(path) and path.is_file())
            _require_no_way_out(place, files)
        elif place.exists():
            files = [place] if _kind(place) and place.is_file() else []
        else:
            raise BacktestRefused(f"{place} does not exist", hint="--history DIR, or --history own")
        size = sum(path.stat().st_size for path in files)
    except OSError as exc:
        raise BacktestRefused(f"{place}: {exc.strerror}", hint="check the folder and its permissions") from exc
    if not files:
        raise BacktestRefused(f"{place} holds no history", hint=f"a history is a file that ends in {_FORMATS}")
    if size > BYTES_MAX:
        raise BacktestRefused(
            f"{place} holds {size / 10**9:.1f} GB, more than the {BYTES_MAX // 10**9} GB that are read",
            hint="give a folder with fewer files, such as the last month",
        )
    if len(files) > FILES_MAX:
        raise BacktestRefused(f"{place} holds {len(files):,} files", hint=f"put them into at most {FILES_MAX:,}")
    return files


def _require_no_way_out(place: Path, files: list[Path]) -> None:
    """Require that no link leads out of the folder: an error shows a piece of the line that it is about.

    Raises:
        BacktestRefused: one does.
    """
    inside = place.resolve()
    for path in files:
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise BacktestRefused(f"{path} is a link that leads out of the folder", hint="put the file itself there")


def _kind(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    ending = Path(name).suffix
    return ending if ending in {".csv", ".jsonl", ".json", ".sqlite"} and not name.startswith(".") else ""
