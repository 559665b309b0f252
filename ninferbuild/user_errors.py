"""What an error says, and where in a user's own code it came from, for messages of one line.

Exceptions pass through unchanged, so that callers of the Python interface catch what was raised; only what is shown to
a user is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from types import CodeType, TracebackType

from ninferbuild.user_modules import SourceOnlyLoader


def message_of(error: BaseException) -> str:
    """The message of ``error``; with the name of its class where the message alone says too little."""
    message = str(error)
    if message and not isinstance(error, LookupError | ArithmeticError | AssertionError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def place_of(error: BaseException) -> str | None:
    """``file:line`` of the statement of a user's recipe, or of a module beside it, that led to ``error``.

    The innermost such statement of the error itself counts, else that of the error it was raised from. None when no
    code of a user took part.
    """
    for raised in _chain(error):
        if isinstance(raised, SyntaxError) and raised.filename:
            return _shown(raised.filename, raised.lineno or 1)
        found = None
        for code, line, namespace_loader in _frames(raised.__traceback__):
            if isinstance(namespace_loader, SourceOnlyLoader):
                found = _shown(code.co_filename, line)
        if found is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int, object]]:
    while traceback is not None:
        frame = traceback.tb_frame
        yield frame.f_code, traceback.tb_lineno, frame.f_globals.get("__loader__")
        traceback = traceback.tb_next


def _shown(file: str, line: int) -> str:
    relative = os.path.relpath(file)
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"
