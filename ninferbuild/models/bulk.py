"""Making very many objects at once."""

from __future__ import annotations

from collections.abc import Callable
import functools
import gc
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class collection_paused:
    """No cyclic garbage collection inside: ``with collection_paused():``, or a decorator of a function.

    A model with thousands of experts makes hundreds of thousands of objects that all stay alive. The collector would
    walk them again and again and find nothing, which takes as long as making them.
    """

    __slots__ = ("_resume",)

    def __enter__(self) -> None:
        self._resume = gc.isenabled()
        gc.disable()

    def __exit__(self, *_exception: object) -> None:
        if self._resume:
            gc.enable()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def paused(*args: P.args, **kwargs: P.kwargs) -> R:
            if not gc.isenabled():  # recipes call some of these for each of very many names
                return function(*args, **kwargs)
            with collection_paused():
                return function(*args, **kwargs)

        return paused
