"""What a user's function does while it runs, seen from outside: the files it opens, and what makes it unrepeatable.

Python raises an *audit event* before it opens a file, starts a process or a thread, or uses a socket, whoever asks. One
hook for the process, installed at the first recording, notes the events of threads that are recording.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
import importlib
import os
import random
import stat
import sys
import threading
from types import FrameType
from typing import Any

import xxhash

from ninferbuild.digest import BLOCK_BYTES, BlockHasher
from ninferbuild.hazards import HAZARDOUS_DYNAMIC, NETWORK, RANDOM, Hazard
from ninferbuild.lazy_torch import is_loaded
from ninferbuild.opening import opened_by
from ninferbuild.origins import COMPATIBILITY_PACKAGES, OWN_PACKAGE, in_standard_library, is_within
from ninferbuild.reason import Reason

_TRUSTED = frozenset({"numpy", "torch", "triton", OWN_PACKAGE, *COMPATIBILITY_PACKAGES})
"""Packages whose own processes, threads and directory listings say nothing about a function's results."""

_SOURCE_READERS = ("linecache", "tokenize", "traceback", "importlib", "zipimport")
"""Modules that read the text of code, to import it or to show it in a message."""

_PSEUDO = ("/proc/", "/sys/")  # and devices; regular files lie below /dev/ too, in /dev/shm

Signature = tuple[int, int, int, int] | None
"""(inode, size, mtime_ns, ctime_ns) of a file when it was opened; None: it did not exist."""


class Recording:
    """The result of :func:`recording`; complete when the context is left.

    Attributes:
        accounted: source files whose bytes enter the key anyway; opening them is not noted.
    """

    def __init__(self, accounted: Collection[object] = ()):
        self.accounted = frozenset(map(id, accounted))
        self._keep = tuple(accounted)  # an id is an identity only as long as its object lives
        self._files: dict[str, Signature] = {}
        self._digests: dict[str, bytes] = {}
        self._reasons: dict[Reason, None] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that were opened for reading, existing or not, as given: relative ones stay relative."""
        return tuple(sorted(self._files))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why a result cannot be trusted a second time; empty for a function that can be repeated."""
        return tuple(self._reasons)

    @property
    def digests(self) -> Mapping[str, bytes]:
        """Digest of each of :attr:`paths`, taken when the recording ended."""
        return self._digests

    def refuse(self, name: str, hazard: Hazard) -> None:
        """Note that the result cannot be trusted a second time."""
        self._reasons[Reason(name, hazard.why, hazard.fix)] = None

    def opened(self, path: str) -> None:
        """Note a file; what it was at the first opening counts."""
        if path not in self._files:
            self._files[path] = _signature(path)

    def close(self) -> None:
        """Take the digest of every file, then compare the file with what it was when it was opened.

        In this order a change is seen even if it comes while the digest is taken. May be called again, after something
        else has used the files.
        """
        for path, before in self._files.items():
            if path not in self._digests:
                self._digests[path] = digest_dep(path)
            if _signature(path) != before:
                self.refuse(path, Hazard("it changed while the function ran", "build again"))


def _signature(path: str) -> Signature:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class _ThreadState(threading.local):
    recording: Recording | None = None
    busy = False


_thread = _ThreadState()
_install_lock = threading.Lock()
_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    recording = _thread.recording
    if recording is None or _thread.busy:
        return
    if event == "open":
        handler = _note_open
    elif event in HAZARDOUS_DYNAMIC or event.startswith("socket."):
        handler = _note_hazard
    else:
        return
    _thread.busy = True
    try:
        handler(recording, event, arguments)
    finally:
        _thread.busy = False


def _note_open(recording: Recording, event: str, arguments: tuple[Any, ...]) -> None:
    path, mode, flags = (*arguments, None, None)[:3]
    if isinstance(path, int):
        if path == 0:
            recording.refuse("standard input", Hazard("it cannot be read twice", "read a file"))
        return  # a descriptor that was opened before, and noted then
    if not _reads(mode, flags) or id(opened_by()) in recording.accounted:
        return
    text = os.fsdecode(path)
    if _user(sys._getframe(2), reading_source=True) is None:
        return
    absolute = os.path.abspath(text)
    if absolute.startswith(_PSEUDO) or (absolute.startswith("/dev/") and not os.path.isfile(absolute)):
        if text != os.devnull:
            recording.refuse(text, Hazard("it is no file but a view of this machine", "read a regular file"))
        return
    recording.opened(text)


