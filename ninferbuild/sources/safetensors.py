"""Safetensors checkpoints: a file, an index with its shards, or a directory.

Headers are parsed when a tensor of their file is first asked for. Payloads are read at offsets into buffers of the
reader, see :mod:`ninferbuild.sources.files`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
import json
from math import prod
from pathlib import Path
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.dtypes import STORED_DTYPES, WORD_BYTES
from ninferbuild.sources.files import CheckpointFile
from ninferbuild.sources.header import Entry, parse_header
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.regions import Region, SourceFile, Span
from ninferbuild.sources.stored import StoredReader

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsFile", "SafetensorsSource", "TensorInfo", "TensorViews", "is_described_store", "tensor_source"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a stored tensor lies: ``offset`` is that of its first byte in ``file``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    bytes: int


class SafetensorsFile(CheckpointFile):
    """One ``.safetensors`` file."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._header: dict[str, Entry] | None = None
        self._data_offset = 0
        self._digest = b""
        self._header_lock = threading.Lock()

    @property
    def header(self) -> dict[str, Entry]:
        """Tensor name → entry, in file order.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the header is truncated or corrupt.
        """
        header = self._header  # set once, after everything that belongs to it
        if header is None:
            with self._header_lock:
                if self._header is None:
                    self._header = self._read_header()
                header = self._header
        return header

    def _read_header(self) -> dict[str, Entry]:
        size = self.size
        if size < 8:
            raise ValueError(f"{self.path}: {size} bytes are no Safetensors file; it is truncated, download it again")
        prefix = bytearray(8)
        self.read_uncounted(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > size - 8:
            raise ValueError(
                f"{self.path}: Safetensors header exceeds file: {length} bytes in a file of {size}; "
                "it is truncated or no Safetensors file"
            )
        raw = bytearray(length)
        self.read_uncounted(8, memoryview(raw))
        header = parse_header(bytes(raw), size - 8 - length, str(self.path))
        self._data_offset = 8 + length
        self._digest = xxhash.xxh3_128_digest(bytes(prefix) + raw)
        return header

    def header_digest(self) -> bytes:
        _ = self.header
        return self._digest

    @property
    def data_offset(self) -> int:
        """Offset of the data section in the file."""
        if self._header is None:
            _ = self.header
        return self._data_offset


class SafetensorsSource:
    """A Safetensors checkpoint: a context manager.

    Args:
        path: a ``.safetensors`` file; another file, which is an index JSON; or a directory with
            ``model.safetensors.index.json``, ``model.safetensors`` or neither (a configuration without weights).

    Attributes:
        path: the path as given.
        root: the directory.
        config: the parsed ``config.json`` of the directory, or ``{}``.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: ``config.json`` is not a JSON object.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.is_dir():
            self.root = self.path
        elif self.path.exists():
            self.root = self.path.parent
        else:
            raise FileNotFoundError(f"{self.path}: no such checkpoint file or directory")
        config = self.root / "config.json"
        self.config: dict[str, Any] = _read_json_object(config) if config.is_file() else {}
        self._files: dict[Path, SafetensorsFile] = {}
        self._described: dict[str, Description] = {}

    @cached_property
    def weight_map(self) -> dict[str, Path]:
        """Tensor name → file.

        Raises:
            ValueError: the index is not an index, or the single file has a corrupt header.
        """
        if self.path.is_dir():
            index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
            if index.is_file():
                return _read_index(index)
            return dict.fromkeys(self._file(single).header, single) if single.is_file() else {}
        if self.path.suffix == ".safetensors":
            return dict.fromkeys(self._file(self.path).header, self.path)
        return _read_index(self.path)

    def _file(self, path: Path) -> SafetensorsFile:
        file = self._files.get(path)
        if file is None:
            file = self._files.setdefault(path, SafetensorsFile(path))
        return file

    def paths(self) -> set[Path]:
        """The path as given, and the files that hold the tensors."""
        return {self.path, *self.weight_map.values()}

    def has(self, name: str) -> bool:
        return name in self.weight_map

    def _entry(self, name: str) -> tuple[SafetensorsFile, Entry]:
        path = self.weight_map.get(name)
        if path is None:
            raise ValueError(f"{self.path}: missing source tensor {name!r}; complete the checkpoint or leave it out")
        file = self._file(path)
        try:
            entry = file.header.get(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}: missing file, which the index of {self.path} names for {name!r}; complete the download"
            ) from error
        if entry is None:
            raise ValueError(f"{path}: missing source tensor {name!r}, which the index of {self.path} places here")
        return file, entry

    def describe(self, name: str) -> TensorInfo:
        """What the header says about ``name``.

        Raises:
            ValueError: there is no such tensor, or its file is damaged.
            FileNotFoundError: the index names a file that does not exist.
        """
        file, entry = self._entry(name)
        begin, end = entry.data_offsets
        return TensorInfo(file.path, entry.shape, entry.dtype, file.data_offset + begin, end - begin)

    def tensor(self, name: str) -> Description:
        """The description of a whole tensor as it is stored.

        Raises:
            ValueError: as :meth:`describe`; the element type is unsupported; the byte count disagrees with the shape.
        """
        description = self._described.get(name)
        if description is None:  # thousands of experts may be views of one tensor
            description = self._described[name] = self._describe(name)
        return description

    def _describe(self, name: str) -> Description:
        file, entry = self._entry(name)
        if entry.dtype not in STORED_DTYPES:
            raise ValueError(f"{file.path}: unsupported source dtype {entry.dtype} of {name!r}")
        begin, end = entry.data_offsets
        word = WORD_BYTES[entry.dtype]
        if prod(entry.shape) * word != end - begin:
            raise ValueError(
                f"{file.path}: byte count disagrees for {name!r}: "
                f"{end - begin} bytes do not hold {entry.dtype}{entry.shape}"
            )
        start = file.data_offset
        region = Region((Span(file, start + begin, start + end),) if begin < end else ())
        part = Part("values", region, prod(entry.shape[1:]) * word, name=name)
        return Description(shape=entry.shape, dtype=entry.dtype, decoder="plain", parts=(part,))

    def read_flat(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements ``[begin, end)`` of a tensor in C order, 1-D, in the stored type.

        Raises:
            ValueError: as :meth:`tensor`, or the range lies outside.
        """
        from ninferbuild.sources import decoding

        description = self.tensor(name)
        end = description.elements if end is None else end
        if not 0 <= begin <= end <= description.elements:
            raise ValueError(f"{name}: invalid element range [{begin}, {end}) of {description.elements}")
        return decoding.read_values(description, begin, end)

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far, headers not counted."""
        return sum(file.bytes_read for file in list(self._files.values()))

    def owns(self, file: SourceFile) -> bool:
        """Whether ``file`` is one of this store's."""
        return file.path is not None and self._files.get(file.path) is file

    def close(self) -> None:
        """Give all descriptors back."""
        for file in list(self._files.values()):
            file.close()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(value).__name__}")
    return value


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = _weight_map(path)
    except ValueError as error:
        raise ValueError(
            f"{error}; a checkpoint is a directory, a .safetensors file or a Safetensors index JSON"
        ) from error
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: no Safetensors index: it has no object 'weight_map'")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise ValueError(f"{path}: weight_map names no file for {name!r}")
        if file not in files:
            files[file] = path.parent / file
    return {name: files[file] for name, file in weight_map.items()}


