"""Running actions: encode on the device, commit to the cache.

Each worker thread takes one action from beginning to end, so reading, arithmetic and writing of different actions
overlap, and no action's memory grows with its parent. The cache's writer thread commits blocks before the record that
names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
import threading
import time
from typing import TYPE_CHECKING

import torch

from ninferbuild import user_actions
from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.artifact.layouts import planes as planes_of
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.block_memory import BlockMemory
from ninferbuild.cache import ActionRecord, AuxiliaryRow, Cache, Dep, Writer
from ninferbuild.device import Device
from ninferbuild.encode import CHUNK_BYTES, CUDA_CHUNK_BYTES, PayloadSink, encode
from ninferbuild.errors import Cancelled, NinferbuildError, SourceChangedError
from ninferbuild.fingerprint import Reason, Recording, recording
from ninferbuild.lanes import Lane, lane_for
from ninferbuild.memo import Memo
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PreparedMethod
from ninferbuild.plan import prepare_user_method
from ninferbuild.resolve import Action, Resolver
from ninferbuild.rules import compiled, grouped_search
from ninferbuild.spill import SpillWriter
from ninferbuild.user_errors import message_of
from ninferbuild.warming import warm_up

if TYPE_CHECKING:
    from ninferbuild.plan import Parent
    from ninferbuild.staging import Staging

DELIVERY_THREADS = 4
"""Threads that hash finished blocks and hand them on."""

SMALLEST_CHUNK = 256 << 10
"""Chunks are not made smaller than this many bytes when the device runs out of memory."""


@dataclass
class PreparedUser:
    """A user's method that has been called and still has to produce."""

    method: PreparedMethod
    seen: Recording
    lookups: user_actions.Lookups


