"""What name maps undo of an exporter's conversion, as callables that can also be said without calling them.

A transform is called with flat values and a shape, as a user's function in its place would be, and returns both. It is
a description of the same thing too: sources that go through it alone are described, and nothing is read to find
whether they changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ninferbuild.sources.description import Description
from ninferbuild.sources.ranges import Range

if TYPE_CHECKING:
    import torch


class TensorStore(Protocol):
    """What a composite needs of the store that it is built from."""

    def describe(self, name: str) -> Any:
        """What the store says about a tensor; has a ``shape``."""

    def read_flat(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements of a tensor in C order, 1-D."""


class Transform:
    """``transform(values, shape) -> (values, shape)``: FP32 values in C order, 1-D, and the shape they have."""

    def describe(self, description: Description) -> Description:
        """What the transform makes of FP32 values; raises ``ValueError`` where their shape does not suit it."""
        raise NotImplementedError

    def __call__(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        from ninferbuild.sources.decoding import read_values
        from ninferbuild.sources.logical import array_source

        given = array_source(values.reshape(tuple(shape)), "values").description
        assert given is not None
        result = self.describe(given.to_float32())
        return read_values(result, 0, result.elements), result.shape


@dataclass(frozen=True)
class Offset(Transform):
    """``x + constant`` in FP32: exporters store some norms as ``1 + w``."""

    constant: float

    def describe(self, description: Description) -> Description:
        return description.add(self.constant)


@dataclass(frozen=True)
class LogNegative(Transform):
    """``float32(log(-float64(x)))``: exporters store ``A_log`` as ``-exp(A_log)``. Refuses values not below zero."""

    def describe(self, description: Description) -> Description:
        return description.log_negative()


@dataclass(frozen=True)
class SwapGroups(Transform):
    """Blocks of ``width`` positions along ``axis``, from position ``first``, that lie as ``[rows, columns]``: swapped.

    Position ``first + (c * rows + r) * width + i`` of the result is position ``first + (r * columns + c) * width + i``
    of the source. Positions before ``first`` stay.
    """

    axis: int
    rows: int
    columns: int
    width: int
    first: int = 0

    def ranges(self) -> tuple[Range, ...]:
        """The positions of the result, as ranges of the source's."""
        begins = [
            self.first + (row * self.columns + column) * self.width
            for column in range(self.columns)
            for row in range(self.rows)
        ]
        return ((0, self.first), *((begin, begin + self.width) for begin in begins))

    def describe(self, description: Description) -> Description:
        extent = self.first + self.rows * self.columns * self.width
        if len(description.shape) <= self.axis or description.shape[self.axis] != extent:
            heads = f"{self.rows} x {self.columns} heads of {self.width}" + f" after {self.first}" * bool(self.first)
            raise ValueError(
                f"expected {extent} positions along axis {self.axis} ({heads}), got shape {description.shape}"
            )
        return description.gather(self.axis, self.ranges())


@dataclass(frozen=True)
class InOrder(Transform):
    """Several transforms, one after another."""

    transforms: tuple[Transform, ...]

    def describe(self, description: Description) -> Description:
        for transform in self.transforms:
            description = transform.describe(description)
        return description


@dataclass(frozen=True)
class Stack:
    """A composite: tensors of ``shape``, one after another along a new axis."""

    names: tuple[str, ...]
    axis: int
    shape: tuple[int, ...]

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return (*self.shape[: self.axis], len(self.names), *self.shape[self.axis :])

    def require_shapes(self, store: TensorStore) -> None:
        """Raises ``ValueError`` unless each tensor has the shape of the stack's parts."""
        for name in self.names:
            found = tuple(store.describe(name).shape)
            if found != self.shape:
                raise ValueError(f"{name}: expected shape {self.shape}, got {found}")

    def __call__(self, store: TensorStore) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The values of the stack in C order, 1-D, and its shape."""
        import torch

        self.require_shapes(store)
        parts = [store.read_flat(name).reshape(self.shape) for name in self.names]
        return torch.stack(parts, dim=self.axis).reshape(-1), self.stacked_shape


def reorder_linear_attention_v_heads(
    values: Any, shape: Sequence[int], dim: int, num_row_groups: int, group_size: int, head_dim: int
) -> Any:
    """Swap the groups that value heads lie in along one axis.

    The axis ``dim`` (from the end when negative) is seen as ``[num_row_groups, group_size, head_dim]`` and its first
    two axes are swapped. ``(key heads, value heads a key head)`` is the exporter's direction; ``(value heads a key
    head, key heads)`` undoes it.

    Args:
        values: a tensor or array with the elements of ``shape``.

    Returns:
        the reordered values, in ``shape``.

    Raises:
        ValueError: the axis does not exist or has another extent than the three numbers say.
    """
    shape = tuple(shape)
    axis = dim + len(shape) if dim < 0 else dim
    if not 0 <= axis < len(shape):
        raise ValueError(f"there is no axis {dim} in a shape {shape}")
    heads = (num_row_groups, group_size, head_dim)
    if shape[axis] != prod(heads):
        raise ValueError(f"axis {dim} of shape {shape} does not hold {' x '.join(map(str, heads))} positions")
    split = values.reshape((*shape[:axis], *heads, *shape[axis + 1 :]))
    return split.swapaxes(axis, axis + 1).reshape(shape)
