"""The import names of the reference converter, ``tools.convert`` and ``tools.artifact``, as views of this project.

Existing recipe files import from those packages. While :func:`active` is entered, a finder resolves every module of
:data:`MODULES`; a module is a thin view whose names are looked up here on first use, so importing one imports nothing.

The rule about a real ``tools``: a package, a directory or a file of that name that Python finds on its path
stays what ``import tools`` gives, with all its other submodules. Only ``tools.convert``, ``tools.artifact`` and what
is below them belong to this project, and only while active: on leaving, modules that were there before are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
import importlib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
import sys
import threading
from types import ModuleType
from typing import Any

from ninferbuild.origins import COMPATIBILITY_ORIGIN, COMPATIBILITY_PACKAGES, is_within


def _names(module: str, names: str) -> dict[str, tuple[str, str]]:
    return {name: (module, name) for name in names.split()}


MODULES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "tools.convert.official_recipes": {
        **_names(
            "ninferbuild.recipes.qwen3_5",
            """qwen3_6_27b qwen3_8_27b qwen3_6_35b_a3b qwen3_6_27b_nvfp4 qwen3_8_27b_nvfp4 qwen3_8_27b_q6
            qwen3_8_27b_imatrix Q4 Q5 Q6 Q8 FP8""",
        ),
        **_names(
            "ninferbuild.recipes.qwen3_5_releases",
            "qwen3_8_27b_nvfp4_nvidia qwen3_8_27b_nvfp4_orcarouter qwen3_6_35b_a3b_nvfp4",
        ),
        **_names("ninferbuild.recipes.qwen3_5_gguf", "qwen3_8_27b_gguf qwen3_6_35b_a3b_gguf"),
        **_names("ninferbuild.recipes.bonsai2_ternary", "bonsai2_27b_ternary"),
        **_names("ninferbuild.recipes", "RECIPES"),
    },
    "tools.convert.sources.logical": _names(
        "ninferbuild.sources.logical",
        "LogicalSource EncodedRows array_source select_rows gather_source transpose_source",
    ),
    "tools.convert.sources.safetensors": _names(
        "ninferbuild.sources.safetensors", "SafetensorsSource TensorInfo tensor_source"
    ),
    "tools.convert.sources.compressed_tensors": _names(
        "ninferbuild.sources.compressed_tensors", "matrix_source compressed_matrix_source"
    ),
    "tools.convert.sources.gguf": _names("ninferbuild.sources.gguf", "GGUFFile TensorInfo"),
    "tools.convert.sources.gguf_source": _names(
        "ninferbuild.sources.gguf_source",
        """GGUFSource HFAliasSource standard_dense_name_map qwen35_mtp_name_map qwen35_vision_name_map
        qwen35_linear_attention_name_map reorder_linear_attention_v_heads""",
    ),
    "tools.convert.methods": {
        **_names(
            "ninferbuild.rules",
            "cast_direct grouped_absmax fp8_row_maxabs import_encoded nvfp4_maxabs grouped_search METHODS",
        ),
        **_names(
            "ninferbuild.method",
            "AuxiliaryValue MethodInput PrepareRequest PreparedMethod UseKey AuxiliaryKey Method",
        ),
    },
    "tools.convert.model": _names("ninferbuild.models.model", "Model Parameter"),
    "tools.convert.recipe": {
        **_names("ninferbuild.recipe", "Recipe Selection"),
        **_names("ninferbuild.plan", "WeightJob PreparedRecipe"),
        **_names("ninferbuild.artifact.formats", "default_layout"),
    },
    "tools.convert.pipeline": _names("ninferbuild.pipeline", "convert"),
    "tools.convert.proposal": _names(
        "ninferbuild.recipes.proposal", "add_proposal add_official_proposal select_shortlist DEFAULT_RANKING"
    ),
    "tools.convert.resources": _names(
        "ninferbuild.models.resources", "token_domain load_resources TEXT_RESOURCES VISION_RESOURCES"
    ),
    "tools.convert.imatrix": _names("ninferbuild.imatrix", "load"),
    "tools.convert.qwen3_5": _names("ninferbuild.models.qwen3_5", "build_model text_config vision_config draft_config"),
    "tools.convert.quantization.groupwise": {
        **_names("ninferbuild.rules.groupwise", "quantize_matrix QuantizedMatrix pick_device"),
        **_names("ninferbuild.rules.scale_search", "search_quantize_matrix"),
    },
    "tools.convert.quantization.fp8_row": _names("ninferbuild.rules.fp8_words", "quantize_bf16_rows RowScaledFp8Words"),
    "tools.artifact.formats": _names(
        "ninferbuild.artifact.formats",
        """get_format default_layout DirectFormat QuantFormat Nvfp4Format Fp8RowFormat BF16 FP32 INT32 Q4_G64_FP16
        Q5_G64_FP16 Q6_G64_FP16 Q8_G32_FP16 NVFP4 FP8_E4M3FN_ROW_BF16 DIRECT_FORMATS QUANT_FORMATS NVFP4_FORMATS
        FP8_ROW_FORMATS NUMERIC_FORMATS decode_e2m1_word decode_e4m3fn_word valid_fp8_weight_word
        valid_fp8_row_scale_word valid_nvfp4_scale_word valid_positive_fp32_word GgufFormat GGUF_FORMATS
        GGUF_FORMATS_BY_TYPE""",
    ),
    "tools.artifact.layouts": _names(
        "ninferbuild.artifact.layouts",
        """get_layout encoded_size row_split_geometry row_scale_geometry block_scale_geometry align_up LAYOUTS
        PLANE_ALIGNMENT K_ALIGNMENT gguf_blocks_geometry""",
    ),
    "tools.artifact.schema": _names(
        "ninferbuild.artifact.schema",
        """TensorSpec ResourceSpec TensorObject ResourceObject FileRecord Directory ACTIVATION_POLICIES ArtifactError
        plan_objects validate_encoding parse_directory decode_directory encode_directory binding_parts""",
    ),
    "tools.artifact.framing": _names("ninferbuild.artifact.framing", "MAGIC PART_MAGIC HEADER PAYLOAD_ALIGNMENT"),
    "tools.artifact.tensor_output": _names("ninferbuild.artifact.tensor_output", "TensorOutput"),
    "tools.artifact.writer": _names(
        "ninferbuild.artifact.writer", "ArtifactWriter layout_directory DEFAULT_MAX_FILE_BYTES"
    ),
    "tools.artifact.reader": _names("ninferbuild.artifact.reader", "Artifact"),
    "tools.artifact.inspect": _names("ninferbuild.artifact.inspect", "artifact_summary main"),
    "tools.artifact.codecs.row_split": _names(
        "ninferbuild.artifact.codecs.row_split", "encode_row_split decode_row_split_codes dequantize_row_split"
    ),
    "tools.artifact.codecs.nvfp4": _names("ninferbuild.artifact.codecs.nvfp4", "encode_nvfp4 decode_nvfp4_words"),
    "tools.artifact.codecs.fp8_row": _names(
        "ninferbuild.artifact.codecs.fp8_row",
        "encode_fp8_row_scaled decode_fp8_row_scaled_words validate_fp8_row_words",
    ),
    "tools.artifact.codecs.direct": _names("ninferbuild.artifact.codecs.direct", "encode_direct decode_direct"),
}
"""Module → name → (module of this project, name there)."""

PACKAGES = frozenset(
    ".".join(parts[:count]) for parts in (name.split(".") for name in MODULES) for count in range(1, len(parts))
)
"""The packages above :data:`MODULES`, ``tools`` included."""


class _View(ModuleType):
    """A module whose names live elsewhere. Every name is looked up once and then kept."""

    def __getattr__(self, name: str) -> Any:
        places = MODULES.get(self.__name__, {})
        if name == "__all__" and places:
            return sorted(name for name, place in places.items() if _resolve(*place) is not _MISSING)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _resolve(*places[name]) if name in places else _MISSING
        if value is _MISSING:
            raise AttributeError(f"module {self.__name__!r} has no {name!r}; {_available(self.__name__)}")
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES.get(self.__name__, {})})


_MISSING = object()


def _resolve(module: str, name: str) -> Any:
    """The object, or ``_MISSING`` when this version has no such module or name; other import errors propagate."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not is_within(module, error.name):
            raise
        return _MISSING
    return getattr(found, name, _MISSING)


