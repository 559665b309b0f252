"""The header of a GGUF file, version 3: keys and values, and where the tensors lie.

The header is read in steps of :data:`STEP` bytes, and nothing is reserved for what a count or a length merely claims:
memory grows with the bytes that were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
import struct
from typing import Any, Protocol

import xxhash

from ninferbuild.sources.ggml_types import GGML_TYPES, OTHER_TYPES, GgmlType, type_label

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
STEP = 1 << 20

MAX_RANK = 16
MAX_DEPTH = 16
"""Arrays within arrays."""

MAX_STRING = 1 << 30
MAX_ELEMENTS = 1 << 25
"""Elements of all arrays together; a vocabulary of 2**18 tokens has four arrays of that size."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Value type → its character in :mod:`struct`."""

_LENGTH = struct.Struct("<Q")


class HeaderFile(Protocol):
    """What a header is read from."""

    @property
    def size(self) -> int: ...

    def read_uncounted(self, offset: int, buffer: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a GGUF file.

    Attributes:
        shape: row-major, the slowest axis first: the file's dimensions reversed.
        type_id: the ggml type as the file numbers it; it may be one that nothing is known of.
        offset: first byte, relative to the data section.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def type(self) -> GgmlType:
        """The type's geometry. Raises ``ValueError`` for a type that nothing is known of."""
        found = GGML_TYPES.get(self.type_id)
        if found is None:
            unknown = "" if self.type_id in OTHER_TYPES else "unknown "
            raise ValueError(f"{self.name}: {unknown}{type_label(self.type_id)}, whose blocks cannot be read")
        return found

    @property
    def type_name(self) -> str:
        """Upper-case name of the type, such as ``IQ3_S``; the number as text where it is unknown."""
        found = GGML_TYPES.get(self.type_id)
        return str(self.type_id) if found is None else found.name

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor. Raises ``ValueError`` for an unknown type or a broken block."""
        found = self.type
        blocks, rest = divmod(self.elements, found.block_values)
        if rest:
            raise ValueError(
                f"{self.name}: {self.elements} elements are not whole blocks of {found.block_values} ({found.name})"
            )
        return blocks * found.block_bytes

    @property
    def columns(self) -> int:
        """Elements of a row: the last axis. Raises ``ValueError`` where there are no rows."""
        if not self.shape or self.shape[-1] <= 0:
            raise ValueError(f"{self.name}: a tensor of shape {self.shape} has no rows")
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of a tensor of any rank, matrix after matrix. Raises ``ValueError`` where there are none."""
        return self.elements // self.columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. Raises ``ValueError`` for an unknown type or where rows end within a block."""
        found = self.type
        blocks, rest = divmod(self.columns, found.block_values)
        if rest:
            raise ValueError(
                f"{self.name}: {self.columns} columns are not whole blocks of {found.block_values} ({found.name})"
            )
        return blocks * found.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says; ``digest`` is the xxh3_128 of its ``length`` bytes."""

    kv: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    length: int
    digest: bytes


def read_header(file: HeaderFile, path: str) -> Header:
    """Read and check the header of ``file``; ``path`` names it in messages.

    Raises:
        ValueError: not a GGUF file of version 3, a damaged header, or tensors that are misaligned or overlap.
    """
    cursor = _Cursor(file, path)
    if cursor.take(4, "the magic") != MAGIC:
        raise ValueError(f"{path}: not a GGUF file: it does not begin with {MAGIC.decode()!r}")
    version = cursor.scalar("I")
    if version == VERSION << 24:
        raise ValueError(f"{path}: a big-endian GGUF file; only little-endian ones are read")
    if version != VERSION:
        raise ValueError(f"{path}: unsupported GGUF version {version}; only version {VERSION} is read")
    tensor_count, kv_count = cursor.scalar("Q"), cursor.scalar("Q")
    kv: dict[str, Any] = {}
    for _ in range(kv_count):
        key = cursor.text("a key")
        if key in kv:
            raise ValueError(f"{path}: duplicate key {key!r} in the GGUF header")
        kv[key] = _value(cursor, cursor.scalar("I"), key)
    alignment = _alignment(kv.get("general.alignment", DEFAULT_ALIGNMENT), path)
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        info = _tensor(cursor)
        if info.name in tensors:
            raise ValueError(f"{path}: duplicate tensor {info.name!r} in the GGUF header")
        tensors[info.name] = info
    _require_packed(tensors.values(), alignment, path)
    return Header(kv, tensors, alignment, cursor.position, cursor.digest())


class _Cursor:
    """Reads forwards through the header and hashes what it has passed."""

    def __init__(self, file: HeaderFile, path: str):
        self.path = path
        self.elements = 0
        self._file = file
        self._size = file.size
        self._buffer = b""
        self._index = 0  # of the next byte in the buffer
        self._read = 0  # bytes read from the file
        self._hasher = xxhash.xxh3_128()

    @property
    def position(self) -> int:
        """Offset of the next byte in the file."""
        return self._read - len(self._buffer) + self._index

    def digest(self) -> bytes:
        """Digest of everything before :attr:`position`."""
        self._hasher.update(memoryview(self._buffer)[: self._index])
        return self._hasher.digest()

    def _fill(self, count: int) -> bool:
        """Have at least ``count`` bytes in the buffer; False where the file ends before."""
        missing = count - (len(self._buffer) - self._index)
        if missing <= 0:
            return True
        if missing > self._size - self._read:
            return False
        fresh = bytearray(min(max(missing, STEP), self._size - self._read))
        self._file.read_uncounted(self._read, memoryview(fresh))
        self._read += len(fresh)
        self._hasher.update(memoryview(self._buffer)[: self._index])
        self._buffer = self._buffer[self._index :] + fresh
        self._index = 0
        return True

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        if not self._fill(count):
            raise ValueError(f"{self.path}: the file ends within {what} of the GGUF header; it is truncated")
        begin = self._index
        self._index += count
        return self._buffer[begin : self._index]

    def scalar(self, character: str) -> Any:
        """The next little-endian number, ``character`` as in :mod:`struct`."""
        form = f"<{character}"
        return struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0]

    def raw_string(self) -> bytes:
        """The bytes of the next string."""
        length = self.scalar("Q")
        if length > self._size - self.position:
            raise ValueError(
                f"{self.path}: a GGUF string runs past the header: {length} bytes where the file has "
                f"{self._size - self.position} left; it is truncated or damaged"
            )
        if length > MAX_STRING:
            raise ValueError(f"{self.path}: a string of {length} bytes in the GGUF header; the file is damaged")
        return self.take(length, "a string")

    def text(self, what: str) -> str:
        """The next string, which has to be UTF-8."""
        raw = self.raw_string()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} of the GGUF header is not UTF-8: {raw[:64]!r}") from error

    def strings(self, count: int) -> list[str]:
        """The next ``count`` strings; bytes that are no UTF-8, as in some vocabularies, become U+FFFD."""
        found: list[str] = []
        length_at = _LENGTH.unpack_from
        while len(found) < count:
            found.append(self.raw_string().decode(errors="replace"))
            # Vocabularies have hundreds of thousands of strings: those in the buffer are taken without further calls.
            buffer, begin, last = self._buffer, self._index + 8, len(self._buffer)
            try:
                for _ in range(count - len(found)):
                    if begin > last:
                        break
                    end = begin + length_at(buffer, begin - 8)[0]
                    if end > last:
                        break
                    found.append(buffer[begin:end].decode())
                    begin = end + 8
            except UnicodeDecodeError:
                pass  # the next one is taken with replacement
            self._index = begin - 8
        return found

    def scalars(self, count: int, character: str) -> list[Any]:
        """The next ``count`` numbers."""
        found: list[Any] = []
        size = struct.calcsize(f"<{character}")
        while len(found) < count:
            some = min(count - len(found), STEP // size)
            found += struct.unpack(f"<{some}{character}", self.take(some * size, "an array"))
        return found


def _value(cursor: _Cursor, kind: int, key: str, depth: int = 0) -> Any:
    character = _SCALARS.get(kind)
    if character is not None:
        return cursor.scalar(character)
    if kind == _STRING:
        return cursor.raw_string().decode(errors="replace")
    if kind != _ARRAY:
        raise ValueError(f"{cursor.path}: unsupported GGUF value type {kind} of {key!r}")
    if depth == MAX_DEPTH:
        raise ValueError(f"{cursor.path}: arrays of {key!r} are nested more than {MAX_DEPTH} deep")
    element, count = cursor.scalar("I"), cursor.scalar("Q")
    character = _SCALARS.get(element)
    if character is None and element not in (_STRING, _ARRAY):
        raise ValueError(f"{cursor.path}: unsupported GGUF value type {element} in the array {key!r}")
    cursor.elements += count
    if cursor.elements > MAX_ELEMENTS:
        raise ValueError(f"{cursor.path}: more than {MAX_ELEMENTS} array elements in the GGUF header, at {key!r}")
    if character is not None:
        return cursor.scalars(count, character)
    if element == _STRING:
        return cursor.strings(count)
    return [_value(cursor, _ARRAY, key, depth + 1) for _ in range(count)]


def _tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text("a tensor name")
    rank = cursor.scalar("I")
    if rank > MAX_RANK:
        raise ValueError(f"{cursor.path}: tensor {name!r} has rank {rank} in the GGUF header; the file is damaged")
    dimensions = cursor.scalars(rank, "Q")
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    return TensorInfo(name, tuple(reversed(dimensions)), type_id, offset)


def _alignment(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise ValueError(f"{path}: general.alignment must be a positive power of two, not {value!r}")
    return value


def _require_packed(tensors: Iterable[TensorInfo], alignment: int, path: str) -> None:
    """Each tensor begins where the one before it ends, aligned up.

    Type numbers were reused for blocks of other sizes, 42 most of all; only the distances between tensors show it.
    """
    reached: int | None = 0
    previous: TensorInfo | None = None
    for info in sorted(tensors, key=lambda info: (info.offset, info.elements)):
        if info.offset % alignment:
            raise ValueError(f"{path}: tensor {info.name!r} is misaligned: offset {info.offset}, alignment {alignment}")
        if reached is not None and info.offset != reached:
            relation = "is overlapping" if info.offset < reached else "does not follow"
            before = "the beginning of the data" if previous is None else f"{previous.name!r} ({previous.type_name})"
            raise ValueError(
                f"{path}: tensor {info.name!r} {relation} {before}: it begins at {info.offset} instead of {reached}; "
                "the file is damaged, or its writer meant other blocks by these type numbers"
            )
        try:
            reached = -(-(info.offset + info.nbytes) // alignment) * alignment
        except ValueError:  # its size is unknown; asking for its bytes says why
            reached = None
        previous = info
