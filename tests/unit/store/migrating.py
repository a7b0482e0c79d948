"""A process that is killed while it brings states up to date, run as `python -m tests.unit.store.migrating FOLDER`.

It imports once. For each former revision it makes a state in FOLDER with the rows of the first release, counts the
statements that opening a copy of it takes, and forks a child for each of ten moments between the first statement and
the last: the child opens a copy of its own and kills itself with SIGKILL there.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, event

from spotd.store import Store
from spotd.store.engine import BUNDLED, _upgrade, open_engine, pass_on
from spotd.store.place import parse_place

KILLS: Final = 10
HERE: Final = Path(__file__).parent


def make_state(path: Path, revision: str) -> None:
    """Make a state of the first release, with its rows, and bring it to this revision."""
    with closing(sqlite3.connect(path)) as first:
        for name in ("first_schema.sql", "first_rows.sql"):
            first.executescript((HERE / name).read_text(encoding="utf-8"))
        first.execute("PRAGMA journal_mode = WAL")
    engine = open_engine(parse_place(path))
    with engine.connect() as connection:
        _upgrade(connection, pass_on, BUNDLED, to=revision)
        connection.commit()
    engine.dispose()


def each_statement(passed: Callable[[int], None]) -> None:
    """From now on call with the number of each statement, before it is executed."""
    count = [0]

    def before(*_: object) -> None:
        count[0] += 1
        passed(count[0])

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "commit", before)


def in_child(work: Callable[[], None]) -> int:
    """Return the status with which a fork of this process ends that does so much."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def count_statements(path: Path) -> int:
    """Return how many statements it takes to open this state."""
    found = path.with_suffix(".count")

    def note(number: int) -> None:
        found.write_text(str(number))

    def work() -> None:
        each_statement(note)
        Store.open(path).close()

    assert in_child(work) == 0
    return int(found.read_text())


def die_at(path: Path, last: int) -> bool:
    """Whether a child that opens the state died before its statement of this number."""

    def die(number: int) -> None:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        each_statement(die)
        Store.open(path)

    status = in_child(work)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(folder: Path) -> int:
    """Leave for each revision its state, and those of which the writer was killed; return how many were not."""
    survivors = 0
    for revision in BUNDLED.revisions[:-1]:
        whole = folder / f"{revision}.db"
        make_state(whole, revision)
        shutil.copyfile(whole, folder / "counted.db")
        total = count_statements(folder / "counted.db")
        for number in range(KILLS):
            path = folder / f"{revision}-{number}.db"
            shutil.copyfile(whole, path)
            last = 1 + number * (total - 1) // (KILLS - 1)
            if not die_at(path, last):
                survivors += 1
                sys.stderr.write(f"{revision}: lived through statement {last} of {total}\n")
    return survivors


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
