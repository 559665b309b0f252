"""The ternary recipe: what it takes from a file, how it stores it, and the files that it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fixtures import synthetic, ternary_hybrid, ternary_released
from fixtures.gguf_files import write_gguf
from fixtures.ternary_hybrid import BF16, F32, GEOMETRY, PQ2_0, PTQ1_0, Entry, Export, write_sparse
import numpy as np
import pytest
import torch

from ninferbuild import models
from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.plan import PlannedRecipe, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.bonsai2_ternary import import_ternary
from ninferbuild.recipes.gguf_geometry import QWEN_27B
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_direct import direct_source
from ninferbuild.sources.opened import Sources

T2, Q4, Q8 = "t2_g128_fp16", "q4_g64_fp16", "q8_g32_fp16"


@pytest.fixture(scope="module")
def exported() -> Export:
    return ternary_hybrid.export()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, exported: Export) -> Path:
    """A directory with the toy and everything around it."""
    root = tmp_path_factory.mktemp("toy")
    exported.write(root / "ternary.gguf")
    ternary_hybrid.write_base(root / "base", vision=True)
    ternary_hybrid.write_mtp(root / "mtp.safetensors")
    ternary_hybrid.write_dflash2(root / "dflash2")
    np.arange(ternary_hybrid.VOCAB, dtype="<i8").tofile(root / "ranking.i64")
    return root


Configure = Callable[..., Recipe]


@pytest.fixture
def configure(toy: Path) -> Iterator[Configure]:
    """Builds the toy and runs the recipe on it."""
    opened: list[Sources] = []

    def configure(components: str = "text", ternary: Path | None = None, base: Path | None = None) -> Recipe:
        paths = {"ternary": ternary or toy / "ternary.gguf", "dflash2": toy / "dflash2"}
        if "mtp" in components:
            paths["mtp"] = toy / "mtp.safetensors"
        sources = Sources(base or toy / "base", paths)
        opened.append(sources)
        model = models.build(sources["base"], components.split(","), sources=sources)
        recipe = Recipe(model)
        import_ternary(model, recipe, sources, GEOMETRY)
        return recipe

    yield configure
    for sources in opened:
        sources.close()


def formats(planned: PlannedRecipe) -> dict[str, str]:
    return {name: parent.target.format for parent in planned.parents for name in parent.names}


def names_of(planned: PlannedRecipe) -> list[tuple[str, ...]]:
    return [parent.names for parent in planned.parents]


def uses_of(planned: PlannedRecipe) -> tuple[dict[tuple[str, str], dict[str, Any]], list[Any]]:
    uses, objects = planned.uses([parent.checked.auxiliaries for parent in planned.parents if parent.checked])
    return {(use["parameter"], use["input"]): use for use in uses}, objects


# What is stored


def test_every_text_parameter_comes_from_the_file(configure: Configure, exported: Export) -> None:
    recipe = configure()
    planned = plan_parents(recipe)
    assert set(formats(planned)) == exported.matrices.keys() | exported.words.keys()
    for name, format in formats(planned).items():
        expected = T2 if name in exported.matrices else "fp32" if name.endswith(("/a_log", "/dt_bias")) else "bf16"
        assert format == expected, name
        (selection,) = recipe.selections[name]
        description = selection.source.description
        assert description is not None
        assert {span.file.path.name for part in description.parts for span in part.region.spans if span.file.path} == {
            "ternary.gguf"
        }
    assert set(recipe.policies.values()) == {"A16Only"}


def test_encoded_rows_are_those_of_the_model(configure: Configure, exported: Export) -> None:
    recipe = configure()
    for name, (codes, scales) in exported.matrices.items():
        (selection,) = recipe.selections[name]
        assert selection.source.read_encoded is not None
        rows, columns = codes.shape
        middle = rows // 2 - 3
        found = selection.source.read_encoded(middle, middle + 6)
        assert (found.codes.numpy() == codes[middle : middle + 6].reshape(6, columns // 128, 128)).all(), name
        assert (found.scales.numpy().view(np.uint16) == scales[middle : middle + 6]).all(), name


def test_parents(configure: Configure) -> None:
    planned = plan_parents(configure())
    layer = "text/layers/0/"
    assert names_of(planned)[:3] == [
        (layer + "gdn/query", layer + "gdn/key"),
        (layer + "gdn/value", layer + "gdn/z"),
        (layer + "mlp/gate", layer + "mlp/up"),
    ]
    layer = "text/layers/3/"
    assert names_of(planned)[9:12] == [
        (layer + "attention/query", layer + "attention/key"),
        (layer + "attention/gate", layer + "attention/value"),
        (layer + "mlp/gate", layer + "mlp/up"),
    ]
    assert all(len(names) == 1 for names in names_of(planned)[12:])
    assert ("text/layers/0/gdn/a_projection",) in names_of(planned)
    assert ("text/layers/2/gdn/b_projection",) in names_of(planned)


def test_the_signs_of_each_use(configure: Configure) -> None:
    planned = plan_parents(configure("text,mtp,dflash2,vision"))
    uses, objects = uses_of(planned)
    assert [(item.format, item.shape) for item in objects] == [("bf16", (width,)) for width in ternary_hybrid.WIDTHS]
    for item, width in zip(objects, ternary_hybrid.WIDTHS, strict=True):
        words = np.array([0x3F80 if sign > 0 else 0xBF80 for sign in ternary_hybrid.signs(width)], "<u2")
        assert item.data == words.tobytes()
    shapes = {name: parameter.shape for name, parameter in planned.recipe.model.parameters.items()}
    ids = {item.shape[0]: item.id for item in objects}
    for (name, _), use in uses.items():
        if formats(planned).get(name) == T2:
            assert use["auxiliaries"] == {"hadamard_signs": {"object": ids[shapes[name][1]]}}
        else:
            assert "auxiliaries" not in use
        assert use["activation_policy"] == "A16Only"
    assert uses["text/layers/0/mlp/down", "text/layers/0/mlp/product"]["auxiliaries"] == {
        "hadamard_signs": {"object": "auxiliary/000002"}
    }
    assert "auxiliaries" not in uses["text/layers/0/gdn/a_projection", "text/layers/0/mixer_input"]
    heads = {used for name, used in uses if name == "text/output_head"}
    assert heads == {"text/final_hidden", "mtp/final_hidden", "dflash2/final_hidden"}
    assert not [name for name, _ in uses if name == "text/token_embedding"]


def test_formats_of_the_other_components(configure: Configure) -> None:
    recipe = configure("text,mtp,dflash2,vision")
    found = formats(plan_parents(recipe))
    assert found["mtp/layers/0/mlp/up"] == Q8
    assert found["mtp/input_projection"] == Q8
    assert found["vision/patch_embedding"] == "q6_g64_fp16"
    for name in ("feature_projection", *(f"layers/1/{part}" for part in ("attention/output", "mlp/gate", "mlp/down"))):
        assert found[f"dflash2/{name}"] == Q4
    for name in ("query", "key", "value"):
        assert found[f"dflash2/layers/0/attention/{name}"] == Q8
    assert recipe.aliases["dflash2/layers/0/attention/context_key"] == "dflash2/layers/0/attention/key"
    assert recipe.aliases["dflash2/layers/1/attention/context_value"] == "dflash2/layers/1/attention/value"
    for name in ("layers/0/attention_conv/kernel_projection", "candidate_selector/hidden_projection"):
        assert found[f"dflash2/{name}"] == "bf16"


def test_the_mtp_block_may_come_from_the_base_checkpoint(toy: Path, tmp_path: Path) -> None:
    base = ternary_hybrid.write_base(tmp_path / "base")
    (base / "model.safetensors").symlink_to(toy / "mtp.safetensors")
    with Sources(base, {"ternary": toy / "ternary.gguf"}) as sources:
        model = models.build(sources["base"], ("text", "mtp"), sources=sources)
        recipe = Recipe(model)
        import_ternary(model, recipe, sources, GEOMETRY)
        assert formats(plan_parents(recipe))["mtp/layers/0/attention/gate"] == Q8


def test_the_proposal_head_is_made_of_rows_of_the_head(configure: Configure, toy: Path, exported: Export) -> None:
    recipe = configure("text,mtp,dflash2")
    add_official_proposal(recipe, ranking=toy / "ranking.i64", rows=7)
    planned = plan_parents(recipe)
    (parent,) = (parent for parent in planned.parents if parent.names == ("proposal/head",))
    assert (parent.target.format, parent.method_name, parent.target.shape) == (T2, "import_encoded", (7, 1024))
    ids = recipe.selections["proposal/token_ids"][0].source.values().tolist()
    assert ids != sorted(ids)
    source = parent.request.inputs[0].source
    assert source.read_encoded is not None
    rows = source.read_encoded(0, 7)
    codes, scales = exported.matrices["text/output_head"]
    assert (rows.codes.reshape(7, -1).numpy() == codes[ids]).all()
    assert (rows.scales.numpy().view(np.uint16) == scales[ids]).all()
    uses, objects = uses_of(planned)
    assert len(objects) == 3
    for used in ("mtp/final_hidden", "dflash2/final_hidden"):
        assert uses["proposal/head", used]["auxiliaries"] == {"hadamard_signs": {"object": "auxiliary/000000"}}


def test_known_values_of_vectors(tmp_path: Path) -> None:
    norm = np.array([1.0, 1.0078125, 0.9990234375, 1.3], "<f4").tobytes()
    decay = np.array([-1, -0.5, -16, -np.float32(np.e)], "<f4").tobytes()
    tensors = [(name, (4,), F32, raw) for name, raw in (("norm", norm), ("ssm_a", decay), ("zero", bytes(16)))]
    with GGUFFile(write_gguf(tmp_path / "v.gguf", {"general.architecture": "t"}, tensors)) as gguf:
        shifted = direct_source(gguf, "norm", change=lambda stored: stored.add(-1.0)).values()
        words = shifted.bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert words.tolist() == [0x0000, 0x3C00, 0xBA80, 0x3E9A]
        logarithms = direct_source(gguf, "ssm_a", change=lambda stored: stored.log_negative()).values()
        expected = [0x00000000, 0xBF317218, 0x40317218, 0x3F7FFFFF]
        assert logarithms.numpy().view(np.uint32).tolist() == expected
        with refused("negative"):
            direct_source(gguf, "zero", change=lambda stored: stored.log_negative()).values()


# What is refused


@contextmanager
def refused(*fragments: str) -> Iterator[None]:
    with pytest.raises(ValueError) as caught:
        yield
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


class Sparse:
    """The toy's header over zeros; what a test changes of it is refused before any matrix is read."""

    def __init__(self, exported: Export, path: Path):
        self.kv: dict[str, Any] = dict(exported.kv)
        self.entries: dict[str, Entry] = {
            name: (name, shape, kind) for name, shape, kind, _ in exported.tensors.values()
        }
        self.contents = {name: raw for name, _, _, raw in exported.tensors.values() if name.endswith("ssm_a")}
        self.path = path

    def write(self) -> Path:
        return write_sparse(self.path, self.kv, self.entries.values(), self.contents)


