"""What cards draw under load, by their makers' data sheets, in watts. A card that is missing must be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
    "MI300X": 750,
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
