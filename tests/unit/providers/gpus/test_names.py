"""What people type, what providers sell, and that the two meet where they should and nowhere else."""

from __future__ import annotations

import pytest

from spotd_providers.contract.gpus import (
    GPUS,
    UnknownGpu,
    aws_gpus,
    canonical,
    gpu_info,
    kept_name,
    matches,
    resolve,
    vram_fits,
)
from tests.cases import every

H100 = {"H100_SXM", "H100_PCIE", "H100_NVL"}
A100 = {"A100_SXM_80", "A100_SXM_40", "A100_PCIE_80", "A100_PCIE_40"}
PRO_6000 = {"RTX_PRO_6000", "RTX_PRO_6000_SE", "RTX_PRO_6000_WS", "RTX_PRO_6000_MAXQ"}

TYPED = [
    ("h100", H100),
    ("H100_SXM", {"H100_SXM"}),
    ("H100 SXM5", {"H100_SXM"}),
    ("h100-80gb", {"H100_SXM", "H100_PCIE"}),
    ("NVIDIA H100 80GB HBM3", {"H100_SXM"}),
    ("a100", A100),
    ("A100-80GB", {"A100_SXM_80", "A100_PCIE_80"}),
    ("a100 80", {"A100_SXM_80", "A100_PCIE_80"}),
    ("a100_40g", {"A100_SXM_40", "A100_PCIE_40"}),
    ("A100 SXM4", {"A100_SXM_80", "A100_SXM_40"}),
    ("A100-SXM4-80GB", {"A100_SXM_80"}),
    ("A100 80GB PCIe", {"A100_PCIE_80"}),
    ("4090", {"RTX_4090"}),
    ("rtx4090", {"RTX_4090"}),
    ("RTX_4090", {"RTX_4090"}),
    ("nvidia geforce rtx 4090", {"RTX_4090"}),
    ("4090 24gb", {"RTX_4090"}),
    ("4090 48gb", {"RTX_4090_48"}),
    ("4090d", {"RTX_4090D"}),
    ("RTX A6000", {"RTX_A6000"}),
    ("a6000", {"RTX_A6000"}),
    ("rtx 6000 ada", {"RTX_6000_ADA"}),
    ("6000 Ada", {"RTX_6000_ADA"}),
    ("quadro rtx 6000", {"QUADRO_RTX_6000"}),
    ("rtx pro 6000", PRO_6000),
    ("rtx pro 6000 max-q", {"RTX_PRO_6000_MAXQ"}),
    ("a10", {"A10"}),
    ("a10g", {"A10G"}),
    ("h200", {"H200_SXM"}),
    ("h200 nvl", {"H200_NVL"}),
    ("l40", {"L40"}),
    ("l40s", {"L40S"}),
    ("v100", {"V100_16", "V100_32"}),
    ("Tesla V100-SXM2-16GB", {"V100_16"}),
    ("v100 32gb", {"V100_32"}),
    ("4080 super", {"RTX_4080_SUPER"}),
    ("4080s", {"RTX_4080_SUPER"}),
    ("4060 ti", {"RTX_4060_TI", "RTX_4060_TI_16"}),
    ("4060ti 16gb", {"RTX_4060_TI_16"}),
    ("3060", {"RTX_3060"}),
    ("3060 8gb", {"RTX_3060_8"}),
    ("tesla t4", {"T4"}),
    ("rtx 3060 laptop", {"RTX_3060_LAPTOP"}),
    ("RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", {"RTX_PRO_6000_SE_MIG_1G_24GB"}),
]


@every(("typed", "meant"), TYPED, ids=[typed for typed, _ in TYPED])
def test_a_typed_name_means_these_cards(typed: str, meant: set[str]) -> None:
    assert resolve(typed) == meant