@pytest.fixture
def sparse(exported: Export, tmp_path: Path) -> Sparse:
    return Sparse(exported, tmp_path / "sparse.gguf")


def test_the_unchanged_header_is_accepted(configure: Configure, sparse: Sparse) -> None:
    configure(ternary=sparse.write())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen35moe"),
        ("qwen35.block_count", 63),
        ("qwen35.block_count", 5),
        ("qwen35.embedding_length", 5120),
        ("qwen35.feed_forward_length", 1024),
        ("qwen35.attention.head_count", 24),
        ("qwen35.attention.head_count_kv", 4),
        ("qwen35.attention.key_length", 128),
        ("qwen35.attention.value_length", 128),
        ("qwen35.ssm.conv_kernel", 3),
        ("qwen35.ssm.state_size", 128),
        ("qwen35.ssm.group_count", 16),
        ("qwen35.ssm.time_step_rank", 48),
        ("qwen35.ssm.inner_size", 6144),
        ("qwen35.full_attention_interval", 2),
        ("prism.hadamard.version", 2),
        ("prism.hadamard.block_size", 512),
        ("prism.hadamard.transform", "walsh"),
        ("prism.hadamard.axis", "output"),
        ("prism.hadamard.sign_mode", "seeded"),
        ("prism.hadamard.gdn_v_grouped", False),
    ],
)
@pytest.mark.parametrize("absent", [False, True])
def test_header_values(configure: Configure, sparse: Sparse, key: str, value: Any, absent: bool) -> None:
    expected = sparse.kv.pop(key)
    if not absent:
        sparse.kv[key] = value
    with refused(f"{sparse.path}: {key} = {None if absent else value!r}, expected {expected!r}"):
        configure(ternary=sparse.write())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sign_widths", [1024, 3072, 2048], "sign widths (1024, 3072, 2048), expected (1024, 2048, 3072)"),
        ("sign_widths", None, "sign widths None, expected (1024, 2048, 3072)"),
        ("sign_widths", 1024, "sign widths 1024, expected (1024, 2048, 3072)"),
        ("sign_values", None, "sign values must be 6144 entries of +-1, not None"),
        ("sign_values", [1] * 6143, "sign values must be 6144 entries of +-1, not an array of 6143"),
        ("sign_values", [1] * 6145, "sign values must be 6144 entries of +-1, not an array of 6145"),
        ("sign_values", [1] * 100 + [0] + [1] * 6043, "must be 6144 entries of +-1; entry 100 is 0"),
        ("sign_values", [0.5] * 6144, "sign values must be 6144 entries of +-1; entry 0 is 0.5"),
        ("weight_names", None, "the rotated tensor set differs from the registered one"),
        ("inverse_weight_names", None, "only token_embd.weight may be stored inverse-rotated"),
        ("inverse_weight_names", ["output.weight"], "only token_embd.weight may be stored inverse-rotated"),
        ("inverse_weight_names", ["token_embd.weight"] * 2, "only token_embd.weight may be stored inverse-rotated"),
    ],
)  # fmt: skip
def test_rotations(configure: Configure, sparse: Sparse, key: str, value: Any, message: str) -> None:
    del sparse.kv[f"prism.hadamard.{key}"]
    if value is not None:
        sparse.kv[f"prism.hadamard.{key}"] = value
    with refused(f"{sparse.path}: ", message):
        configure(ternary=sparse.write())


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_rotated_tensors(configure: Configure, sparse: Sparse, change: str) -> None:
    names = list(sparse.kv["prism.hadamard.weight_names"])
    name = "blk.1.ssm_out.weight" if change == "missing" else "token_embd.weight"
    sparse.kv["prism.hadamard.weight_names"] = (
        [other for other in names if other != name] if change == "missing" else [*names, name]
    )
    with refused("the rotated tensor set differs from the registered one", name):
        configure(ternary=sparse.write())


