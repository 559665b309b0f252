"""Architecture adapters: a checkpoint's configuration → logical parameters, packing groups and resources.

An adapter is a module that offers

* ``ARCHITECTURES``: the values of ``architectures[0]`` in ``config.json`` that it handles,
* ``DEFAULT_COMPONENTS``: what is built when the user selects no components,
* ``COMPANIONS``: component → whether it needs a named source of its own (true) or may have one (false), and
* ``build_model(base, *, components, companions, resource_overrides) -> Model``.

Other distributions register theirs as entry points of the group ``ninferbuild.models``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
import os
from typing import TYPE_CHECKING, Any, Protocol, cast

from ninferbuild.models.bulk import collection_paused
from ninferbuild.models.model import ComponentsError, Model, Parameter

if TYPE_CHECKING:
    from ninferbuild.models.model import Store

__all__ = ["Adapter", "ComponentsError", "Model", "Parameter", "adapter_for", "build"]

BUILT_IN = ("ninferbuild.models.qwen3_5",)
"""Adapters of this distribution; they are found whatever the installed metadata says."""

ENTRY_POINTS = "ninferbuild.models"


class Adapter(Protocol):
    """The module of one model family."""

    ARCHITECTURES: tuple[str, ...]
    DEFAULT_COMPONENTS: tuple[str, ...]
    COMPANIONS: Mapping[str, bool]

    def build_model(
        self,
        base: Any,
        *,
        components: Iterable[str],
        companions: Mapping[str, Any] | None = None,
        resource_overrides: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> Model:
        """The model of an opened checkpoint."""


@cache
def _built_in() -> dict[str, Adapter]:
    """Architecture → adapter of this distribution."""
    modules = [cast("Adapter", import_module(name)) for name in BUILT_IN]
    return {architecture: adapter for adapter in modules for architecture in adapter.ARCHITECTURES}


@cache
def _registered() -> tuple[dict[str, Adapter], dict[str, Exception]]:
    """Architecture → registered adapter, and the registrations that cannot be imported with the reason.

    A broken plug-in must not stop the build of a model that another adapter handles.
    """
    from importlib.metadata import entry_points

    adapters: dict[str, Adapter] = {}
    broken: dict[str, Exception] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            adapter = cast("Adapter", entry.load())
            architectures = tuple(adapter.ARCHITECTURES)
        except Exception as error:
            broken[entry.name] = error
            continue
        for architecture in architectures:
            adapters.setdefault(architecture, adapter)
    return adapters, broken


def adapter_for(base: Store) -> Adapter:
    """The adapter for an opened checkpoint, chosen by the first of its ``architectures``.

    Raises:
        ValueError: the checkpoint names no architecture, or one that no adapter handles.
    """
    names = base.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str):
        if not base.config and not base.path.is_dir():
            raise ValueError(f"{base.path}: not a checkpoint directory, and no config.json beside it describes a model")
        raise ValueError(f"{base.root / 'config.json'}: names no model architecture (architectures: {names!r})")
    if name in _built_in():
        return _built_in()[name]
    registered, broken = _registered()
    if name in registered:
        return registered[name]
    known = ", ".join(sorted({*_built_in(), *registered}))
    failed = "".join(f"; adapter {entry} cannot be loaded: {error}" for entry, error in broken.items())
    raise ValueError(f"{base.root / 'config.json'}: unsupported architecture {name}; known: {known}{failed}")


def _require_checkpoint(component: str, source: object) -> None:
    from ninferbuild.sources.artifact import ArtifactSource  # few builds open one

    if isinstance(source, ArtifactSource):
        raise ValueError(
            f"component {component} is built from a checkpoint, and {source.path} is an artifact; leave {component} "
            "out of the components: a recipe or --graft takes it from there"
        )


def build(
    base: Any,
    components: Iterable[str] | None = None,
    companions: Mapping[str, Any] | None = None,
    resource_overrides: Mapping[str, str | os.PathLike[str]] | None = None,
    sources: Mapping[str, Any] | None = None,
) -> Model:
    """The model of the opened checkpoint ``base``, whatever family it is of.

    Args:
        components: selected components; None for the family's default.
        companions: component → opened checkpoint that holds it.
        resource_overrides: role → file that replaces a resource.
        sources: named sources; a component that needs or may have a companion takes it from here, under its own
            name, unless ``companions`` has it.

    Raises:
        ValueError: no adapter handles the architecture, a needed source is missing, or the adapter refuses.
    """
    adapter = adapter_for(base)
    selected = tuple(adapter.DEFAULT_COMPONENTS if components is None else components)
    opened = dict(companions or {})
    if sources is not None:
        for component, needed in adapter.COMPANIONS.items():
            if component in selected and component not in opened and (needed or component in sources):
                opened[component] = sources[component]
                _require_checkpoint(component, opened[component])
    with collection_paused():
        return adapter.build_model(base, components=selected, companions=opened, resource_overrides=resource_overrides)
