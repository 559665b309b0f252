"""Building a target: the stages in order.

configure → plan → resolve (keys and lookups) → execute (what is missing) → link. Nothing before *execute* reads weight
payloads or imports torch, unless a user's own function does.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
import threading
import time
from typing import TYPE_CHECKING

from ninferbuild import standing
from ninferbuild.errors import CacheDamagedError, PayloadLostError
from ninferbuild.history import Explainer
from ninferbuild.job import BuildResult, Job
from ninferbuild.models.bulk import collection_paused
from ninferbuild.preview import BuildPlan, PlannedAction, parameters, plan
from ninferbuild.progress import Progress, QuietProgress
from ninferbuild.publish import behind_link, recover, require_regular
from ninferbuild.report import report_path
from ninferbuild.session import CacheInUse, open_cache, open_session

if TYPE_CHECKING:
    from ninferbuild.locked import LockGate
    from ninferbuild.target import Target

__all__ = ["BuildPlan", "BuildResult", "PlannedAction", "build", "parameters", "plan"]

ATTEMPTS = 3
"""How often a build begins with a damaged cache, and makes one damaged payload again, before it gives up."""


def build(
    target: Target,
    *,
    device: str | None = None,
    rerun: bool = False,
    link: bool = True,
    overwrite: bool = False,
    rehash: bool = False,
    keep_going: bool = False,
    jobs: int | None = None,
    explain: bool = False,
    gate: LockGate | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build a target: encode what the cache does not hold, and link the artifact unless it is up to date.

    Args:
        device: overrides the target's; None with a target that names none takes CUDA where there is one.
        rerun: run every action, whatever is cached.
        link: write the artifact; otherwise only the cache is filled. An output that is a symbolic link stays one: the
            file that it leads to is written.
        overwrite: replace an output that ninferbuild did not make.
        rehash: read sources again instead of trusting remembered digests.
        keep_going: after a failure, run what does not depend on it; nothing is linked then.
        jobs: actions at a time; None lets the device decide.
        explain: say why actions run, as explanations to ``progress`` and in the result.
        gate: holds the build to a lock: nothing is published that differs from it.
        progress: receives what happens.

    Raises:
        BytesDifferError: the build would differ, or differs, from the lock of ``gate``.
        NinferbuildError, ValueError, TypeError, OSError: with one line that names the parameter, file or option.
            Finished actions are kept, and nothing half-written has the output's name.
    """
    shown: Progress = progress if progress is not None else QuietProgress()
    target = replace(target, out=behind_link(target.out))
    for attempt in range(ATTEMPTS):
        try:
            return _build(
                target,
                device=device,
                rerun=rerun,
                link=link,
                overwrite=overwrite,
                rehash=rehash,
                keep_going=keep_going,
                jobs=jobs,
                explain=explain,
                gate=gate,
                shown=shown,
            )
        except CacheDamagedError as error:
            if attempt == ATTEMPTS - 1:
                raise
            shown.note(f"{error}; the cache is opened again without it")
    raise AssertionError("unreachable")


def _build(
    target: Target,
    *,
    device: str | None,
    rerun: bool,
    link: bool,
    overwrite: bool,
    rehash: bool,
    keep_going: bool,
    jobs: int | None,
    explain: bool,
    gate: LockGate | None,
    shown: Progress,
) -> BuildResult:
    """:func:`build`, once.

    Raises:
        CacheDamagedError: an environment of the cache is damaged; when it is opened again it is set aside.
    """
    began = time.perf_counter()
    cancel = threading.Event()
    with ExitStack() as stack:
        if link:
            for made in (target.out, report_path(target.out)):
                require_regular(made)
            if not target.out.exists():  # otherwise it may be up to date
                standing.require_writable(target.out)
            recover(target.out)  # finish an interrupted publication first
        seen = standing.state_of(target.out)
        in_use = stack.enter_context(CacheInUse())
        cache = in_use.watch(stack.enter_context(open_cache(target)))
        if link:  # before anything is encoded
            standing.refuse_foreign([target.out], overwrite=overwrite, previous=cache.last_linked(target.identity))
        # A cache that cannot be written still serves what it holds.
        writer = None if cache.read_only else stack.enter_context(cache.writer())
        session = stack.enter_context(open_session(target, cache, writer, device, rerun=rerun, rehash=rehash))
        if link:
            session.refuse_inputs(target.out)
        lease = None if cache.read_only else stack.enter_context(cache.lease(target.identity))
        with collection_paused():
            session.resolver.look_up(session.actions, hash_sources=True, cancel=cancel)
        if lease is not None:
            lease.add([action.record.key for action in session.actions if action.record is not None])
        for notice in (*cache.notices, *session.notes()):
            shown.note(notice)
        for kind, path in session.memo.distrusted.items():
            shown.note(f"{path} is on {kind}, whose file times are not trusted: sources are read again on every build")
        if gate is not None:
            gate.before_encoding(session, cache)
        job = Job(
            session,
            cache,
            writer,
            lease,
            shown,
            cancel,
            keep_going,
            jobs,
            began,
            gate,
            linking=link,
            overwrite=overwrite,
            seen=seen,
        )
        stack.callback(job.close)
        if explain:
            job.explained_execute(Explainer(cache, target.identity, rerun=rerun))
        else:
            job.execute()
        if not link:
            return job.finish_unlinked()
        losses: Counter[bytes] = Counter()
        while True:
            try:
                return job.link()
            except PayloadLostError as lost:
                losses[lost.key] += 1
                if losses[lost.key] == ATTEMPTS:  # making it again does not help
                    raise
                job.remake(lost)