@dataclass
class Executor:
    """Runs the actions of one build in worker threads.

    Attributes:
        advance: told source bytes as they are encoded.
        note: told what the user should know.
        target: identity of the target, kept with each result.
        threads: torch's threads within one action.
        staging: the output's temporaries, filled while payloads are made; None when nothing will be linked.
    """

    cache: Cache
    writer: Writer
    resolver: Resolver
    memo: Memo
    device: Device
    target: str
    advance: Callable[[int], None]
    cancel: threading.Event
    note: Callable[[str], None]
    threads: int = 1
    staging: Staging | None = None
    source_bytes: int = 0
    executed: set[bytes] = field(default_factory=set)
    seconds: dict[bytes, float] = field(default_factory=dict)
    _delivery: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(DELIVERY_THREADS, thread_name_prefix="deliver")
    )
    _memory: BlockMemory = field(default_factory=BlockMemory)
    _thread: threading.local = field(default_factory=threading.local)
    _users: dict[int, PreparedUser] = field(default_factory=dict)
    _user_lock: threading.Lock = field(default_factory=threading.Lock)
    _count_lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: list[Lane] = field(default_factory=list)
    _warming: list[threading.Thread] = field(default_factory=list)

    def close(self) -> None:
        """End the executor's threads, and let go of its memory."""
        self._delivery.shutdown()
        for thread in self._warming:
            thread.join()
        for lane in self._opened:
            lane.close()

    def prepare(self, action: Action) -> Mapping[AuxiliaryKey, AuxiliaryValue]:
        """Call the user's method of an action that will run; its auxiliaries.

        Raises:
            ValueError: the method refused its parent.
        """
        parent = action.parent
        lookups = user_actions.Lookups(parent)
        device = str(self.device())
        watched = replace(parent, request=lookups.watch(parent.request, device))
        with self._watching(action) as seen:
            prepared = prepare_user_method(watched, device)
        self._users[id(action)] = PreparedUser(prepared, seen, lookups)
        return prepared.auxiliaries

    def expect(self, actions: Sequence[Action]) -> None:
        """What will be run, so that what is worth preparing is prepared meanwhile."""
        if self.device().type != "cpu":
            self._warming += warm_up(self.device.all, (action.parent for action in actions))
            return
        elements = dict.fromkeys(compiled.Work, 0)
        for action in actions:
            parent = action.parent
            if parent.target.format in QUANT_FORMATS:
                work = compiled.Work.SEARCH if parent.rule is grouped_search else compiled.Work.ENCODE
                elements[work] += prod(parent.target.shape)
        for work, count in elements.items():
            if count >= work.value:
                compiled.load(work)

    def run(self, action: Action) -> None:
        """Make one payload and commit it.

        Raises:
            ValueError: the source or the method refused; the message names the parameters.
            SourceChangedError: a file changed while it was read, or since its digest was remembered.
            CacheError: the cache cannot take the payload.
        """
        # Actions run side by side: one thread each is worth more than many threads for one action at a time.
        torch.set_num_threads(self.threads)
        started, began = self.memo.now_ns(), time.perf_counter()
        try:
            record = self._user(action) if action.parent.rule is None else self._built_in(action, started)
        except (NinferbuildError, Cancelled, OSError, MemoryError):
            raise
        except Exception as error:  # a user's function may raise anything
            raise _producer_error(action.parent, error) from error
        record = replace_seconds(record, time.perf_counter() - began)
        self.writer.action(record, self.resolver.probe(action))
        action.record = record
        if self.staging is not None:
            self.staging.mark([parent.target.id for parent in action.parents])
        with self._count_lock:
            self.source_bytes += record.source_bytes
            self.executed.add(record.key)
            self.seconds[record.key] = record.seconds

    def _built_in(self, action: Action, started_ns: int) -> ActionRecord:
        deps: tuple[Dep, ...] = ()
        parent = action.parent
        if parent.rule is not None and parent.checked is not None:
            parent.rule.require_sound(parent.checked)
        if action.user:
            with self._watching(action) as seen:
                blocks, digest, digests, count = self._encode(action)
            deps = _file_deps(seen)
            self._refuse(action, seen.reasons)
        else:
            blocks, digest, digests, count = self._encode(action)
        self.memo.check_unchanged(action.stored_regions())
        self._compare(action, digests)
        text = action.settle(digests)
        rows = self.resolver.keepable(action, digests, started_ns)
        if rows:
            self.writer.remember(rows)
        return self._record(action, text, blocks, digest, count, deps=deps)

    def _encode(self, action: Action) -> tuple[tuple[tuple[bytes, int], ...], bytes, list[bytes], int]:
        parent = action.parent
        target = parent.request.target
        chunk = CUDA_CHUNK_BYTES if self.device().type == "cuda" else CHUNK_BYTES
        if parent.request.rows_per_chunk != 512 and len(target.shape) == 2:
            chunk = max(1, parent.request.rows_per_chunk * target.shape[1] * 2)
        while True:
            sink = self._sink(action)
            try:
                digests, count = encode(
                    parent, sink, self._lane(), chunk_bytes=chunk, cancel=self.cancel, advance=self.advance
                )
            except torch.cuda.OutOfMemoryError as error:
                sink.abandon()
                chunk //= 4
                torch.cuda.empty_cache()
                if chunk < SMALLEST_CHUNK:
                    raise NinferbuildError(
                        f"{_names(parent)}: the GPU is out of memory even for small chunks; free some of it, or "
                        "build with --device cpu"
                    ) from error
            except BaseException:
                sink.abandon()
                raise
            return *sink.finish(), digests, count

    @contextmanager
    def _watching(self, action: Action) -> Iterator[Recording]:
        """Run a user's function inside: alone, under settled torch, with what it does recorded."""
        files = [span.file for region in action.stored_regions() for span in region.spans]
        with self._user_lock, user_actions.settled_torch(), recording(action.fingerprints, accounted=files) as seen:
            yield seen

    def _refuse(self, action: Action, reasons: Sequence[Reason]) -> None:
        """Keep the result of a run that cannot be repeated from being used again, and say so."""
        fresh = [reason for reason in reasons if reason not in action.uncacheable]
        action.refuse(fresh)
        for reason in fresh:
            self.note(f"{action.parent.names[0]}: {reason}")

    def _lane(self) -> Lane:
        """This thread's way to a device, ready for an action; threads take turns among the devices."""
        lane: Lane | None = getattr(self._thread, "lane", None)
        if lane is None:
            with self._count_lock:
                device = self.device.all[len(self._opened) % len(self.device.all)]
                lane = self._thread.lane = lane_for(device)
                self._opened.append(lane)
        lane.reset()
        return lane

    def _sink(self, action: Action) -> PayloadSink:
        """Where the bytes of an action's planes go: to the cache, and to the output's temporaries if there are any."""
        target = action.parent.request.target
        planes = planes_of(target.layout, target.format, target.shape, target.divisors)
        staging = self.staging
        if staging is None:
            return PayloadSink(planes, lambda offset, data: self.writer.block(data), self._delivery, self._memory)
        objects = [parent.target.id for parent in action.parents]

        def put(offset: int, data: memoryview) -> bytes:
            staged = staging.write(objects, offset, data)
            digest = self.writer.block(data)
            staged.result()
            return digest

        return PayloadSink(planes, put, self._delivery, self._memory)

    def _user(self, action: Action) -> ActionRecord:
        if any(digest is None for digest in action.digests):
            self.resolver.hash(action, self.cancel)
        prepared = self._users.pop(id(action), None)
        if prepared is None:
            self.prepare(action)
            prepared = self._users.pop(id(action))
        target = action.parent.request.target
        with SpillWriter(target, self.cache.path) as spill:
            with self._watching(action) as seen:
                prepared.method.produce(TensorOutput(spill, target.id))
            sink = self._sink(action)
            spill.feed(sink)
        blocks, digest = sink.finish()
        self.memo.check_unchanged(action.stored_regions())
        prepared.seen.close()  # what preparing opened may have been read, or mapped, until now
        deps = (*prepared.lookups.deps(), *_file_deps(prepared.seen, seen))
        self.advance(action.source_bytes)
        rows = [
            AuxiliaryRow(input=i, use=u, role=role, format=value.format, shape=value.shape, data=value.data)
            for (i, u, role), value in user_actions.positions(prepared.method.auxiliaries, action.parent.request)
        ]
        self._refuse(action, (*prepared.seen.reasons, *seen.reasons))
        text = action.settle([known for known in action.digests if known is not None])
        return self._record(action, text, blocks, digest, action.source_bytes, tuple(rows), deps)

    def _compare(self, action: Action, digests: list[bytes]) -> None:
        changed = [
            key
            for key, before, now in zip(action.memo_keys, action.digests, digests, strict=True)
            if before is not None and before != now
        ]
        if changed:
            self.cache.forget([key for key in changed if key is not None])
            raise SourceChangedError(
                f"{_names(action.parent)}: its source changed without a change of its file times; "
                "what was remembered about it is dropped, build again"
            )

    def _record(
        self,
        action: Action,
        text: str,
        blocks: tuple[tuple[bytes, int], ...],
        digest: bytes,
        count: int,
        auxiliaries: tuple[AuxiliaryRow, ...] = (),
        deps: tuple[Dep, ...] = (),
    ) -> ActionRecord:
        assert action.key is not None
        return ActionRecord(
            key=action.key,
            manifest=text,
            kind="encode",
            method=action.parent.method_name,
            format=action.parent.request.target.format,
            blocks=blocks,
            length=sum(length for _, length in blocks),
            digest=digest,
            auxiliaries=auxiliaries,
            source_bytes=count,
            made_by=self.target,
            deps=deps,
        )


def replace_seconds(record: ActionRecord, seconds: float) -> ActionRecord:
    """The record with the time that its action took."""
    import msgspec

    return msgspec.structs.replace(record, seconds=seconds)


def _file_deps(*finished: Recording) -> tuple[Dep, ...]:
    found: dict[str, bytes] = {}
    for seen in finished:
        found |= seen.digests
    return tuple(Dep(path=path, digest=digest) for path, digest in sorted(found.items()))


def _names(parent: Parent) -> str:
    names = parent.names
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _producer_error(parent: Parent, error: Exception) -> ValueError:
    target = parent.request.target
    shown = ", ".join(parent.names[:4])
    return ValueError(f"{shown} [{parent.method_name}/{target.format}]: {message_of(error)}")
