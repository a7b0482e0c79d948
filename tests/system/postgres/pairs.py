"""Two daemons over one state in PostgreSQL, as processes: two installations of one label, one store and one market."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spotd.client.transport import ClientError, DaemonNotice
from tests.e2e.ctl import assert_no_traceback, log_lines
from tests.e2e.harness import FINAL, Lab, host, lab, until

SCALE = 20.0
FAILOVER_S = 20.0
START_S = 5.0
"""For a start on a busy computer, beside that."""


@dataclass(frozen=True)
class Pair:
    first: Lab
    second: Lab

    def start(self) -> None:
        """The first leads, the second waits."""
        self.first.start()
        self.second.start(wait=False)
        until(lambda: log_lines(self.second, "daemon.waits"), what="the second to wait", within=60)


@contextmanager
def two_daemons(
    folder: Path, first_url: str, second_url: str = "", *, more: tuple[str, str] = ("", "")
) -> Iterator[Pair]:
    """Yield the two, not started. `more`: lines of [daemon] of each."""
    store = folder / "store"
    hosts = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(3))
    texts = [
        f'state = "{url}"\n{lines}\n[store]\nurl = "file://{store}"\n[budget]\nmachines = 1\n'
        for url, lines in zip((first_url, second_url or first_url), more, strict=True)
    ]
    with (
        lab(folder / "a", hosts=hosts, scale=SCALE, daemon=texts[0]) as first,
        lab(folder / "b", hosts=hosts, scale=SCALE, daemon=texts[1]) as second,
    ):
        config = second.folder / "config.toml"
        config.write_text(config.read_text().replace(str(second.market_folder), str(first.market_folder)))
        clock = (first.folder / "state" / "clock.json").read_text()
        (second.folder / "state" / "clock.json").write_text(json.dumps(json.loads(clock)))
        second.ledgers = first.ledgers
        yield Pair(first=first, second=second)
        for one in (first, second):
            assert_no_traceback(one)
            if not one.is_dead and not leads(one):
                one.kill()  # who waits has no receipts to be compared


def leads(lab: Lab) -> bool:
    """Whether this daemon answers by itself, and not the other one or the database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DaemonNotice)
        try:
            status = lab.api.status()["status"]
        except ClientError:
            return False
    own = None if lab.process is None else lab.process.pid
    return status["pid"] == own and not status["paused"].startswith("this spotd waits")


def is_saved(lab: Lab, job: str) -> bool:
    row = lab.job(job)
    assert row["state"] not in FINAL, row
    return row["state"] == "RUNNING" and bool(lab.api.checkpoints(job)["checkpoints"])
