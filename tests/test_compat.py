"""The import names of the reference converter resolve to this project, and to nothing else's expense."""

from __future__ import annotations

from collections.abc import Iterator
import importlib
import inspect
from pathlib import Path
import subprocess
import sys

import pytest

from ninferbuild import compat


def resolved(module: str) -> dict[str, object]:
    with compat.active():
        view = importlib.import_module(module)
        return {name: getattr(view, name) for name in view.__all__}


@pytest.mark.parametrize("module", sorted(compat.MODULES))
def test_names_are_the_objects_of_this_project(module: str) -> None:
    for name, value in resolved(module).items() if any_exists(module) else ():
        place, there = compat.MODULES[module][name]
        assert value is getattr(importlib.import_module(place), there)


def any_exists(module: str) -> bool:
    return any(importlib.util.find_spec(place) for place, _ in compat.MODULES[module].values())


DOCUMENTED = {
    "tools.convert.official_recipes": """qwen3_6_27b qwen3_8_27b qwen3_6_35b_a3b qwen3_6_27b_nvfp4 qwen3_8_27b_nvfp4
        RECIPES Q4 Q5 Q6 Q8 FP8 qwen3_8_27b_q6 qwen3_8_27b_imatrix qwen3_8_27b_nvfp4_nvidia
        qwen3_8_27b_nvfp4_orcarouter qwen3_6_35b_a3b_nvfp4""",
    "tools.convert.sources.logical": """LogicalSource EncodedRows array_source select_rows gather_source
        transpose_source""",
    "tools.convert.sources.safetensors": "SafetensorsSource tensor_source TensorInfo",
    "tools.convert.sources.compressed_tensors": "matrix_source compressed_matrix_source",
    "tools.convert.methods": """cast_direct grouped_absmax fp8_row_maxabs import_encoded METHODS AuxiliaryValue
        MethodInput PrepareRequest PreparedMethod grouped_search""",
    "tools.convert.model": "Model Parameter",
    "tools.convert.recipe": "Recipe Selection WeightJob PreparedRecipe default_layout",
    "tools.convert.pipeline": "convert",
    "tools.convert.proposal": "add_proposal add_official_proposal select_shortlist DEFAULT_RANKING",
    "tools.convert.resources": "token_domain load_resources TEXT_RESOURCES VISION_RESOURCES",
    "tools.convert.qwen3_5": "build_model text_config vision_config draft_config",
    "tools.convert.quantization.groupwise": "quantize_matrix QuantizedMatrix pick_device search_quantize_matrix",
    "tools.convert.quantization.fp8_row": "quantize_bf16_rows RowScaledFp8Words",
    "tools.artifact.formats": """get_format DirectFormat QuantFormat Nvfp4Format Fp8RowFormat BF16 FP32 INT32
        Q4_G64_FP16 Q5_G64_FP16 Q6_G64_FP16 Q8_G32_FP16 NVFP4 FP8_E4M3FN_ROW_BF16 DIRECT_FORMATS QUANT_FORMATS
        NVFP4_FORMATS FP8_ROW_FORMATS NUMERIC_FORMATS decode_e2m1_word decode_e4m3fn_word valid_fp8_weight_word
        valid_fp8_row_scale_word valid_nvfp4_scale_word valid_positive_fp32_word""",
    "tools.artifact.layouts": """get_layout encoded_size row_split_geometry row_scale_geometry block_scale_geometry
        align_up LAYOUTS PLANE_ALIGNMENT K_ALIGNMENT""",
    "tools.artifact.schema": """TensorSpec ResourceSpec TensorObject ResourceObject ACTIVATION_POLICIES binding_parts
        ArtifactError""",
    "tools.artifact.tensor_output": "TensorOutput",
    "tools.artifact.writer": "ArtifactWriter DEFAULT_MAX_FILE_BYTES",
    "tools.artifact.reader": "Artifact",
    "tools.artifact.codecs.row_split": "encode_row_split decode_row_split_codes dequantize_row_split",
    "tools.artifact.codecs.nvfp4": "encode_nvfp4 decode_nvfp4_words",
    "tools.artifact.codecs.fp8_row": "encode_fp8_row_scaled decode_fp8_row_scaled_words validate_fp8_row_words",
    "tools.artifact.codecs.direct": "encode_direct decode_direct",
    "tools.convert.sources.gguf": "GGUFFile TensorInfo",
    "tools.convert.sources.gguf_source": """GGUFSource HFAliasSource standard_dense_name_map qwen35_mtp_name_map
        qwen35_vision_name_map qwen35_linear_attention_name_map reorder_linear_attention_v_heads""",
    "tools.convert.imatrix": "load",
}
"""Every name that recipe files of the reference converter may import."""


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_names_are_there(module: str) -> None:
    with compat.active():
        for name in DOCUMENTED[module].split():
            namespace: dict[str, object] = {}
            exec(f"from {module} import {name}", namespace)
            assert name in namespace


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("sources.logical", "LogicalSource", "shape label read_values read_encoded weight_divisor input_divisor"),
        ("sources.logical", "EncodedRows", "format codes scales weight_divisor"),
        ("sources.logical", "array_source", "values label"),
        ("sources.logical", "transpose_source", "source axes shape"),
        ("sources.safetensors", "tensor_source", "store name shape *offset *source_shape"),
        ("sources.compressed_tensors", "matrix_source", "store name shape format"),
        ("sources.compressed_tensors", "compressed_matrix_source", "store prefix shape format"),
        ("sources.gguf_source", "GGUFSource", "path"),
        ("sources.gguf_source", "HFAliasSource", "source name_map *transforms *shapes *composites"),
        (
            "sources.gguf_source",
            "standard_dense_name_map",
            "num_hidden_layers *tie_word_embeddings *text_prefix",
        ),
        (
            "sources.gguf_source",
            "qwen35_linear_attention_name_map",
            "layer_index *num_k_heads *num_v_heads *head_k_dim *head_v_dim *text_prefix",
        ),
        ("sources.gguf_source", "qwen35_mtp_name_map", "gguf_layer_index *hf_prefix"),
        (
            "sources.gguf_source",
            "qwen35_vision_name_map",
            "num_blocks *hidden_size *in_channels *temporal_patch_size *patch_size *hf_prefix",
        ),
        (
            "sources.gguf_source",
            "reorder_linear_attention_v_heads",
            "values shape dim num_row_groups group_size head_dim",
        ),
        ("model", "Model", "components parameters resources packing_groups token_count special_token_ids"),
        ("model", "Parameter", "name shape source source_factory inputs direct_format residency"),
        (
            "pipeline",
            "convert",
            "model recipe output *name *provenance *device *rows_per_chunk *max_file_bytes *progress",
        ),
        ("proposal", "add_proposal", "recipe *ranking *rows *source *format"),
        ("proposal", "add_official_proposal", "recipe *ranking *rows"),
        ("proposal", "select_shortlist", "total n force_include"),
        ("resources", "load_resources", "model_dir *vocab_size *vision_config *overrides"),
        ("qwen3_5", "build_model", "base *components *companions *resource_overrides"),
        ("quantization.groupwise", "quantize_matrix", "weight format *device"),
    ],
)
def test_documented_parameters_are_taken_as_documented(module: str, name: str, parameters: str) -> None:
    """In this order, those with a star by name only. There may be more, which must be optional."""
    documented = [item.lstrip("*") for item in parameters.split()]
    by_name = [item.lstrip("*") for item in parameters.split() if item.startswith("*")]
    with compat.active():
        taken = inspect.signature(getattr(importlib.import_module(f"tools.convert.{module}"), name)).parameters
    assert list(taken)[: len(documented)] == documented
    assert [taken[item].name for item in by_name if taken[item].kind is not inspect.Parameter.KEYWORD_ONLY] == []
    assert all(taken[item].default is not inspect.Parameter.empty for item in list(taken)[len(documented) :])


