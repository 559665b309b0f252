"""Errors that the command line turns into one line and an exit code.

Everything the specifications name as ``ValueError``, ``TypeError`` or an ``OSError`` subclass is raised as exactly
that; the classes here are for what only a build system knows about.
"""

from __future__ import annotations

from collections.abc import Sequence


class NinferbuildError(Exception):
    """A failure with a message for the user; the command line exits with :attr:`exit_code`."""

    exit_code = 1


class UsageError(NinferbuildError):
    """The request itself is wrong: an unknown key, option or target."""

    exit_code = 2


class DiffersError(NinferbuildError):
    """Two things that had to be equal are not."""

    exit_code = 3


class SourceChangedError(NinferbuildError):
    """A source file changed while it was read, or since its digest was remembered."""


class CacheError(NinferbuildError):
    """The cache cannot be used: unwritable, on a network file system, out of space."""


class CacheDamagedError(CacheError):
    """The engine met damage in a file of the cache that is open; opened again, the file is set aside."""


class Cancelled(Exception):
    """The build was interrupted; raised inside running actions."""


class PayloadLostError(NinferbuildError):
    """A cached payload failed its check; the action has to run again.

    ``key`` is the key of the action whose payload was dropped.
    """

    def __init__(self, key: bytes, reason: str):
        super().__init__(f"cached payload {key.hex()} is damaged ({reason}); it will be made again")
        self.key = key


class ActionsFailedError(NinferbuildError):
    """Several actions of a build that kept going failed; ``failures`` holds the error of each, in that order."""

    def __init__(self, failures: Sequence[BaseException]):
        self.summary = f"{len(failures)} actions failed, nothing is linked; finished actions are kept"
        super().__init__("\n".join([f"{self.summary}:", *(f"  {failure}" for failure in failures)]))
        self.failures = tuple(failures)
