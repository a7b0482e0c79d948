"""`python -m spotd_providers.testkit NAME`: the whole suite against a provider found by its entry points.

The provider is the entry point NAME of the group `spotd.providers`, its harness the one of `spotd.harnesses`. Ends with
0 if every behaviour passed or does not apply, 1 if one failed, 2 if there is nothing to run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final
from unittest import SkipTest

from spotd_providers.testkit.behaviours import BEHAVIOURS
from spotd_providers.testkit.harness import HarnessFactory
from spotd_providers.testkit.suite import Behaviour, run

PROVIDERS: Final = "spotd.providers"
HARNESSES: Final = "spotd.harnesses"


class NothingToRun(Exception):
    """A provider or harness that does not exist; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, print the report on stdout and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m spotd_providers.testkit", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="the provider, as its entry point calls it")
    parser.add_argument("-k", metavar="TEXT", default="", help="only behaviours whose name holds TEXT")
    parser.add_argument("-v", "--verbose", action="store_true", help="also list what passed")
    chosen = parser.parse_args(arguments)
    try:
        factory = load_harness(chosen.name)
    except NothingToRun as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    selected = [one for one in BEHAVIOURS if chosen.k in one.name]
    if not selected:
        sys.stderr.write(f"error: no behaviour is named like {chosen.k!r}\n")
        return 2
    results = Counter(_report(one, factory, verbose=chosen.verbose) for one in selected)
    sys.stdout.write(
        f"{chosen.name}: {results['passed']} passed, {results['skipped']} do not apply, {results['failed']} failed\n"
    )
    return 1 if results["failed"] else 0


def load_harness(name: str) -> HarnessFactory:
    """Load the harness of an installed provider, and check that it opens that very provider.

    Raises:
        NothingToRun: one of the two entry points is missing or broken.
    """
    plugin = _entry_point(PROVIDERS, name).load()
    factory: HarnessFactory = _entry_point(HARNESSES, name).load()
    if str(plugin.name) != name:
        raise NothingToRun(f"the entry point {name} of {PROVIDERS} names a provider that calls itself {plugin.name}")
    with tempfile.TemporaryDirectory() as folder, factory(Path(folder)) as harness:
        if harness.plugin is not plugin:
            raise NothingToRun(f"the harness {name} opens another provider than the entry point {name} of {PROVIDERS}")
    return factory


def _entry_point(group: str, name: str) -> EntryPoint:
    found = entry_points(group=group, name=name)
    for entry_point in found:
        return entry_point
    known = ", ".join(sorted({e.name for e in entry_points(group=group)})) or "none"
    raise NothingToRun(f"no entry point {name!r} in the group {group} (installed: {known})")


def _report(one: Behaviour, factory: HarnessFactory, *, verbose: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(one, factory, Path(folder))
        except SkipTest as reason:
            sys.stdout.write(f"  n/a  {one.name}: {reason}\n")
            return "skipped"
        except Exception as exc:  # noqa: BLE001 - whatever a provider does wrong is a failed behaviour
            sys.stdout.write(f" FAIL  {one.name}: {one.says}\n")
            where = traceback.format_exception(exc) if verbose else traceback.format_exception_only(exc)
            sys.stdout.write("".join(f"         {line}\n" for text in where for line in text.splitlines()))
            return "failed"
    if verbose:
        sys.stdout.write(f"   ok  {one.name}: {one.says}\n")
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