def test_the_order_of_rotated_tensors_does_not_matter(configure: Configure, sparse: Sparse) -> None:
    sparse.kv["prism.hadamard.weight_names"] = sparse.kv["prism.hadamard.weight_names"][::-1]
    configure(ternary=sparse.write())


def test_missing_and_extra_tensors(configure: Configure, sparse: Sparse) -> None:
    del sparse.entries["blk.2.ssm_norm.weight"]
    sparse.entries["rope_freqs.weight"] = ("rope_freqs.weight", (8,), F32)
    with refused("tensor set mismatch (missing [blk.2.ssm_norm.weight], extra [rope_freqs.weight])"):
        configure(ternary=sparse.write())


def test_only_five_names_are_listed(configure: Configure, sparse: Sparse) -> None:
    for index in range(9):
        sparse.entries[f"x{index}"] = (f"x{index}", (8,), F32)
    with refused("tensor set mismatch (missing [], extra [x0, x1, x2, x3, x4, …])"):
        configure(ternary=sparse.write())


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        ("blk.0.ffn_gate.weight", (3072, 1024), PTQ1_0, "blk.0.ffn_gate.weight is PTQ1_0 (3072, 1024)"),
        ("blk.3.attn_q.weight", (2048, 1024), PQ2_0, "blk.3.attn_q.weight is PQ2_0 (2048, 1024)"),
        ("output_norm.weight", (1024,), BF16, "output_norm.weight is BF16 (1024,)"),
        ("blk.1.ssm_alpha.weight", (8, 1024), F32, "blk.1.ssm_alpha.weight is F32 (8, 1024)"),
        ("blk.1.ssm_conv1d.weight", (4, 3072), F32, "blk.1.ssm_conv1d.weight is F32 (4, 3072)"),
    ],
)
def test_shapes_and_types(
    configure: Configure, sparse: Sparse, name: str, shape: tuple[int, ...], kind: int, message: str
) -> None:
    sparse.entries[name] = (name, shape, kind)
    with refused(f"{sparse.path}: {message}"):
        configure(ternary=sparse.write())


