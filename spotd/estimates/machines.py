"""Which machines hold a workload, and whether to rent or to buy one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from spotd.estimates.memory import MemoryParts, WorkloadError, adapter_params, memory_parts
from spotd.estimates.workload import LINEAR_BYTES, Architecture, Layout, Optimizer, Precision, Sharding, Workload
from spotd_providers.contract.gpus import GpuInfo

GIB: Final = 2**30
CARDS_MAX: Final = 16
"""Cards of one machine; a job runs on one."""
REPORTED_SHARE: Final = Fraction(98, 100)
_NOMINAL_SHARE: Final = Fraction(93, 100)

_CAPABILITY_MIN: Final = {
    Precision.BF16: (8, 0),
    Precision.BF16_PURE: (8, 0),
    Precision.FP16: (6, 0),
    Precision.FP8: (8, 9),
    Precision.INT8: (7, 5),
    Precision.INT4: (6, 0),
    Precision.FP32: (0, 0),
}
"""CUDA's compute capability from which the precision is fast or works at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the user wants the model spread; `tensor` is `None` where it is left open."""

    sharding: Sharding = Sharding.AUTO
    tensor: int | None = None
    pipeline: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """A GPU that holds the workload on so many cards."""

    gpu: GpuInfo
    cards: int
    needed: int
    usable: int