def _available(module: str) -> str:
    """What there is instead, for an error message."""
    names = MODULES.get(module)
    if names is not None:
        return (
            f"available: {', '.join(sorted(name for name, place in names.items() if _resolve(*place) is not _MISSING))}"
        )
    below = sorted({name for name in MODULES if is_within(name, module)})
    return f"available modules: {', '.join(below or sorted(MODULES))}"


class _ViewLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _View(spec.name, f"``{spec.name}`` as provided by ninferbuild.")

    def exec_module(self, module: ModuleType) -> None:
        pass


class _CompatibilityFinder(MetaPathFinder):
    """First on ``sys.meta_path`` while active."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "tools":
            return self._top(target)
        if not any(is_within(fullname, package) for package in COMPATIBILITY_PACKAGES):
            return None
        if fullname in MODULES or fullname in PACKAGES:
            # Every view is a package: `from view import name` then comes here for a name that it lacks.
            return ModuleSpec(fullname, _ViewLoader(), origin=COMPATIBILITY_ORIGIN, is_package=True)
        parent, _, name = fullname.rpartition(".")
        if parent in MODULES:
            raise ImportError(f"cannot import {name!r} from {parent!r}; {_available(parent)}", name=fullname)
        close = get_close_matches(fullname, MODULES, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        # Without `name`: `from package import module` would replace a message about that very module by its own.
        raise ModuleNotFoundError(f"no module {fullname!r}{hint}; {_available(parent)}")

    @staticmethod
    def _top(target: ModuleType | None) -> ModuleSpec | None:
        """A real ``tools`` if there is one, able to hold our two packages; else an empty one."""
        found = PathFinder.find_spec("tools", None, target)
        if found is None:
            return ModuleSpec("tools", _ViewLoader(), origin=COMPATIBILITY_ORIGIN, is_package=True)
        if found.submodule_search_locations is not None:
            return None  # a real package: whoever finds it next loads it
        found.submodule_search_locations = []  # a single file tools.py
        return found


_finder = _CompatibilityFinder()
_lock = threading.RLock()
_depth = 0
_before: dict[str, ModuleType] = {}
_CHILDREN = tuple(name.partition(".")[2] for name in COMPATIBILITY_PACKAGES)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the compatibility names from ``sys.modules`` and return what was there."""
    if not any(name in sys.modules for name in ("tools", *COMPATIBILITY_PACKAGES)):
        return {}  # a module is never there without its package, and walking through thousands of names takes a while
    names = [
        name
        for name, module in list(sys.modules.items())
        if any(is_within(name, package) for package in COMPATIBILITY_PACKAGES)
        or (name == "tools" and isinstance(module, _View))
    ]
    taken = {name: sys.modules.pop(name) for name in names}
    real = sys.modules.get("tools")
    for child in _CHILDREN:  # `from tools import convert` asks the package before the finder
        if real is not None and child in vars(real):
            delattr(real, child)
    return taken


def _put_back() -> None:
    sys.modules.update(_before)
    real = sys.modules.get("tools")
    for package, child in zip(COMPATIBILITY_PACKAGES, _CHILDREN, strict=True):
        if real is not None and package in _before:
            setattr(real, child, _before[package])
    _before.clear()


@contextmanager
def active() -> Iterator[None]:
    """While entered, ``tools.convert`` and ``tools.artifact`` are this project. Nests; counts over all threads.

    Enter it while a recipe file loads and around every later call of a recipe's functions: they may import lazily.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _before.update(_take_modules())
            real = sys.modules.get("tools")
            if real is not None and not hasattr(real, "__path__"):
                real.__path__ = []  # a single file tools.py, imported earlier
            sys.meta_path.insert(0, _finder)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                sys.meta_path.remove(_finder)
                _take_modules()
                _put_back()
