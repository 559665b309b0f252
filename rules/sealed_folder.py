"""Folders of machine code that a compiler keeps for itself, with a digest of all that is in them.

The compiler believes what it finds. A folder is therefore emptied before it is used unless it is what it was when it
was last sealed: damaged code is made again, and never run.
"""

from __future__ import annotations

from contextlib import suppress
import os
from pathlib import Path
import shutil

from ninferbuild.digest import block_digest, combine

SEAL = "seal"


def discard_unless_sealed(folder: Path) -> None:
    """Empty ``folder`` unless it is as it was sealed. What cannot be removed is left to the compiler's own errors."""
    with suppress(OSError):
        if (folder / SEAL).read_bytes() == _digest(folder):
            return
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with suppress(OSError):
            folder.unlink()


def seal(folder: Path) -> None:
    """Note what ``folder`` holds now. Where that fails it is made again the next time."""
    made = folder / f"{SEAL}.{os.getpid()}"
    with suppress(OSError):
        made.write_bytes(_digest(folder))
        os.replace(made, folder / SEAL)


def _digest(folder: Path) -> bytes:
    """Digest of the names and bytes of all files but seals. Raises ``OSError`` when one cannot be read."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith(SEAL))
    parts = [part for path in files for part in (os.fsencode(path.relative_to(folder)), path.read_bytes())]
    return combine(map(block_digest, parts))
