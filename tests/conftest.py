"""What holds for every test.

Hypothesis: the machine may be busy, so slowness is no failure; and `make test` draws the same examples every time, so
that what failed for one fails for all. `make swarm` runs these tests too and draws ten times as many new ones:
HYPOTHESIS_PROFILE=search.

Tiers: a test is `quick` by its folder or file, unless it is marked `process`, `long`, `lengthy`, `slow` or `system`. A
quick test that starts a process or really sleeps fails, whatever runs it. `--part 2/4` runs every fourth of the chosen
tests, from the third on: the parts 0/4 to 3/4 together are all of them, and each part has its share of each folder.

Surroundings: every test process, and so every process that a test starts, begins with the same signals, umask and
environment, whoever started it; see `tests/inherited.py`.

Order: every worker begins with what takes long. As many as there are processors compute, the others mostly wait for
processes; so no processor idles meanwhile, and no long test is left for the end.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

from tests import inherited

if TYPE_CHECKING:
    from tests.fakes.seaweed import Weed

inherited.settle()
settings.register_profile(
    "same",
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", settings.get_profile("same"), max_examples=200, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_TESTS: Final = Path(__file__).parent
_QUICK_FOLDERS: Final = (
    "integration/runner/test_completeness.py",
    "integration/runner/test_corruptions.py",
    "integration/runner/test_lease.py",
    "integration/team/test_rights.py",
    "sim",
    "unit/api",
    "unit/backtest",
    "unit/cli",
    "unit/config",
    "unit/core",
    "unit/daemon/checkpoints",
    "unit/daemon/grants",
    "unit/daemon/hosts/test_flood.py",
    "unit/daemon/hosts/test_reader.py",
    "unit/daemon/market",
    "unit/daemon/test_install_lease.py",
    "unit/daemon/test_launch_turns.py",
    "unit/estimates",
    "unit/history",
    "unit/jobs",
    "unit/providers/gpus",
    "unit/providers/kit",
    "unit/setup",
    "unit/site",
    "unit/store",
    "unit/test_cases.py",
    "unit/test_docs.py",
    "unit/test_words.py",
    "unit/web",
)
_QUICK_PLACES: Final = tuple(f"{_TESTS / name}{os.sep}" for name in _QUICK_FOLDERS)
_WAITING_PLACES: Final = tuple(
    f"{_TESTS / name}{os.sep}" for name in ("e2e", "integration", "unit/jobs", "unit/providers", "unit/service")
)
"""Where most tests wait for processes more than they compute."""
_PIECE: Final = 20
"""A longer file of end-to-end tests is shared among workers."""
_NOT_QUICK: Final = ("process", "long", "lengthy", "slow", "system", "e2e")
_SERVERS: Final = frozenset({"weed"})
"""Fixtures that start a process."""
_PROCESS_EVENTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_WORKERS: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PROCESSORS: Final = os.cpu_count() or 1
_GARBAGE: Final = (20_000, 20, 20)
"""How seldom Python searches for cycles: by default after every 700 new objects, which no short test needs."""
_SLEEP_MAX_S: Final = 0.05
"""A shorter sleep is a poll of a thread that is about to be done."""
_running: list[str] = []
"""The quick test that runs now."""


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """Start one S3 server for every test that needs one; each writes below a prefix of its own."""
    from tests.fakes import seaweed

    reason = seaweed.missing()
    if reason:
        pytest.skip(reason)
    with seaweed.running(tmp_path_factory.mktemp("weed")) as server:
        yield server


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test that `make quick` would not run: each of its processes would."""
    return True if config.getoption("markexpr") == "quick" and not _is_quick_place(collection_path) else None


def _is_quick_place(path: Path) -> bool:
    place = f"{path}{os.sep}"
    return place.startswith(_QUICK_PLACES) or any(quick.startswith(place) for quick in _QUICK_PLACES)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Search for no garbage meanwhile: what is imported and collected stays."""
    gc.disable()
    try:
        if _WORKERS > 1 and [Path(place).resolve() for place in session.config.args] == [_TESTS]:
            _import_own_share(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_own_share(config: pytest.Config) -> None:
    """Compile what has changed in one worker each: the others find it compiled. A failure is for the collection."""
    is_all = config.getoption("markexpr") != "quick"
    modules = sorted(path for path in _TESTS.rglob("test_*.py") if is_all or _is_quick_place(path))
    for path in modules[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) :: _WORKERS]:
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(_TESTS.parent).with_suffix("").parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, default=(0, 1), metavar="K/N", help="run every Nth of the chosen tests")


def _part(words: str) -> tuple[int, int]:
    number, _, count = words.partition("/")
    part = int(number), int(count)
    if not 0 <= part[0] < part[1]:
        raise ValueError(words)
    return part


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before `-m` selects, and after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _mark(items)
    yield
    number, count = config.getoption("part")
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % count != number])
    items[:] = _dealt(items[number::count], _WORKERS)


def _mark(items: list[pytest.Item]) -> None:
    for item in items:
        if _SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("process")
        if f"{item.path}{os.sep}".startswith(_QUICK_PLACES) and not any(
            item.get_closest_marker(name) for name in _NOT_QUICK
        ):
            item.add_marker("quick")


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests such that each worker's share, an equal slice of them, begins with what takes long.

    As many workers as there are processors, but at most half of them, begin with the files that compute; the others get
    those that mostly wait for processes. What is stolen from a worker later is the end of its share.
    """
    if workers < 2:
        return items
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    computing = min(workers // 2, _PROCESSORS)
    waits: list[list[pytest.Item]] = []
    computes: list[list[pytest.Item]] = []
    rest: list[pytest.Item] = []
    for path, own in _by_file(items).items():
        if f"{path}{os.sep}".startswith(_WAITING_PLACES):
            waits += [own[at : at + _PIECE] for at in range(0, len(own), _PIECE)] if _has(own, "e2e") else [own]
        elif _has(own, "long"):
            computes.append(own)
        else:
            rest += own
    for pieces, hands in ((waits, shares[computing:]), (computes, shares[:computing])):
        for number, piece in enumerate(pieces):
            hands[number % len(hands)] += piece
    dealt: list[pytest.Item] = []
    for number, share in enumerate(shares):
        missing = max(0, (len(items) - len(dealt)) // (workers - number) - len(share))
        dealt += [*share, *rest[:missing]]
        del rest[:missing]
    return dealt


def _by_file(items: list[pytest.Item]) -> dict[Path, list[pytest.Item]]:
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return files


def _has(items: list[pytest.Item], mark: str) -> bool:
    return any(item.get_closest_marker(mark) for item in items)


def pytest_collection_finish() -> None:
    """Leave out of every search for garbage what was imported and collected: it stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("quick"):
        _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()


def _forbid_waiting(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail the quick test that starts a process or sleeps. (Python tells an audit hook of both.)"""
    if not _running:
        return
    if event in _PROCESS_EVENTS or (event == "time.sleep" and arguments[0] > _SLEEP_MAX_S):
        # The first argument only: an environment among the others would be printed.
        raise RuntimeError(f"{event}({arguments[0] if arguments else ''}) in {_running[0]}: mark it as `process`")


sys.addaudithook(_forbid_waiting)
