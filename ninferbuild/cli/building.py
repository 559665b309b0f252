"""Building targets one after the other, and saying what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ninferbuild.cli.output import Output
from ninferbuild.errors import DiffersError, UsageError
from ninferbuild.target import Target

if TYPE_CHECKING:
    from ninferbuild.build import BuildResult
    from ninferbuild.locked import LockGate


def build_targets(
    output: Output,
    targets: Sequence[Target],
    *,
    device: str | None = None,
    overwrite: bool = False,
    rerun: bool = False,
    rehash: bool = False,
    link: bool = True,
    keep_going: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    explain: bool = False,
    locked: bool = False,
) -> int:
    """Build ``targets``, or plan them if ``dry_run``; the exit code.

    The first failure ends it, unless ``keep_going``: then the other targets are built and the code is that of the
    first failure.

    Raises:
        UsageError: ``locked``, and a target is in no lock; nothing is built then.
    """
    if dry_run and locked:
        raise UsageError("--locked holds a build to its lock; --dry-run builds nothing")
    if dry_run:
        from ninferbuild.cli.planning import plan_targets

        plan_targets(output, targets, device=device, rehash=rehash, explain=explain)
        return 0
    from ninferbuild.build import build

    gates = _gates(targets) if locked else {}
    code = 0
    for target in targets:
        progress = output.progress()
        if len(targets) > 1:
            output.note(f"building {target.name}")
        try:
            result = build(
                target,
                device=device,
                rerun=rerun,
                link=link,
                overwrite=overwrite,
                rehash=rehash,
                keep_going=keep_going,
                jobs=jobs,
                explain=explain,
                gate=gates.get(target.name),
                progress=progress,
            )
        except Exception as error:
            progress.close()
            _show_differences(output, target, error)
            if not keep_going or target is targets[-1]:
                raise
            from ninferbuild.cli.run import exit_code, show_error

            show_error(error)
            code = code or exit_code(error)
            continue
        finally:
            progress.close()
        _report(output, target, result)
    return code


def _gates(targets: Sequence[Target]) -> dict[str, LockGate]:
    from ninferbuild.lock import locked_target
    from ninferbuild.locked import LockGate
    from ninferbuild.locking import lock_of

    gates = {}
    for target in targets:
        path = lock_of(target)
        gates[target.name] = LockGate(locked_target(path, target.name), path)
    return gates


def _show_differences(output: Output, target: Target, error: Exception) -> None:
    if not isinstance(error, DiffersError):
        return
    from ninferbuild.cli.differing import show_differences
    from ninferbuild.differences import BytesDifferError

    if isinstance(error, BytesDifferError):
        if output.as_json:
            found = [difference.to_json() for difference in error.differences]
            output.json_line({"target": target.name, "error": str(error), "differences": found})
        else:
            show_differences(output, error.differences)


def _report(output: Output, target: Target, result: BuildResult) -> None:
    if output.as_json:
        output.json_line(result.to_json())
        return
    output.note(f"{result.total} actions: {result.executed} executed, {result.cached} cached")
    if result.up_to_date:
        output.report(f"{target.out} is up to date, {result.seconds:.1f}s")
    elif result.out is None:
        output.report(f"{target.name}: all payloads are cached, nothing linked, {result.seconds:.1f}s")
    else:
        output.report(f"wrote {result.out}: {result.objects} objects, {len(result.files)} files, {result.seconds:.1f}s")
