"""The GGUF recipes on a toy export: what is refused, how parents are formed, and which bytes come out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from fixtures import fx, gguf_hybrid
from fixtures.gguf_files import BLOCKS
from fixtures.gguf_hybrid import BF16, DENSE, F16, F32, IQ4_NL, MOE, Q2_0, Q4_0, Q4_1, Q4_K, Q5_0, Q8_0, Export
import numpy as np
import pytest

from ninferbuild import models
from ninferbuild.artifact.formats import DIRECT_FORMATS
from ninferbuild.plan import Parent, PlannedRecipe, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.gguf_geometry import Experts
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.recipes.qwen3_5_gguf import dense_blocks, mixture_blocks
from ninferbuild.sources.opened import Sources

EXPERTS = range(3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base checkpoints without weights."""
    root = tmp_path_factory.mktemp("bases")
    gguf_hybrid.write_base(root / "dense")
    gguf_hybrid.write_base(root / "moe", moe=True)
    return root


Plan = Callable[..., PlannedRecipe]


@pytest.fixture
def plan(bases: Path, tmp_path: Path) -> Iterator[Plan]:
    """Plans a toy export; the sources stay open."""
    opened: list[Sources] = []

    def plan(
        export: Export,
        *components: str,
        sources: Mapping[str, Path] | None = None,
        ranking: Path | None = None,
        base: Path | None = None,
    ) -> PlannedRecipe:
        moe = export.kv["general.architecture"] == "qwen35moe"
        path = export.write(tmp_path / f"model-{len(opened)}.gguf")
        named = Sources(base or bases / ("moe" if moe else "dense"), {"gguf": path, **(sources or {})})
        opened.append(named)
        model = models.build(named["base"], components=("text", *components), sources=named)
        recipe = Recipe(model)
        (mixture_blocks if moe else dense_blocks)(model, recipe, named, MOE if moe else DENSE)
        if ranking is not None:
            add_official_proposal(recipe, ranking=ranking, rows=6)
        return plan_parents(recipe)

    yield plan
    for named in opened:
        named.close()


def planes(parent: Parent) -> list[bytes]:
    """The bytes of each plane of a parent, encoded by its own method in one block."""
    import torch

    assert parent.rule is not None
    assert parent.checked is not None
    request = parent.request
    values: Any
    if parent.rule.reads == "encoded":
        values = request.encoded_rows(0, parent.target.shape[0])
    else:
        values = request.values(0, prod(parent.target.shape))
        if parent.target.format not in DIRECT_FORMATS:
            values = values.reshape(parent.target.shape)
    found = parent.rule.encode(values, parent.target, parent.checked, 0, torch.device("cpu"))
    return [plane.view(torch.uint8).numpy().tobytes() for plane in found]


def payload(parent: Parent) -> bytes:
    """The bytes of a parent whose layout has one plane."""
    (found,) = planes(parent)
    return found


def parents_of(planned: PlannedRecipe, prefix: str) -> list[tuple[str, ...]]:
    """Names in each parent that begins below ``prefix``, without the prefix."""
    return [
        tuple(name.removeprefix(prefix) for name in parent.names)
        for parent in planned.parents
        if parent.names[0].startswith(prefix)
    ]


def by_name(planned: PlannedRecipe) -> dict[str, Parent]:
    return {name: parent for parent in planned.parents for name in parent.names}


# Refusals


@contextmanager
def refused(*fragments: str) -> Iterator[None]:
    with pytest.raises(ValueError) as caught:
        yield
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen3"),
        ("qwen35.embedding_length", 1024),
        ("qwen35.ssm.time_step_rank", 4),
        ("qwen35.attention.head_count_kv", [1, 1, 1, 1]),
        ("qwen35.full_attention_interval", None),
        ("qwen35.block_count", 5),
        ("qwen35.block_count", 3),
    ],
)
def test_header_values_are_held_to_the_geometry(plan: Plan, key: str, value: Any) -> None:
    export = gguf_hybrid.export()
    expected = export.kv.pop(key)
    if value is not None:
        export.kv[key] = value
    found = "an array of 4" if isinstance(value, list) else repr(value)
    with refused("model-0.gguf", f"{key} = {found}, expected {expected!r}"):
        plan(export)