def _reads(mode: object, flags: object) -> bool:
    """Whether a file is opened with content to read: neither truncated nor created nor for writing alone."""
    if isinstance(mode, str):
        return not set(mode) & {"w", "x"} and ("a" not in mode or "+" in mode)
    if isinstance(flags, int):
        fresh = flags & os.O_TRUNC or (flags & os.O_CREAT and flags & os.O_EXCL)
        return not fresh and flags & os.O_ACCMODE != os.O_WRONLY
    return True


def _note_hazard(recording: Recording, event: str, arguments: tuple[Any, ...]) -> None:
    user = _user(sys._getframe(2))
    if user is None or (user in _TRUSTED and not event.startswith("socket.")):
        return
    recording.refuse(event, HAZARDOUS_DYNAMIC.get(event, NETWORK))


def _user(frame: FrameType | None, *, reading_source: bool = False) -> str | None:
    """The top-level package, or module, that acts through the standard library; None when code is imported or shown."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        file = frame.f_code.co_filename
        if is_within(name, "importlib") or (reading_source and name.partition(".")[0] in _SOURCE_READERS):
            return None
        transparent = name == __name__ or file.startswith("<frozen ") or in_standard_library(os.path.abspath(file))
        if not transparent:
            if is_within(name, f"{OWN_PACKAGE}.user_modules"):
                return None  # the text of a user's module: its code enters the fingerprint
            return next((own for own in COMPATIBILITY_PACKAGES if is_within(name, own)), name.partition(".")[0])
        frame = frame.f_back
    return ""


def _install() -> None:
    """Install the hook for the life of the process: audit hooks cannot be removed."""
    global _installed
    with _install_lock:
        if _installed:
            return
        _installed = True
        sys.addaudithook(_hook)
        if sys.version_info < (3, 12):  # which starts threads without an event
            start = threading._start_new_thread  # type: ignore[attr-defined]

            def announce(*arguments: Any) -> Any:
                sys.audit("_thread.start_new_thread", *arguments)
                return start(*arguments)

            threading._start_new_thread = announce  # type: ignore[attr-defined]


@contextmanager
def watching(accounted: Collection[object] = ()) -> Iterator[Recording]:
    """Record what this thread does within the context. Nested recordings are seen by the innermost only.

    Args:
        accounted: source files (see :mod:`ninferbuild.opening`) whose bytes are accounted for elsewhere.
    """
    _install()
    found = Recording(accounted)
    generators = _random_states(load=True)
    before, _thread.recording = _thread.recording, found
    try:
        yield found
    finally:
        _thread.recording = None
        try:
            after = _random_states()
            for name in sorted(after):
                if after[name] != generators.get(name):
                    found.refuse(f"the global random numbers of {name}", RANDOM)
            found.close()
        finally:
            _thread.recording = before


def _random_states(*, load: bool = False) -> dict[str, object]:
    """The states of the global generators of the packages that are loaded.

    Args:
        load: load the generators of loaded packages, which make them on first use. A package that is loaded later has
            no state to compare with, which counts as a change.
    """
    states: dict[str, object] = {"random": random.getstate()}
    if load and "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    if (module := sys.modules.get("numpy.random")) is not None:
        kind, key, *rest = module.get_state()
        states["numpy"] = (kind, key.tobytes(), *rest)
    if is_loaded():
        module = importlib.import_module("torch")
        states["torch"] = module.random.get_rng_state().numpy().tobytes()
        if module.cuda.is_initialized():
            states["torch on the GPU"] = [state.numpy().tobytes() for state in module.cuda.get_rng_state_all()]
    return states


def digest_dep(path: str | os.PathLike[str]) -> bytes:
    """The digest of a file that a function opened, 16 bytes; what is missing or unreadable has a digest too.

    A relative path is relative to the current directory, as it was for the function. What is no regular file gets
    another digest each time: it never counts as unchanged.
    """
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            return os.urandom(16)
        with open(path, "rb", buffering=0) as file:
            hasher = BlockHasher()
            buffer = memoryview(bytearray(min(BLOCK_BYTES, max(1, os.fstat(file.fileno()).st_size))))
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
            return hasher.digest()
    except (FileNotFoundError, NotADirectoryError):
        return xxhash.xxh3_128_digest(b"no such file")
    except IsADirectoryError:
        return xxhash.xxh3_128_digest(b"a directory")
    except OSError as error:
        return xxhash.xxh3_128_digest(f"unreadable: {error.errno}".encode())
