"""Importance matrices as ``llama-imatrix`` writes them: a GGUF file, or the older ``imatrix.dat``.

Both give the mean squared activation of each input channel of a matrix, by the name of its GGUF tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import struct
from typing import TYPE_CHECKING

from ninferbuild.sources.ggml_types import DIRECT_TYPES
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_header import MAGIC

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

SUMS, COUNTS = ".in_sum2", ".counts"

MAX_NAME = 4096
"""Bytes of a name in ``imatrix.dat``; longer ones are damage."""


class GGUFMatrix:
    """An importance matrix in GGUF form: a context manager.

    ``NAME.in_sum2`` holds the sums of squared activations of a matrix, ``NAME.counts`` the rows that were summed, one
    number for each matrix that shares the name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a GGUF file of version 3, or sums or counts are not plain numbers.
    """

    def __init__(self, path: Path):
        self._file = GGUFFile(path)
        for name, info in self._file.tensors.items():
            if name.endswith((SUMS, COUNTS)) and info.type_id not in DIRECT_TYPES:
                self._file.close()
                raise ValueError(f"{path}: {name}: {info.type_name} is not a direct format")

    def mean_squares(self, matrix: str) -> Vector | None:
        """float32 ``[K]``; None where the file says nothing of ``matrix``.

        Raises:
            ValueError: there is not exactly one count, a value is negative or not finite, or the file is truncated.
        """
        import numpy as np

        path, name = self._file.path, matrix + SUMS
        if not self._file.has(name):
            return None
        if not self._file.has(matrix + COUNTS) or self._file.info(matrix + COUNTS).elements != 1:
            raise ValueError(f"{path}: {matrix} needs one dense activation count ({matrix}{COUNTS})")
        count = float(self._file.read_direct(matrix + COUNTS).reshape(-1)[0])
        sums = self._file.read_direct(name).reshape(-1)
        if not np.isfinite(count):
            raise ValueError(f"{path}: {matrix}: the activation count is {count}")
        return _require_squares(sums / np.float32(max(count, 1.0)), path, matrix)

    def __enter__(self) -> GGUFMatrix:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class LegacyMatrix:
    """An ``imatrix.dat``, read whole: a few megabytes.

    Little-endian: the number of entries, int32; for each the length of its name, int32, the name, the number of calls
    ``n``, int32, the number of values, int32, and the values, float32. A value is ``sum / count * n``, the mean squared
    activation times the number of calls. What may follow, the last chunk and the name of the data set, is ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is GGUF, truncated or otherwise damaged.
    """

    def __init__(self, path: Path):
        self._path = path
        data = memoryview(path.read_bytes())
        if data[:4] == MAGIC:
            raise ValueError(f"{path}: a GGUF file; give it with --gguf")
        self._entries: dict[str, tuple[int, memoryview]] = {}
        position = 0

        def take(count: int, what: str) -> memoryview:
            nonlocal position
            if count > len(data) - position:
                raise ValueError(f"{path}: not an imatrix.dat, or truncated: it ends within {what}")
            position += count
            return data[position - count : position]

        def number(what: str, least: int) -> int:
            (found,) = struct.unpack("<i", take(4, what))
            if found < least:
                raise ValueError(f"{path}: not an imatrix.dat, or damaged: {what} is {found}")
            return int(found)

        for index in range(number("the number of entries", 1)):
            length = number(f"the length of name {index}", 1)
            if length > MAX_NAME:
                raise ValueError(f"{path}: not an imatrix.dat, or damaged: name {index} has {length} bytes")
            try:
                name = str(take(length, f"name {index}"), "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not an imatrix.dat, or damaged: name {index} is not UTF-8") from error
            if name in self._entries:
                raise ValueError(f"{path}: {name} occurs twice")
            calls = number(f"the number of calls of {name}", 0)
            values = number(f"the number of values of {name}", 1)
            self._entries[name] = calls, take(4 * values, f"the values of {name}")

    def mean_squares(self, matrix: str) -> Vector | None:
        """float32 ``[K]``; None where the file says nothing of ``matrix``.

        Raises:
            ValueError: a value is negative or not finite.
        """
        import numpy as np

        if matrix not in self._entries:
            return None
        calls, values = self._entries[matrix]
        means = np.frombuffer(values, "<f4").astype(np.float32) / np.float32(max(calls, 1))
        return _require_squares(means, self._path, matrix)

    def __enter__(self) -> LegacyMatrix:
        return self

    def __exit__(self, *error: object) -> None:
        self._entries.clear()


FORMS: dict[str, Callable[[Path], GGUFMatrix | LegacyMatrix]] = {"gguf": GGUFMatrix, "dat": LegacyMatrix}
"""Form → reader."""


def _require_squares(means: Vector, path: Path, matrix: str) -> Vector:
    import numpy as np

    if not (np.isfinite(means).all() and (means >= 0).all()):
        raise ValueError(f"{path}: {matrix}: importance must be finite and nonnegative; measure it again")
    return means
