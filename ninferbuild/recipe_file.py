"""Loading the functions that configure a recipe: official ones by name, a user's from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
import importlib
import importlib.util
import inspect
from pathlib import Path
import sys
from types import ModuleType
from typing import Any

from ninferbuild import compat, lazy_torch, user_modules
from ninferbuild.errors import NinferbuildError
from ninferbuild.target_schema import OptionError

MODULE_NAME = "ninfer_user_recipe"
"""The import name of a recipe file while it is loaded; a second file replaces the first."""

DEFAULT_FUNCTION = "configure"


class UnknownRecipeError(OptionError):
    """What was given as a recipe is neither an official name nor a Python file."""


class MissingFunctionError(NinferbuildError, AttributeError):
    """A recipe file does not define the function that was asked for."""


@dataclass(frozen=True, slots=True)
class RecipeFunction:
    """A configuring function ``f(model, recipe, sources)`` and how reports refer to it.

    Attributes:
        function: the callable as the recipe defines it. Call the :class:`RecipeFunction` instead where possible: it
            sets up :func:`user_code`.
        reference: an official name, or ``file.py:function`` with the file's base name only.
        file: the resolved recipe file; None for an official recipe.
    """

    function: Callable[[Any, Any, Any], object]
    reference: str
    file: Path | None = None

    def __call__(self, model: Any, recipe: Any, sources: Any) -> None:
        if self.file is not None:
            _require_arguments(self.function, self.file, self.reference.rpartition(":")[2])
        with user_code():
            self.function(model, recipe, sources)


@contextmanager
def user_code() -> Iterator[None]:
    """The import environment of user code; enter it around every call of a function that a recipe file defined.

    Compatibility names resolve (:mod:`ninferbuild.compat`), a user's modules come from source text
    (:mod:`ninferbuild.user_modules`), and torch is loaded on first use (:mod:`ninferbuild.lazy_torch`).
    """
    with ExitStack() as stack:
        # The finder entered last is asked first: torch, then the compatibility names, then everybody's modules.
        stack.enter_context(user_modules.source_only())
        stack.enter_context(compat.active())
        stack.enter_context(lazy_torch.deferred())
        yield


def split_reference(value: str) -> tuple[str, str]:
    """``FILE[:function]`` → (file, function): the last colon splits when an identifier follows it."""
    file, colon, function = value.rpartition(":")
    if colon and file and function.isidentifier():
        return file, function
    return value, DEFAULT_FUNCTION


def load(value: str, base: Path | None = None) -> RecipeFunction:
    """The recipe function that ``value`` names.

    Args:
        value: an official recipe's name, or ``FILE.py`` or ``FILE.py:function`` (default ``configure``).
        base: directory that a relative file is relative to; default: the current one.

    Raises:
        ValueError: neither an official name nor a Python file.
        FileNotFoundError: the file does not exist.
        AttributeError: the file defines no such function.
        TypeError: what it defines is not callable.

    Whatever the file raises while it is executed propagates unchanged.
    """
    official = _official_recipes()
    if value in official:
        return RecipeFunction(official[value], value)
    file, name = split_reference(value)
    path = Path(base or Path.cwd(), Path(file).expanduser()).resolve()
    if path.suffix != ".py":
        close = get_close_matches(value, official, 1)
        hint = f"did you mean {close[0]}?" if close else f"official recipes: {', '.join(official)}"
        raise UnknownRecipeError(
            f"cannot load recipe file {file!r}: it is not a .py file and not an official recipe; {hint}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"recipe file {path} does not exist" + (" (it is a directory)" if path.exists() else "")
        )
    module = _execute(path)
    reference = f"{path.name}:{name}"
    try:
        function = getattr(module, name)
    except AttributeError:
        raise MissingFunctionError(
            f"recipe file {path} defines no function {name!r}; use FILE:function to name one"
        ) from None
    if not callable(function):
        raise TypeError(f"{reference} must be callable with (model, recipe, sources), not {type(function).__name__}")
    return RecipeFunction(function, reference, path)


def _require_arguments(function: Callable[..., object], path: Path, name: str) -> None:
    """Raises ``TypeError`` when the function does not take what it is called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of what is not written in Python none is known
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise TypeError(f"{path}: {name}{signature} must take (model, recipe, sources): {error}") from None


def _official_recipes() -> Mapping[str, Callable[[Any, Any, Any], object]]:
    return importlib.import_module("ninferbuild.recipes").RECIPES  # type: ignore[no-any-return]


def _execute(path: Path) -> ModuleType:
    """Run a recipe file as the module :data:`MODULE_NAME`; its siblings can be imported meanwhile."""
    importlib.invalidate_caches()  # a sibling written a moment ago must be found
    _evict_namesakes(path.parent)
    spec = importlib.util.spec_from_file_location(
        MODULE_NAME, path, loader=user_modules.SourceOnlyLoader(MODULE_NAME, str(path))
    )
    if spec is None or spec.loader is None:
        raise ValueError(f"cannot load recipe file {path}")
    module = importlib.util.module_from_spec(spec)
    user_modules.remember(MODULE_NAME)
    sys.modules[MODULE_NAME] = module
    directory = str(path.parent)
    with user_code():
        sys.path.insert(0, directory)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(MODULE_NAME, None)
            raise
        finally:
            if directory in sys.path:
                sys.path.remove(directory)
    return module


def _evict_namesakes(directory: Path) -> None:
    """Forget user modules of other directories that would hide a sibling of the recipe file."""
    for name in user_modules.imported():
        if "." in name or name == MODULE_NAME:
            continue
        sibling = directory / f"{name}.py"
        if not sibling.is_file():
            sibling = directory / name / "__init__.py"
            if not sibling.is_file():
                continue
        if getattr(sys.modules[name], "__file__", None) != str(sibling):
            user_modules.evict(name)


def purge() -> None:
    """Forget all user modules; call it between targets, so that each reads the files as they are."""
    user_modules.purge()
