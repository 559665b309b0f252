"""What manifests of built-in methods depend on, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from ninferbuild import manifest
from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.artifact.layouts import CODEC_VERSIONS, LAYOUTS
from ninferbuild.models.model import Model, Parameter
from ninferbuild.recipe import Recipe
from ninferbuild.rules import BUILT_IN, Rule
from ninferbuild.sources.description import DECODER_VERSIONS, Description, Part
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.logical import LogicalSource, StoredReader, array_source, select_rows, transpose_source
from ninferbuild.sources.regions import Region, Span
from ninferbuild.sources.steps import STEP_VERSIONS

Manifests = dict[str, str]

OF_BLOCKS = {
    **{name: (f.block_elements, f.block_bytes, name) for name, f in GGUF_FORMATS.items()},
    "pq2_0": (128, 34, "t2_g128_fp16"),
    "ptq1_0": (128, 28, "t2_g128_fp16"),
}
"""Decoders of GGUF blocks: values and bytes of a block, and the format that keeps its rows."""


@pytest.fixture(scope="module")
def reference(layer: Any, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    found: Manifests = layer.manifests(tmp_path_factory.mktemp("reference"))
    return found


def changed(before: Manifests, after: Manifests) -> set[str]:
    assert before.keys() == after.keys()
    return {role for role in before if before[role] != after[role]}


NAMES = st.text("abcdé0._- ", min_size=1, max_size=12).filter(lambda name: name.strip(" .") == name)

SURROUNDINGS = {
    "directory": NAMES,
    "layer": st.integers(0, 90),
    "shards": st.integers(1, 5),
    "foreign": st.integers(0, 9000),
    "age": st.integers(0, 10**8),
    "label": NAMES,
    "backwards": st.booleans(),
    "rows_per_chunk": st.integers(1, 1000),
    "device": st.sampled_from(["", "cpu", "cuda", "cuda:7"]),
    "input": NAMES,
    "policy": st.sampled_from(["A16Only", "AllowA8", "AllowA4"]),
    "divisor": st.floats(0.5, 2, width=32),
    "residency": st.sampled_from(["text", "vision", "mtp"]),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.fixed_dictionaries({}, optional=SURROUNDINGS))
@example(changes={"policy": "AllowA4", "divisor": 2.0, "directory": "other", "layer": 4, "shards": 5, "foreign": 1})
def test_surroundings_leave_them_alone(
    layer: Any, reference: Manifests, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    if changes.get("policy") == "AllowA4":
        changes.setdefault("divisor", 1.0)  # the uses of NVFP4 weights need one then
    around = replace(layer.Surroundings(), **changes)
    assert changed(reference, layer.manifests(tmp_path_factory.mktemp("moved"), around)) == set()


@pytest.mark.parametrize(
    ("tensor", "element", "roles"),
    [
        ("plain.weight", 0, {"plain", "rows"}),
        ("plain.weight", 2 * 128 + 127, {"plain", "gathered"}),
        ("plain.weight", 4 * 128, {"plain", "rows"}),
        ("gate.weight", 383, {"gate+up"}),
        ("up.weight", 0, {"gate+up"}),
        ("conv.weight", 63, {"transposed", "turned_rows"}),
        ("experts.weight", 127, set()),
        ("experts.weight", 128, {"expert"}),
        ("experts.weight", 256, set()),
        ("four.weight_packed", 4095, {"four", "stack+ed", "quantised"}),
        ("four.weight_scale", 0, {"four", "stack+ed", "quantised"}),
        ("four.weight_global_scale", 0, {"four", "stack+ed", "quantised"}),
        ("other.weight_packed", 0, {"stack+ed"}),
        ("other.weight_scale", 511, {"stack+ed"}),
        ("other.weight_global_scale", 0, {"stack+ed"}),
        ("eight.weight", 127, {"eight", "eight_words"}),
        ("eight.weight_scale", 3, {"eight", "eight_words"}),
        ("block.weight", 0, {"block", "block_rows"}),
        ("block.weight", 128, {"block"}),
        ("block.weight", 129 * 128, {"block", "block_rows"}),
        ("block.weight_scale_inv", 0, {"block", "block_rows"}),
        ("block.weight_scale_inv", 1, {"block", "block_rows"}),
    ],
)
def test_one_word_of_the_checkpoint(
    layer: Any, reference: Manifests, tmp_path: Any, tensor: str, element: int, roles: set[str]
) -> None:
    tensors = layer.tensors()
    words = tensors[tensor][2]
    words[element] += np.array(1, words.dtype)
    assert changed(reference, layer.manifests(tmp_path, tensors=tensors)) == roles


def test_an_element_type_of_equal_bytes(layer: Any, reference: Manifests, tmp_path: Any) -> None:
    tensors = layer.tensors()
    _, shape, words = tensors["plain.weight"]
    tensors["plain.weight"] = "F16", shape, words
    assert changed(reference, layer.manifests(tmp_path, tensors=tensors)) == {"plain", "rows", "gathered"}


def test_the_element_type_of_scales(layer: Any, reference: Manifests, tmp_path: Any) -> None:
    tensors = layer.tensors()
    tensors["eight.weight_scale"] = "BF16", (4, 1), np.ones(4, "<u2")
    assert changed(reference, layer.manifests(tmp_path, tensors=tensors)) == {"eight", "eight_words"}


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_the_version_of_a_rule(
    layer: Any, reference: Manifests, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    affected = {role for role, text in reference.items() if f"method: {rule.name} v1\n" in text}
    assert affected
    monkeypatch.setattr(type(rule), "version", 2)
    assert changed(reference, layer.manifests(tmp_path)) == affected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_version_of_a_codec(
    layer: Any, reference: Manifests, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    affected = {role for role, text in reference.items() if f"layout: {layout}\n" in text}
    assert affected
    monkeypatch.setitem(CODEC_VERSIONS, layout, 2)
    assert changed(reference, layer.manifests(tmp_path)) == affected


@pytest.mark.parametrize("decoder", [name for name in DECODER_VERSIONS if name not in OF_BLOCKS])
def test_the_version_of_a_decoder(
    layer: Any, reference: Manifests, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    affected = {role for role, text in reference.items() if f"] {decoder} v1\n" in text}
    assert affected
    monkeypatch.setitem(DECODER_VERSIONS, decoder, 2)
    assert changed(reference, layer.manifests(tmp_path)) == affected


@pytest.mark.parametrize("step", STEP_VERSIONS)
def test_the_version_of_a_step(
    layer: Any, reference: Manifests, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    affected = {role for role, text in reference.items() if f'tuple (str "{step}", ' in text}
    assert affected
    monkeypatch.setitem(STEP_VERSIONS, step, 2)
    assert changed(reference, layer.manifests(tmp_path)) == affected


def test_the_version_of_the_text(
    layer: Any, reference: Manifests, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MANIFEST_VERSION", manifest.MANIFEST_VERSION + 1)
    assert changed(reference, layer.manifests(tmp_path)) == set(reference)


Built = Callable[..., str]


@pytest.fixture
def built(layer: Any) -> Built:
    """The manifest of one parent that packs ``sources``."""

    def build(*sources: LogicalSource, format: str = "fp32", method: str = "cast_direct") -> str:
        model = Model({"text": {"config": {}}})
        for index, source in enumerate(sources):
            model.add(Parameter(f"p{index}", source.shape, source))
        recipe = Recipe(model)
        recipe.assign("*", format=format, method=method)
        if len(sources) > 1:
            recipe.group("*")
        (text,) = layer.by_role(layer.actions_of(recipe, "cuda:99")).values()
        assert isinstance(text, str)
        return text

    return build


def array(*shape: int, first: int = 0, dtype: str = "<f4") -> LogicalSource:
    return array_source(np.arange(first, first + np.prod(shape)).astype(dtype).reshape(shape), "array")


@pytest.mark.parametrize("decoder", OF_BLOCKS)
def test_the_version_of_a_decoder_of_blocks(built: Built, monkeypatch: pytest.MonkeyPatch, decoder: str) -> None:
    values, size, format = OF_BLOCKS[decoder]
    raw = np.arange(3 * size, dtype=np.uint8).tobytes()
    part = Part("blocks", Region.of([Span(MemoryFile(raw, "blocks"), 0, len(raw))]), size)
    reader = StoredReader(lambda: Description((3, values), "F32", decoder, (part,), encoding=format))
    source = LogicalSource((3, values), "blocks", reader.read_values, reader.read_encoded)

    def manifests() -> tuple[str, str]:
        return built(source, format=format, method="import_encoded"), built(source)

    before = manifests()
    monkeypatch.setitem(DECODER_VERSIONS, decoder, 2)
    after = manifests()
    assert [text.replace(f"{decoder} v1", f"{decoder} v2") for text in before] == list(after)
    assert not set(before) & set(after)


def test_choices(built: Built) -> None:
    """Each differs from all others, though most read the same bytes."""
    square, cube = array(8, 8), array(4, 4, 4)
    first, second = array(4, 8), array(4, 8, first=32)
    manifests = [
        built(square),
        built(square, format="bf16"),
        built(square, format="q4_g64_fp16", method="grouped_absmax"),
        built(square, format="q5_g64_fp16", method="grouped_absmax"),
        built(square, format="fp8_e4m3fn_row_bf16", method="fp8_row_maxabs"),
        built(array(64)),
        built(array(4, 16)),
        built(array(8, 8, first=1)),
        built(array(8, 8, dtype="<i4")),
        built(array(8, 8, dtype="<f8")),
        built(first, second),
        built(second, first),
        built(select_rows(square, ((0, 4),))),
        built(transpose_source(square, (1, 0), (8, 8))),
        built(transpose_source(square, (1, 0), (4, 16))),
        built(cube),
        built(transpose_source(cube, (2, 1, 0), (4, 4, 4))),
        built(transpose_source(cube, (2, 0, 1), (4, 4, 4))),
        built(transpose_source(cube, (2, 0, 1), (8, 8))),
        built(select_rows(transpose_source(square, (1, 0), (8, 8)), ((0, 4),))),
        built(select_rows(transpose_source(square, (1, 0), (8, 8)), ((1, 5),))),
    ]
    assert len(set(manifests)) == len(manifests)


def test_equal_bytes_are_equal_wherever_they_come_from(built: Built) -> None:
    whole = array(8, 8)
    assert built(select_rows(whole, ((2, 4),))) == built(array(2, 8, first=16))
    assert built(select_rows(whole, ((0, 3), (3, 8)))) == built(whole)
    assert built(array(8, 8)) == built(whole)
