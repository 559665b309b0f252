"""What :mod:`ninferbuild.diff` compares: an artifact as it is, or a target as it would be built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ninferbuild import link as linker
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import ArtifactError, Directory
from ninferbuild.digest import BlockHasher, digest_of

if TYPE_CHECKING:
    from ninferbuild.resolve import Action
    from ninferbuild.session import Session
    from ninferbuild.target import Target


@dataclass(frozen=True, slots=True)
class Side:
    """One of two things to compare.

    Attributes:
        name: path of the artifact, or name of the target.
        artifact: the open artifact, or None for a target.
        actions: object id → the action that makes it, and the parameters of the object; empty for an artifact.
        known: object id → payload digest, as far as a target's are known without encoding.
    """

    name: str
    kind: Literal["artifact", "target"]
    directory: Directory
    artifact: Artifact | None = None
    actions: Mapping[str, tuple[Action, tuple[str, ...]]] = field(default_factory=dict)
    known: Mapping[str, bytes] = field(default_factory=dict)

    def digest(self, object_id: str) -> bytes | None:
        """The digest of an object's payload; an artifact's is read, a target's may not be known.

        Raises:
            ArtifactError: a part does not belong to the artifact.
            OSError: a part is missing or unreadable.
        """
        if self.artifact is None:
            return self.known.get(object_id)
        return _stored_digest(self.artifact, object_id)


def _stored_digest(artifact: Artifact, object_id: str) -> bytes:
    from ninferbuild.verify import object_digest

    try:
        artifact.object(object_id)
    except ArtifactError:  # an encoding that nobody knows here: its bytes can be compared all the same
        item = artifact.by_id[object_id]
        hasher = BlockHasher()
        for piece in artifact.iter_range(item.offset, item.bytes):
            hasher.update(piece)
        return hasher.digest()
    return object_digest(artifact, object_id)


def artifact_side(artifact: Artifact) -> Side:
    """An artifact, which stays open for as long as the side is used."""
    return Side(str(artifact.path), "artifact", artifact.directory, artifact)


def target_side(target: Target, *, hash_sources: bool = False) -> Side:
    """A target as it would be built. Its sources are closed again; nothing of them is needed to compare.

    Args:
        hash_sources: read sources where that tells whether a cached payload is the one that would be built.

    Raises:
        as :func:`ninferbuild.build.plan`.
    """
    from ninferbuild.preview import previewed

    with previewed(target, hash_sources=hash_sources) as (session, _):
        contents = session.contents()
        layout = linker.lay_out(
            contents, target.out.name, payload_digests=None, source_digests=session.source_digests()
        )
        known = {name: digest_of(data) for name, data in contents.resources.items()}
        known |= {item.id: digest_of(item.data) for item in contents.auxiliaries}
        actions = _actions(session)
        for object_id, (action, _) in actions.items():
            if action.record is not None:
                known[object_id] = action.record.digest
        return Side(target.name, "target", layout.directory, actions=actions, known=known)


def _actions(session: Session) -> dict[str, tuple[Action, tuple[str, ...]]]:
    return {parent.target.id: (action, parent.names) for action in session.actions for parent in action.parents}
