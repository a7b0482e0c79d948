"""What a host with a real NVIDIA H200 answered (driver 580.159.04), idle and beside a training; its ids are made up."""

from __future__ import annotations

from spotd_jobs.runner.heartbeat import parse_gpus
from spotd_providers.ssh.answers import facts_of, offers_of
from spotd_providers.ssh.settings import SshHost, SshSettings
from tests.cases import every
from tests.unit.core.builders import NOW

CARD = "GPU-00000000-1111-2222-3333-444444444444"
ANSWER = f"""host\t069a37da-a0f6-4070-91cb-ee7f4ce99c55\t149\t1795848745\tann\te3b0c44298fc1c14
cpus\t16
memory\t131981020
disk\t63382320
has\tflock
has\ttimeout
has\tsetsid
has\tsha256sum
has\tpython3
nvidia\t0
gpu\t0, {CARD}, NVIDIA H200, 143771, 580.159.04
more\tmig.mode.current\t{CARD}, Disabled
more\tmemory.used\t{CARD}, USED
more\tecc.errors.uncorrected.volatile.total\t{CARD}, 0
listed\tGPU 0: NVIDIA H200 (UUID: {CARD})
"""


@every(
    ("answer", "fault"),
    [
        (ANSWER.replace("USED", "0"), ""),
        (ANSWER.replace("USED", "7039") + f"app\t{CARD}, 667\n", "another process uses it"),
    ],
)
def test_a_real_card_is_offered_while_nothing_else_uses_it(answer: str, fault: str) -> None:
    host = SshHost(name="attic", address="10.0.0.7", user="ann", price=0.5)
    facts = facts_of([line.split("\t") for line in answer.splitlines()], host)
    (card,) = facts.devices
    assert (card.id, card.gpu, card.vram_mb, card.fault) == (CARD, "H200_SXM", 143_771, fault)
    assert (facts.cpus, facts.faults) == (16, [])
    offers, _ = offers_of(host, facts, SshSettings(hosts=(host,)), NOW)
    assert [(offer.gpu, offer.gpu_count) for offer in offers] == ([] if fault else [("H200_SXM", 1)])


def test_its_figures_are_read_as_its_driver_prints_them() -> None:
    (busy,) = parse_gpus("0, NVIDIA H200, 96, 7039, 143771, 420.16, 49\n")
    assert busy == {
        "index": 0,
        "name": "NVIDIA H200",
        "util_pct": 96.0,
        "mem_used_mb": 7039.0,
        "mem_total_mb": 143771.0,
        "power_w": 420.16,
        "temp_c": 49.0,
    }


WARNING = "WARNING: User is missing the following required groups: render, video. Please add user to these groups."
AMD_ROWS = (
    '[    {        "gpu": 0,        "asic": {            "market_name": "AMD Instinct MI300X",'
    '            "asic_serial": "0x6F1F0A2B3C4D5E6F"        },'
    '        "vram": {            "type": "HBM3",            "size": {                "value": 196592,'
    '                "unit": "MB"            }        }    }]'
)


@every("rows", [AMD_ROWS, '{    "gpu_data": ' + AMD_ROWS + "}"], ids=["amd-smi 6", "amd-smi 7"])
@every("before", ["", WARNING, "[!] " + WARNING], ids=["root", "no group", "another warning"])
def test_a_card_of_amd_is_read_behind_the_warning_of_its_tool(rows: str, before: str) -> None:
    host = SshHost(name="attic", address="10.0.0.7", user="ann", price=0.5)
    lines = [line for line in ANSWER.splitlines() if line.partition("\t")[0] not in ("nvidia", "gpu", "more", "listed")]
    facts = facts_of([line.split("\t") for line in [*lines, f"amd\t{before}{rows}"]], host)
    assert facts.faults == []
    (card,) = facts.devices
    assert (card.id, card.gpu, card.vram_mb) == ("GPU-6f1f0a2b3c4d5e6f", "MI300X", 196_592)