def test_every_way_to_import() -> None:
    namespace: dict[str, object] = {}
    with compat.active():
        exec(
            "import tools.artifact.formats\n"
            "from tools.artifact import formats\n"
            "from tools.artifact.formats import get_format\n"
            "from tools import artifact\n"
            "import tools.artifact.formats as other\n"
            "import tools\n"
            "same = tools.artifact.formats is formats is other is artifact.formats\n"
            "same = same and formats.get_format is get_format\n"
            "from tools.artifact.framing import *\n",
            namespace,
        )
    assert namespace["same"] is True
    assert namespace["MAGIC"] == importlib.import_module("ninferbuild.artifact.framing").MAGIC


@pytest.mark.parametrize(
    ("statement", "error", "fragments"),
    [
        ("from tools.artifact.formats import get_fromat", ImportError, ["get_fromat", "available:", "get_format"]),
        (
            "import tools.convert.recipes",
            ModuleNotFoundError,
            ["did you mean tools.convert.recipe?", "official_recipes"],
        ),
        ("from tools.convert.sources import nothing", ImportError, ["nothing", "tools.convert.sources.logical"]),
        ("import tools.artifact.formats as f; f.nope", AttributeError, ["nope", "get_format"]),
    ],
)
def test_what_is_missing_is_said_with_what_there_is(statement: str, error: type, fragments: list[str]) -> None:
    with compat.active(), pytest.raises(error) as caught:
        exec(statement, {})
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_a_module_that_this_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.MODULES, "tools.convert.later", {"thing": ("ninferbuild.later", "thing")})  # type: ignore[arg-type]
    with compat.active(), pytest.raises(ImportError, match="thing"):
        exec("from tools.convert.later import thing", {})


