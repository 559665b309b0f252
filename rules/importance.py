"""Importance vectors: how much each input channel of a parameter matters, from a Safetensors file.

The file holds float32 vectors ``[K]`` by parameter name (``text/layers/3/mlp/down``): the mean squared activation of
each input channel, as ``ninferbuild imatrix`` writes it. Nothing here imports torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import prod
import os
from pathlib import Path
import threading
import time
from typing import TYPE_CHECKING

from ninferbuild.errors import SourceChangedError
from ninferbuild.sources.safetensors import SafetensorsFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ninferbuild.sources.regions import FileIdentity

KEPT_FILES = 4
"""Files whose headers are kept for the process."""

SETTLED_NS = 2_000_000_000
"""How long a file must have been left alone before its times tell one version from another, in nanoseconds."""


class ImportanceFile:
    """One version of a file of importance vectors. Its header is read once, a vector whenever it is asked for.

    Args:
        path: the path as given; relative ones start from the working directory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no Safetensors file, or the path holds a NUL.
    """

    def __init__(self, path: str):
        if "\0" in path:
            raise ValueError(f"{path!r}: not the path of an importance matrix: it holds a NUL")
        self.path = path
        opened_ns = time.time_ns()
        self._file = SafetensorsFile(Path(path))
        try:
            _ = self._file.header
            self._identity = self._file.identity()
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: there is no such importance matrix") from None
        except IsADirectoryError:
            raise ValueError(f"{path}: an importance matrix is one Safetensors file, not a directory") from None
        except ValueError as error:
            raise ValueError(f"{error}; what llama-imatrix writes is imported with `ninferbuild imatrix`") from error
        times = (self._identity.mtime_ns, self._identity.ctime_ns)
        self._settled = opened_ns - max(times) >= SETTLED_NS

    @property
    def identity(self) -> FileIdentity:
        """The file as it was at the first look."""
        return self._identity

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that the file has vectors for, in its order."""
        return tuple(self._file.header)

    def has(self, name: str) -> bool:
        """Whether the file has a vector for a parameter."""
        return name in self._file.header

    def is_current(self) -> bool:
        """Whether the path certainly leads to this version still."""
        try:
            return self._settled and os.path.realpath(self.path) == self._identity.path and self._unchanged()
        except OSError:
            return False

    def _unchanged(self) -> bool:
        try:
            return self._file.identity() == self._identity
        except SourceChangedError:
            return False

    def require_unchanged(self) -> None:
        """Raises ``SourceChangedError`` when the file is not what it was when vectors were taken from it."""
        try:
            unchanged = self._unchanged()
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            raise SourceChangedError(f"{self.path}: the importance matrix changed while it was in use; build again")

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """The vector of one parameter, in the shape that it is stored in; None when the file has none.

        Raises:
            ValueError: it is not stored as float32, or the file is damaged.
        """
        import numpy as np

        entry = self._file.header.get(name)
        if entry is None:
            return None
        begin, end = entry.data_offsets
        if entry.dtype != "F32":
            raise ValueError(f"{self.path}: importance of {name} must be stored as F32, not {entry.dtype}")
        if 4 * prod(entry.shape) != end - begin:
            raise ValueError(f"{self.path}: importance of {name}: {end - begin} bytes do not hold F32{entry.shape}")
        data = bytearray(end - begin)
        self._file.read_into(self._file.data_offset + begin, memoryview(data))
        return np.frombuffer(data, dtype="<f4").reshape(entry.shape)

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


_kept: OrderedDict[str, ImportanceFile] = OrderedDict()
_lock = threading.Lock()


def open_importance(path: str) -> ImportanceFile:
    """The file at ``path`` as it is now; opened before in this process or anew.

    Raises:
        FileNotFoundError, ValueError: as :class:`ImportanceFile`.
    """
    with _lock:
        kept = _kept.pop(path, None)
        if kept is None or not kept.is_current():
            if kept is not None:
                kept.close()
            kept = ImportanceFile(path)
        _kept[path] = kept
        while len(_kept) > KEPT_FILES:
            _kept.popitem(last=False)[1].close()
        return kept


def mean_importance(file: ImportanceFile, names: Iterable[str], columns: int) -> NDArray[np.float32] | None:
    """The mean, in float32, of the vectors that the file has for ``names``: ``[columns]``, None when it has none.

    Raises:
        ValueError: a vector has another shape.
    """
    import numpy as np

    total: NDArray[np.float32] | None = None
    count = 0
    for name in names:
        vector = file.vector(name)
        if vector is None:
            continue
        if vector.shape != (columns,):
            raise ValueError(
                f"imatrix vector length differs from K={columns}: {file.path} has shape {list(vector.shape)} for {name}"
            )
        with np.errstate(over="ignore"):
            total = vector if total is None else total + vector
        count += 1
    return total if total is None else total / np.float32(count)
