"""Digests of what an artifact file holds."""

from __future__ import annotations

from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorObject
from ninferbuild.digest import BLOCK_BYTES, block_digest, combine


def object_digest(artifact: Artifact, object_id: str) -> bytes:
    """The digest of one object's bytes, over the same blocks as a payload in the cache.

    Blocks end at plane boundaries and every 8 MiB within a plane.

    Raises:
        ArtifactError: the object's encoding is unknown or inconsistent, or a part does not belong to the artifact.
        OSError: a part is missing or unreadable.
    """
    item = artifact.object(object_id)
    if isinstance(item, TensorObject):
        extents = [plane.extent for plane in planes(item.layout, item.format, item.shape, item.divisors)]
    else:
        extents = [item.bytes]
    digests = []
    offset = item.offset
    for extent in extents:
        end = offset + extent
        while offset < end:
            length = min(BLOCK_BYTES, end - offset)
            digests.append(block_digest(artifact.read_range(offset, length)))
            offset += length
    return combine(digests)
