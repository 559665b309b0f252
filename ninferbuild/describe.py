"""What an artifact holds, as a lock states it: from its files, or from a directory while payloads are still missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.labels import labels_of
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import Directory, TensorObject, encode_directory
from ninferbuild.bindings import WEIGHT
from ninferbuild.digest import combine, digest_of
from ninferbuild.errors import NinferbuildError
from ninferbuild.lock import Information, LockedAction, LockedFile, LockedObject, LockedTarget
from ninferbuild.manifest import parse
from ninferbuild.verify import object_digest

if TYPE_CHECKING:
    from ninferbuild.cache import BuildRecord, Cache


def describe(
    directory: Directory,
    *,
    artifact_id: bytes | None,
    files: Mapping[str, LockedFile],
    digests: Mapping[str, bytes | None],
    sources: Mapping[str, str | None] | None = None,
    actions: Mapping[str, LockedAction] | None = None,
) -> LockedTarget:
    """What an artifact with this directory holds.

    Args:
        digests: object id → digest of its payload; None where it is not known.
        sources: source name → digest; None takes those of the directory's provenance.
        actions: object id → what made it.
    """
    provenance = directory.provenance
    objects = {}
    labels = labels_of(directory)
    for item in directory.objects:
        label, parameters = labels[item.id]
        known = digests[item.id]
        digest = known.hex() if known is not None else None
        if isinstance(item, TensorObject):
            objects[label] = LockedObject(
                digest=digest,
                bytes=item.bytes,
                format=item.format,
                layout=item.layout,
                shape=item.shape,
                divisors=item.divisors,
                parameters=parameters,
            )
        else:
            objects[label] = LockedObject(digest=digest, bytes=item.bytes)
    return LockedTarget(
        artifact_id=artifact_id.hex() if artifact_id is not None else None,
        files=dict(files),
        sources=dict(sources) if sources is not None else _source_digests(provenance),
        directory=_member_digests(directory),
        objects=objects,
        information=Information(
            recipe=_text_or_none(provenance.get("recipe")), overrides=tuple(map(str, provenance.get("overrides", ())))
        ),
        actions={labels[identifier][0]: action for identifier, action in (actions or {}).items()},
    )


def _source_digests(provenance: Mapping[str, Any]) -> dict[str, str | None]:
    # Artifacts made elsewhere have sources without digests.
    return {
        name: source.get("digest") if isinstance(source, dict) else None
        for name, source in dict(provenance.get("sources", {})).items()
    }


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _member_digests(directory: Directory) -> dict[str, str]:
    """Digests of the directory's members, but for the files and what provenance says of payload and sources."""
    members = directory.to_json()
    del members["files"]
    members["provenance"] = {
        name: value for name, value in directory.provenance.items() if name not in ("payload", "sources")
    }
    return {name: digest_of(encode_directory({name: value})).hex() for name, value in members.items()}


def describe_artifact(path: Path, actions: Mapping[str, LockedAction] | None = None) -> LockedTarget:
    """What the files of the artifact ``path`` hold; every byte is read.

    Args:
        actions: object id → what made it.

    Raises:
        NinferbuildError: the payload is not the one that the artifact says it was made with.
        ArtifactError: the entry or a part is not valid.
        OSError: a file is missing or unreadable.
    """
    with Artifact(path) as artifact:
        directory = artifact.directory
        digests = {item.id: object_digest(artifact, item.id) for item in artifact.objects}
        named = directory.provenance.get("payload")
        if directory.provenance.get("converter") == "ninferbuild" and named != combine(digests.values()).hex():
            raise NinferbuildError(f"{path}: the payload is damaged; remove the artifact and build it again")
        paths = [path, *(path.with_name(str(record.path)) for record in directory.files[1:])]
        return describe(
            directory,
            artifact_id=artifact.artifact_id,
            files=file_facts(paths),
            digests=digests,
            actions=actions,
        )


def file_facts(paths: Iterable[Path], names: Sequence[str] | None = None) -> dict[str, LockedFile]:
    """Size and SHA-256 of each file, by its name or by the one of ``names`` in its place."""
    listed = list(paths)
    facts = {}
    for path, name in zip(listed, names or [path.name for path in listed], strict=True):
        with path.open("rb") as file:
            facts[name] = LockedFile(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    return facts


def recorded_actions(cache: Cache, build: BuildRecord | None, directory: Directory) -> dict[str, LockedAction]:
    """Object id → the action behind it, as the record of the build that made ``directory`` tells."""
    if build is None:
        return {}
    weights = [item.id for item in directory.objects if item.id.startswith(WEIGHT)]
    if len(weights) != len(build.keys):
        return {}
    methods: dict[bytes, str] = {}
    for key in build.keys:
        if key not in methods:
            methods[key] = _method_of(cache, key)
    return {
        identifier: LockedAction(key=key.hex(), method=methods[key])
        for identifier, key in zip(weights, build.keys, strict=True)
    }


def _method_of(cache: Cache, key: bytes) -> str:
    manifest = cache.manifest(key)
    if manifest is None:
        return "forgotten"
    return parse(manifest).get("method", "a function of the recipe")
