"""From the bytes of a vast.ai search to priced offers: CPU time, as ratios to two other ways, in one run.

    python benchmarks/bench_vast_parse.py [--rows 3000] [--rounds 15] [--payload FILE] [--gpuhunt PYTHON]

The contenders see the same bytes and take turns, so that a busy machine slows all of them alike:
* `spotd`: strict rows, every row priced or rejected with a reason, the offer index built, and every offer of it at
  its effective price with every term, as `spotctl prices` shows it;
* `json + pydantic`: `json.loads`, then a plain (lax, intolerant) pydantic model of the same fields, sorted by price;
* `gpuhunt`: its vast.ai provider fed with the same bytes, if it can be imported here or by the interpreter `--gpuhunt`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.core.domain.market import build_offer_index
from spotd.core.pricing import Needs, quote
from spotd_providers.contract.values import Market
from spotd_providers.vastai.offers import OnDemandPrices, offers_of
from spotd_providers.vastai.wire import VastSettings, offer_rows
from tests.fakes.vastai import Quirks, some_asks
from tests.fakes.vastai.rows import ask_row

SETTINGS = VastSettings(verified=False, laptops=True, cpu_arch="any")
CPU_LIMIT_MS = 300
PEER_LIMIT = 2.5
"""What fails the run is a ratio alone: seconds are those of the machine, and of what else runs on it."""
NEEDS = Needs(disk_gb=100, upload_bytes_per_hour=8 * 10**9, restore_bytes_per_hour=10**9)
FEE_PPM = 1_200_000
AT = datetime(2026, 3, 2, tzinfo=UTC)

GPUHUNT = """
import json, sys, time, types
import requests
from gpuhunt.providers.vastai import VastAIProvider
body = open(sys.argv[1], "rb").read()
answer = types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(body))
requests.post = lambda *a, **k: answer
provider = VastAIProvider()
for _ in sys.stdin:
    start = time.process_time()
    found = sorted(provider.get(), key=lambda item: item.price)
    print(time.process_time() - start, len(found), flush=True)
"""


def body_of(rows: int, payload: Path | None) -> bytes:
    """The HTTP answer of a search with so many rows: made up, or a recorded one repeated under new ids."""
    if payload is None:
        found = [
            ask_row(ask, kind="bid", allocated_gb=64, now=datetime(2026, 3, 2, tzinfo=UTC), quirks=Quirks())
            for ask in some_asks(machines=rows)
        ]
    else:
        content = payload.read_bytes()
        value = json.loads(gzip.decompress(content) if payload.suffix == ".gz" else content)
        recorded = value["offers"] if isinstance(value, dict) else value
        found = [{**recorded[n % len(recorded)], "id": n + 1, "ask_contract_id": n + 1} for n in range(rows)]
    return json.dumps({"offers": found[:rows]}).encode()


def spotd(body: bytes) -> int:
    """Every row priced or rejected; the offer index built as the daemon builds it, and every offer of it priced."""
    understood = offer_rows(body)
    offers, rejected = offers_of(understood.rows, Market.SPOT, SETTINGS, on_demand=OnDemandPrices(understood.rows))
    offer_index = build_offer_index(tuple(offers))
    priced = [quote(offer, NEEDS, FEE_PPM, AT) for group in offer_index.by_gpu.values() for offer in group]
    priced.sort(key=lambda item: item.price.per_gpu)
    return len(priced) + len(rejected) + len(understood.rejected)


class PlainRow(BaseModel):
    """The same fields as anybody would first write them down."""

    id: int
    machine_id: int
    gpu_name: str
    num_gpus: int
    gpu_ram: float
    dph_base: float
    min_bid: float
    storage_cost: float
    inet_up_cost: float
    inet_down_cost: float
    duration: float | None = None
    geolocation: str | None = None
    cpu_arch: str | None = None
    cpu_cores_effective: float | None = None
    cpu_ram: float | None = None
    disk_space: float | None = None
    cuda_max_good: float | None = None
    reliability2: float | None = None
    reliability: float | None = None
    inet_up: float | None = None
    inet_down: float | None = None
    direct_port_count: int | None = None
    hosting_type: int | None = None
    verification: str | None = None
    rentable: bool | None = None
    rented: bool | None = None
    external: bool | None = None


PLAIN = TypeAdapter(list[PlainRow])


def plain(body: bytes) -> int:
    """json, pydantic, sorted."""
    rows = PLAIN.validate_python(json.loads(body)["offers"])
    return len(sorted(rows, key=lambda row: row.min_bid))


def in_process(contender: Callable[[bytes], int], body: bytes) -> Callable[[], tuple[float, int]]:
    """CPU seconds of one round, and how many rows it accounted for."""

    def one_round() -> tuple[float, int]:
        start = time.process_time()
        count = contender(body)
        return time.process_time() - start, count

    return one_round


def gpuhunt(python: str, body: bytes, folder: Path, cleanup: ExitStack) -> Callable[[], tuple[float, int]] | None:
    """A round of gpuhunt in an interpreter that has it; `None` if this one has not."""
    (folder / "body.json").write_bytes(body)
    probe = subprocess.run([python, "-c", "import gpuhunt.providers.vastai"], capture_output=True, check=False)
    if probe.returncode:
        return None
    process = subprocess.Popen(
        [python, "-c", GPUHUNT, str(folder / "body.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it logs every row it skips
        text=True,
    )
    cleanup.callback(process.communicate)  # the end of its input ends it

    def one_round() -> tuple[float, int]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        seconds, count = process.stdout.readline().split()
        return float(seconds), int(count)

    return one_round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--payload", type=Path, help="a recorded search answer to repeat, .json or .json.gz")
    parser.add_argument("--gpuhunt", default=sys.executable, metavar="PYTHON", help="an interpreter that has gpuhunt")
    options = parser.parse_args()
    body = body_of(options.rows, options.payload)
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        contenders = {"spotd": in_process(spotd, body), "json + pydantic": in_process(plain, body)}
        other = gpuhunt(options.gpuhunt, body, Path(folder), cleanup)
        if other is not None:
            contenders["gpuhunt"] = other
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        counts: dict[str, int] = {}
        for number in range(options.rounds + 2):
            for name, one_round in contenders.items():
                seconds, counts[name] = one_round()
                if number >= 2:  # the first rounds warm caches and are not counted
                    taken[name].append(seconds * 1000)
    base = statistics.median(taken["spotd"])
    print(f"{options.rows} rows, {len(body) / 1e6:.1f} MB, Python {sys.version.split()[0]}, {options.rounds} rounds")
    for name, rounds in taken.items():
        median = statistics.median(rounds)
        print(f"{name:16} {median:7.1f} ms CPU (least {min(rounds):.1f}) x{median / base:.2f} {counts[name]} results")
    if other is None:
        print("gpuhunt          not measured: it cannot be imported; name an interpreter that has it with --gpuhunt")
    print(f"goal: below {CPU_LIMIT_MS} ms CPU for 3,000 rows: {'met' if base < CPU_LIMIT_MS else 'MISSED'}")
    against = base / statistics.median(taken["json + pydantic"])
    print(f"limit: at most {PEER_LIMIT:g} times json + pydantic: {against:.2f}")
    return 0 if against <= PEER_LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
