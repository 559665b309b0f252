"""Where a user's method writes its object: a temporary file that accepts regions in any order."""

from __future__ import annotations

from pathlib import Path
import tempfile
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from ninferbuild.artifact.coverage import Coverage
from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.schema import ArtifactError, TensorObject, TensorSpec, plan_objects
from ninferbuild.digest import BLOCK_BYTES

if TYPE_CHECKING:
    from ninferbuild.encode import PayloadSink


class SpillWriter:
    """The writer behind a ``TensorOutput`` while a user's method runs.

    It has the part of ``ArtifactWriter`` that an output uses, and the same rule: every byte exactly once.

    Args:
        target: the parent's spec.
        directory: where the temporary file is made; it has no name there and vanishes with the process.
    """

    def __init__(self, target: TensorSpec, directory: Path):
        (planned,) = plan_objects([target])
        assert isinstance(planned, TensorObject)
        self.object = planned
        self.by_id = {target.id: self.object}
        self.objects = (self.object,)
        self._coverage = Coverage()
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close()
        self._file.truncate(self.object.bytes)

    def write_region(self, object_id: str, offset: int, data: Any) -> None:
        """Write bytes at ``offset`` of the object.

        Raises:
            ArtifactError: another object, a region outside, or bytes that were written before.
        """
        view = memoryview(data).cast("B")
        self._check(object_id, offset, len(view))
        if len(view):
            self._cover(offset, offset + len(view))
            self._file.seek(offset)
            self._file.write(view)

    def write_zeros(self, object_id: str, offset: int, length: int) -> None:
        """Cover a region with zeros, as which the file starts.

        Raises:
            ArtifactError: as :meth:`write_region`.
        """
        self._check(object_id, offset, length)
        if length:
            self._cover(offset, offset + length)

    def write_object(self, object_id: str, data: Any) -> None:
        """Write the object from its start: bytes, or an iterable of byte chunks."""
        chunks = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        offset = 0
        for chunk in chunks:
            self.write_region(object_id, offset, chunk)
            offset += memoryview(chunk).nbytes

    def _cover(self, begin: int, end: int) -> None:
        if not self._coverage.add(begin, end):
            raise ArtifactError(f"object {self.object.id!r}: duplicate output coverage in [{begin}, {end})")

    def _check(self, object_id: str, offset: int, length: int) -> None:
        if object_id != self.object.id:
            raise ArtifactError(f"{object_id}: this output writes {self.object.id} only")
        if offset < 0 or offset + length > self.object.bytes:
            raise ArtifactError(f"{object_id}: region [{offset}, {offset + length}) exceeds {self.object.bytes} bytes")

    def feed(self, sink: PayloadSink) -> None:
        """Hand the finished object to ``sink``, plane by plane.

        Raises:
            ArtifactError: the method left bytes unwritten.
        """
        gap = self._coverage.first_gap(self.object.bytes)
        if gap is not None:
            raise ArtifactError(f"object {self.object.id!r}: coverage is incomplete, [{gap[0]}, {gap[1]}) is missing")
        self._file.flush()
        target = self.object
        for index, plane in enumerate(planes(target.layout, target.format, target.shape, target.divisors)):
            self._file.seek(plane.offset)
            left = plane.extent
            while left:
                data = self._file.read(min(left, BLOCK_BYTES))
                sink.append(index, memoryview(data))
                left -= len(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SpillWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
