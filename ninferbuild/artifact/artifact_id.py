"""The id of an artifact, computed from its directory."""

from __future__ import annotations

from collections.abc import Sequence
import hashlib

from ninferbuild.artifact.framing import ARTIFACT_ID_BYTES
from ninferbuild.artifact.schema import FileRecord, encode_directory


def artifact_id_of(text: bytes, files: Sequence[FileRecord]) -> bytes:
    """The id of an artifact with this directory text: SHA-256 of the text without part names and padding, 16 bytes.

    ``files`` are the directory's; their records end the text.
    """
    end = text.rfind(b"}") + 1
    if len(files) == 1 and text.count(b" ", end) == len(text) - end:  # as nearly always, of many megabytes: no copy
        return hashlib.sha256(memoryview(text)[:end]).digest()[:ARTIFACT_ID_BYTES]
    plain = text.rstrip(b" ")
    if len(files) > 1:
        named = encode_directory({"files": [record.to_json() for record in files]})[1:-1]
        unnamed = encode_directory({"files": [FileRecord(None, record.payload_bytes).to_json() for record in files]})
        head, found, tail = plain.rpartition(named)
        if found:
            plain = head + unnamed[1:-1] + tail
    return hashlib.sha256(plain).digest()[:ARTIFACT_ID_BYTES]
