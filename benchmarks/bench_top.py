"""One refresh of `spotctl top` with 1,000 jobs: the daemon's answers read and parsed, the tables filled and drawn.

The daemon is a real one with 1,000 jobs in its state; the time of this process alone counts, so that a busy machine
does not matter. The screen has 120 columns and 40 lines, and an event loop draws it as on a terminal.
Run: python benchmarks/bench_top.py
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from crowd import crowded_lab

from spotd.client.daemon import Daemon
from spotd.top.app import Top
from spotd.top.screens import Feed

JOBS, ROUNDS, LIMIT_S = 1_000, 25, 0.1


async def measured(socket: Path) -> tuple[list[float], list[float]]:
    """Seconds of this process's processor: for the answers, and for the screen."""
    asking: list[float] = []
    drawing: list[float] = []
    app = Top(Daemon(socket))
    # This program asks by itself, so that each refresh is timed alone.
    with patch.object(Feed, "start"):
        async with app.run_test(size=(120, 40)) as pilot:
            for _ in range(ROUNDS):
                start = time.process_time()
                snapshot = app.questions.snapshot()
                asking.append(time.process_time() - start)
                assert len(snapshot.jobs) == JOBS, snapshot.error
                start = time.process_time()
                app.take(snapshot)
                await pilot.pause()
                app.screen._compositor.render_strips()  # noqa: SLF001 - draws all of the screen, as a resized terminal asks for
                drawing.append(time.process_time() - start)
    return asking, drawing


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as folder:
        lab = crowded_lab(Path(folder) / "lab", jobs=JOBS, running=0)
        try:
            lab.start()
            asking, drawing = asyncio.run(measured(lab.folder / "run" / "spotd.sock"))
        finally:
            lab.close()
    both = [a + b for a, b in zip(asking, drawing, strict=True)]
    for name, values in (("answers", asking), ("screen", drawing), ("one refresh", both)):
        print(f"{name:12} {1000 * statistics.median(values):6.1f} ms median  {1000 * max(values):6.1f} ms worst")
    ratio = statistics.median(both) / LIMIT_S
    print(f"one refresh  ratio {ratio:.2f}  limit {1000 * LIMIT_S:.0f} ms  {'met' if ratio <= 1 else 'NOT MET'}")


if __name__ == "__main__":
    main()