def test_the_expert_count_is_the_models(plan: Plan) -> None:
    export = gguf_hybrid.export(moe=True)
    export.kv["qwen35moe.expert_count"] = 4
    with refused("qwen35moe.expert_count = 4, expected 3"):
        plan(export)


def test_fewer_experts_than_the_release_has(bases: Path, tmp_path: Path) -> None:
    """A pruned model says so in its configuration; the file has to agree with that."""
    assert isinstance(MOE.feed_forward, Experts)
    released = replace(MOE, feed_forward=replace(MOE.feed_forward, count=256))
    path = gguf_hybrid.export(moe=True).write(tmp_path / "pruned.gguf")
    with Sources(bases / "moe", {"gguf": path}) as sources:
        model = models.build(sources["base"], components=("text",), sources=sources)
        recipe = Recipe(model)
        mixture_blocks(model, recipe, sources, released)
        assert plan_parents(recipe).parents


def test_the_tensor_set_is_exact(plan: Plan) -> None:
    export = gguf_hybrid.export()
    del export.tensors["output.weight"]
    export.tensors["rope_freqs.weight"] = ("rope_freqs.weight", (8,), F32, bytes(32))
    with refused("tensor set mismatch", "missing [output.weight]", "extra [rope_freqs.weight]"):
        plan(export)


def test_long_lists_of_tensors_break_off(plan: Plan) -> None:
    export = gguf_hybrid.export()
    for name in [name for name in export.tensors if name.startswith("blk.1.")]:
        del export.tensors[name]
    with refused("blk.1.attn_gate.weight, blk.1.attn_norm.weight", ", …], extra []"):
        plan(export)


def test_an_mtp_block_without_its_stem_is_extra(plan: Plan) -> None:
    export = gguf_hybrid.export(mtp=True)
    export.kv["qwen35.block_count"] = 4
    del export.tensors["blk.4.nextn.eh_proj.weight"]
    with refused("tensor set mismatch", "blk.4.attn_k.weight"):
        plan(export)


def retyped(export: Export, name: str, kind: int) -> None:
    """Zeros of another type in place of a tensor."""
    _, shape, _, _ = export.tensors[name]
    values, size = BLOCKS[kind]
    export.tensors[name] = (name, shape, kind, bytes(prod(shape) // values * size))


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        ("blk.0.ffn_gate.weight", F16, "F16 (256, 128)"),
        ("output.weight", BF16, "BF16 (16, 128)"),
        ("blk.0.attn_norm.weight", F16, "F16 (128,)"),
        ("blk.0.ssm_conv1d.weight", F16, "F16 (320, 4)"),
        (
            "blk.0.ssm_alpha.weight",
            Q4_1,
            "3 (6, 128); ggml type 3 (Q4_1) is none that this recipe takes for a gate of the delta net",
        ),
        ("blk.2.ssm_dt.bias", BF16, "BF16 (6,)"),
    ],
)
def test_types_are_held_to_what_is_imported(plan: Plan, name: str, kind: int, shown: str) -> None:
    export = gguf_hybrid.export()
    retyped(export, name, kind)
    with refused("model-0.gguf", f"{name} is {shown}"):
        plan(export)


def test_shapes_are_held_to_the_geometry(plan: Plan) -> None:
    export = gguf_hybrid.export()
    export.tensors["blk.0.ffn_up.weight"] = ("blk.0.ffn_up.weight", (128, 256), Q8_0, bytes(128 * 8 * 34))
    with refused("blk.0.ffn_up.weight is Q8_0 (128, 256), expected shape (256, 128)"):
        plan(export)


