"""Letting go of mapped pages after use, so that reading a large cache does not fill the process's resident set."""

from __future__ import annotations

import ctypes
import mmap
import sys

_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_SIMPLE = 0  # PyBUF_SIMPLE


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of the stable C interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def drop(view: memoryview) -> None:
    """Tell the kernel that the whole pages under ``view``, which lie in a read-only file map, are not needed now.

    Their content is unharmed: the next access maps them again.
    """
    if _libc is None or sys.implementation.name != "cpython":
        return
    buffer = _Buffer()
    get, put = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get(ctypes.py_object(view), ctypes.byref(buffer), _SIMPLE)
    try:
        page = mmap.PAGESIZE
        begin = -(-buffer.buf // page) * page
        end = (buffer.buf + buffer.len) // page * page
        if begin < end:
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)
    finally:
        put(ctypes.byref(buffer))
