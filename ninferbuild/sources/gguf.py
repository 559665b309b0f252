"""GGUF files: tensors as they are stored, block for block.

The header is parsed when the file is opened; payloads are read at offsets into buffers of the reader, see
:mod:`ninferbuild.sources.files`. No value is decoded here except the direct ones.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ninferbuild.sources.files import CheckpointFile
from ninferbuild.sources.ggml_types import BF16, DIRECT_TYPES, F16, F32
from ninferbuild.sources.gguf_header import TensorInfo, read_header
from ninferbuild.sources.regions import Region, SourceFile, Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GGUFFile", "TensorInfo"]


class GGUFFile(CheckpointFile):
    """One GGUF file of version 3: a store and a context manager.

    A file whose data section is truncated opens, so that it can be looked at; reading what is missing fails.

    Args:
        path: the file.
        shard: accept one file of a split model as it stands.

    Attributes:
        kv: keys and values of the header; arrays are lists.
        tensors: name → :class:`TensorInfo`, in file order.
        alignment: of the data section and of each tensor, in bytes.
        header_bytes: length of the header.
        data_offset: first byte of the data section.
        file_bytes: length of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a GGUF file of version 3, a damaged header, or one of the files of a split model.
    """

    def __init__(self, path: str | Path, *, shard: bool = False):
        super().__init__(Path(path))
        if self.path.is_dir():
            raise ValueError(f"{path}: not a GGUF file but a directory")
        if not self.path.exists():
            raise FileNotFoundError(f"{path}: no such GGUF file")
        header = read_header(self, str(path))
        self.kv: dict[str, Any] = header.kv
        self.tensors: dict[str, TensorInfo] = header.tensors
        self.alignment = header.alignment
        self.header_bytes = header.length
        self.data_offset = -(-header.length // header.alignment) * header.alignment
        self.file_bytes = self.size
        self._digest = header.digest
        if not shard:
            self._require_whole()

    def _require_whole(self) -> None:
        count = self.kv.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            self.close()
            raise ValueError(
                f"{self.path}: one of the {count} files of a split GGUF (split.count), which are not joined here; "
                "join them with `gguf-split --merge` and give the result"
            )

    def header_digest(self) -> bytes:
        return self._digest

    @property
    def data_bytes_available(self) -> int:
        """Bytes of the data section that the file has."""
        return max(0, self.file_bytes - self.data_offset)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """What the header says about the tensor ``name``. Raises ``KeyError`` where it is absent."""
        found = self.tensors.get(name)
        if found is None:
            raise KeyError(f"{self.path}: tensor {name!r} is absent")
        return found

    def region(self, name: str, begin: int = 0, end: int | None = None) -> Region:
        """Where bytes ``[begin, end)`` of the tensor ``name`` lie.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its size is unknown, the bytes lie outside the tensor, or the file ends before them.
        """
        info = self.info(name)
        try:
            size = info.nbytes
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        end = size if end is None else end
        if not 0 <= begin <= end <= size:
            raise ValueError(f"{self.path}: {name}: byte range [{begin}, {end}) is outside {size} bytes")
        start = self.data_offset + info.offset
        if start + end > self.file_bytes:
            raise ValueError(
                f"{self.path}: {name}: bytes [{begin}, {end}) are past the end of the file ({self.file_bytes} bytes; "
                "the data section is truncated, download it again)"
            )
        return Region((Span(self, start + begin, start + end),) if begin < end else ())

    def tensor_bytes(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Bytes ``[begin, end)`` of the tensor ``name``, 1-D uint8. Raises as :meth:`region`."""
        import numpy as np

        region = self.region(name, begin, end)
        data = np.empty(region.length, np.uint8)
        for span in region.spans:
            self.read_into(span.begin, data.data)
        return data

    def read_direct(self, name: str) -> NDArray[np.float32]:
        """The float32 values, in its shape, of a tensor that is stored as F32, F16 or BF16; the conversion is exact.

        Raises:
            KeyError: there is no such tensor.
            ValueError: another type, or as :meth:`region`.
        """
        import numpy as np

        info = self.info(name)
        if info.type_id not in DIRECT_TYPES:
            raise ValueError(f"{self.path}: {name}: {info.type_name} is not a direct format")
        if info.type_id == BF16.id:
            words = self.read_bf16_words(name).astype(np.uint32)
            return (words << 16).view(np.float32)
        stored = {F32.id: "<f4", F16.id: "<f2"}[info.type_id]
        return self.tensor_bytes(name).view(stored).reshape(info.shape).astype(np.float32, copy=False)

    def read_bf16_words(self, name: str) -> NDArray[np.uint16]:
        """The 16-bit words, in its shape, of a tensor that is stored as BF16.

        Raises:
            KeyError: there is no such tensor.
            ValueError: another type, or as :meth:`region`.
        """
        import numpy as np

        info = self.info(name)
        if info.type_id != BF16.id:
            raise ValueError(f"{self.path}: {name}: expected BF16, got {info.type_name}")
        return self.tensor_bytes(name).view("<u2").reshape(info.shape).astype(np.uint16, copy=False)

    def block_rows(self, name: str) -> tuple[TensorInfo, str]:
        """The tensor ``name``, which has to consist of whole rows of stored blocks, and the format of its blocks.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its type is not a stored block format, or its rows are not whole blocks.
        """
        info = self.info(name)
        try:
            format = info.type.format
            if format is not None:
                _ = info.row_bytes
                return info, format
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        raise ValueError(f"{self.path}: {name}: {info.type_name} is not a stored block format")

    def read_blocks(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Rows ``[begin, end)`` of a tensor of stored blocks, uint8 ``[rows, row bytes]``.

        Rows run along the last axis; those of a tensor of rank 3 follow each other matrix by matrix.

        Raises:
            KeyError: there is no such tensor.
            ValueError: as :meth:`block_rows` and :meth:`region`, or the rows lie outside.
        """
        info, _ = self.block_rows(name)
        rows, width = info.rows, info.row_bytes
        end = rows if end is None else end
        if not 0 <= begin <= end <= rows:
            raise ValueError(f"{self.path}: {name}: row range [{begin}, {end}) is outside {rows} rows")
        return self.tensor_bytes(name, begin * width, end * width).reshape(end - begin, width)

    def owns(self, file: SourceFile) -> bool:
        """Whether ``file`` is this file."""
        return file is self

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
