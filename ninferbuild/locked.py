"""Building what a lock says and nothing else: a build is held to it as early as each fact is known.

Before anything is encoded: the plan, sources whose digests are remembered, payloads that are cached. Before anything
is linked: every payload and the artifact id. Before the files get their names: their SHA-256.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ninferbuild import link as linker
from ninferbuild.artifact.labels import labels_of
from ninferbuild.describe import describe, file_facts
from ninferbuild.differences import BytesDifferError, Difference, compare, reasons
from ninferbuild.digest import digest_of
from ninferbuild.lock import LockedFile, LockedTarget

if TYPE_CHECKING:
    from ninferbuild.artifact.schema import Directory
    from ninferbuild.cache import Cache
    from ninferbuild.resolve import Action
    from ninferbuild.session import Session


class LockGate:
    """Holds one build to its lock.

    Args:
        wanted: what the lock says of the target.
        path: the lock, for messages.
    """

    def __init__(self, wanted: LockedTarget, path: Path):
        self._wanted = wanted
        self._path = path

    def before_encoding(self, session: Session, cache: Cache) -> None:
        """Compare what is known before anything is encoded.

        Raises:
            BytesDifferError: the build would give something else.
        """
        # A user's method that has still to be called decides about auxiliary tensors, so about sizes and uses.
        partial = any(action.parent.rule is None and action.record is None for action in session.actions)
        layout = linker.lay_out(
            contents := session.contents(),
            session.configured.target.out.name,
            payload_digests=None,
            source_digests=session.source_digests(),
        )
        self._compare(session, cache, contents, layout, "nothing was encoded", artifact_id=None, partial=partial)

    def before_linking(self, session: Session, cache: Cache, contents: linker.Contents, layout: linker.Layout) -> None:
        """Compare everything but the SHA-256 of the files, every payload being there.

        Raises:
            BytesDifferError: the build gives something else.
        """
        self._compare(session, cache, contents, layout, "nothing was linked", artifact_id=layout.artifact_id)

    def _compare(
        self,
        session: Session,
        cache: Cache,
        contents: linker.Contents,
        layout: linker.Layout,
        outcome: str,
        *,
        artifact_id: bytes | None,
        partial: bool = False,
    ) -> None:
        target = session.configured.target
        actions = dict(zip((parent.target.id for parent in session.planned.parents), session.action_of(), strict=True))
        digests = {
            **{name: digest_of(data) for name, data in contents.resources.items()},
            **{name: action.record.digest if action.record is not None else None for name, action in actions.items()},
            **{item.id: digest_of(item.data) for item in contents.auxiliaries},
        }
        unread = session.unread_sources()
        found = describe(
            layout.directory,
            artifact_id=artifact_id,
            files={
                path.name: LockedFile(bytes=length, sha256=None)
                for path, length in zip(layout.paths(target.out), layout.lengths(), strict=True)
            },
            digests=digests,
            sources={
                name: None if name in unread else digest.hex() for name, digest in session.source_digests().items()
            },
        )
        because = reasons(self._wanted.actions, _Made(layout.directory, actions), cache.manifest)
        self._require_none(
            compare(self._wanted, found, because=because, partial=partial), f"{target.name} would differ", outcome
        )

    def holds(self, paths: Iterable[Path]) -> bool:
        """Whether the files have the sizes and SHA-256 of the lock."""
        return not self._file_differences(list(paths))

    def accept(self, staged: Sequence[Path], final: Sequence[Path]) -> None:
        """Compare complete files, which do not have their names yet, with the lock.

        Raises:
            BytesDifferError: their bytes differ.
        """
        names = [path.name for path in final]
        self._require_none(self._file_differences(staged, names), f"{final[0]} would differ", "nothing was published")

    def _file_differences(self, paths: Sequence[Path], names: Sequence[str] | None = None) -> list[Difference]:
        facts = file_facts(paths, names)
        wanted = self._wanted
        return compare(
            LockedTarget(artifact_id=None, files=wanted.files, sources={}, directory={}, objects={}),
            LockedTarget(artifact_id=None, files=facts, sources={}, directory={}, objects={}),
        )

    def _require_none(self, differences: Sequence[Difference], what: str, outcome: str) -> None:
        if differences:
            count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}"
            raise BytesDifferError(f"{what} from {self._path}: {count}; {outcome}", differences)


class _Made:
    """Label of a weight → method, manifest and input names of the action that makes it in this build."""

    def __init__(self, directory: Directory, actions: dict[str, Action]):
        self._directory = directory
        self._actions = actions
        self._by_label: dict[str, Action] | None = None

    def __call__(self, label: str) -> tuple[str, str, Sequence[str]] | None:
        if self._by_label is None:  # asked for differences only
            labels = labels_of(self._directory)
            self._by_label = {labels[identifier][0]: action for identifier, action in self._actions.items()}
        action = self._by_label.get(label)
        if action is None:
            return None
        rule = action.parent.rule
        method = f"{rule.name} v{rule.version}" if rule is not None else action.parent.method_name
        return method, action.template.fill_known(action.digests), action.parent.names