def test_a_truncated_file_is_refused(plan: Plan, bases: Path, tmp_path: Path) -> None:
    path = gguf_hybrid.export().write(tmp_path / "cut.gguf")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)
    with Sources(bases / "dense", {"gguf": path}) as sources, refused("cut.gguf", "truncated"):
        model = models.build(sources["base"], components=("text",), sources=sources)
        dense_blocks(model, Recipe(model), sources, DENSE)


def test_mtp_needs_its_block(plan: Plan) -> None:
    with refused("component mtp", "blk.4.nextn.*", "-mtp GGUF"):
        plan(gguf_hybrid.export(), "mtp")


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf")])
def test_decay_must_be_negative(plan: Plan, value: float) -> None:
    export = gguf_hybrid.export()
    name, shape, kind, raw = export.tensors["blk.1.ssm_a"]
    values = np.frombuffer(raw, "<f4").copy()
    values[4] = value
    export.tensors[name] = (name, shape, kind, values.tobytes())
    with refused("model-0.gguf", "blk.1.ssm_a must be strictly negative", "element 4"):
        plan(export)


def test_the_source_must_be_a_gguf_file(bases: Path, checkpoints: Path) -> None:
    with Sources(bases / "dense", {"gguf": checkpoints / "dense"}) as sources:
        model = models.build(sources["base"], components=("text",), sources=sources)
        with refused("--source gguf must name the model's .gguf file"):
            dense_blocks(model, Recipe(model), sources, DENSE)


def test_a_missing_source_is_asked_for(bases: Path) -> None:
    with Sources(bases / "dense") as sources:
        model = models.build(sources["base"], components=("text",), sources=sources)
        with refused("requires source 'gguf'", "--source gguf=PATH"):
            dense_blocks(model, Recipe(model), sources, DENSE)


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("qwen3_8_27b_gguf", "moe", "requires Qwen3.5 Dense"),
        ("qwen3_6_35b_a3b_gguf", "dense", "requires Qwen3.5 MoE"),
        ("qwen3_8_27b_gguf", "dense", "27B dense geometry: hidden_size is 128"),
        ("qwen3_6_35b_a3b_gguf", "moe", "35B-A3B geometry: hidden_size is 128"),
    ],
)
def test_the_model_must_be_the_one_of_the_recipe(bases: Path, name: str, base: str, message: str) -> None:
    with Sources(bases / base) as sources:
        model = models.build(sources["base"], components=("text",), sources=sources)
        with refused(message):
            RECIPES[name](model, Recipe(model), sources)


def test_vision_needs_its_source(plan: Plan) -> None:
    with refused("requires source 'vision'"):
        plan(gguf_hybrid.export(), "vision")


# Parents and uses


def test_parents_of_a_uniform_export(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(mtp=True), "mtp")
    text = [parent for parent in planned.parents if parent.names[0].startswith("text/")]
    assert len(text) == 3 + 12 * 3 + 8 * 1
    assert len(planned.parents) - len(text) == 12
    found = by_name(planned)
    mixed = found["text/layers/0/gdn/query"]
    assert [name.rsplit("/", 1)[1] for name in mixed.names] == ["query", "key", "value", "z"]
    assert (mixed.target.format, mixed.target.shape) == ("gguf_q8_0", (512, 128))
    assert mixed.target.layout == "gguf_blocks_v1"
    attention = found["mtp/layers/0/attention/query"]
    assert [name.rsplit("/", 1)[1] for name in attention.names] == ["query", "key", "gate", "value"]
    assert attention.target.shape == (384, 128)
    assert found["text/layers/0/mlp/up"].names == ("text/layers/0/mlp/gate", "text/layers/0/mlp/up")
    bindings = planned.bindings
    assert [part["range"] for part in bindings["text/layers/0/gdn/z"]["parts"]] == [[320 * 128, 512 * 128]]
    assert [part["range"] for part in bindings["text/layers/3/attention/gate"]["parts"]] == [[192 * 128, 320 * 128]]


