"""From a logical parameter to the tensor that holds it, in the model's own checkpoint or in another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ninferbuild.models.model import Store
from ninferbuild.models.qwen3_5.compatibility import Compatibility, has_model_config
from ninferbuild.sources.compressed_tensors import has_matrix, matrix_source
from ninferbuild.sources.logical import select_rows, transpose_source
from ninferbuild.sources.safetensors import tensor_source

if TYPE_CHECKING:
    from ninferbuild.sources.logical import LogicalSource

_NESTED = "model.language_model."
_FLAT = "model."


class Placement(msgspec.Struct, frozen=True):
    """Where a parameter lies in a checkpoint of its family.

    Attributes:
        tensor: name of the stored tensor.
        stored: its shape.
        rows: row ranges of a stored matrix that make up the parameter, in order; None for all of it.
        offset: first element of the parameter in the flattened tensor.
        axes: order of the stored axes in the parameter; None when they are not permuted.
        separate: name of a matrix that holds the parameter alone and is preferred where it exists.
    """

    tensor: str
    stored: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] | None = None
    offset: int = 0
    axes: tuple[int, ...] | None = None
    separate: str | None = None


class StoreMapping(msgspec.Struct, frozen=True, eq=False):
    """The ``source_factory`` of one parameter: ``mapping(store, format) -> LogicalSource``."""

    _parameter: str
    _shape: tuple[int, ...]
    _placement: Placement
    _origin: Store
    _compatibility: Compatibility

    def __call__(self, store: Any, format: str | None = None) -> LogicalSource:
        """The parameter in ``store``; with ``format``, as encoded rows of that format.

        Raises:
            ValueError: the store does not suit the model, or the parameter cannot be read as encoded rows.
        """
        if store is not self._origin:
            self._compatibility.check(self._parameter, store)
        placement = self._placement
        stored, rows, offset, axes = placement.stored, placement.rows, placement.offset, placement.axes
        separate = placement.separate
        if separate is not None and has_matrix(store, name := self._name_in(store, separate)):
            return matrix_source(store, name, (self._shape[0], self._shape[1]), format)
        name = self._name_in(store, placement.tensor)
        if axes is not None:
            if format is not None:
                raise ValueError(f"{self._parameter}: transpose source requires value access, not {format} rows")
            return transpose_source(tensor_source(store, name, stored), axes, self._shape)
        if len(stored) == 2 and not offset:
            matrix = matrix_source(store, name, (stored[0], stored[1]), format)
            return matrix if rows is None else select_rows(matrix, rows)
        if format is not None:
            raise ValueError(
                f"{self._parameter}: {name} holds no {format} rows of it alone; "
                "provide an explicit encoded source mapping"
            )
        return tensor_source(store, name, self._shape, offset=offset, source_shape=stored)

    def _name_in(self, store: Store, name: str) -> str:
        """Text tensors of a multimodal checkpoint have a longer prefix than those of a text-only one."""
        if store is self._origin or not self._parameter.startswith("text/") or not has_model_config(store):
            return name
        if "text_config" not in store.config:
            return name.replace(_NESTED, _FLAT, 1)
        if "text_config" not in self._origin.config and name.startswith(_FLAT):
            return name.replace(_FLAT, _NESTED, 1)
        return name
