"""Digests of an action's inputs without encoding them, and without torch where the inputs are stored tensors."""

from __future__ import annotations

from collections.abc import Iterator
import threading
from typing import TYPE_CHECKING

from ninferbuild.digest import BLOCK_BYTES, BlockHasher
from ninferbuild.errors import Cancelled
from ninferbuild.manifest import declares_content
from ninferbuild.sources.regions import Region, RegionReader

if TYPE_CHECKING:
    from ninferbuild.plan import Parent


def hash_region(region: Region, cancel: threading.Event | None = None) -> bytes:
    """The digest of a region, read from its files in blocks.

    Raises:
        Cancelled: ``cancel`` was set.
        ValueError, OSError: a file cannot be read as far as the region reaches.
    """
    hasher = BlockHasher()
    reader = RegionReader(region, hasher.update)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, region.length)))
    left = region.length
    while left:
        if cancel is not None and cancel.is_set():
            raise Cancelled
        piece = buffer[: min(left, len(buffer))]
        reader.read_into(piece)
        left -= len(piece)
    return hasher.digest()


def hash_inputs(parent: Parent, cancel: threading.Event) -> Iterator[tuple[bytes, int]]:
    """For each slot of the parent's manifest its digest and the bytes that were read for it.

    The values of a user's reader are read through the reader.
    """
    for item in parent.request.inputs:
        described = item.source.description
        if described is not None:
            for part in described.parts:
                yield hash_region(part.region, cancel), part.region.length
        elif not declares_content(item.source):
            from ninferbuild.encode import hash_values

            yield hash_values(item, encoded=parent.rule is not None and parent.rule.reads == "encoded", cancel=cancel)
