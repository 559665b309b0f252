"""The values of a GGUF under the names of a checkpoint: the sources of an override.

:class:`GGUFSource` decodes the tensors of a file to FP32; :class:`HFAliasSource` gives them the names, shapes and
values that a recipe knows. ``model.source(name, store)`` takes parameters from either. Both describe what they read
wherever all that happens to a tensor is known, so nothing is read to find whether it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ninferbuild.sources.alias_transforms import Stack, Transform, reorder_linear_attention_v_heads
from ninferbuild.sources.description import Description
from ninferbuild.sources.ggml_types import ggml_name
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_maps import (
    qwen35_linear_attention_name_map,
    qwen35_mtp_name_map,
    qwen35_vision_name_map,
    standard_dense_name_map,
)
from ninferbuild.sources.gguf_values import describe_values
from ninferbuild.sources.safetensors import is_described_store

if TYPE_CHECKING:
    import torch

    from ninferbuild.sources.regions import SourceFile

__all__ = [
    "GGUFSource",
    "HFAliasSource",
    "TensorInfo",
    "qwen35_linear_attention_name_map",
    "qwen35_mtp_name_map",
    "qwen35_vision_name_map",
    "reorder_linear_attention_v_heads",
    "standard_dense_name_map",
]

UserTransform = Callable[[Any, tuple[int, ...]], tuple[Any, tuple[int, ...]]]
"""``(values, shape) -> (values, shape)``: FP32 values in C order, 1-D, and the shape they have in the GGUF."""

UserComposite = Callable[[Any], tuple[Any, tuple[int, ...]]]
"""``store -> (values, shape)``: values in C order, 1-D, made of several tensors of the GGUF, and their shape."""

Reshape = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Shape in the GGUF → shape in the checkpoint, of the same values in C order."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape (row-major) and stored type (``Q8_0``, ``F32``, …; ``composite``) of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class _Store:
    """What both sources have in common: a context manager that reads ranges of described tensors."""

    path: Path
    config: dict[str, Any]

    @property
    def root(self) -> Path:
        """The directory of the file."""
        return self.path.parent

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class GGUFSource(_Store):
    """The tensors of a GGUF file as FP32 values, under their names in the file.

    Attributes:
        path: the path as given.
        config: empty; what is a model's is not compared with the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a GGUF of version 3, damaged, or one file of a split model.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = {}
        self._file = GGUFFile(self.path)
        self._described: dict[str, Description] = {}

    def has(self, name: str) -> bool:
        return self._file.has(name)

    def describe(self, name: str) -> TensorInfo:
        """Shape and stored type. Raises ``ValueError`` when there is no such tensor."""
        if not self._file.has(name):
            raise ValueError(
                f"{self.path}: missing GGUF tensor {name!r}; `ninferbuild gguf ls {self.path}` lists what there is"
            )
        info = self._file.info(name)
        return TensorInfo(tuple(info.shape), ggml_name(info.type_id))

    def tensor(self, name: str) -> Description:
        """The description of a whole tensor's FP32 values.

        Raises:
            ValueError: there is no such tensor, its type has no decoder, or the file ends before it does.
        """
        description = self._described.get(name)
        if description is None:  # three parameters may be views of one tensor
            self.describe(name)
            description = self._described[name] = describe_values(self._file, name)
        return description

    def read_flat(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements ``[begin, end)`` of a tensor in C order, FP32, 1-D.

        Raises:
            ValueError: as :meth:`tensor`, or the range lies outside.
        """
        return _read_range(self.tensor(name), f"{self.path}: {name}", begin, end)

    def list_tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, row-major shape and stored type of each tensor, in file order."""
        for name, info in self._file.tensors.items():
            yield name, tuple(info.shape), ggml_name(info.type_id)

    def metadata(self) -> dict[str, Any]:
        """Keys and values of the header."""
        return dict(self._file.kv)

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far, the header not counted."""
        return self._file.bytes_read

    def owns(self, file: SourceFile) -> bool:
        """Whether ``file`` is this store's."""
        return file is self._file

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


class HFAliasSource(_Store):
    """A store under other names, with what an exporter did to tensors undone.

    Transforms and composites that the name maps of this package made are described; a user's are called when values
    are read, and what they give is compared by content in each build.

    Args:
        source: the store with the tensors: a :class:`GGUFSource`.
        name_map: name here → name in ``source``.
        transforms: name here → ``(values, shape) -> (values, shape)`` on the whole tensor, FP32 and 1-D, with the shape
            in ``source``; the number of elements stays, the shape is the one in ``source`` or the one here, and values
            are floating-point.
        shapes: name here → function of the shape in ``source`` that gives the shape here, of the same values.
        composites: name here → ``source -> (values, shape)``, for what is built from several tensors. Go before the
            other three.

    Raises:
        TypeError: ``source`` is a file that was opened for its blocks.
    """

    def __init__(
        self,
        source: Any,
        name_map: Mapping[str, str],
        *,
        transforms: Mapping[str, UserTransform] | None = None,
        shapes: Mapping[str, Reshape] | None = None,
        composites: Mapping[str, UserComposite] | None = None,
    ):
        if isinstance(source, GGUFFile):
            raise TypeError(
                f"{source.path}: opened for its blocks, not its values; a source for an alias needs another name, such "
                f"as --source quantized={source.path}"
            )
        self.path = Path(source.path)
        self.config = {}
        self._source = source
        self._names = dict(name_map)
        self._transforms = dict(transforms or {})
        self._shapes = dict(shapes or {})
        self._composites = dict(composites or {})
        self._made: tuple[str, torch.Tensor, tuple[int, ...]] | None = None
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        if name in self._composites:
            return True
        return name in self._names and bool(self._source.has(self._names[name]))

    def describe(self, name: str) -> TensorInfo:
        """The shape that ``name`` has here, and its stored type. Calls no transform, but a user's composite.

        Raises:
            ValueError: the name is not mapped, the tensor is missing, or its shape does not suit.
        """
        composite = self._composites.get(name)
        if isinstance(composite, Stack):
            composite.require_shapes(self._source)
            return TensorInfo(composite.stacked_shape, "composite")
        if composite is not None:
            return TensorInfo(self._whole(name)[1], "composite")
        info = self._source.describe(self._mapped(name))
        return TensorInfo(self._shape_here(name, tuple(info.shape)), info.dtype)

    def _mapped(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            raise ValueError(
                f"no GGUF tensor mapped for {name!r}; add it to the name map of {self.path} "
                f"(`ninferbuild gguf ls {self.path}` lists its tensors)"
            )
        return found

    def _shape_here(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        if name not in self._shapes:
            return stored
        found = self._shapes[name](stored)
        try:
            shape = tuple(map(index, found))
        except TypeError:
            raise TypeError(f"{self.path}: {name}: its shape function must return a shape, not {found!r}") from None
        if prod(shape) != prod(stored):
            raise ValueError(f"{self.path}: {name}: shape {shape} does not hold the elements of {stored}")
        return shape

    def describes(self, name: str) -> bool:
        """Whether :meth:`tensor` can say everything about ``name`` without calling a user's function."""
        composite = self._composites.get(name)
        if composite is not None:
            return isinstance(composite, Stack) and self._stacks(composite)
        known = name not in self._transforms or isinstance(self._transforms[name], Transform)
        return known and (name not in self._names or is_described_store(self._source, self._names[name]))

    def _stacks(self, composite: Stack) -> bool:
        if not all(is_described_store(self._source, name) for name in composite.names):
            return False
        try:
            first, *others = (self._source.tensor(name) for name in composite.names)
        except (ValueError, OSError):
            return True  # `tensor` will say what is wrong
        return all(first.stacks_with(other) for other in others)

    def tensor(self, name: str) -> Description:
        """The description of ``name``; only where :meth:`describes` is true.

        Raises:
            ValueError: the name is not mapped, or the tensors do not suit what happens to them.
        """
        try:
            composite = self._composites.get(name)
            if isinstance(composite, Stack):
                composite.require_shapes(self._source)
                return Description.stack([self._source.tensor(part) for part in composite.names], composite.axis)
            description: Description = self._source.tensor(self._mapped(name))
            transform = self._transforms.get(name)
            if transform is not None:
                assert isinstance(transform, Transform)
                description = transform.describe(description)
            return description.reshape(self._shape_here(name, description.shape))
        except ValueError as error:
            if name in str(error):
                raise
            raise ValueError(f"{self.path}: {name}: {error}") from error

    def read_flat(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements ``[begin, end)`` of ``name`` in C order, 1-D, a copy.

        Raises:
            ValueError: as :meth:`tensor`, the range lies outside, or a user's function changed the number of elements
                or returned another shape than it declared.
            TypeError: a user's function returned something else than values and their shape.
        """
        if self.describes(name):
            return _read_range(self.tensor(name), f"{self.path}: {name}", begin, end)
        if name not in self._composites and name not in self._transforms:  # a store that describes nothing
            values: torch.Tensor = self._source.read_flat(self._mapped(name), begin, end)
            return values
        values, _ = self._whole(name)
        end = values.numel() if end is None else end
        _require_range(f"{self.path}: {name}", begin, end, values.numel())
        return values[begin:end].clone()

    def _whole(self, name: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        """What a user's function makes, with its shape; the last result is kept, because parameters share tensors."""
        with self._lock:
            if self._made is None or self._made[0] != name:
                self._made = None  # two whole tensors are never held
                self._made = (name, *self._make(name))
            return self._made[1:]

    def _make(self, name: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        composite = self._composites.get(name)
        if composite is not None:
            values, shape = _checked_result(composite(self._source), name, "composite")
            if prod(shape) != values.numel():
                raise ValueError(f"{name}: its composite returned {values.numel()} values of shape {shape}")
            return values, shape
        stored = self._mapped(name)
        shape = tuple(self._source.describe(stored).shape)
        result = self._transforms[name](self._source.read_flat(stored), shape)
        values, returned = _checked_result(result, name, "transform")
        here = self._shape_here(name, shape)
        if values.numel() != prod(shape):
            raise ValueError(
                f"{name}: its transform must not change the element count: {prod(shape)} values went in, "
                f"{values.numel()} came out"
            )
        if returned not in (shape, here, (values.numel(),)):  # a flat shape says nothing about the order
            raise ValueError(
                f"{name}: its transform returned the shape {returned}, and the parameter is read as {here}; return the "
                "values in the order of that shape, and say in `shapes` where it is not the stored one"
            )
        if not values.is_floating_point():
            raise TypeError(f"{name}: its transform must return floating-point values, not {values.dtype}")
        return values, here

    @property
    def bytes_read(self) -> int:
        """Payload bytes that the underlying store has read so far."""
        found: int = self._source.bytes_read
        return found

    def owns(self, file: SourceFile) -> bool:
        """Whether ``file`` is the underlying store's."""
        return bool(self._source.owns(file))

    def close(self) -> None:
        """Forget the kept result. The underlying store stays open: it belongs to whoever opened it."""
        with self._lock:
            self._made = None


def _read_range(description: Description, name: str, begin: int, end: int | None) -> torch.Tensor:
    from ninferbuild.sources.decoding import read_values

    end = description.elements if end is None else end
    _require_range(name, begin, end, description.elements)
    return read_values(description, begin, end)


def _require_range(name: str, begin: int, end: int, elements: int) -> None:
    if not 0 <= begin <= end <= elements:
        raise ValueError(f"{name}: invalid element range [{begin}, {end}) of {elements}")


def _checked_result(result: object, name: str, kind: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The values, 1-D, and the shape that a user's function returned."""
    import torch

    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"{name}: its {kind} must return (values, shape), not {type(result).__name__}")
    values, shape = result
    try:
        return torch.as_tensor(values).reshape(-1), tuple(int(extent) for extent in shape)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: its {kind} must return (values, shape): {error}") from error