def test_groups_come_layer_by_layer(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(mtp=True), "mtp")
    groups = [parent.names[0] for parent in planned.parents if len(parent.names) > 1]
    assert groups == [
        *(f"text/layers/{layer}/{first}" for layer in range(3) for first in ("gdn/query", "mlp/gate")),
        "text/layers/3/attention/query",
        "text/layers/3/mlp/gate",
        "mtp/layers/0/attention/query",
        "mtp/layers/0/mlp/gate",
    ]


def test_z_of_another_type_stands_alone(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(types={"blk.0.attn_gate.weight": Q4_0}))
    found = parents_of(planned, "text/layers/0/gdn/")
    assert ("query", "key", "value") in found
    assert ("z",) in found
    assert by_name(planned)["text/layers/0/gdn/z"].target.format == "gguf_q4_0"


def test_attention_of_mixed_types_packs_what_agrees(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(types={"blk.3.attn_v.weight": Q5_0}))
    found = parents_of(planned, "text/layers/3/attention/")
    assert {("query", "key"), ("gate",), ("value",)} <= set(found)


def test_feed_forwards_of_mixed_types_stand_alone(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(types={"blk.0.ffn_up.weight": IQ4_NL}))
    assert {("gate",), ("up",), ("down",)} <= set(parents_of(planned, "text/layers/0/mlp/"))


def test_uses_and_the_shared_permutation(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(mtp=True), "mtp")
    uses, auxiliaries = planned.uses([parent.checked.auxiliaries for parent in planned.parents if parent.checked])
    (columns,) = auxiliaries
    assert (columns.id, columns.format, columns.shape) == ("auxiliary/000000", "int32", (192,))
    assert columns.data == DENSE.input_columns
    with_columns = {use["parameter"] for use in uses if "auxiliaries" in use}
    assert with_columns == {f"text/layers/{layer}/gdn/output" for layer in range(3)}
    assert uses[next(i for i, use in enumerate(uses) if use["parameter"] == "text/layers/0/gdn/output")] == {
        "parameter": "text/layers/0/gdn/output",
        "input": "text/layers/0/gdn/gated_output",
        "activation_policy": "AllowA8",
        "auxiliaries": {"input_columns": {"object": "auxiliary/000000"}},
    }
    policies = {(use["parameter"], use["input"]): use["activation_policy"] for use in uses}
    assert policies["text/output_head", "mtp/final_hidden"] == "AllowA8"
    exact = {parameter for (parameter, _), policy in policies.items() if policy == "A16Only"}
    assert exact == {f"text/layers/{layer}/gdn/{gate}_projection" for layer in range(3) for gate in "ab"}


def test_an_unselected_mtp_block_is_ignored(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(mtp=True))
    assert not any(name.startswith("mtp/") for name in planned.bindings)


# Bytes


