"""Official recipe for Ternary Bonsai 2: a Qwen3.8 27B whose text model is ternary and acts on rotated activations.

Text comes from ``--source ternary=FILE.gguf`` without any rounding, vision, MTP (unless ``--source mtp=…`` is given)
and resources from the base checkpoint, drafts from their own sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ninferbuild.models.bulk import collection_paused
from ninferbuild.recipes.components import optional_components, quantize
from ninferbuild.recipes.formats import Q4, T2
from ninferbuild.recipes.gguf_geometry import QWEN_27B, Geometry, Rows
from ninferbuild.recipes.gguf_import import Importer
from ninferbuild.recipes.qwen3_5_gguf import require_geometry
from ninferbuild.recipes.ternary_checks import check_export

if TYPE_CHECKING:
    from ninferbuild.method import AuxiliaryValue
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.recipes import RecipeFunction
    from ninferbuild.sources.gguf import GGUFFile

Sources = Mapping[str, Any]

_DRAFT_Q4 = ("/feature_projection", "/attention/output", "/mlp/gate", "/mlp/up", "/mlp/down")
"""What DFlash2 stores in Q4 beside a ternary text model. The runtime reads query, key and value at once, in Q8 only."""


def bonsai2_27b_ternary(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Ternary text imported from ``ternary``, a PQ2_0 GGUF, with its rotation; MTP in Q8, DFlash2 in Q4 and Q8."""
    import_ternary(model, recipe, sources, QWEN_27B)


@collection_paused()
def import_ternary(model: Model, recipe: Recipe, sources: Sources, geometry: Geometry) -> None:
    """The recipe for a model of any geometry whose input widths are multiples of 1024.

    Raises:
        ValueError: the model or the file has another geometry, the file is no whole export, or a source is missing.
    """
    _require_geometry(model, geometry)
    gguf = _opened(sources)
    signs = check_export(gguf, geometry)
    optional_components(model, recipe)
    adapter = [name for name in model.parameters if name.startswith("dflash2/") and name.endswith(_DRAFT_Q4)]
    quantize(recipe, adapter, lambda name: Q4)
    _Importer(model, recipe, gguf, geometry, signs).text()


def _require_geometry(model: Model, geometry: Geometry) -> None:
    config = model.config
    sizes = (config["hidden_size"], config["num_hidden_layers"])
    if "num_experts" in config or sizes != (geometry.hidden, geometry.layers):
        raise ValueError(
            f"the ternary Bonsai 2 recipe requires the Qwen3.8-27B Dense geometry: hidden_size {geometry.hidden} and "
            f"{geometry.layers} layers without experts; the model's config.json has {sizes[0]} and {sizes[1]}"
        )
    require_geometry(model, geometry)


def _opened(sources: Sources) -> GGUFFile:
    from ninferbuild.sources.gguf import GGUFFile

    gguf = sources["ternary"]
    if not isinstance(gguf, GGUFFile):
        raise ValueError(f"--source ternary must name a PQ2_0 .gguf file, not {gguf.path}")
    return gguf


class _Importer(Importer):
    """Ternary matrices with their signs, in the pairs that the runtime multiplies at once."""

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        gguf: GGUFFile,
        geometry: Geometry,
        signs: Mapping[int, AuxiliaryValue],
    ):
        super().__init__(model, recipe, gguf, geometry)
        self._signs = signs

    def _matrix(self, name: str, tensor: str, stored: Rows | None = None) -> None:
        from ninferbuild.sources.ternary import ternary_source

        parameter = self._model.parameters[name]
        rows, columns = parameter.shape
        source = ternary_source(self._gguf, tensor, (rows, columns), stored)
        self._recipe.assign(name, format=T2, method="import_encoded", source=source)
        for used in parameter.inputs:
            self._recipe.use(name, used, auxiliaries={"hadamard_signs": self._signs[columns]})
        self._formats[name] = T2
        self.assigned.add(name)

    def _group_attention(self, prefix: str) -> None:
        self._group(prefix, "query", "key")
        self._group(prefix, "gate", "value")

    def _group_delta_net(self, prefix: str) -> None:
        self._group(prefix, "query", "key")
        self._group(prefix, "value", "z")

    def _use_columns(self, output: str) -> None:
        """Here the exporter moved the columns too: they are in the order of the model."""


RECIPES: dict[str, RecipeFunction] = {bonsai2_27b_ternary.__name__: bonsai2_27b_ternary}
