"""Features at the side: each could be deleted with its commands, and the rest goes on.

None imports another, so what goes on without all of them goes on without each.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDE = {
    "spotd.agents": ("spotd.cli.commands.interfaces",),
    "spotd.backtest": ("spotd.cli.commands.backtest", "spotd.cli.views.backtest_view"),
    "spotd.estimates": ("spotd.cli.commands.size", "spotd.cli.views.size_view"),
    "spotd.top": ("spotd.cli.commands.interfaces",),
    "spotd.web": ("spotd.cli.commands.interfaces",),
    "spotd_providers.local": ("spotd.demo",),
    "spotd_providers.testkit": (),
}
"""What of `spotd` may import a feature: what its commands need, which goes with it."""
HEART = ("spotd.api", "spotd.config", "spotd.core", "spotd.daemon", "spotd.history", "spotd.store")
REST = """
import importlib, pathlib, sys

features, users = (tuple(one.split(",")) for one in sys.argv[1:])
is_of = lambda name, roots: any(name == root or name.startswith(root + ".") for root in roots)


class Deleted:
    def find_spec(self, name, path=None, target=None):
        if is_of(name, features):
            raise ImportError(f"{name} was deleted")


sys.meta_path.insert(0, Deleted())
for root, base in (("spotd", "."), ("providers/spotd_providers", "providers"), ("jobs/spotd_jobs", "jobs")):
    for file in sorted(pathlib.Path(root).rglob("*.py")):
        name = ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        if not is_of(name, (*features, *users)) and not name.endswith(("__main__", "migrations.env")):
            importlib.import_module(name)
from spotd.core.decide import decide
from spotd.core.domain.plan import applied, broken_rules
from spotd.core.domain.world import World
from tests.unit.core import builders as b

job = b.job()
world = World(policy=b.shop_policy(), jobs={job.id: job}, attempts={}, intents={})
plan = decide(world, b.market(b.offer()), b.NOW)
assert [item.state.value for item in plan.attempts.values()] == ["intended"], plan
assert not broken_rules(applied(world, plan))
print(len(sys.modules))
"""


def imports(root: str) -> Iterator[tuple[str, str]]:
    """Yield each module of a package, and the names that it imports, also within its functions."""
    for file in sorted((ROOT / root.replace(".", "/")).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


def shared(users: tuple[str, ...]) -> frozenset[str]:
    """Return the modules of commands that several features have together."""
    counts = Counter(user for one in SIDE.values() for user in one)
    return frozenset(user for user in users if counts[user] > 1 or user == "spotd.demo")


def is_of(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


def test_nothing_but_its_commands_imports_a_feature_at_the_side_or_them() -> None:
    found = [
        (module, name)
        for module, name in imports("spotd")
        for feature, users in SIDE.items()
        if any(is_of(name, part) and part not in shared(users) for part in (feature, *users))
        and not any(is_of(module, user) for user in (feature, *users))
    ]
    assert found == []


def test_no_command_or_view_is_imported_by_what_is_no_command() -> None:
    modules = [(module, name) for root in HEART for module, name in imports(root)]
    assert len({module for module, _ in modules}) > 100
    assert [(module, name) for module, name in modules if is_of(name, "spotd.cli")] == []


@pytest.mark.process
def test_the_rest_is_imported_and_decides_where_all_of_them_are_deleted() -> None:
    users = {user for one in SIDE.values() for user in one}
    command = [sys.executable, "-c", REST, ",".join(SIDE), ",".join(sorted(users))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert int(done.stdout) > 300
