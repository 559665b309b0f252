"""Public names of the directory: records, planning, parsing."""

from __future__ import annotations

from ninferbuild.artifact.directory import (
    ACTIVATION_POLICIES,
    Directory,
    FileRecord,
    binding_parts,
    decode_directory,
    encode_directory,
    parse_directory,
)
from ninferbuild.artifact.objects import (
    RESOURCE_ENCODING,
    ArtifactObject,
    ResourceObject,
    ResourceSpec,
    TensorObject,
    TensorSpec,
    plan_objects,
    validate_encoding,
)
from ninferbuild.artifact.primitives import ArtifactError

__all__ = [
    "ACTIVATION_POLICIES",
    "RESOURCE_ENCODING",
    "ArtifactError",
    "ArtifactObject",
    "Directory",
    "FileRecord",
    "ResourceObject",
    "ResourceSpec",
    "TensorObject",
    "TensorSpec",
    "binding_parts",
    "decode_directory",
    "encode_directory",
    "parse_directory",
    "plan_objects",
    "validate_encoding",
]
