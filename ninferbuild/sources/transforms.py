"""The arithmetic of steps. A change of the resulting bits needs a new version in
:data:`ninferbuild.sources.steps.STEP_VERSIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ninferbuild.sources.ranges import Range
from ninferbuild.sources.steps import Step


def apply_steps(values: torch.Tensor, steps: Iterable[Step], name: str) -> torch.Tensor:
    """``values`` after ``steps``, 1-D.

    Args:
        name: the stored tensor, for error messages.

    Raises:
        ValueError: a step refuses the values.
    """
    for step, shape, *arguments in steps:
        try:
            values = STEPS[step](values.reshape(shape), *arguments)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return values.reshape(-1)


def _rows(values: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    return _gather(values, 0, ranges)


def _gather(values: torch.Tensor, axis: int, ranges: Sequence[Range]) -> torch.Tensor:
    pieces = [values.narrow(axis, begin, end - begin) for begin, end in ranges or [(0, 0)]]
    return torch.cat(pieces, dim=axis)


def _transpose(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return values.permute(axes).contiguous()


def _reshape(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return values.reshape(shape)


def _float32(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(torch.float32)


def _add(values: torch.Tensor, constant: float) -> torch.Tensor:
    return values + constant  # PyTorch rounds the constant to FP32 first, which `Description.add` made sure is exact


def _log_negative(values: torch.Tensor) -> torch.Tensor:
    words = values.numpy()
    if not ((words < 0) & np.isfinite(words)).all():  # NaN is not below zero
        raise ValueError("log(-x) requires finite negative values")
    return torch.from_numpy(np.asarray(np.log(-words.astype(np.float64)), dtype=np.float32))


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "rows": _rows,
    "transpose": _transpose,
    "reshape": _reshape,
    "gather": _gather,
    "float32": _float32,
    "add": _add,
    "log_negative": _log_negative,
}
"""Step → its implementation on values of the shape that it starts from; the names are those of ``STEP_VERSIONS``."""
