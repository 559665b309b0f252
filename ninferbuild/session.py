"""One target, configured and planned, with its actions and their keys: what planning and building share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ninferbuild import link as linker
from ninferbuild.configure import Configured, configured
from ninferbuild.device import Device
from ninferbuild.digest import combine
from ninferbuild.errors import ActionsFailedError, CacheError, PayloadLostError
from ninferbuild.importance_use import ImportanceUse, importance_uses, unmatched
from ninferbuild.inputs import input_files, refuse_in_cache, refuse_inputs
from ninferbuild.memo import Memo
from ninferbuild.method import AuxiliaryValue
from ninferbuild.models.bulk import collection_paused
from ninferbuild.plan import PlannedRecipe, plan_parents
from ninferbuild.report import report_path
from ninferbuild.resolve import Action, Resolver

if TYPE_CHECKING:
    from ninferbuild.cache import ActionRecord, Cache, Writer
    from ninferbuild.method import AuxiliaryKey
    from ninferbuild.plan import Parent
    from ninferbuild.target import Target


class CacheInUse:
    """Watches over a cache: what goes wrong because it was removed is said to be that."""

    def __init__(self) -> None:
        self._watched: tuple[Path, tuple[int, int]] | None = None

    def watch(self, cache: Cache) -> Cache:
        """Watch over ``cache`` from now on."""
        self._watched = cache.path, _identity(cache.path)
        return cache

    def __enter__(self) -> CacheInUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CacheError | ActionsFailedError | PayloadLostError | OSError) and self._removed():
            assert self._watched is not None
            raise CacheError(f"{self._watched[0]}: the cache was removed while it was in use; build again") from error

    def _removed(self) -> bool:
        if self._watched is None:
            return False
        path, identity = self._watched
        try:
            return _identity(path) != identity or not (path / "index").is_dir()
        except FileNotFoundError:
            return True


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def open_cache(target: Target, *, read_only: bool = False) -> Cache:
    """The cache of a target.

    Raises:
        CacheError: it cannot be used.
    """
    from ninferbuild.cache import Cache  # a plan where nothing is cached needs none of it

    settings = target.cache
    return Cache.open(
        settings.directory(),
        read_only=read_only,
        max_size=settings.max_size,
        allow_foreign_fs=settings.allow_foreign_fs,
    )


@dataclass
class Session:
    """One configured and planned target with its actions."""

    configured: Configured
    planned: PlannedRecipe
    actions: list[Action]
    resolver: Resolver
    memo: Memo
    device: Device
    importance: tuple[ImportanceUse, ...] = ()
    auxiliaries: dict[int, Mapping[AuxiliaryKey, AuxiliaryValue]] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """What a user would want to know of the target, a line each: choices that have no effect."""
        target, opened = self.configured.target, self.configured.sources.opened
        unused = [
            f"{target.origin / 'sources' / name}: nothing in the recipe and the components asks for this source; "
            "it is not read"
            for name in target.sources
            if name not in opened
        ]
        return [*unused, *unmatched(self.importance)]

    def require_unchanged(self) -> None:
        """Raises ``SourceChangedError`` when a file that planning took values from is not what it was.

        Actions look themselves at what they read; what is taken from the cache reads nothing.
        """
        for use in self.importance:
            use.file.require_unchanged()

    def refuse_inputs(self, entry: Path, layout: linker.Layout | None = None) -> None:
        """Raises ``OptionError`` when a file that the build reads, or one of the cache, would be written.

        Args:
            entry: the output.
            layout: what it consists of; None: not known yet, only the entry and its report are looked at.
        """
        paths = [entry] if layout is None else layout.paths(entry)
        outputs, target = [*paths, report_path(entry)], self.configured.target
        refuse_inputs(outputs, input_files(self), target.origin / "out")
        refuse_in_cache(outputs, target.cache.directory(), target.origin / "out")

    def action_of(self) -> list[Action]:
        """The action of each parent, in parent order."""
        by_parent = {id(parent): action for action in self.actions for parent in action.parents}
        return [by_parent[id(parent)] for parent in self.planned.parents]

    def parent_auxiliaries(self) -> list[Mapping[AuxiliaryKey, AuxiliaryValue]]:
        """Each parent's auxiliaries: from its rule's check, from the cached record, or from its prepared method."""
        found: list[Mapping[AuxiliaryKey, AuxiliaryValue]] = []
        for parent, action in zip(self.planned.parents, self.action_of(), strict=True):
            if parent.checked is not None:
                found.append(parent.checked.auxiliaries)
            elif id(action) in self.auxiliaries:
                found.append(self.auxiliaries[id(action)])
            elif action.record is not None:
                found.append(_recorded_auxiliaries(action.record, parent))
            else:
                found.append({})
        return found

    def contents(self) -> linker.Contents:
        """What the linker needs besides payloads."""
        uses, auxiliaries = self.planned.uses(self.parent_auxiliaries())
        target, model = self.configured.target, self.configured.model
        return linker.Contents(
            components=model.components,
            resources=model.resources,
            weights=self.planned.weights,
            auxiliaries=auxiliaries,
            bindings=self.planned.bindings,
            uses=uses,
            recipe=self.configured.recipe_reference,
            overrides=self.configured.override_references,
            name=target.artifact_name,
            max_file_bytes=target.max_file_bytes,
            grafted=self.planned.grafted,
        )

    def source_digests(self) -> dict[str, bytes]:
        """Source name → digest over what the parents consumed of it, in parent order."""
        consumed: dict[str, list[bytes]] = {name: [] for name in self.configured.sources.opened}
        if any(digest is not None for action in self.actions for digest in action.digests):
            for name, digest in self._consumed():
                if digest is not None:
                    consumed[name].append(digest)
        return {name: combine(digests) for name, digests in consumed.items()}

    def unread_sources(self) -> set[str]:
        """Sources of which something is consumed whose digest is not known yet."""
        return {name for name, digest in self._consumed() if digest is None}

    def _consumed(self) -> Iterator[tuple[str, bytes | None]]:
        """(source name, digest) of each region of each parent, in order."""
        names: dict[int, str | None] = {}
        for action in self.action_of():
            for region, digest in zip(action.regions, action.digests, strict=True):
                if region is None:
                    continue
                for file in region.files:
                    if id(file) not in names:
                        names[id(file)] = self.configured.sources.name_of(file)
                    name = names[id(file)]
                    if name is not None:
                        yield name, digest


def _recorded_auxiliaries(record: ActionRecord, parent: Parent) -> dict[AuxiliaryKey, AuxiliaryValue]:
    from ninferbuild.user_actions import by_name

    return {
        by_name((row.input, row.use, row.role), parent.request): AuxiliaryValue(row.format, tuple(row.shape), row.data)
        for row in record.auxiliaries
    }


@contextmanager
def open_session(
    target: Target,
    cache: Cache | None,
    writer: Writer | None,
    device: str | None,
    *,
    rerun: bool = False,
    rehash: bool = False,
    peek: bool = False,
) -> Iterator[Session]:
    """Configure and plan a target and make its actions; the arguments are those of :class:`Resolver` and ``Memo``."""
    chosen = Device(device if device is not None else target.device)
    with ExitStack() as stack:
        with collection_paused():
            ready = stack.enter_context(configured(target))
            planned = plan_parents(ready.recipe, rows_per_chunk=target.rows_per_chunk)
            importance = importance_uses(planned.parents)
            memo = Memo(cache, trust_stat=target.cache.trust_stat, rehash=rehash)
            resolver = Resolver(cache, memo, device=chosen, writer=writer, rerun=rerun, peek=peek)
            actions = resolver.actions(planned.parents)
        yield Session(ready, planned, actions, resolver, memo, chosen, importance)