SOLD = [
    ("vast", "H100 SXM", 81559, "H100_SXM"),
    ("vast", "H100 NVL", 95830, "H100_NVL"),
    ("vast", "A100 SXM4", 81920, "A100_SXM_80"),
    ("vast", "A100 SXM4", 40960, "A100_SXM_40"),
    ("vast", "A100 SXM", 40536, "A100_SXM_40"),
    ("vast", "A100 PCIE", 81920, "A100_PCIE_80"),
    ("vast", "Tesla V100", 16384, "V100_16"),
    ("vast", "Tesla V100", 32768, "V100_32"),
    ("vast", "RTX 4090", 24564, "RTX_4090"),
    ("vast", "RTX 4090", 49140, "RTX_4090_48"),
    ("vast", "RTX 4090D", 24564, "RTX_4090D"),
    ("vast", "RTX 3080", 20480, "RTX_3080_20"),
    ("vast", "RTX 4060 Ti", 8188, "RTX_4060_TI"),
    ("vast", "RTX 4060 Ti", 16380, "RTX_4060_TI_16"),
    ("vast", "RTX A2000", 6138, "RTX_A2000"),
    ("vast", "RTX A2000", 12282, "RTX_A2000_12"),
    ("vast", "RTX A6000", 46068, "RTX_A6000"),
    ("vast", "RTX 6000Ada", 49140, "RTX_6000_ADA"),
    ("vast", "Q RTX 6000", 23040, "QUADRO_RTX_6000"),
    ("vast", "RTX PRO 6000 S", 97887, "RTX_PRO_6000_SE"),
    ("vast", "RTX PRO 6000 Max-Q", 97887, "RTX_PRO_6000_MAXQ"),
    ("vast", "RTX PRO 6000", 97887, "RTX_PRO_6000"),
    ("vast", "RTX 4080S", 16376, "RTX_4080_SUPER"),
    ("vast", "RTX 4070S Ti", 16376, "RTX_4070_TI_SUPER"),
    ("vast", "A10g", 23028, "A10G"),
    ("vast", "A10", 23028, "A10"),
    ("vast", "H200", 143771, "H200_SXM"),
    ("vast", "H200 NVL", 143771, "H200_NVL"),
    ("vast", "RTX 3060 laptop", 12288, "RTX_3060_LAPTOP"),
    ("runpod", "NVIDIA H100 80GB HBM3", 80 * 1024, "H100_SXM"),
    ("runpod", "NVIDIA H100 PCIe", 80 * 1024, "H100_PCIE"),
    ("runpod", "NVIDIA A100-SXM4-80GB", 80 * 1024, "A100_SXM_80"),
    ("runpod", "NVIDIA A100-SXM4-40GB", 40 * 1024, "A100_SXM_40"),
    ("runpod", "NVIDIA A100 80GB PCIe", 80 * 1024, "A100_PCIE_80"),
    ("runpod", "NVIDIA  A30", 24 * 1024, "A30"),
    ("runpod", "NVIDIA  RTX A4500", 20 * 1024, "RTX_A4500"),
    ("runpod", "NVIDIA GeForce RTX 3080TI", 12 * 1024, "RTX_3080_TI"),
    ("runpod", "NVIDIA A5000 Ada", 32 * 1024, "RTX_5000_ADA"),
    ("runpod", "NVIDIA RTX 4000 SFF Ada Generation", 20 * 1024, "RTX_4000_ADA"),
    ("runpod", "NVIDIA H200 NVL", 143 * 1024, "H200_NVL"),
    ("runpod", "Tesla V100-PCIE-16GB", 16 * 1024, "V100_16"),
    (
        "runpod",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb",
        48 * 1024,
        "RTX_PRO_6000_SE_MIG_2G_48GB",
    ),
    ("aws", "A10G", 22888, "A10G"),
    ("aws", "L4", 22888, "L4"),
    ("aws", "L40S", 45776, "L40S"),
    ("aws", "V100", 16384, "V100_16"),
    ("aws", "V100", 32768, "V100_32"),
    ("aws", "A100", 40960, "A100_SXM_40"),
    ("aws", "A100", 81920, "A100_SXM_80"),
    ("aws", "H100", 81920, "H100_SXM"),
    ("aws", "H200", 144384, "H200_SXM"),
    ("aws", "B200", 183359, "B200_SXM"),
    ("aws", "B300", 275040, "B300_SXM"),
    ("aws", "RTX PRO Server 6000", 98304, "RTX_PRO_6000_SE"),
    ("lambda", "RTX 6000", 24576, "QUADRO_RTX_6000"),
]


@every(("provider", "name", "vram_mb", "meant"), SOLD, ids=[f"{p}-{n}-{v}" for p, n, v, _ in SOLD])
def test_a_sold_name_with_its_memory_is_this_card(provider: str, name: str, vram_mb: int, meant: str) -> None:
    assert canonical(provider, name, vram_mb) == meant


@every(("provider", "name"), [("vast", "A100 SXM4"), ("vast", "Tesla V100"), ("vast", "RTX 4060 Ti")])
def test_without_stated_memory_the_smallest_card_of_that_name_is_assumed(provider: str, name: str) -> None:
    assumed = gpu_info(canonical(provider, name, None))
    assert assumed is not None
    sold_so = [row.vram_gb[0] for row in GPUS if name in row.vast]
    assert assumed.vram_gb[0] == min(sold_so)


def test_memory_beyond_seven_percent_is_another_card() -> None:
    assert vram_fits(24, 22888)
    assert not vram_fits(24, 22800)
    assert vram_fits(24, 26296)
    assert not vram_fits(24, 26400)
    assert canonical("vast", "RTX 3090", 49152) == "RTX_3090_48"
    assert canonical("aws", "L4", 2861) == "L4_3", "an eighth of a card is not the card"
    assert not matches(resolve("l4"), "L4_3")


@every("typed", ["rtx 6000", "rtx 5000", "rtx 4000", "rtx 6000 48gb"])
def test_a_name_that_several_generations_share_is_never_guessed(typed: str) -> None:
    with pytest.raises(UnknownGpu) as refusal:
        resolve(typed)
    assert refusal.value.text == typed