def nominal_bytes(gpu: GpuInfo) -> int:
    """Return the bytes that a card surely offers: error correction takes up to 7 percent of what its name says."""
    usual = gpu.vram_gb[0] * GIB * _NOMINAL_SHARE
    return min(usual.numerator // usual.denominator, min(gpu.vram_gb) * GIB)


def reported_bytes(mib: float) -> int:
    """Return the bytes that can be used of what a provider measured on a machine."""
    return int(Fraction(mib) * 2**20 * REPORTED_SHARE)


def can_compute(gpu: GpuInfo, precision: Precision) -> bool:
    """Whether the card computes in this precision; cards without CUDA are not judged."""
    if gpu.compute_capability is None:
        return True
    major, minor = gpu.compute_capability.split(".")
    return (int(major), int(minor)) >= _CAPABILITY_MIN[precision]


def layout_for(model: Architecture, work: Workload, spread: Spread, cards: int) -> Layout | None:
    """Return how so many cards share the work, or `None` where they cannot be divided like that.

    Left open, inference cuts each layer over a power of two of the cards, and training gives each card its own data.
    """
    tensor = spread.tensor
    if tensor is None:
        tensor = 1
        open_inference = not work.training and spread.sharding is Sharding.AUTO
        while open_inference and 2 * tensor * spread.pipeline <= cards and model.heads % (2 * tensor) == 0:
            tensor *= 2
    unit = tensor * spread.pipeline
    if cards < unit or (cards % unit and spread.tensor is not None) or cards % spread.pipeline:
        return None
    sharding = spread.sharding
    if not work.training and sharding is Sharding.AUTO:
        sharding = Sharding.NONE
    return Layout(data=max(1, cards // unit), tensor=tensor, pipeline=spread.pipeline, sharding=sharding)


class MemoryNeeds:
    """What one card needs when so many share the work; each number of cards is computed once."""

    def __init__(self, model: Architecture, work: Workload, spread: Spread, *, headroom: Fraction) -> None:
        self._model = model
        self._work = work
        self._spread = spread
        self._headroom = headroom
        self._known: dict[int, int | None] = {}

    def parts(self, cards: int) -> MemoryParts | None:
        """Return the parts of one card's memory.

        Raises:
            WorkloadError: the work itself is not possible.
        """
        layout = layout_for(self._model, self._work, self._spread, cards)
        return None if layout is None else memory_parts(self._model, self._work, layout)

    def bytes_for(self, cards: int) -> int | None:
        """Return the bytes for one card with headroom, or `None` where so many cards cannot share the work."""
        if cards not in self._known:
            try:
                parts = self.parts(cards)
            except WorkloadError:
                parts = None
            share = Fraction(0) if parts is None else parts.total * (1 + self._headroom)
            self._known[cards] = None if parts is None else -(-share.numerator // share.denominator)
        return self._known[cards]

    def cards_on(self, usable: int) -> int | None:
        """Return the fewest cards, a power of two, that hold the work; `None` where `CARDS_MAX` are too few."""
        cards = 1
        while cards <= CARDS_MAX:
            needed = self.bytes_for(cards)
            if needed is not None and needed <= usable:
                return cards
            cards *= 2
        return None


def gpu_fits(needs: MemoryNeeds, precision: Precision, gpus: Iterable[GpuInfo]) -> Iterator[GpuFit]:
    """Yield the GPUs that hold the work, the least memory in all first."""
    found = []
    for gpu in gpus:
        usable = nominal_bytes(gpu)
        cards = needs.cards_on(usable) if can_compute(gpu, precision) else None
        needed = None if cards is None else needs.bytes_for(cards)
        if cards is not None and needed is not None:
            found.append(GpuFit(gpu=gpu, cards=cards, needed=needed, usable=usable))
    yield from sorted(found, key=lambda fit: (fit.cards * fit.usable, fit.cards))


# The field's rules of thumb, for all cards together.


_OVERHEAD: Final = Fraction(6, 5)
_STATE_BYTES: Final = {
    Optimizer.ADAMW: 8,
    Optimizer.ADAMW_8BIT: 2,
    Optimizer.ADAFACTOR: 0,
    Optimizer.LION: 4,
    Optimizer.LION_8BIT: 1,
    Optimizer.MUON: 4,
    Optimizer.SGD: 0,
    Optimizer.MOMENTUM: 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """What the rule gives, and the rule in words."""

    total: int
    rule: str


def rule_of_thumb(model: Architecture, work: Workload) -> RuleOfThumb:
    """Return the rule that people use for such work.

    Inference takes 1.2 times the weights (EleutherAI, Transformer Math 101). Training takes the bytes of weight,
    gradient, 32-bit copy and optimizer states per parameter, 16 for AdamW (ZeRO, arXiv 1910.02054), and leaves
    activations out. Adapters add their own 16 bytes per parameter to what inference takes.
    """
    if work.training and work.lora is None:
        each = _trained_bytes(work)
        return RuleOfThumb(total=each * model.params, rule=f"{each} bytes per parameter, activations not counted")
    each_weight = LINEAR_BYTES[work.precision]
    if work.precision is Precision.INT4:
        each_weight = Fraction(1, 2)
    elif work.training and work.precision is Precision.FP8:
        each_weight = Fraction(2)
    total = _OVERHEAD * each_weight * model.params
    rule = f"{float(each_weight):g} bytes per parameter x 1.2"
    if work.lora is not None:
        total += 16 * adapter_params(model, work.lora)
        rule += ", and 16 bytes per parameter of the adapters"
    return RuleOfThumb(total=-(-total.numerator // total.denominator), rule=rule)


def _trained_bytes(work: Workload) -> int:
    states = _STATE_BYTES[work.optimizer]
    if work.precision is Precision.BF16_PURE:
        return 4 + -(-states // 2)
    return 8 + states


# Renting a machine against buying one.


HOURS_PER_WEEK: Final = 168
WEEKS_PER_MONTH: Final = Fraction(36_525, 8_400)
HOURS_PER_MONTH: Final = HOURS_PER_WEEK * WEEKS_PER_MONTH
MONTHS_PER_YEAR: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """A machine to buy. Money is micro-dollars.

    Attributes:
        price: of everything that is bought.
        busy_watts, idle_watts: of the whole machine while it is used, and the rest of the time.
        electricity: price of a kilowatt-hour.
        hosting: per month: place, network, insurance.
        resale: share of the price that it brings in the end.
        years: after which it is sold.
    """

    price: int
    cards: int
    busy_watts: Fraction
    idle_watts: Fraction
    electricity: Fraction
    hosting: int
    resale: Fraction
    years: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """When buying has cost as much as renting. Money is micro-dollars.

    Attributes:
        renting_month, owning_month: what a month costs; owning without the purchase.
        lost_value: the price less what is got back in the end.
        months, hours: until then, of calendar time and of use; `None` where renting stays cheaper.
        pays: it is reached before the machine is sold.
        owned_gpu_hour: one card-hour of use with everything in it, over all the years.
        hours_per_week_min: use from which buying pays within the years; `None` where none does.
    """

    renting_month: Fraction
    owning_month: Fraction
    lost_value: Fraction
    months: Fraction | None
    hours: Fraction | None
    pays: bool
    owned_gpu_hour: Fraction
    hours_per_week_min: Fraction | None


def break_even(purchase: Purchase, *, rent_hour: int, hours_per_week: Fraction) -> BreakEven:
    """Return when buying has cost as much as renting.

    With u hours of use per month (hours per week x 365.25 / 12 / 7), out of 730.5, and kW and $/kWh as given:

        renting = rent per hour x u
        owning  = (busy kW x u + idle kW x (730.5 - u)) x $/kWh + hosting
        months  = price x (1 - resale share) / (renting - owning)
        hours   = months x u

    Renting stays cheaper for ever where renting <= owning. The money in the machine is taken to earn no interest.

    Raises:
        ValueError: no use at all, or more than a week has.
    """
    if not 0 < hours_per_week <= HOURS_PER_WEEK:
        raise ValueError(f"use of {hours_per_week} hours a week")
    use = hours_per_week * WEEKS_PER_MONTH
    busy = purchase.busy_watts / 1000 * purchase.electricity
    idle = purchase.idle_watts / 1000 * purchase.electricity
    renting = rent_hour * use
    owning = busy * use + idle * (HOURS_PER_MONTH - use) + purchase.hosting
    lost = purchase.price * (1 - purchase.resale)
    span = purchase.years * MONTHS_PER_YEAR
    months = lost / (renting - owning) if renting > owning else None
    return BreakEven(
        renting_month=renting,
        owning_month=owning,
        lost_value=lost,
        months=months,
        hours=None if months is None else months * use,
        pays=months is not None and months <= span,
        owned_gpu_hour=(lost / span + owning) / (use * purchase.cards),
        hours_per_week_min=_least_use(lost / span + idle * HOURS_PER_MONTH + purchase.hosting, rent_hour - busy + idle),
    )


def _least_use(fixed_month: Fraction, saved_hour: Fraction) -> Fraction | None:
    """Return the hours per week at which what an hour saves makes up for what a month costs anyway."""
    if saved_hour <= 0:
        return None
    week = fixed_month / saved_hour / WEEKS_PER_MONTH
    return week if week <= HOURS_PER_WEEK else None


# What cards draw under load, by their makers' data sheets, in watts. A card that is missing must be given.


CARD_WATTS: Final[Mapping[str, int]] = {
    "B200_SXM": 1000,
    "H200_SXM": 700,
    "H200_NVL": 600,
    "H100_SXM": 700,
    "H100_PCIE": 350,
    "H100_NVL": 400,
    "A100_SXM_80": 400,
    "A100_SXM_40": 400,
    "A100_PCIE_80": 300,
    "A100_PCIE_40": 250,
    "L40S": 350,
    "L40": 300,
    "L4": 72,
    "A40": 300,
    "A30": 165,
    "A10": 150,
    "T4": 70,
    "MI325X": 1000,
    "MI300X": 750,
    "MI250X": 560,
    "RTX_PRO_6000_SE": 600,
    "RTX_PRO_6000_WS": 600,
    "RTX_PRO_6000_MAXQ": 300,
    "RTX_6000_ADA": 300,
    "RTX_A6000": 300,
    "RTX_A5000": 230,
    "RTX_A4000": 140,
    "RTX_5090": 575,
    "RTX_5080": 360,
    "RTX_4090": 450,
    "RTX_4080": 320,
    "RTX_4080_SUPER": 320,
    "RTX_4070_TI": 285,
    "RTX_3090": 350,
    "RTX_3090_TI": 450,
    "RTX_3080": 320,
}
