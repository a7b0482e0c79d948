"""The dashboard and the alert rules in `docs/monitoring/` ask only for metrics that exist, in valid queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotd.service.metrics import MetricsReader, families
from tests.unit.daemon.rig import Rig

FOLDER = Path(__file__).parents[3] / "docs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
RULES = (FOLDER / "alerts.yml").read_text(encoding="utf-8")
NAME = re.compile(r"\b(?:spotd|process)_[a-z0-9_]+\b")
GRAFANA_ONLY = {"$instance": "a", "$gpu": "b"}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


async def exposed(rig: Rig) -> set[str]:
    """Every name that a series can have."""
    suffixes = {"counter": ["_total"], "summary": ["_count", "_sum"]}
    async with rig.ready():
        reading = await MetricsReader(rig.context(), [rig.control_loop.controller]).read()
        found = list(families(reading))
    names = {one.name + end for one in found for end in suffixes.get(one.type, [""])}
    return names | {"process_resident_memory_bytes", "process_cpu_seconds_total"}


@pytest.mark.anyio
async def test_every_metric_that_is_asked_for_exists_and_every_one_of_ours_is_documented(rig: Rig) -> None:
    names = await exposed(rig)
    variables = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    text = "\n".join([*queries(), *variables, "\n".join(re.findall(r"expr: (?:>-)?(.*?)\n\s+\w+:", RULES, re.DOTALL))])
    asked = set(NAME.findall(text))
    assert len(asked) > 25
    assert asked - names == set()
    page = (FOLDER.parent / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert {name for name in names if name.startswith("spotd_")} - set(NAME.findall(page)) == set()


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at: dict[str, Any] = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@promtool
@pytest.mark.system
def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, query in enumerate(queries()):
        for name, value in GRAFANA_ONLY.items():
            query = query.replace(name, value)
        rules.append({"record": f"dashboard:{number}", "expr": query})
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    checked("check", "rules", str(file))


@promtool
@pytest.mark.system
def test_each_alert_fires_for_its_cause_and_for_nothing_else() -> None:
    checked("check", "rules", "--lint-fatal", str(FOLDER / "alerts.yml"))
    checked("test", "rules", str(FOLDER / "alerts_test.yml"))


def checked(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