def test_look_alikes_are_named_in_the_refusal() -> None:
    with pytest.raises(UnknownGpu) as refusal:
        resolve("rtx 6000")
    assert set(refusal.value.nearest) == {"RTX_A6000", "RTX_6000_ADA", "QUADRO_RTX_6000", "RTX_PRO_6000_SE"}


@every(
    ("typed", "nearest"),
    [("h1000", "H100_SXM"), ("4091", "RTX_4090"), ("h100-40gb", "H100_SXM"), ("a6001", "RTX_A6000")],
)
def test_an_unknown_name_is_refused_with_the_nearest_known(typed: str, nearest: str) -> None:
    with pytest.raises(UnknownGpu, match=nearest) as refusal:
        resolve(typed)
    assert nearest in refusal.value.nearest


@every("typed", ["", "   ", "🚀", "gpu:8", "x" * 4000])
def test_nonsense_is_refused_without_crashing(typed: str) -> None:
    with pytest.raises(UnknownGpu):
        resolve(typed)
    assert kept_name(typed)


def test_an_unknown_card_keeps_its_own_name_and_can_be_asked_for_by_it() -> None:
    offered = canonical("vast", "NVIDIA  Foo 9000-X", 65536)
    assert offered == "FOO_9000_X"
    assert gpu_info(offered) is None
    assert resolve("foo 9000 x", sold=[offered, "RTX_4090"]) == {offered}
    with pytest.raises(UnknownGpu) as refusal:
        resolve("foo-9000-x")
    assert matches(frozenset({refusal.value.kept}), offered)


def test_a_modified_card_is_asked_for_by_its_memory_once_it_is_sold() -> None:
    offered = canonical("vast", "RTX 3090", 49152)
    assert resolve("3090 48gb", sold=[offered]) == {offered}
    assert not matches(resolve("3090"), offered)


def test_an_offer_whose_form_is_open_matches_only_those_who_accept_every_form() -> None:
    for name in ("H100", canonical("shelf", "H100", 81920), canonical("shelf", "NVIDIA H100 80GB", None)):
        assert matches(resolve("h100"), name)
        assert not matches(resolve("h100 sxm"), name)
    assert matches(resolve("a100"), canonical("shelf", "A100", 81920))
    assert matches(resolve("a100-80gb"), canonical("shelf", "A100", 81920))
    assert not matches(resolve("a100-40gb"), canonical("shelf", "A100", 81920))


LOOK_ALIKES = [
    ("RTX A6000", "RTX 6000 Ada"),
    ("RTX A6000", "Quadro RTX 6000"),
    ("RTX A6000", "RTX PRO 6000"),
    ("RTX 6000 Ada", "RTX PRO 6000"),
    ("RTX 6000 Ada", "Quadro RTX 6000"),
    ("RTX A4000", "RTX 4000 Ada"),
    ("RTX A5000", "RTX 5000 Ada"),
    ("A10", "A10G"),
    ("A10", "A100"),
    ("H200", "H200 NVL"),
    ("H100", "GH200"),
    ("RTX 4090", "RTX 4090D"),
    ("L40", "L40S"),
    ("L4", "L40"),
    ("RTX 4080", "RTX 4080 SUPER"),
    ("RTX 4070 Ti", "RTX 4070 Ti SUPER"),
    ("V100 16GB", "V100 32GB"),
    ("A100 40GB", "A100 80GB"),
    ("A100", "A100X"),
    ("RTX 3060", "RTX 3060 laptop"),
    ("RTX PRO 6000", "RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb"),
    ("P4", "P40"),
]


@every(("one", "other"), LOOK_ALIKES, ids=[f"{a} / {b}" for a, b in LOOK_ALIKES])
def test_cards_that_look_alike_are_never_taken_for_each_other(one: str, other: str) -> None:
    assert resolve(one).isdisjoint(resolve(other))
    assert not any(matches(resolve(one), offered) for offered in resolve(other))
    assert not any(matches(resolve(other), offered) for offered in resolve(one))


def test_every_canonical_id_resolves_to_a_set_that_holds_it_and_is_unique() -> None:
    ids = [row.name for row in GPUS]
    assert len(ids) == len(set(ids))
    for name in ids:
        assert name in resolve(name)
        assert name in resolve(name.lower().replace("_", "-"))
        assert matches(resolve(name), name)


def test_every_provider_name_of_the_table_comes_back_to_its_row() -> None:
    for row in GPUS:
        for provider, names in (("vast", row.vast), ("runpod", row.runpod), ("aws", row.aws)):
            for name in names:
                assert canonical(provider, name, row.vram_gb[0] * 1024) == row.name, (provider, name)


def test_ec2_types_hold_whole_known_gpus() -> None:
    assert aws_gpus("p5.48xlarge") == ("H100_SXM", 8)
    assert aws_gpus("g6e.12xlarge") == ("L40S", 4)
    assert aws_gpus("p3dn.24xlarge") == ("V100_32", 8)
    assert aws_gpus("g7e.12xlarge") == ("RTX_PRO_6000_SE", 2)
    assert aws_gpus("g6f.large") is None, "a fraction of a card"
    assert aws_gpus("m5.large") is None
