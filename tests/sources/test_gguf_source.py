"""Values of GGUF tensors, and what an alias makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures.gguf_files import Tensor, write_gguf
import numpy as np
import pytest
import torch

from ninferbuild.sources.decoding import read_values
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_source import (
    GGUFSource,
    HFAliasSource,
    qwen35_linear_attention_name_map,
    qwen35_vision_name_map,
    reorder_linear_attention_v_heads,
    standard_dense_name_map,
)
from ninferbuild.sources.safetensors import is_described_store, tensor_source

F32, F16, BF16 = 0, 1, 30

Write = Callable[..., GGUFSource]


def stored(name: str, values: Any, type_id: int = F32) -> Tensor:
    array = np.asarray(values, np.float32)
    if type_id == BF16:
        assert not (array.view(np.uint32) & 0xFFFF).any()
        raw = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        raw = array.astype({F32: "<f4", F16: "<f2"}[type_id]).tobytes()
    return name, array.shape, type_id, raw


def q8_0(name: str, shape: tuple[int, ...]) -> tuple[Tensor, np.ndarray]:
    """A tensor of Q8_0 blocks, and its values."""
    count = int(np.prod(shape)) // 32
    scales = (np.arange(1, count + 1) / 8).astype("<f2")
    codes = (np.arange(32 * count) * 37 % 255 - 127).astype(np.int8).reshape(count, 32)
    raw = np.concatenate([scales.view(np.uint8).reshape(-1, 2), codes.view(np.uint8)], axis=1).tobytes()
    return (name, shape, 8, raw), (scales.astype(np.float32)[:, None] * codes).reshape(shape)


@pytest.fixture
def source(tmp_path: Path) -> Write:
    def write(*tensors: Tensor, **kv: Any) -> GGUFSource:
        return GGUFSource(write_gguf(tmp_path / "model.gguf", {"general.architecture": "qwen35", **kv}, tensors))

    return write


def values_of(store: Any, name: str) -> np.ndarray:
    return store.read_flat(name).numpy().reshape(store.describe(name).shape)


class TestGGUFSource:
    def test_ranges_of_a_matrix(self, source: Write) -> None:
        store = source(stored("m", np.arange(24).reshape(6, 4)))
        assert store.read_flat("m", 5, 11).tolist() == [5, 6, 7, 8, 9, 10]
        assert store.read_flat("m").tolist() == list(range(24))
        empty = store.read_flat("m", 2, 2)
        assert (empty.dtype, empty.shape) == (torch.float32, (0,))
        info = store.describe("m")
        assert (info.shape, info.dtype) == ((6, 4), "F32")
        assert (store.has("m"), store.has("n")) == (True, False)
        assert store.config == {}

    @pytest.mark.parametrize(("begin", "end"), [(0, 100), (-1, 3), (5, 4), (25, 25)])
    def test_a_range_outside(self, source: Write, begin: int, end: int) -> None:
        store = source(stored("m", np.arange(24).reshape(6, 4)))
        with pytest.raises(ValueError, match=r"model\.gguf: m: invalid element range"):
            store.read_flat("m", begin, end)

    @pytest.mark.parametrize("method", ["describe", "tensor", "read_flat"])
    def test_a_name_that_is_not_there(self, source: Write, method: str) -> None:
        store = source(stored("m", np.zeros(4)))
        with pytest.raises(ValueError, match=r"missing GGUF tensor 'n'.*gguf ls"):
            getattr(store, method)("n")

    @pytest.mark.parametrize("type_id", [F32, F16, BF16])
    @pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2), ()])
    def test_direct_types_are_widened(self, source: Write, type_id: int, shape: tuple[int, ...]) -> None:
        values = np.array([1, -2, 0.5, 3])[: int(np.prod(shape))].reshape(shape)
        store = source(stored("x", values, type_id))
        assert store.describe("x").dtype == {F32: "F32", F16: "F16", BF16: "BF16"}[type_id]
        found = store.read_flat("x")
        assert found.dtype == torch.float32
        assert found.tolist() == values.reshape(-1).tolist()

    def test_parts_of_a_bf16_vector(self, source: Write) -> None:
        store = source(stored("x", [1, 2, 3, 4], BF16))
        assert store.read_flat("x", 0, 1).tolist() == [1]
        assert store.read_flat("x", 1, 3).tolist() == [2, 3]

    def test_listing_and_metadata(self, source: Write) -> None:
        store = source(stored("b", np.zeros((2, 3))), stored("a", np.zeros(4), F16), **{"general.name": "toy"})
        assert list(store.list_tensors()) == [("b", (2, 3), "F32"), ("a", (4,), "F16")]
        assert store.metadata() == {"general.architecture": "qwen35", "general.name": "toy"}

    def test_only_what_is_needed_is_read(self, source: Write) -> None:
        with source(stored("m", np.zeros((64, 16)), BF16)) as store:
            store.read_flat("m", 17, 31)
            assert store.bytes_read == 2 * 14

    @pytest.mark.parametrize("shape", [(96,), (3, 64), (2, 3, 64)])
    def test_blocks_are_decoded(self, source: Write, shape: tuple[int, ...]) -> None:
        tensor, values = q8_0("w", shape)
        store = source(tensor)
        assert store.describe("w").dtype == "Q8_0"
        assert np.array_equal(values_of(store, "w"), values)
        flat = values.reshape(-1)
        for begin, end in ((0, 1), (5, 70), (31, 33), (64, 64), (90, 96)):
            assert store.read_flat("w", begin, end).tolist() == flat[begin:end].tolist()

    def test_a_file_with_a_type_that_the_package_lacks(self, source: Write) -> None:
        codes = bytes(range(16))
        store = source(("w", (2, 64), 42, (np.float16(0.5).tobytes() + codes) * 2), stored("x", [1, 2]))
        expected = [0.5 * ((byte >> shift & 3) - 1) for byte in codes for shift in (0, 2, 4, 6)]
        assert store.read_flat("w").tolist() == expected * 2
        assert store.read_flat("x").tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("type_id", "size", "name"),
        [(142, 68, "PQ2_0"), (3, 160, "Q4_1"), (99, 3, "99")],
        ids=["ternary", "old", "new"],
    )
    def test_a_type_without_values(self, source: Write, type_id: int, size: int, name: str) -> None:
        store = source(("w", (2, 128), type_id, bytes(size)), stored("x", [1, 2]))
        assert store.describe("w").dtype == name
        with pytest.raises(ValueError, match=rf"model\.gguf: w: values of type {name} cannot be decoded"):
            store.read_flat("w")


def plus_one(values: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    return values + 1, shape


class TestAlias:
    def test_names(self, source: Write) -> None:
        alias = HFAliasSource(source(stored("g", [1, 2])), {"h": "g", "gone": "not there"})
        assert [alias.has(name) for name in ("h", "g", "gone", "other")] == [True, False, False, False]
        assert alias.read_flat("h").tolist() == [1, 2]
        for method in (alias.describe, alias.tensor, alias.read_flat):
            with pytest.raises(ValueError, match=r"^no GGUF tensor mapped for 'other'.*gguf ls .*model\.gguf"):
                method("other")
            with pytest.raises(ValueError, match="missing GGUF tensor 'not there'"):
                method("gone")
        assert alias.config == {}

    def test_a_source_of_blocks_is_refused(self, source: Write) -> None:
        path = source(stored("g", [1, 2])).path
        with pytest.raises(TypeError, match=r"blocks, not its values.*--source quantized="):
            HFAliasSource(GGUFFile(path), {"h": "g"})

    @pytest.mark.parametrize("transform", [plus_one, "described"])
    def test_a_transform_and_a_shape(self, source: Write, transform: Any) -> None:
        if transform == "described":
            from ninferbuild.sources.alias_transforms import Offset

            transform = Offset(1.0)
        alias = HFAliasSource(
            source(stored("g", [0.5] * 4)),
            {"h": "g"},
            transforms={"h": transform},
            shapes={"h": lambda shape: (2, 2)},
        )
        assert alias.describe("h").shape == (2, 2)
        assert alias.describe("h").dtype == "F32"
        assert alias.read_flat("h").tolist() == [1.5] * 4
        assert alias.read_flat("h", 1, 3).tolist() == [1.5, 1.5]
        with pytest.raises(ValueError, match="invalid element range"):
            alias.read_flat("h", 1, 5)

    def test_a_users_transform_runs_once_for_reads_of_one_tensor(self, source: Write) -> None:
        calls: list[str] = []

        def transform(values: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
            calls.append("called")
            values += 1  # the values are the function's own
            return values, shape

        alias = HFAliasSource(
            source(stored("g", [1, 2, 3]), stored("f", [9])), {"h": "g", "o": "f"}, transforms={"h": transform}
        )
        first = alias.read_flat("h", 0, 2)
        first.zero_()
        assert alias.read_flat("h").tolist() == [2, 3, 4]
        assert alias.read_flat("o").tolist() == [9]
        assert len(calls) == 1
        alias.close()
        assert alias.read_flat("h", 2, 3).tolist() == [4]
        assert len(calls) == 2

    @pytest.mark.parametrize(
        ("transform", "error", "message"),
        [
            (
                lambda values, shape: (values[:2], (2,)),
                ValueError,
                "h: its transform must not change the element count",
            ),
            (lambda values, shape: values, TypeError, "h: its transform must return"),
            (lambda values, shape: None, TypeError, "h: its transform must return"),
            (lambda values, shape: ("text", shape), TypeError, "h: its transform must return"),
            (
                lambda values, shape: (values.reshape(shape).T, shape[::-1]),
                ValueError,
                r"h: its transform returned the shape \(3, 2\), and the parameter is read as \(2, 3\)",
            ),
            (
                lambda values, shape: (values.int(), shape),
                TypeError,
                r"h: its transform must return floating-point values, not torch\.int32",
            ),
        ],
    )
    def test_what_a_users_transform_may_not_return(
        self, source: Write, transform: Any, error: type[Exception], message: str
    ) -> None:
        alias = HFAliasSource(source(stored("g", [[1, 2, 3], [4, 5, 6]])), {"h": "g"}, transforms={"h": transform})
        with pytest.raises(error, match=message):
            alias.read_flat("h")

    @pytest.mark.parametrize("returned", [(2, 3), (3, 2), (6,)])
    def test_a_users_transform_returns_the_shape_there_here_or_none(self, source: Write, returned: Any) -> None:
        alias = HFAliasSource(
            source(stored("g", [[1, 2, 3], [4, 5, 6]])),
            {"h": "g"},
            transforms={"h": lambda values, shape: (values.reshape(shape).T, returned)},
            shapes={"h": lambda shape: shape[::-1]},
        )
        assert alias.describe("h").shape == (3, 2)
        assert alias.read_flat("h").tolist() == [1, 4, 2, 5, 3, 6]

    def test_arrays_and_lists_are_values_too(self, source: Write) -> None:
        alias = HFAliasSource(
            source(stored("g", [1, 2])),
            {"h": "g"},
            transforms={"h": lambda values, shape: (values.numpy()[::-1].copy(), shape)},
        )
        assert alias.read_flat("h").tolist() == [2, 1]

    def test_a_shape_of_other_elements(self, source: Write) -> None:
        alias = HFAliasSource(source(stored("g", [1, 2])), {"h": "g"}, shapes={"h": lambda shape: (3,)})
        for method in (alias.describe, alias.tensor):
            with pytest.raises(ValueError, match=r"h: shape \(3,\) does not hold"):
                method("h")

    @pytest.mark.parametrize("found", [None, 2, (2.0,), "2"])
    def test_what_is_no_shape(self, source: Write, found: Any) -> None:
        alias = HFAliasSource(source(stored("g", [1, 2])), {"h": "g"}, shapes={"h": lambda shape: found})
        with pytest.raises(TypeError, match="h: its shape function must return a shape, not "):
            alias.describe("h")

    def test_a_users_composite_goes_before_everything_else(self, source: Write) -> None:
        store = source(stored("a", [[1, 2, 3], [4, 5, 6]]), stored("b", [[7, 8, 9], [10, 11, 12]]))

        def stack(given: GGUFSource) -> tuple[Any, tuple[int, ...]]:
            assert given is store
            parts = [given.read_flat(name).reshape(2, 3) for name in "ab"]
            return torch.stack(parts, dim=1).reshape(-1), (2, 2, 3)

        alias = HFAliasSource(
            store,
            {"h": "a"},
            transforms={"h": plus_one},
            shapes={"h": lambda shape: (6,)},
            composites={"h": stack, "wrong": lambda given: (torch.zeros(3), (2, 2))},
        )
        info = alias.describe("h")
        assert (info.shape, info.dtype) == ((2, 2, 3), "composite")
        assert alias.read_flat("h", 2, 7).tolist() == [3, 7, 8, 9, 4]
        assert alias.has("h")
        with pytest.raises(ValueError, match="wrong: its composite returned 3 values"):
            alias.read_flat("wrong")


class TestWhatIsDescribed:
    """A source is described exactly where nothing but known steps happens to it."""

    def test_a_users_function_makes_its_tensor_opaque_and_no_other(self, source: Write) -> None:
        names, transforms, shapes = standard_dense_name_map(1, text_prefix="")
        mixed = {**transforms, "norm.weight": lambda values, shape: (values - 1, shape)}
        store = source(stored("output_norm.weight", [2, 3]), stored("blk.0.attn_norm.weight", [2, 3]))
        alias = HFAliasSource(store, names, transforms=mixed, shapes=shapes)
        own = tensor_source(alias, "norm.weight", (2,))
        known = tensor_source(alias, "layers.0.input_layernorm.weight", (2,))
        assert own.description is None
        assert known.description is not None
        assert known.description.steps == (("add", (2,), -1.0),)
        assert own.values().tolist() == known.values().tolist() == [1, 2]

    @pytest.mark.parametrize("kind", ["alias", "file"])
    def test_a_subclass_is_opaque(self, source: Write, kind: str) -> None:
        class Doubled(HFAliasSource if kind == "alias" else GGUFSource):  # type: ignore[misc]
            def read_flat(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
                return super().read_flat(name, begin, end) * 2

        plain = source(stored("g", [1, 2]))
        store = Doubled(plain, {"h": "g"}) if kind == "alias" else HFAliasSource(Doubled(plain.path), {"h": "g"})
        found = tensor_source(store, "h", (2,))
        assert found.description is None
        assert found.values().tolist() == [2, 4]

    def test_frames_of_different_types_are_stacked_by_value(self, source: Write) -> None:
        first, second = np.arange(12).reshape(1, 3, 2, 2), 20 + np.arange(12).reshape(1, 3, 2, 2)
        expected = np.stack([first, second], axis=2)
        names = ("v.patch_embd.weight", "v.patch_embd.weight.1")
        _, _, _, composites = qwen35_vision_name_map(0, hidden_size=1, patch_size=2, hf_prefix="")
        for types in ((F16, F16), (F16, F32)):
            store = source(stored(names[0], first, types[0]), stored(names[1], second, types[1]))
            alias = HFAliasSource(store, {}, composites=composites)
            assert is_described_store(alias, "patch_embed.proj.weight") == (types[0] == types[1])
            assert alias.describe("patch_embed.proj.weight").shape == (1, 3, 2, 2, 2)
            assert np.array_equal(values_of(alias, "patch_embed.proj.weight"), expected)
            flat = tensor_source(alias, "patch_embed.proj.weight", (1, 24), source_shape=(1, 3, 2, 2, 2))
            assert flat.values(3, 9).tolist() == expected.reshape(-1)[3:9].tolist()

    def test_a_frame_of_another_shape_is_refused(self, source: Write) -> None:
        _, _, _, composites = qwen35_vision_name_map(0, hidden_size=1, patch_size=2, hf_prefix="")
        store = source(
            stored("v.patch_embd.weight", np.zeros((1, 3, 2, 2))),
            stored("v.patch_embd.weight.1", np.zeros((1, 3, 2, 1))),
        )
        alias = HFAliasSource(store, {}, composites=composites)
        for method in (alias.describe, alias.tensor, alias.read_flat):
            with pytest.raises(ValueError, match=r"v\.patch_embd\.weight\.1: expected shape"):
                method("patch_embed.proj.weight")

    def test_reordered_rows_read_only_their_bytes(self, source: Write) -> None:
        names, transforms, shapes = qwen35_linear_attention_name_map(
            0, num_k_heads=2, num_v_heads=6, head_k_dim=4, head_v_dim=4, text_prefix=""
        )
        store = source(stored("blk.0.attn_qkv.weight", np.arange(40 * 8).reshape(40, 8) % 251, F16))
        alias = HFAliasSource(store, names, transforms=transforms, shapes=shapes)
        whole = alias.tensor("layers.0.linear_attn.in_proj_qkv.weight")
        query = whole.select_rows([(0, 8)])
        (span,) = query.parts[0].region.spans
        assert span.end - span.begin == 8 * 8 * 2
        assert query.steps == (("float32", (8, 8), "F16"),)
        order = [*range(16), *(16 + 4 * (r * 2 + k) + d for k in range(2) for r in range(3) for d in range(4))]
        assert np.array_equal(
            read_values(whole, 0, whole.elements).numpy().reshape(40, 8),
            values_of(store, "blk.0.attn_qkv.weight")[order],
        )

    def test_columns_of_blocks_go_back_row_by_row(self, source: Write) -> None:
        names, transforms, _ = qwen35_linear_attention_name_map(
            0, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16, text_prefix=""
        )
        tensor, values = q8_0("blk.0.ssm_out.weight", (6, 64))
        alias = HFAliasSource(source(tensor), names, transforms=transforms)
        name = "layers.0.linear_attn.out_proj.weight"
        expected = values.reshape(6, 2, 2, 16).swapaxes(1, 2).reshape(6, 64)
        assert np.array_equal(values_of(alias, name), expected)
        two = alias.tensor(name).select_rows([(4, 6)])
        assert two.parts[0].region.length == 2 * 2 * 34
        assert np.array_equal(read_values(two, 0, 128).numpy().reshape(2, 64), expected[4:])

    @pytest.mark.parametrize("transform", ["in_proj_z.weight", "out_proj.weight", "A_log", "in_proj_qkv.weight"])
    def test_heads_that_do_not_fit_are_refused_with_the_name(self, source: Write, transform: str) -> None:
        names, transforms, _ = qwen35_linear_attention_name_map(
            0, num_k_heads=2, num_v_heads=6, head_k_dim=4, head_v_dim=4, text_prefix=""
        )
        name = f"layers.0.linear_attn.{transform}"
        store = source(stored(names[name], -np.ones((7, 7) if "proj" in transform else (7,))))
        alias = HFAliasSource(store, names, transforms=transforms)
        with pytest.raises(ValueError, match=f"{name}: expected .* positions along axis"):
            alias.tensor(name)


class TestReorder:
    def test_swaps_groups(self) -> None:
        values = torch.tensor([0, 1, 2, 10, 11, 12])
        swapped = reorder_linear_attention_v_heads(values, (6,), 0, 2, 3, 1)
        assert swapped.tolist() == [0, 10, 1, 11, 2, 12]
        assert reorder_linear_attention_v_heads(swapped, (6,), 0, 3, 2, 1).tolist() == values.tolist()
        assert reorder_linear_attention_v_heads(swapped, (6,), 0, 2, 3, 1).tolist() != values.tolist()
        four = torch.arange(4)
        twice = reorder_linear_attention_v_heads(four, (4,), 0, 2, 2, 1)
        assert reorder_linear_attention_v_heads(twice, (4,), 0, 2, 2, 1).tolist() == four.tolist()

    @pytest.mark.parametrize("make", [torch.arange, np.arange])
    def test_any_axis_of_tensors_and_arrays(self, make: Any) -> None:
        values = make(2 * 12 * 3)
        expected = np.arange(72).reshape(2, 2, 3, 2, 3).swapaxes(1, 2).reshape(2, 12, 3)
        for dim in (1, -2):
            assert np.array_equal(reorder_linear_attention_v_heads(values, (2, 12, 3), dim, 2, 3, 2), expected)

    @pytest.mark.parametrize(("dim", "heads"), [(0, (2, 2, 1)), (1, (2, 3, 1)), (-2, (2, 3, 1))])
    def test_what_does_not_fit(self, dim: int, heads: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="axis"):
            reorder_linear_attention_v_heads(torch.arange(6), (6,), dim, *heads)