def test_errors_inside_a_module_are_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_part.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(compat.MODULES, "tools.convert.broken", {"thing": ("broken_part", "thing")})  # type: ignore[arg-type]
    with compat.active(), pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        exec("from tools.convert.broken import thing", {})


def test_feature_detection_works() -> None:
    with compat.active():
        view = importlib.import_module("tools.convert.methods")
        assert not hasattr(view, "no_such_method")
        assert hasattr(view, "grouped_absmax")


def test_nothing_is_left_behind() -> None:
    with compat.active(), compat.active():
        importlib.import_module("tools.artifact.formats")
    assert not [name for name in sys.modules if name == "tools" or name.startswith("tools.")]
    with pytest.raises(ImportError):
        importlib.import_module("tools.artifact.formats")


@pytest.fixture
def real_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    kind = request.param
    if kind == "file":
        (tmp_path / "tools.py").write_text("MINE = 1\n")
    else:
        package = tmp_path / "tools"
        (package / "convert").mkdir(parents=True)
        if kind == "package":
            (package / "__init__.py").write_text("MINE = 1\n")
        (package / "convert" / "__init__.py").write_text("")
        (package / "convert" / "methods.py").write_text("THEIRS = 1\n")
        (package / "other.py").write_text("OTHER = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name == "tools" or name.startswith("tools.")]:
        del sys.modules[name]


@pytest.mark.parametrize("real_tools", ["package", "namespace", "file"], indirect=True)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_real_tools_keeps_all_but_our_two_packages(
    real_tools: Path, earlier: bool, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["real_tools"]
    before = importlib.import_module("tools") if earlier else None
    theirs = importlib.import_module("tools.convert.methods") if earlier and kind != "file" else None
    with compat.active():
        namespace: dict[str, object] = {}
        exec("from tools.convert.methods import METHODS\nfrom tools import convert\nimport tools", namespace)
        assert namespace["METHODS"] is importlib.import_module("ninferbuild.rules").METHODS
        assert isinstance(namespace["convert"], compat._View)
        if kind != "namespace":
            assert namespace["tools"].MINE == 1  # type: ignore[attr-defined]
        if kind != "file":
            assert importlib.import_module("tools.other").OTHER == 1
    if earlier:
        assert sys.modules["tools"] is before
    if kind != "file":
        assert importlib.import_module("tools.convert.methods").THEIRS == 1
        if theirs is not None:
            assert before is not None
            assert before.convert.methods is sys.modules["tools.convert.methods"] is theirs
    else:
        with pytest.raises(ImportError):
            importlib.import_module("tools.convert.methods")


def test_importing_the_views_loads_neither_torch_nor_anything_else() -> None:
    script = (
        "import sys\n"
        "from ninferbuild import compat\n"
        "with compat.active():\n"
        "    import tools.convert.quantization.groupwise, tools.artifact.codecs.row_split, tools.convert.methods\n"
        "    from tools.artifact.formats import get_format\n"
        "print([name for name in ('torch', 'numpy', 'ninferbuild.rules') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
