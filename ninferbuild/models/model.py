"""The model that a recipe sees: component records, logical parameters, resources and packing groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ninferbuild.struct_fields import with_dataclass_fields

if TYPE_CHECKING:
    from ninferbuild.models.fields import Config
    from ninferbuild.sources.logical import LogicalSource


class ComponentsError(ValueError):
    """The selected components are none that the model family has."""


class Store(Protocol):
    """What an adapter needs of an opened checkpoint."""

    @property
    def path(self) -> Path:
        """The path as it was given."""

    @property
    def root(self) -> Path:
        """The directory of the checkpoint."""

    @property
    def config(self) -> Config:
        """The parsed ``config.json``; empty when there is none."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""


SourceFactory = Callable[[Any, str | None], "LogicalSource"]
"""``(store, format or None) -> LogicalSource``: one parameter, taken from another store."""


@with_dataclass_fields
class Parameter(msgspec.Struct, frozen=True):
    """A named mathematical tensor.

    Attributes:
        name: ``component/…``.
        shape: logical shape.
        source: the default source; its shape is ``shape``.
        source_factory: maps the parameter onto another store.
        inputs: names of the mathematical inputs that it multiplies, in order; empty for norms, biases and tables.
        direct_format: the format it has until a recipe chooses another.
        residency: load unit; one physical tensor never mixes two.
    """

    name: str
    shape: tuple[int, ...]
    source: LogicalSource
    source_factory: SourceFactory | None = None
    inputs: tuple[str, ...] = ()
    direct_format: str = "bf16"
    residency: str = "text"

    @property
    def projection(self) -> bool:
        """Whether the parameter multiplies an input."""
        return bool(self.inputs)


@dataclass(slots=True)
class Model:
    """A checkpoint as logical parameters.

    Attributes:
        components: component id → record, written verbatim to the artifact.
        parameters: name → parameter; the order decides the order of objects.
        resources: object id → bytes.
        packing_groups: parameter names that may share one physical tensor, in order of preference.
        token_count: size of the public token domain.
        special_token_ids: ascending.
        source_layers: indices of the source layers of a layer slice, else None.
        root: directory of the base checkpoint, else None.
    """

    components: dict[str, dict[str, Any]]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    resources: dict[str, bytes] = field(default_factory=dict)
    packing_groups: list[tuple[str, ...]] = field(default_factory=list)
    token_count: int = 0
    special_token_ids: tuple[int, ...] = ()
    source_layers: tuple[int, ...] | None = None
    root: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the text component."""
        config: dict[str, Any] = self.components["text"]["config"]
        return config

    def add(self, parameter: Parameter) -> None:
        """Append a parameter.

        Raises:
            ValueError: the name exists, or the source has another shape.
        """
        name, shape = parameter.name, parameter.source.shape
        if name in self.parameters:
            raise ValueError(f"duplicate logical parameter {name}")
        if shape is not parameter.shape and tuple(shape) != parameter.shape:
            raise ValueError(
                f"{parameter.name}: source shape differs: {tuple(parameter.source.shape)}, not {parameter.shape}"
            )
        self.parameters[name] = parameter

    def source(self, name: str, store: Any, format: str | None = None) -> LogicalSource:
        """The parameter ``name`` taken from ``store``; with ``format``, as encoded rows of that format.

        Raises:
            KeyError: there is no such parameter.
            ValueError: it cannot be mapped onto a store, or the store does not suit the model.
        """
        factory = self.parameters[name].source_factory
        if factory is None:
            raise ValueError(f"{name} has no mapping onto other stores; assign an explicit logical source")
        return factory(store, format)