def require_equal(planned: PlannedRecipe, export: Export) -> None:
    """Every parameter that the export knows lies in its parent as the export says, byte for byte."""
    by_object = {parent.target.id: payload(parent) for parent in planned.parents if not drafted(parent)}
    for name, binding in planned.bindings.items():
        if name not in export.blocks and name not in export.words:
            continue
        parts = binding.get("parts") or [{"object": binding["object"], "range": None}]
        found = b""
        for part in parts:
            data = by_object[part["object"]]
            if part["range"] is None:
                found += data
            elif name in export.words:
                found += data[2 * part["range"][0] : 2 * part["range"][1]]
            else:
                values, size = BLOCKS[export.blocks[name][0]]
                found += data[part["range"][0] // values * size : part["range"][1] // values * size]
        expected = export.words[name] if name in export.words else export.blocks[name][1].tobytes()
        assert found == expected, name


def drafted(parent: Parent) -> bool:
    return parent.names[0].startswith(("vision/", "dflash", "proposal/"))


TYPES = {
    "token_embd.weight": Q4_0,
    "output.weight": Q5_0,
    "blk.0.attn_qkv.weight": Q2_0,
    "blk.0.ssm_alpha.weight": BF16,
    "blk.0.ssm_beta.weight": F32,
    "blk.1.attn_gate.weight": IQ4_NL,
    "blk.1.ssm_alpha.weight": F16,
    "blk.2.ffn_down.weight": Q4_K,
    "blk.2.ssm_out.weight": Q4_0,
    "blk.3.attn_q.weight": Q2_0,
    "blk.4.attn_v.weight": Q4_0,
}


@pytest.mark.parametrize("types", [{}, TYPES], ids=["uniform", "mixed"])
def test_dense_round_trip(plan: Plan, types: Mapping[str, int]) -> None:
    export = gguf_hybrid.export(mtp=True, types=types)
    planned = plan(export, "mtp")
    assert set(planned.bindings) == export.blocks.keys() | export.words.keys()
    require_equal(planned, export)


@pytest.mark.parametrize(
    "types",
    [{}, {"blk.0.ffn_up_exps.weight": Q4_0, "blk.3.attn_v.weight": Q4_0, "blk.1.ffn_gate_inp.weight": BF16}],
    ids=["uniform", "mixed"],
)
def test_mixture_round_trip(plan: Plan, types: Mapping[str, int]) -> None:
    export = gguf_hybrid.export(moe=True, mtp=True, types=types)
    planned = plan(export, "mtp")
    assert set(planned.bindings) == export.blocks.keys() | export.words.keys()
    require_equal(planned, export)


def test_parents_of_a_mixture(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(moe=True, types={"blk.1.ffn_up_exps.weight": Q4_0, "blk.3.attn_v.weight": Q4_0}))
    found = parents_of(planned, "text/layers/0/moe/")
    assert tuple(f"experts/{expert}/{half}" for expert in EXPERTS for half in ("gate", "up")) in found
    assert tuple(f"experts/{expert}/down" for expert in EXPERTS) in found
    assert {("router", "shared_score"), ("shared/gate", "shared/up"), ("shared/down",)} <= set(found)
    apart = parents_of(planned, "text/layers/1/moe/")
    assert tuple(f"experts/{expert}/gate" for expert in EXPERTS) in apart
    assert tuple(f"experts/{expert}/up" for expert in EXPERTS) in apart
    assert ("a_projection", "b_projection") in parents_of(planned, "text/layers/0/gdn/")
    attention = parents_of(planned, "text/layers/3/attention/")
    assert {("query", "gate"), ("key",), ("value",)} <= set(attention)
    assert ("key", "value") in parents_of(plan(gguf_hybrid.export(moe=True)), "text/layers/3/attention/")
    assert by_name(planned)["text/layers/0/moe/router"].target.shape == (4, 128)


def test_axes_of_one_are_no_part_of_a_shape(plan: Plan) -> None:
    """Exporters write the scores of the shared expert as ``(1, K)``; the quantiser drops that axis."""
    parameter, tensor = "text/layers/0/moe/router", "blk.0.ffn_gate_inp_shexp.weight"
    export = gguf_hybrid.export(moe=True)
    expected = payload(by_name(plan(export))[parameter])
    name, shape, kind, raw = export.tensors[tensor]
    export.tensors[tensor] = (name, (1, *shape), kind, raw)
    assert payload(by_name(plan(export))[parameter]) == expected
    export.tensors[tensor] = (name, (2, shape[0] // 2), kind, raw)
    with refused(f"{tensor} is F32 (2, 64), expected shape (128,)"):
        plan(export)


def test_a_mixture_ignores_an_unselected_mtp_block(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export(moe=True, mtp=True))
    assert not any(name.startswith("mtp/") for name in planned.bindings)


# Values


def words_of(plan: Plan, name: str, tensor: str, values: Any) -> list[int]:
    """The stored words of the parameter ``name`` after the first of the tensor's values were replaced."""
    export = gguf_hybrid.export()
    stored, shape, kind, raw = export.tensors[tensor]
    head = np.asarray(values, "<f4").tobytes()
    export.tensors[tensor] = (stored, shape, kind, head + raw[len(head) :])
    parent = by_name(plan(export))[name]
    words = np.frombuffer(payload(parent), {"bf16": "<u2", "fp32": "<u4"}[parent.target.format])
    return [int(word) for word in words]


def test_norms_lose_their_one(plan: Plan) -> None:
    values = [1.0, 1.5, 0.0, 1.00390625, 0.998046875, 1.1]
    found = words_of(plan, "text/layers/0/input_norm", "blk.0.attn_norm.weight", values)
    assert found[:6] == [0x0000, 0x3F00, 0xBF80, 0x3B80, 0xBB00, 0x3DCD]


def test_the_norm_of_the_delta_net_has_none_to_lose(plan: Plan) -> None:
    assert words_of(plan, "text/layers/0/gdn/norm", "blk.0.ssm_norm.weight", [1.0, 1.5])[:2] == [0x3F80, 0x3FC0]


def test_decay_is_the_logarithm(plan: Plan) -> None:
    stored = [-1, -2, -0.5, -0.01, -1, -1]  # positions of the heads 0, 3, 1, 4, 2, 5
    found = words_of(plan, "text/layers/0/gdn/a_log", "blk.0.ssm_a", stored)
    assert found == [0x00000000, 0xBF317218, 0x00000000, 0x3F317218, 0xC0935D8E, 0x00000000]


def test_decay_comes_back_in_head_order(plan: Plan) -> None:
    found = words_of(plan, "text/layers/0/gdn/a_log", "blk.0.ssm_a", -np.exp([0, 3, 1, 4, 2, 5]))
    assert np.allclose(np.array(found, "<u4").view("<f4"), range(6), atol=1e-6, rtol=0)


def test_gates_of_blocks_are_rounded_to_bf16(plan: Plan) -> None:
    export = gguf_hybrid.export()
    name, shape, kind, raw = export.tensors["blk.0.ssm_alpha.weight"]
    block = np.uint16(0x224C).tobytes() + np.array([1, -127, 100, 3], np.int8).tobytes()
    export.tensors[name] = (name, shape, kind, block + raw[len(block) :])
    words = np.frombuffer(payload(by_name(plan(export))["text/layers/0/gdn/a_projection"]), "<u2")
    assert words[:4].tolist() == [0x3C4A, 0xBFC8, 0x3F9D, 0x3D17]


def test_bf16_gates_keep_their_bits(plan: Plan) -> None:
    """NaN with a payload among them; the first row of the export says which."""
    export = gguf_hybrid.export(types={"blk.0.ssm_alpha.weight": BF16})
    found = payload(by_name(plan(export))["text/layers/0/gdn/a_projection"])
    assert found == export.words["text/layers/0/gdn/a_projection"]
    assert np.frombuffer(found, "<u2")[:3].tolist() == [0x7FC1, 0x8000, 0xFF81]


def test_other_matrices_cannot_take_over_the_permutation(plan: Plan) -> None:
    planned = plan(gguf_hybrid.export())
    recipe = planned.recipe
    recipe.assign("text/layers/0/gdn/output", format="q8_g32_fp16", method="grouped_absmax")
    with refused("input_columns of text/layers/0/gdn/output", "gguf_* blocks"):
        plan_parents(recipe)


# Other components


@pytest.mark.parametrize("moe", [False, True])
def test_drafts_are_those_of_the_other_recipes(plan: Plan, checkpoints: Path, moe: bool) -> None:
    planned = plan(gguf_hybrid.export(moe=moe), "dflash2", sources={"dflash2": checkpoints / "dflash2"})
    found = by_name(planned)
    assert found["dflash2/layers/0/mlp/gate"].target.format == "q8_g32_fp16"
    assert found["dflash2/layers/0/attention_conv/kernel_projection"].target.format == "bf16"
    shared = planned.bindings["dflash2/layers/1/attention/context_key"]
    assert shared == planned.bindings["dflash2/layers/1/attention/key"]


def test_vision_of_a_dense_model_comes_from_its_source(plan: Plan, tmp_path: Path) -> None:
    source = gguf_hybrid.write_vision(tmp_path / "eyes")
    found = by_name(plan(gguf_hybrid.export(), "vision", sources={"vision": source}))
    formats = {
        "vision/patch_embedding": "q6_g64_fp16",
        "vision/merger/fc1": "q8_g32_fp16",
        "vision/layers/0/attention/key": "q4_g64_fp16",
        "vision/layers/0/mlp/fc1": "q4_g64_fp16",
        "vision/layers/0/attention/output": "q5_g64_fp16",
        "vision/layers/0/mlp/fc2": "q5_g64_fp16",
        "vision/position_embedding": "bf16",
        "vision/layers/0/norm1_weight": "bf16",
    }
    assert {name: found[name].target.format for name in formats} == formats
    assert all(
        "eyes" in label for name, parent in found.items() if name.startswith("vision/") for label in parent.labels
    )


def test_vision_of_a_mixture_stays_bf16(plan: Plan, tmp_path: Path) -> None:
    source = gguf_hybrid.write_vision(tmp_path / "eyes")
    found = by_name(plan(gguf_hybrid.export(moe=True), "vision", sources={"vision": source}))
    assert {parent.target.format for name, parent in found.items() if name.startswith("vision/")} == {"bf16"}


@pytest.mark.parametrize("moe", [False, True])
def test_vision_of_an_mmproj_file_is_the_same(plan: Plan, tmp_path: Path, moe: bool) -> None:
    stores = gguf_hybrid.write_vision(tmp_path / "eyes"), gguf_hybrid.write_mmproj(tmp_path / "mmproj.gguf")
    export = gguf_hybrid.export(moe=moe)
    one, other = (by_name(plan(export, "vision", sources={"vision": store})) for store in stores)
    names = [name for name in one if name.startswith("vision/")]
    assert names
    for name in names:
        assert other[name].target.format == one[name].target.format, name
        assert planes(other[name]) == planes(one[name]), name


@pytest.mark.parametrize(
    ("key", "value"), [("general.architecture", "qwen35"), ("clip.projector_type", "qwen2.5vl_merger")]
)
def test_an_mmproj_file_of_another_encoder_is_refused(plan: Plan, tmp_path: Path, key: str, value: str) -> None:
    path = gguf_hybrid.write_mmproj(tmp_path / "mmproj.gguf", **{key: value})
    with refused("mmproj.gguf", f"{key} = {value!r}"):
        plan(gguf_hybrid.export(), "vision", sources={"vision": path})


@pytest.mark.parametrize("moe", [False, True])
def test_the_proposal_copies_rows_of_the_head(plan: Plan, tmp_path: Path, moe: bool) -> None:
    export = gguf_hybrid.export(moe=moe, mtp=True, types={"output.weight": Q4_0})
    ranking = tmp_path / "ranking.i64"
    ranking.write_bytes(np.array(fx.RANKING, "<i8").tobytes())
    planned = plan(export, "mtp", ranking=ranking)
    found = by_name(planned)
    ids = np.frombuffer(payload(found["proposal/token_ids"]), "<i4")
    assert len(ids) == 6
    head = found["proposal/head"]
    assert (head.target.format, head.method_name) == ("gguf_q4_0", "import_encoded")
    assert payload(head) == export.blocks["text/output_head"][1][ids].tobytes()
    assert planned.recipe.policies["proposal/head", "mtp/final_hidden"] == "A16Only"
    assert planned.recipe.model.components["text"]["proposal"] == {"domain": "indexed", "rows": 6}
