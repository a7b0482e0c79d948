from __future__ import annotations

from fractions import Fraction

from spotd.estimates.machines import (
    GIB,
    MemoryNeeds,
    Spread,
    can_compute,
    gpu_fits,
    layout_for,
    nominal_bytes,
    reported_bytes,
)
from spotd.estimates.workload import Layout, Lora, Precision, Sharding, Workload
from spotd_providers.contract.gpus import GPUS, GpuInfo, gpu_info
from tests.cases import every
from tests.unit.estimates.models import model

LLAMA = model("llama-3.1-8b")
NO_ROOM = Fraction(0)


def gpu(name: str) -> GpuInfo:
    found = gpu_info(name)
    assert found is not None
    return found


@every(
    ("name", "mib"),
    [
        ("RTX_4090", 24_564), ("A100_SXM_40", 40_536), ("L4", 23_034), ("L40S", 46_068), ("T4", 15_360),
        ("H100_SXM", 81_559),
    ],
)  # fmt: skip
def test_a_card_offers_at_least_what_is_counted_on(name: str, mib: int) -> None:
    assert nominal_bytes(gpu(name)) <= mib * 2**20


def test_of_several_figures_for_one_card_none_is_exceeded() -> None:
    assert nominal_bytes(gpu("B300_SXM")) == 262 * GIB


def test_a_reported_size_is_used_nearly_whole() -> None:
    assert 0.97 < reported_bytes(24_564) / (24_564 * 2**20) < 0.99


@every(
    ("name", "precision", "can"),
    [
        ("V100_16", Precision.BF16, False), ("V100_16", Precision.FP16, True), ("A100_SXM_80", Precision.BF16, True),
        ("A100_SXM_80", Precision.FP8, False), ("RTX_4090", Precision.FP8, True), ("MI300X", Precision.BF16, True),
        ("T4", Precision.INT8, True), ("P40", Precision.INT8, False), ("K80", Precision.FP32, True),
    ],
)  # fmt: skip
def test_a_precision_needs_a_card_that_computes_in_it(name: str, precision: Precision, can: bool) -> None:
    assert can_compute(gpu(name), precision) is can


def test_qlora_of_8b_fits_one_24_gb_card_and_full_training_needs_several_large_ones() -> None:
    qlora = Workload(training=True, precision=Precision.INT4, lora=Lora(rank=16, targets=frozenset({"q", "v"})))
    assert MemoryNeeds(LLAMA, qlora, Spread(), headroom=Fraction(1, 10)).cards_on(nominal_bytes(gpu("RTX_4090"))) == 1
    full = MemoryNeeds(LLAMA, Workload(training=True), Spread(), headroom=Fraction(1, 10))
    assert full.cards_on(nominal_bytes(gpu("H200_SXM"))) == 2
    assert full.cards_on(nominal_bytes(gpu("H100_SXM"))) == 4
    assert full.cards_on(nominal_bytes(gpu("RTX_4090"))) == 16


def test_without_sharding_more_cards_do_not_help() -> None:
    needs = MemoryNeeds(LLAMA, Workload(training=True), Spread(sharding=Sharding.NONE), headroom=NO_ROOM)
    assert needs.cards_on(100 * 10**9) is None


def test_inference_is_cut_over_the_cards_of_a_machine() -> None:
    work = Workload(training=False)
    assert layout_for(LLAMA, work, Spread(), 8) == Layout(tensor=8)
    assert layout_for(LLAMA, work, Spread(), 6) == Layout(tensor=4)
    assert layout_for(model("falcon-7b"), work, Spread(), 8) == Layout(data=8)
    assert layout_for(LLAMA, work, Spread(tensor=2), 8) == Layout(data=4, tensor=2)


def test_cards_that_cannot_be_divided_are_no_layout() -> None:
    work = Workload(training=True)
    assert layout_for(LLAMA, work, Spread(tensor=3), 4) is None
    assert layout_for(LLAMA, work, Spread(pipeline=4), 2) is None
    assert layout_for(LLAMA, work, Spread(tensor=2, pipeline=2), 8) == Layout(
        data=2, tensor=2, pipeline=2, sharding=Sharding.AUTO
    )


def test_the_list_begins_with_the_least_memory_and_leaves_out_what_does_not_hold_it() -> None:
    needs = MemoryNeeds(LLAMA, Workload(training=False), Spread(tensor=1), headroom=NO_ROOM)
    fits = list(gpu_fits(needs, Precision.BF16, GPUS))
    assert [fit.cards * fit.usable for fit in fits] == sorted(fit.cards * fit.usable for fit in fits)
    assert all(fit.needed <= fit.usable for fit in fits)
    assert {"RTX_4090", "H100_SXM"} <= {fit.gpu.name for fit in fits}
    assert not {"RTX_4060", "T4", "K80"} & {fit.gpu.name for fit in fits}
