"""The speed of a machine for models that was never measured there, by the name of its chip.

What decoding and prefill reach of a chip's figures is assumed, so a plan that rests on them says
so. None of this was measured on a Mac yet.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from kakeya.core import darwin

_GB_PER_S_AND_TFLOPS = {
    "M1": (68, 2.6),
    "M1 Pro": (200, 5.2),
    "M1 Max": (400, 10.4),
    "M1 Ultra": (800, 21.0),
    "M2": (100, 3.6),
    "M2 Pro": (200, 6.8),
    "M2 Max": (400, 13.6),
    "M2 Ultra": (800, 27.2),
    "M3": (100, 4.1),
    "M3 Pro": (150, 7.4),
    "M3 Max": (400, 14.2),
    "M3 Ultra": (819, 28.0),
    "M4": (120, 4.3),
    "M4 Pro": (273, 9.2),
    "M4 Max": (546, 18.4),
    "M5": (153, 4.3),
}
"""The bandwidth of the memory, and the speed of the GPU."""
_READS, _MULTIPLIES = 0.7, 0.5
"""Assumed shares of these figures that decoding and prefill reach."""
_OTHER_WEIGHTS, _OTHER_PRODUCTS = 10e9, 50e9
_THUNDERBOLT5 = re.compile(r"Apple (?:M4 (?:Pro|Max)|M3 Ultra|M5 (?:Pro|Max))\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSpeed:
    """As in `RingNode`; `is_known` where the figures are of this chip."""

    weights_per_s: float
    products_per_s: float
    is_known: bool


def chip_name() -> str:
    """`Apple M4 Pro`, or "" where the system does not say."""
    if sys.platform != "darwin":
        return ""
    try:
        return darwin.sysctl_text("machdep.cpu.brand_string")
    except OSError:
        return ""


def chip_speed(chip: str) -> ChipSpeed:
    """The assumed speed of a chip; of an unknown one that of a small processor."""
    found = _GB_PER_S_AND_TFLOPS.get(chip.removeprefix("Apple "))
    if found is None:
        return ChipSpeed(
            weights_per_s=_OTHER_WEIGHTS, products_per_s=_OTHER_PRODUCTS, is_known=False
        )
    gb_per_s, tflops = found
    return ChipSpeed(
        weights_per_s=_READS * gb_per_s * 1e9,
        products_per_s=_MULTIPLIES * tflops * 1e12 / 2,
        is_known=True,
    )


def has_thunderbolt5(chip: str) -> bool:
    """Whether all machines with this chip have Thunderbolt 5."""
    return _THUNDERBOLT5.match(chip) is not None