def test_a_file_without_its_last_byte(configure: Configure, sparse: Sparse) -> None:
    path = sparse.write()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with refused(f"{path}: the data section is truncated"):
        configure(ternary=path)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("-inf")])
def test_decay_must_be_negative(configure: Configure, sparse: Sparse, value: float) -> None:
    values = np.frombuffer(sparse.contents["blk.1.ssm_a"], "<f4").copy()
    values[5] = value
    sparse.contents["blk.1.ssm_a"] = values.tobytes()
    with refused("blk.1.ssm_a must be strictly negative (-exp(A_log))"):
        configure(ternary=sparse.write())


def test_models_of_another_geometry(toy: Path, tmp_path: Path) -> None:
    with Sources(toy / "base", {"ternary": toy / "ternary.gguf"}) as sources:
        model = models.build(sources["base"], ("text",), sources=sources)
        message = "the ternary Bonsai 2 recipe requires the Qwen3.8-27B Dense geometry"
        with refused(message):
            RECIPES["bonsai2_27b_ternary"](model, Recipe(model), sources)
        for other in (replace(GEOMETRY, layers=8), replace(GEOMETRY, hidden=2048)):
            with refused(message):
                import_ternary(model, Recipe(model), sources, other)
    synthetic.write_base(
        tmp_path / "moe", synthetic.text_geometry(4, moe=True), 1, moe=True, with_vision=False, with_mtp=False
    )
    with Sources(tmp_path / "moe") as sources, refused(message):
        model = models.build(sources["base"], ("text",), sources=sources)
        RECIPES["bonsai2_27b_ternary"](model, Recipe(model), sources)


