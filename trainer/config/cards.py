"""List the GPUs that a plan may be made for, with what their data sheets say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, final

from pydantic import Field


@final
@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    reported: str  # part of the name that its driver reports
    memory_mib: int  # as its driver reports it
    half: float  # dense bf16 (fp16 where it has no bf16) in 10^12 FLOP/s. TF32 is half of it.
    single: float  # fp32 outside of tensor cores, likewise
    has_bf16: bool = True  # whether its tensor cores take bf16

    def peak(self, precision: str) -> float:
        """Give the dense FLOP/s of a precision."""
        half = self.half
        # Cores without bf16 leave it to those of fp32.
        if precision == "bf16" and not self.has_bf16:
            half = self.single
        return 1e12 * {"fp32": self.single, "tf32": half / 2}.get(precision, half)


CARDS: Mapping[str, Card] = {
    "b200": Card("B200", 183_359, 2250.0, 75.0),
    "h200-nvl": Card("H200 NVL", 143_771, 836.0, 60.0),
    "h200": Card("H200", 143_771, 989.5, 67.0),
    "h100-nvl": Card("H100 NVL", 95_830, 836.0, 60.0),
    "h100-pcie": Card("H100 PCIe", 81_559, 756.0, 51.0),
    "h100": Card("H100", 81_559, 989.5, 67.0),
    "a100": Card("A100", 81_251, 312.0, 19.5),
    "a100-40gb": Card("A100", 40_536, 312.0, 19.5),
    "a10g": Card("A10G", 23_028, 70.0, 35.0),
    "a10": Card("A10", 23_028, 125.0, 31.2),
    "l40s": Card("L40S", 46_068, 362.0, 91.6),
    "l40": Card("L40", 46_068, 181.0, 90.5),
    "l4": Card("L4", 23_034, 121.0, 30.3),
    "t4": Card("Tesla T4", 15_360, 65.0, 8.1, has_bf16=False),
    "rtx4090": Card("RTX 4090", 24_564, 165.2, 82.6),
    "rtx3090": Card("RTX 3090", 24_576, 71.0, 35.6),
    "mi300x": Card("MI300X", 196_592, 1307.4, 163.4),
}
"""By what `device` takes. A reported name that is part of another, as `H200`, stands behind it."""

CardName = Annotated[
    str,
    Field(pattern=f"^({'|'.join(CARDS)})$", description=f"a card to plan for ({', '.join(CARDS)})"),
]
"""What `device` takes under `train plan`, beside the kinds of devices."""

USUAL = "a100"  # what a GPU that is not here is taken for where nobody names it


def reported_as(name: str) -> Card | None:
    """Find a card by the name that its driver reports."""
    for card in CARDS.values():
        if card.reported in name:
            return card
    return None
