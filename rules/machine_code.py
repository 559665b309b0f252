"""Machine code of compiled loops: kept in the user's cache directory, and loaded without the compiler.

Compiling takes numba, whose import alone takes as long as encoding a gigabyte. What it made is kept as an object file,
which llvmlite loads in a tenth of that time. Everything that an object file depends on is in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import ctypes
from dataclasses import dataclass
from importlib.metadata import version
import os
from pathlib import Path
import sys
import tempfile
from typing import Any

from ninferbuild.digest import DIGEST_BYTES, block_digest

LLVMText = Callable[[], tuple[str, str]]
"""Compiles a loop; the name of a function and LLVM's text of the module that defines it."""


class ForeignSymbolsError(Exception):
    """A module calls what is not in this process unless its compiler is: loading it would end the process."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loaded loop, called as numba calls its functions.

    Attributes:
        function: ``int function(result *, void *, argument...)``; not 0 is an error.
        engine: owns the code.
    """

    function: Callable[..., int]
    engine: Any

    def __call__(self, *arguments: int) -> int:
        """Run with addresses and numbers, without the interpreter lock; the result, uint32.

        Raises:
            RuntimeError: it failed.
        """
        result = ctypes.c_uint32()
        if self.function(ctypes.byref(result), None, *arguments):
            raise RuntimeError("a compiled loop failed")
        return result.value


def load(folder: Path, name: str, texts: Iterable[Path], compile: LLVMText, arguments: Sequence[Any]) -> Loop:
    """A loop from its object file in ``folder``; it is compiled, and kept there, if there is none.

    Args:
        name: what the loop is called among those that are made from the same texts.
        texts: source files that it is made from.
        arguments: types of ctypes, of its arguments.

    Raises:
        ForeignSymbolsError: it needs more than the processor.
        Exception: whatever the compiler raised.
    """
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=cpu,
        features=features,
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
    made_from = [block_digest(path.read_bytes()).hex() for path in texts]
    made_by = [version("numba"), version("llvmlite"), str(sys.implementation.cache_tag)]
    key = block_digest("\n".join([name, *made_from, *made_by, llvm.get_process_triple(), cpu, features]).encode())
    path = folder / f"{key.hex()}.{name}"
    kept = _read(path)
    if kept is None:
        name, text = compile()
        module = llvm.parse_assembly(text)
        _require_own(module)
        kept = name.encode() + b"\0" + machine.emit_object(module)
        _keep(path, kept)
    function, code = kept.split(b"\0", 1)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    return Loop(prototype(engine.get_function_address(function.decode())), engine)


def _require_own(module: Any) -> None:
    """Raises :class:`ForeignSymbolsError` unless a module defines all that it uses."""
    for used in (*module.functions, *module.global_variables):
        if used.is_declaration and not used.name.startswith("llvm."):
            raise ForeignSymbolsError(used.name)


def _read(path: Path) -> bytes | None:
    """What was kept in a file; None unless it is whole and nobody but the user could have written it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError:
        return None
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        return None
    kept = data[DIGEST_BYTES:]
    return kept if block_digest(kept) == data[:DIGEST_BYTES] else None


def _keep(path: Path, kept: bytes) -> None:
    """Keep bytes in a file of the user's own. Where that fails they are made again the next time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent)  # readable by the user alone
        try:
            with open(descriptor, "wb") as file:
                file.write(block_digest(kept) + kept)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except OSError:
        return
