"""The second half of a build: run the actions that have no cached result, then link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import os
from pathlib import Path
import threading
import time
from typing import TYPE_CHECKING, Any

from ninferbuild import graph as graphs
from ninferbuild import link as linker
from ninferbuild import platform_io, standing
from ninferbuild.action_graph import action_graph
from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.cache import ActionRecord, BuildRecord, Cache, Lease, OutOfSpaceError, Writer
from ninferbuild.errors import ActionsFailedError, CacheError, PayloadLostError
from ninferbuild.history import Explainer, Explanation, parents_table, text_lines
from ninferbuild.models.bulk import collection_paused
from ninferbuild.progress import Progress, action_line
from ninferbuild.publish import replace_file
from ninferbuild.report import encode_report, is_report, make_report, report_path
from ninferbuild.resolve import Action
from ninferbuild.session import Session
from ninferbuild.staging import Staging

if TYPE_CHECKING:
    from ninferbuild.execute import Executor
    from ninferbuild.locked import LockGate
    from ninferbuild.plan import Parent
    from ninferbuild.target import Target


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build did.

    Attributes:
        files: (path, bytes) of each file of the artifact, entry first; empty when nothing was linked.
        objects: objects of the artifact.
        total, executed, cached: encode actions; one shared with an earlier action counts as cached.
        source_bytes_read: bytes read from sources, whether to encode or to hash.
        up_to_date: the files were already what would have been written, and were left alone.
        explanations: why actions ran; None unless that was asked for.
    """

    target: Target
    out: Path | None
    artifact_id: str | None
    files: tuple[tuple[Path, int], ...]
    objects: int
    total: int
    executed: int
    cached: int
    source_bytes_read: int
    seconds: float
    up_to_date: bool
    explanations: tuple[Explanation, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        explained = self.explanations
        more = {} if explained is None else {"explain": [explanation.to_json() for explanation in explained]}
        return {
            "target": self.target.name,
            "out": str(self.out) if self.out is not None else None,
            "artifact_id": self.artifact_id,
            "files": [{"path": str(path), "bytes": size} for path, size in self.files],
            "actions": {"total": self.total, "executed": self.executed, "cached": self.cached},
            "source_bytes_read": self.source_bytes_read,
            "seconds": round(self.seconds, 3),
            **more,
        }


GPU_WORKERS = 4
"""Actions at a time on GPUs: enough to keep reading, copying and storing busy; more only contend."""

WORKERS_PER_GPU = 2
"""Where there are several, each has at least so many: one is prepared for while the other runs."""

LARGEST_BUFFER = 32 << 20
"""Bytes of the largest buffers that encoding takes and frees again and again."""


class Job:
    """The second half of a build: running actions and linking."""

    def __init__(
        self,
        session: Session,
        cache: Cache,
        writer: Writer | None,
        lease: Lease | None,
        progress: Progress,
        cancel: threading.Event,
        keep_going: bool,
        jobs: int | None,
        began: float,
        gate: LockGate | None = None,
        *,
        linking: bool = True,
        overwrite: bool = False,
        seen: standing.FileState | None = None,
    ):
        self.session = session
        self.cache = cache
        self.writer = writer
        self.lease = lease
        self.progress = progress
        self.cancel = cancel
        self.keep_going = keep_going
        self.jobs = jobs
        self.began = began
        self.gate = gate
        self.linking = linking
        self.overwrite = overwrite
        self.seen = seen  # the entry when the build began
        self.prepared_at = began
        self.executed: set[int] = set()
        self.source_bytes = 0
        self.explanations: tuple[Explanation, ...] | None = None
        self._executor: Executor | None = None
        self._contents: linker.Contents | None = None
        self._staging: Staging | None = None

    @property
    def target(self) -> Target:
        return self.session.configured.target

    def forget(self, key: bytes) -> None:
        """Make the action with this key run again."""
        for action in self.session.actions:
            if action.record is not None and action.record.key == key:
                action.record, action.state = None, "run"

    def remake(self, lost: PayloadLostError) -> None:
        """Make what the cache has lost run again. Damage seldom comes alone: every payload is looked at."""
        self.progress.note(str(lost))
        self.forget(lost.key)
        if self._staging is not None:  # linking has taken its temporaries
            self._staging.discard()
            self._staging = None
        if self._executor is not None:
            self._executor.staging = None
        with self.cache.reading() as view:
            for record in [action.record for action in self.session.actions if action.record is not None]:
                try:
                    for _ in view.blocks(record):
                        pass
                except PayloadLostError as another:
                    self.progress.note(str(another))
                    self.forget(another.key)
        self.execute()

    def explained_execute(self, explainer: Explainer) -> None:
        """:meth:`execute`, saying before why actions run, and afterwards what only reading their sources could tell."""
        missing = [action for action in self.session.actions if action.record is None]
        before = explainer.explain(missing)
        for line in text_lines(before) if before else ["no action runs: every payload is cached"]:
            self.progress.explanation(line)
        self.execute()
        after = explainer.settled(before, missing)
        for line in text_lines([new for old, new in zip(before, after, strict=True) if old != new]):
            self.progress.explanation(line)
        self.explanations = tuple(after)

    def execute(self) -> None:
        """Run every action that has no record."""
        missing = [action for action in self.session.actions if action.record is None]
        self.prepared_at = time.perf_counter()
        self._announce(missing)
        if missing:
            writer = self._require_writer(len(missing))
            self._run(missing, writer)
            writer.flush()
            assert self._executor is not None
            self.source_bytes += self._executor.source_bytes
            self._executor.source_bytes = 0
        if self.lease is not None:
            self.lease.add([action.record.key for action in self.session.actions if action.record is not None])

    def _announce(self, missing: Sequence[Action]) -> None:
        parents = self.session.planned.parents
        self.progress.start(len(parents), sum(action.bytes_to_read for action in missing))
        running = set(map(id, missing))
        for index, (parent, action) in enumerate(zip(parents, self.session.action_of(), strict=True), 1):
            if id(action) not in running:
                self.progress.action(index, len(parents), _line(parent), "cached")
                self.progress.done(index, "cached")

    def _require_writer(self, missing: int) -> Writer:
        if self.writer is None:
            raise CacheError(
                f"{self.cache.path}: the cache is read-only and {missing} actions have to run; make it writable, or "
                "set [cache] dir or NINFERBUILD_CACHE to another directory"
            )
        return self.writer

    def _run(self, missing: Sequence[Action], writer: Writer) -> None:
        executor = self._executor = self._executor or self._new_executor(writer)
        executor.expect(missing)
        self._require_space(missing)
        order = {id(parent): index for index, parent in enumerate(self.session.planned.parents, 1)}
        refused: dict[int, Exception] = {}
        for action in missing:
            if action.parent.rule is None:
                try:
                    self.session.auxiliaries[id(action)] = executor.prepare(action)
                except Exception as error:
                    if not self.keep_going:
                        raise
                    refused[id(action)] = error
            for reason in action.uncacheable:
                self.progress.note(f"{action.parent.names[0]}: {reason}")

        def run(action: Action) -> None:
            index = order[id(action.parent)]
            self.progress.action(index, len(order), _line(action.parent), "run")
            if id(action) in refused:
                raise refused[id(action)]
            executor.run(action)
            self.executed.add(id(action))
            self.progress.done(index, "run")
            for parent in action.parents[1:]:
                self.progress.action(order[id(parent)], len(order), _line(parent), "cached")
                self.progress.done(order[id(parent)], "cached")

        # What the directory cannot hold is refused before anything is encoded.
        self._contents = self.session.contents()
        if self.linking and executor.staging is None:
            executor.staging = self._stage(self._contents)
        graph = action_graph(self.session, self._contents, run)
        try:
            graphs.run(graph, workers=self._workers(), cancel=self.cancel, keep_going=self.keep_going)
        except graphs.Failures as failed:
            writer.flush()
            self._raise(failed)

    def _stage(self, contents: linker.Contents) -> Staging:
        """Temporaries of the output; digests change nothing about where its bytes lie."""
        digests = dict.fromkeys(self.session.configured.sources.opened, bytes(16))
        layout = linker.lay_out(contents, self.target.out.name, payload_digests=None, source_digests=digests)
        self.session.refuse_inputs(self.target.out, layout)
        standing.require_writable(self.target.out)
        previous = self.cache.last_linked(self.target.identity)
        standing.refuse_foreign(layout.paths(self.target.out), overwrite=self.overwrite, previous=previous)
        self._staging = Staging(layout, self.target.out)
        return self._staging

    def close(self) -> None:
        """End threads, and remove temporaries of an output that was not published."""
        if self._executor is not None:
            self._executor.close()
        if self._staging is not None:
            self._staging.discard()

    def _raise(self, failed: graphs.Failures) -> None:
        errors = [error for _, error in failed.failures]
        if len(errors) == 1 or not self.keep_going:
            raise errors[0]
        raise ActionsFailedError(errors) from errors[0]

    def _new_executor(self, writer: Writer) -> Executor:
        # An interrupt while torch loads would be lost: its extensions import numpy, and drop what that raises.
        with platform_io.interrupts_held():
            from ninferbuild.execute import Executor

        self.progress.note(f"encoding on {self.session.device}")
        platform_io.keep_freed_memory(LARGEST_BUFFER)
        return Executor(
            cache=self.cache,
            writer=writer,
            resolver=self.session.resolver,
            memo=self.session.memo,
            device=self.session.device,
            target=self.target.identity,
            advance=self.progress.advance,
            cancel=self.cancel,
            note=self.progress.note,
            threads=max(1, (os.cpu_count() or 1) // self._workers()),
        )

    def _workers(self) -> int:
        if self.jobs is not None:
            return self.jobs
        if self.target.workers is not None:
            return self.target.workers
        devices = self.session.device.all
        if devices[0].type == "cuda":
            return max(GPU_WORKERS, WORKERS_PER_GPU * len(devices))
        return os.cpu_count() or 1

    def _require_space(self, missing: Sequence[Action]) -> None:
        """Compare what has to be written with the free space before anything is encoded."""
        from ninferbuild.cache.filesystem import existing_parent, free_bytes

        fresh = sum(_payload_bytes(action.parent) for action in missing)
        linked = sum(_payload_bytes(parent) for parent in self.session.planned.parents) if self.linking else 0
        directory, out = self.cache.path, existing_parent(self.target.out.parent)
        same = os.stat(directory).st_dev == os.stat(out).st_dev
        free = free_bytes(directory)
        needed = fresh + (linked if same else 0)
        if free < needed:
            what = "to cache and to link" if same else "to cache"
            raise CacheError(
                f"{directory}: {needed} bytes are needed {what} and {free} are free; make room, or set [cache] dir or "
                "NINFERBUILD_CACHE to another disk"
            )
        if self.linking and not same:
            linker.require_space(out, linked)

    def records(self) -> list[ActionRecord]:
        """The record of each parent's action, in parent order."""
        found = []
        for action in self.session.action_of():
            assert action.record is not None
            found.append(action.record)
        return found

    def link(self) -> BuildResult:
        """Link, unless the output is up to date."""
        target = self.target
        self.session.require_unchanged()
        with collection_paused():
            contents, records = self._contents or self.session.contents(), self.records()
            digests = linker.payload_digests(contents, records)
            layout = self._lay_out(contents, digests)
        last = self.cache.last_linked(target.identity)
        published = last.files if last is not None else ()
        if linker.up_to_date(layout, target.out, published, digests) and (
            self.gate is None or self.gate.holds(layout.paths(target.out))
        ):
            if not is_report(report_path(target.out), artifact_id=layout.artifact_id.hex()):
                self._write_report(contents, records, layout)
            self.record(layout, records)
            return self.result(layout, True)
        self.session.refuse_inputs(target.out, layout)
        standing.require_writable(target.out)
        report = encode_report(self._report(contents, records, layout))
        accept = self.gate.accept if self.gate is not None else None
        written = linker.write(
            layout,
            contents,
            records,
            self.cache,
            target.out,
            report,
            overwrite=self.overwrite,
            accept=accept,
            staging=self._staging,
            previous=last,
            seen=self.seen,
        )
        self.seen = standing.state_of(target.out)
        if written.meanwhile:
            self.progress.note(f"{target.out}: replaced an output that another process wrote meanwhile")
        if written.refused:
            self.progress.note(
                f"{written.refused} blocks of the previous artifact are not what it was published with; they were not "
                "used again"
            )
        self.record(layout, records)
        return self.result(layout, False)

    def finish_unlinked(self) -> BuildResult:
        """End a build that only fills the cache."""
        if self.gate is not None:
            contents = self._contents or self.session.contents()
            self._lay_out(contents, linker.payload_digests(contents, self.records()))
        self.record(None, ())
        return self.result(None, False)

    def _lay_out(self, contents: linker.Contents, digests: Sequence[bytes]) -> linker.Layout:
        """The layout of what was built; a lock is compared with it."""
        layout = linker.lay_out(
            contents,
            self.target.out.name,
            payload_digests=digests,
            source_digests=self.session.source_digests(),
        )
        if self.gate is not None:
            self.gate.before_linking(self.session, self.cache, contents, layout)
        return layout

    def _report(
        self, contents: linker.Contents, records: Sequence[ActionRecord], layout: linker.Layout
    ) -> dict[str, Any]:
        first_seen: set[int] = set()
        executed = []
        for action in self.session.action_of():
            executed.append(id(action) in self.executed and id(action) not in first_seen)
            first_seen.add(id(action))
        return make_report(
            self.session.configured,
            self.session.planned.parents,
            records,
            executed,
            layout,
            uses=len(contents.uses),
            device=str(self.session.device) if self._executor is not None else None,
            preparation_seconds=self.prepared_at - self.began,
            seconds=time.perf_counter() - self.began,
        )

    def _write_report(self, contents: linker.Contents, records: Sequence[ActionRecord], layout: linker.Layout) -> None:
        replace_file(report_path(self.target.out), encode_report(self._report(contents, records, layout)))

    def record(self, layout: linker.Layout | None, records: Sequence[ActionRecord]) -> None:
        """Remember this build: what pruning must keep and what the next one is compared with."""
        files = linker.stats_of(layout.paths(self.target.out)) if layout is not None else ()
        if self.cache.read_only:
            return
        build = BuildRecord(
            target=self.target.identity,
            keys=tuple(record.key for record in (records or self.records())),
            artifact_id=layout.artifact_id.hex() if layout is not None else "",
            time=time.time(),
            out=os.path.realpath(self.target.out) if layout is not None else "",
            files=files,
            extra=parents_table(self.session.planned.parents),
        )
        try:
            self.cache.record_build(build)
        except OutOfSpaceError as error:
            self.progress.note(f"this build is done but not remembered: {error}")

    def result(self, layout: linker.Layout | None, up_to_date: bool) -> BuildResult:
        total = len(self.session.planned.parents)
        files: tuple[tuple[Path, int], ...] = ()
        if layout is not None:
            files = tuple(zip(layout.paths(self.target.out), layout.lengths(), strict=True))
        return BuildResult(
            target=self.target,
            out=self.target.out if layout is not None else None,
            artifact_id=layout.artifact_id.hex() if layout is not None else None,
            files=files,
            objects=len(layout.directory.objects) if layout is not None else 0,
            total=total,
            executed=len(self.executed),
            cached=total - len(self.executed),
            source_bytes_read=self.source_bytes + self.session.resolver.hashed_bytes,
            seconds=time.perf_counter() - self.began,
            up_to_date=up_to_date,
            explanations=self.explanations,
        )


def _payload_bytes(parent: Parent) -> int:
    spec = parent.target
    return encoded_size(spec.layout, spec.format, spec.shape, spec.divisors)


def _line(parent: Parent) -> str:
    return action_line(parent.names, parent.target.format, parent.target.shape)
