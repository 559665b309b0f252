"""Loading what GPUs need while nothing else can be done yet.

The driver loads each kernel when it is first launched, which takes a third of a second for those of one method. A tiny
block of every kind of work is therefore encoded, and thrown away, as soon as it is known what will run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
import threading
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.formats import DIRECT_FORMATS

if TYPE_CHECKING:
    from ninferbuild.plan import Parent

ROWS = 128
"""Rows of a block that is thrown away: a whole tile in every layout."""


def warm_up(devices: Sequence[torch.device], parents: Iterable[Parent]) -> list[threading.Thread]:
    """Start to load what encoding ``parents`` takes on each device. What goes wrong is left to the encoding itself."""
    kinds: dict[tuple[str, str], Parent] = {}
    for parent in parents:
        rule, target = parent.rule, parent.request.target
        if rule is None or rule.reads != "values" or rule.surveys or target.format in DIRECT_FORMATS:
            continue
        kinds.setdefault((rule.name, target.format), parent)
    threads = [
        threading.Thread(target=_encode, args=(device, list(kinds.values())), name="warm-up", daemon=True)
        for device in devices
        if kinds
    ]
    for thread in threads:
        thread.start()
    return threads


def _encode(device: torch.device, parents: Sequence[Parent]) -> None:
    for parent in parents:
        rule, target = parent.rule, parent.request.target
        assert rule is not None
        assert parent.checked is not None
        with suppress(Exception), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            rows = torch.zeros(min(ROWS, target.shape[0]), target.shape[1], dtype=torch.bfloat16, device=device)
            rule.encode(rows, target, parent.checked, 0, device)
