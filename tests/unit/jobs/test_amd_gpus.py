"""The figures of AMD's cards, from what their tools print: amd-smi 6 and 7, rocm-smi, and what no tool should print."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from spotd_jobs.runner.amd_gpus import GPUS_MAX, names_of, parse_amd_smi, parse_rocm_smi
from spotd_jobs.runner.heartbeat import GpuReader
from spotd_jobs.wire.reports import Gpu
from spotd_providers.contract.gpus import canonical, resolve
from tests.cases import every

# In the shape of amd-smi 7 on MI300X, cut to what is read and some of what is not.
CARD: dict[str, Any] = {
    "gpu": 0,
    "usage": {
        "gfx_activity": {"value": 97, "unit": "%"},
        "umc_activity": {"value": 41, "unit": "%"},
        "mm_activity": "N/A",
    },
    "power": {
        "socket_power": {"value": 742, "unit": "W"},
        "gfx_voltage": "N/A",
        "throttle_status": "UNTHROTTLED",
    },
    "temperature": {
        "edge": "N/A",
        "hotspot": {"value": 71, "unit": "C"},
        "mem": {"value": 52, "unit": "C"},
    },
    "mem_usage": {
        "total_vram": {"value": 196592, "unit": "MB"},
        "used_vram": {"value": 150283, "unit": "MB"},
        "free_vram": {"value": 46309, "unit": "MB"},
    },
}
STATIC = [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X OAM", "vendor_id": "0x1002"}}]
ROCM = {
    "card0": {
        "Temperature (Sensor edge) (C)": "N/A",
        "Temperature (Sensor junction) (C)": "43.0",
        "Current Socket Graphics Package Power (W)": "138.0",
        "GPU use (%)": "12",
        "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "1073741824",
        "Card Series": "AMD Instinct MI300X OAM",
    },
    "card1": {"GPU use (%)": "0", "Average Graphics Package Power (W)": "36.0", "Card series": "Instinct MI100"},
    "system": {"Driver version": "6.10.5"},
}
EXPECTED = {
    "index": 0,
    "name": "AMD Instinct MI300X OAM",
    "util_pct": 97.0,
    "mem_used_mb": 150283.0,
    "mem_total_mb": 196592.0,
    "power_w": 742.0,
    "temp_c": 71.0,
}


@every("document", [[CARD], {"gpu_data": [CARD]}], ids=["amd-smi 6", "amd-smi 7"])
def test_both_versions_of_amd_smi_are_read(document: Any) -> None:
    names = names_of(json.dumps(STATIC))
    assert parse_amd_smi(json.dumps(document), names) == [EXPECTED]


@every(
    "warning", ["WARNING: User is missing the following required groups: render, video.\n", "[!] no group {render}\n"]
)
def test_a_warning_before_the_figures_hides_none(warning: str) -> None:
    names = names_of(warning + json.dumps(STATIC))
    assert parse_amd_smi(warning + json.dumps({"gpu_data": [CARD]}), names) == [EXPECTED]


def test_rocm_smi_is_read_in_the_units_of_the_others() -> None:
    rows = parse_rocm_smi(json.dumps(ROCM))
    assert rows[0] == {
        "index": 0, "name": "AMD Instinct MI300X OAM", "util_pct": 12.0, "mem_used_mb": 1024.0,
        "mem_total_mb": 196592.0, "power_w": 138.0, "temp_c": 43.0,
    }  # fmt: skip
    assert (rows[1]["index"], rows[1]["power_w"], rows[1]["temp_c"], len(rows)) == (1, 36.0, None, 2)


@every("value", ["N/A", None, True, [], {}, {"value": "N/A"}, float("nan"), 1e308, -1, "9" * 9999])
def test_a_figure_that_is_none_is_unknown_and_costs_no_other(value: Any) -> None:
    card = {**CARD, "usage": {"gfx_activity": value}}
    (row,) = parse_amd_smi(json.dumps([card]), {})
    assert row == {**EXPECTED, "name": "AMD GPU", "util_pct": None}


@every("text", ["", "null", "[[[", "[" * 100_000, "7", '{"gpu_data": 3}', '[1, null, {"gpu": "0"}]'])
def test_what_is_no_list_of_cards_is_none(text: str) -> None:
    assert (parse_amd_smi(text, {}), parse_rocm_smi(text), names_of(text)) == ([], [], {})


def test_a_name_cannot_steer_a_terminal_and_cards_are_bounded() -> None:
    names = names_of(json.dumps([{"gpu": 0, "asic": {"market_name": "MI\x1b[2J\n300X"}}]))
    assert names[0].isprintable()
    assert len(parse_amd_smi(json.dumps([{**CARD, "gpu": n} for n in range(1000)]), {})) == GPUS_MAX


def test_whatever_the_tools_print_makes_rows_that_the_daemon_takes() -> None:
    rng = Random(23)
    texts = [json.dumps({"gpu_data": [CARD]}), json.dumps(ROCM)]
    for number in range(2_000):
        text = bytearray(texts[number % 2].encode())
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        said = text.decode("utf-8", "replace")
        for row in [*parse_amd_smi(said, names_of(said)), *parse_rocm_smi(said)]:
            Gpu.model_validate(row)


@pytest.mark.process
def test_the_runner_asks_the_tool_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "amd-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"static) echo '{json.dumps(STATIC)}';;\nmetric) echo '{json.dumps({'gpu_data': [CARD]})}';;\nesac\n",
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert GpuReader().read() == [EXPECTED]


@every(
    ("name", "memory_mb", "gpu"),
    [
        ("AMD Instinct MI300X OAM", 196_592, "MI300X"),
        ("AMD Instinct MI325X", 262_128, "MI325X"),
        ("AMD Instinct MI325X OAM", None, "MI325X"),
        ("InstinctMI250X", 131_072, "MI250X"),
    ],
)
def test_amd_names_are_canonical(name: str, memory_mb: int | None, gpu: str) -> None:
    assert canonical("", name, memory_mb) == gpu
    assert resolve(gpu.lower()) == frozenset({gpu})


@every(
    "name",
    [
        "AMD Instinct MI300X",
        "AMD Instinct MI300X OAM",
        "AMD Instinct MI300X VF",
    ],
)
def test_a_card_is_the_same_by_each_name_that_the_tools_print(name: str) -> None:
    assert canonical("", name, 196_592) == "MI300X"