def test_sources_that_are_absent_or_no_gguf_file(toy: Path) -> None:
    with Sources(toy / "base") as sources:
        model = models.build(sources["base"], ("text",), sources=sources)
        with refused("selected recipe requires source 'ternary'; provide --source ternary=PATH"):
            import_ternary(model, Recipe(model), sources, GEOMETRY)
    with Sources(toy / "base", {"ternary": toy / "mtp.safetensors"}) as sources:
        model = models.build(sources["base"], ("text",), sources=sources)
        with refused("--source ternary must name a PQ2_0 .gguf file, not", "mtp.safetensors"):
            import_ternary(model, Recipe(model), sources, GEOMETRY)


# The released model


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannedRecipe]:
    """The official recipe on a file and a checkpoint of the released shapes that hold zeros."""
    root = tmp_path_factory.mktemp("released")
    gguf, base = ternary_released.write_gguf(root / "ternary.gguf"), ternary_released.write_base(root / "base")
    with Sources(base, {"ternary": gguf}) as sources:
        model = models.build(sources["base"], ("text",), sources=sources)
        recipe = Recipe(model)
        RECIPES["bonsai2_27b_ternary"](model, recipe, sources)
        yield plan_parents(recipe)


def test_objects_of_the_released_model(released: PlannedRecipe) -> None:
    sizes = {
        ("token_embedding",): ((248320, 5120), 337_715_200, 1),
        ("output_head",): ((248320, 5120), 337_715_200, 1),
        ("attention/query", "attention/key"): ((7168, 5120), 9_748_480, 16),
        ("attention/gate", "attention/value"): ((7168, 5120), 9_748_480, 16),
        ("attention/output",): ((5120, 6144), 8_355_840, 16),
        ("gdn/output",): ((5120, 6144), 8_355_840, 48),
        ("gdn/query", "gdn/key"): ((4096, 5120), 5_570_560, 48),
        ("gdn/value", "gdn/z"): ((12288, 5120), 16_711_680, 48),
        ("mlp/gate", "mlp/up"): ((34816, 5120), 47_349_760, 64),
        ("mlp/down",): ((5120, 17408), 23_674_880, 64),
    }
    found: Counter[tuple[tuple[str, ...], tuple[int, ...], int]] = Counter()
    for parent in released.parents:
        target = parent.target
        if target.format == T2:
            names = tuple("/".join(name.split("/")[3 if "layers" in name else 1 :]) for name in parent.names)
            found[names, target.shape, encoded_size(target.layout, T2, target.shape)] += 1
    assert found == {(names, shape, size): count for names, (shape, size, count) in sizes.items()}
    assert sum(found.values()) == 322
    assert sum(size * count for (_, _, size), count in found.items()) == 7_137_280_000
    assert encoded_size("row_split_k128_v1", T2, (131072, 5120)) == 178_257_920


def test_uses_of_the_released_model(released: PlannedRecipe) -> None:
    uses, objects = uses_of(released)
    assert [item.shape for item in objects] == [(5120,), (6144,), (17408,)]
    widths = {item.id: item.shape[0] for item in objects}
    signed = Counter(
        widths[use["auxiliaries"]["hadamard_signs"]["object"]]
        for (name, _), use in uses.items()
        if "auxiliaries" in use and name.startswith("text/layers/")
    )
    assert signed == {5120: 384, 6144: 64, 17408: 64}


def test_row_maps_of_the_released_model() -> None:
    def stored(ranges: tuple[tuple[int, int], ...], *rows: int) -> list[int]:
        flat = [row for begin, end in ranges for row in range(begin, end)]
        return [flat[row] for row in rows]

    geometry = QWEN_27B
    assert stored(geometry.attention_rows(), *range(250, 260)) == [*range(250, 256), *range(512, 516)]
    assert stored(geometry.attention_rows(gate=True), 0, 1, 2) == [256, 257, 258]
    assert stored(geometry.untiled_rows(2 * geometry.key_dim), 128, 129) == [6144, 6145]
    assert stored(geometry.untiled_rows(), 384) == [128]
    assert stored(geometry.untiled_rows(head_rows=1), *range(6)) == [0, 16, 32, 1, 17, 33]
    assert [(head % 16, head // 16) for head in geometry.value_head_positions] == [(h // 3, h % 3) for h in range(48)]