def _weight_map(path: Path) -> Any:
    """The member ``weight_map``, whatever it is; a regular one, which may be long, in half the time."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError):
        return _read_json_object(path).get("weight_map")


def is_described_store(store: object, name: str) -> bool:
    """Whether regions of the store's tensor ``name`` may be taken in place of calling its ``read_flat``.

    True for a class that itself defines ``tensor(name) -> Description``, unless its ``describes(name)`` denies it. A
    subclass or wrapper may change what reading gives, so it has to define the method anew; otherwise its values count
    as unknown until they are read.
    """
    if "tensor" not in vars(type(store)):
        return False
    describes = getattr(store, "describes", None)
    return describes is None or bool(describes(name))


def tensor_source(
    store: Any,
    name: str,
    shape: tuple[int, ...],
    *,
    offset: int = 0,
    source_shape: tuple[int, ...] | None = None,
) -> LogicalSource:
    """``prod(shape)`` elements of a stored tensor from flat element ``offset``, seen as ``shape``.

    Args:
        store: an object with ``path``, ``describe(name)`` and ``read_flat(name, begin, end)``.
        source_shape: the shape that the tensor must have in the store; ``shape`` by default. Checked at the first use,
            with ``ValueError``.
    """
    shape = tuple(shape)
    expected = shape if source_shape is None else tuple(source_shape)
    if is_described_store(store, name):
        return TensorViews(store, name, shape, expected).at(offset)

    # Its name and what it holds are part of the keys of actions that read a user's store through it.
    def read(begin: int, end: int) -> torch.Tensor:
        _require_shape(store, name, tuple(store.describe(name).shape), expected)
        values: torch.Tensor = store.read_flat(name, offset + begin, offset + end)
        return values

    return LogicalSource(shape, f"{store.path}:{name}[{offset}:{offset + prod(shape)}]", read)


class TensorViews:
    """Views of one shape of a stored tensor, such as the experts of a layer; the arguments are :func:`tensor_source`'s.

    What they have in common is found once.
    """

    def __init__(self, store: Any, name: str, shape: tuple[int, ...], source_shape: tuple[int, ...]):
        self._store = store
        self._name = name
        self._shape = shape
        self._expected = source_shape
        self._elements = prod(shape)
        self._label = f"{store.path}:{name}["
        self._described = is_described_store(store, name)
        self._view: Callable[[int], Description] | None = None

    def at(self, offset: int) -> LogicalSource:
        """The view from flat element ``offset``."""
        shape = self._shape
        if not self._described:
            return tensor_source(self._store, self._name, shape, offset=offset, source_shape=self._expected)
        reader = StoredReader(partial(self._describe, offset), shape, self._name)
        return LogicalSource(shape, f"{self._label}{offset}:{offset + self._elements}]", reader.read_values)

    def _describe(self, offset: int) -> Description:
        view = self._view
        if view is None:
            whole: Description = self._store.tensor(self._name)
            _require_shape(self._store, self._name, whole.shape, self._expected)
            if offset == 0 and self._shape == self._expected:
                return whole
            view = self._view = whole.flat_views(self._shape)
        try:
            return view(offset)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from error


def _require_shape(store: Any, name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if actual != expected:
        raise ValueError(
            f"{store.path}: {name}: expected source shape {expected}, got {actual}; "
            "the weights are not those that config.json describes"
        )
