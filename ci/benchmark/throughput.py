"""How many binary64 instructions a GPU executes in a second, by a Triton kernel that touches no memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

PROGRAMS = 1 << 13
WARPS = 4
ELEMENTS = 8 * 32 * WARPS
"""Eight chains of each thread that do not wait for each other."""

TURNS = 256
UNROLLED = tl.constexpr(8)


@triton.jit
def chains(out_at, TURNS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Multiply and add, one after the other and neither fused."""
    lanes = tl.arange(0, ELEMENTS)
    x = lanes.to(tl.float64)
    for _ in range(TURNS):
        for _ in tl.static_range(UNROLLED):
            x = x * 0.5
            x = x + 1.0
    tl.store(out_at + tl.program_id(0) * ELEMENTS + lanes, x)


def binary64_rate(device: torch.device, seconds_of: Callable[[Callable[[], None]], float]) -> float:
    """Instructions of all threads a second.

    Args:
        seconds_of: measures a function that leaves work on the device.
    """
    out = torch.empty(PROGRAMS * ELEMENTS, dtype=torch.float64, device=device)

    def once() -> None:
        with torch.cuda.device(device):
            chains[(PROGRAMS,)](out, TURNS=TURNS, ELEMENTS=ELEMENTS, num_warps=WARPS, enable_fp_fusion=False)

    once()  # compiles it
    return PROGRAMS * ELEMENTS * TURNS * UNROLLED.value * 2 / seconds_of(once)
