"""Encoded matrices: both naming conventions, row and block FP8, and every word that is refused."""

from __future__ import annotations

from pathlib import Path
import struct

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.sources import decoders
from ninferbuild.sources.compressed_tensors import compressed_matrix_source, matrix_source
from ninferbuild.sources.decoding import DECODERS, open_encoded, open_values
from ninferbuild.sources.description import DECODER_VERSIONS
from ninferbuild.sources.logical import gather_source, select_rows, transpose_source
from ninferbuild.sources.safetensors import SafetensorsSource

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def e4m3(word: int) -> float:
    sign, exponent, fraction = word >> 7, word >> 3 & 15, word & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = np.array([e4m3(word) for word in range(256)], dtype=np.float64)
E4M3[[0x7F, 0xFF]] = np.nan


def f32(value: float) -> np.float32:
    return np.float32(value)


class Files:
    """Tensors of one prefix in each encoding, with the values that they decode to."""

    def __init__(self, checkpoints, seed=0):
        self.make = checkpoints
        self.random = np.random.default_rng(seed)

    def nvfp4(self, prefix, rows, columns, divisor=2.0, input_divisor=1.5):
        codes = self.random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        scales = self.random.integers(0, 127, (rows, columns // 16), dtype=np.uint8)
        tensors = {
            f"{prefix}.weight_packed": self.make.stored("U8", codes),
            f"{prefix}.weight_scale": self.make.stored("F8_E4M3", scales),
            f"{prefix}.weight_global_scale": self.make.stored("F32", f32(divisor)),
            f"{prefix}.input_global_scale": self.make.stored("F32", np.array([input_divisor], np.float32)),
        }
        nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, columns)
        exact = np.array(E2M1)[nibbles] * E4M3[scales].repeat(16, axis=1)
        with np.errstate(all="ignore"):  # bad divisors and overflow to infinity are among the cases
            return tensors, codes, scales, exact.astype(np.float32) / f32(divisor)

    def fp8_codes(self, rows, columns):
        codes = self.random.integers(0, 254, (rows, columns), dtype=np.uint8)
        codes[codes == 0x7F] = 0
        return codes


@pytest.fixture
def encoded(checkpoints):
    return Files(checkpoints)


def equal_bits(values: torch.Tensor, expected: np.ndarray) -> bool:
    assert values.dtype == torch.float32
    return np.array_equal(values.numpy().view(np.uint32), np.asarray(expected, np.float32).reshape(-1).view(np.uint32))


def test_every_decoder_has_a_version():
    assert DECODERS.keys() == DECODER_VERSIONS.keys()


class TestNvfp4:
    def table_source(self, open_tensors, checkpoints, scales=(0x38, 0x40)):
        codes = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]] * 2, np.uint8)
        store = open_tensors(
            {
                "p.weight_packed": checkpoints.stored("U8", codes),
                "p.weight_scale": checkpoints.stored("F8_E4M3", np.array([scales], np.uint8).T),
                "p.weight_global_scale": checkpoints.stored("F32", f32(2.0)),
                "p.input_global_scale": checkpoints.stored("F32", f32(1.5)),
            }
        )
        return store, compressed_matrix_source(store, "p", (2, 16), "nvfp4")

    def test_table(self, open_tensors, checkpoints):
        store, source = self.table_source(open_tensors, checkpoints)
        assert source.label == f"{store.path}:p (nvfp4)"
        assert equal_bits(source.values(), np.array([np.array(E2M1) / 2, E2M1]))
        assert source.weight_divisor() == bytes.fromhex("00000040")
        assert source.input_divisor() == bytes.fromhex("0000c03f")
        rows = source.read_encoded(1, 2)
        assert (rows.format, rows.weight_divisor) == ("nvfp4", bytes.fromhex("00000040"))
        assert (rows.codes.dtype, rows.codes.shape, rows.scales.tolist()) == (torch.uint8, (1, 8), [[0x40]])

    @pytest.mark.parametrize("word", [0x7F, 0x80, 0xFF])
    def test_invalid_scale_words(self, word, open_tensors, checkpoints):
        _, source = self.table_source(open_tensors, checkpoints, scales=(0x38, word))
        assert source.values(0, 16).numel() == 16  # rows are checked as they are decoded
        for read in (lambda: source.values(31, 32), lambda: source.read_encoded(0, 2)):
            with pytest.raises(ValueError, match=r"p\.weight_scale: expected nonnegative finite E4M3FN"):
                read()

    @pytest.mark.parametrize("divisor", [1.0, 3.0, 2688 / 7.3, 1e30, 1e-38])
    def test_values_are_rounded_once(self, divisor, encoded, open_tensors):
        tensors, codes, scales, values = encoded.nvfp4("p", 5, 96, divisor)
        source = matrix_source(open_tensors(tensors), "p.weight", (5, 96))
        assert equal_bits(source.values(), values)
        assert equal_bits(source.values(100, 250), values.reshape(-1)[100:250])
        rows = source.read_encoded(1, 4)
        assert np.array_equal(rows.codes.numpy(), codes[1:4])
        assert np.array_equal(rows.scales.numpy(), scales[1:4])

    def test_model_opt_names(self, encoded, open_tensors, checkpoints):
        tensors, codes, _, _ = encoded.nvfp4("p", 4, 32)
        scale = f32(0.0031)
        store = open_tensors(
            {
                "p.weight": tensors["p.weight_packed"],
                "p.weight_scale": tensors["p.weight_scale"],
                "p.weight_scale_2": checkpoints.stored("F32", scale),
                "p.input_scale": checkpoints.stored("F32", f32(7.0)),
            }
        )
        source = matrix_source(store, "p.weight", (4, 32))
        assert source.weight_divisor() == struct.pack("<f", 1.0 / float(scale))
        assert source.input_divisor() == struct.pack("<f", 1.0 / 7.0)
        assert np.array_equal(source.read_encoded(0, 4).codes.numpy(), codes)
        same = compressed_matrix_source(store, "p", (4, 32), "nvfp4")
        assert same.description == source.description

    @pytest.mark.parametrize("multiplier", [1e-45, 0.0, float("inf"), float("nan"), -1.0])
    def test_model_opt_scalars_without_a_reciprocal(self, multiplier, encoded, open_tensors, checkpoints):
        tensors, *_ = encoded.nvfp4("p", 4, 32)
        tensors["p.weight"] = tensors.pop("p.weight_packed")
        tensors["p.weight_scale_2"] = checkpoints.stored("F32", f32(multiplier))
        source = matrix_source(open_tensors(tensors), "p.weight", (4, 32))
        with pytest.raises(ValueError, match=r"safetensors: p\.weight_scale_2: .*finite and positive.*; download"):
            source.weight_divisor()

    @pytest.mark.parametrize("divisor", [0.0, -2.0, float("inf"), float("nan")])
    def test_bad_divisors(self, divisor, encoded, open_tensors):
        tensors, *_ = encoded.nvfp4("p", 4, 32, divisor, divisor)
        source = compressed_matrix_source(open_tensors(tensors), "p", (4, 32), "nvfp4")
        for read in (source.weight_divisor, source.input_divisor, lambda: source.values(0, 1)):
            with pytest.raises(ValueError, match="finite and positive"):
                read()

    def test_input_divisor_is_not_needed_for_weights(self, encoded, open_tensors):
        tensors, _, _, values = encoded.nvfp4("p", 4, 32)
        del tensors["p.input_global_scale"]
        source = matrix_source(open_tensors(tensors), "p.weight", (4, 32))
        assert equal_bits(source.values(), values)
        with pytest.raises(ValueError, match=r"missing source tensor 'p\.input_global_scale'"):
            source.input_divisor()

    def test_wrong_tensors(self, encoded, open_tensors, checkpoints):
        good, *_ = encoded.nvfp4("p", 4, 32)
        wrong = {
            "p.weight_packed": (checkpoints.stored("I8", np.zeros((4, 16), np.int8)), r"expected U8\(4, 16\), got I8"),
            "p.weight_scale": (checkpoints.stored("F8_E4M3", np.zeros((4, 3), np.uint8)), r"expected F8_E4M3\(4, 2\)"),
            "p.weight_global_scale": (checkpoints.stored("F64", np.float64(1)), "expected a source FP32 scalar"),
        }
        for name, (tensor, message) in wrong.items():
            source = compressed_matrix_source(open_tensors(good | {name: tensor}), "p", (4, 32), "nvfp4")
            with pytest.raises(ValueError, match=message):
                _ = source.description
        store = open_tensors(good | {"p.pre_quant_scale": checkpoints.stored("F32", np.ones(32, np.float32))})
        with pytest.raises(ValueError, match="pre_quant_scale is not supported"):
            _ = matrix_source(store, "p.weight", (4, 32)).description

    def test_construction_errors(self, open_tensors):
        store = open_tensors({})
        with pytest.raises(ValueError, match="divisible by 16"):
            compressed_matrix_source(store, "p", (4, 24), "nvfp4")
        with pytest.raises(ValueError, match="unsupported encoded source format"):
            compressed_matrix_source(store, "p", (4, 32), "q4_g64_fp16")
        source = compressed_matrix_source(store, "p", (4, 32), "nvfp4")
        with pytest.raises(ValueError, match="no NVFP4 encoded source found"):
            _ = source.description


class TestRowFp8:
    def store(self, open_tensors, checkpoints, scales, codes=((0x38, 0xB8, 0x40), (0x30, 0xB0, 0x80))):
        return open_tensors(
            {"p.weight": checkpoints.stored("F8_E4M3", np.array(codes, np.uint8)), "p.weight_scale": scales}
        )

    def test_values_and_reordered_rows(self, open_tensors, checkpoints):
        store = self.store(open_tensors, checkpoints, checkpoints.bf16([[2.0], [0.5]]))
        source = compressed_matrix_source(store, "p", (2, 3), "fp8_e4m3fn_row_bf16")
        assert equal_bits(source.values(), np.array([2, -2, 4, 0.25, -0.25, -0.0]))
        turned = select_rows(source, ((1, 2), (0, 1)))
        rows = turned.read_encoded(0, 2)
        assert rows.codes.tolist() == [[0x30, 0xB0, 0x80], [0x38, 0xB8, 0x40]]
        assert (rows.scales.dtype, rows.scales.tolist(), rows.weight_divisor) == (torch.bfloat16, [0.5, 2.0], None)
        assert equal_bits(turned.values(), np.array([0.25, -0.25, -0.0, 2, -2, 4]))
        with pytest.raises(ValueError, match="does not provide weight_divisor"):
            turned.weight_divisor()

    @pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
    def test_scales_of_any_rank(self, shape, open_tensors, checkpoints):
        store = self.store(open_tensors, checkpoints, checkpoints.bf16(np.array([2.0, 0.5]).reshape(shape)))
        assert matrix_source(store, "p.weight", (2, 3)).values(2, 4).tolist() == [4, 0.25]

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_one_scale_for_all_rows(self, shape, open_tensors, checkpoints):
        scale = checkpoints.stored("F32", np.full(shape, 1 + 2**-8 + 2**-20, np.float32))
        source = matrix_source(self.store(open_tensors, checkpoints, scale), "p.weight", (2, 3))
        rounded = np.float32(1 + 2**-7)
        assert source.read_encoded(0, 2).scales.tolist() == [rounded, rounded]
        assert select_rows(source, ((1, 2),)).read_encoded(0, 1).scales.tolist() == [rounded]
        assert source.values(0, 3).tolist() == [rounded, -rounded, 2 * rounded]

    def test_fp32_scales_round_to_even(self, open_tensors, checkpoints):
        scales = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
        source = matrix_source(
            self.store(open_tensors, checkpoints, checkpoints.stored("F32", scales)), "p.weight", (2, 3)
        )
        assert source.read_encoded(0, 2).scales.tolist() == [1.0, 1 + 2**-6]

    def test_wrong_scales(self, open_tensors, checkpoints):
        for scales, message in (
            (checkpoints.bf16([1.0, 1.0, 1.0]), "one BF16 scale per row"),
            (checkpoints.bf16([1.0, 1.0, 1.0]), "one scale per row or one global scale"),
            (checkpoints.stored("F16", np.ones(2, np.float16)), "expected BF16 or F32 scales"),
        ):
            source = matrix_source(self.store(open_tensors, checkpoints, scales), "p.weight", (2, 3))
            with pytest.raises(ValueError, match=message):
                _ = source.description

    @pytest.mark.parametrize("scale", [-1.0, -0.0, float("inf"), float("nan")])
    def test_invalid_scale_words(self, scale, open_tensors, checkpoints):
        scales = checkpoints.stored("F32", np.array([1.0, scale], np.float32))
        source = matrix_source(self.store(open_tensors, checkpoints, scales), "p.weight", (2, 3))
        assert source.read_encoded(0, 1).scales.tolist() == [1.0]
        for read in (source.values, lambda: source.read_encoded(0, 2)):
            with pytest.raises(ValueError, match="nonnegative finite BF16"):
                read()

    @pytest.mark.parametrize("word", [0x7F, 0xFF])
    def test_invalid_code_words(self, word, open_tensors, checkpoints):
        store = self.store(open_tensors, checkpoints, checkpoints.bf16([1.0, 1.0]), ((0, 0, 0), (0, word, 0)))
        source = matrix_source(store, "p.weight", (2, 3))
        with pytest.raises(ValueError, match="finite E4M3FN"):
            source.values()

    @pytest.mark.parametrize("scale", [-1.0, -0.0, float("inf"), float("nan"), -float("nan"), 3.4e38])
    @pytest.mark.parametrize("dtype", ["F32", "BF16"])
    def test_an_invalid_scale_of_all_rows_is_refused_before_rows_are_read(
        self, scale, dtype, open_tensors, checkpoints
    ):
        word = np.array(scale, np.float32).view(np.uint32)
        stored = checkpoints.stored("F32", word.view(np.float32))
        if dtype == "BF16":
            stored = checkpoints.stored("BF16", np.array((int(word) + 0x7FFF) >> 16, np.uint16))
        source = matrix_source(self.store(open_tensors, checkpoints, stored), "p.weight", (2, 3))
        with pytest.raises(
            ValueError, match=r"safetensors: p\.weight_scale: expected nonnegative finite BF16 row.*; dow"
        ):
            _ = source.description

    @pytest.mark.parametrize("scale", [0.0, 1e-45, 3.38e38])
    def test_the_limits_of_a_scale_of_all_rows(self, scale, open_tensors, checkpoints):
        stored = checkpoints.stored("F32", np.float32(scale))
        source = matrix_source(self.store(open_tensors, checkpoints, stored), "p.weight", (2, 3))
        assert source.description is not None

    def test_zero_scale_admits_zero_codes_only(self, open_tensors, checkpoints):
        zero = checkpoints.bf16([0.0, 1.0])
        fine = self.store(open_tensors, checkpoints, zero, ((0, 0x80, 0), (1, 2, 3)))
        assert matrix_source(fine, "p.weight", (2, 3)).values(0, 3).tolist() == [0, 0, 0]
        bad = self.store(open_tensors, checkpoints, zero, ((0, 1, 0), (1, 2, 3)))
        with pytest.raises(ValueError, match="zero row scale"):
            matrix_source(bad, "p.weight", (2, 3)).read_encoded(0, 2)

    def test_all_finite_codes(self, open_tensors, checkpoints):
        words = np.array([[word for word in range(256) if word & 0x7F != 0x7F]], np.uint8)
        store = self.store(open_tensors, checkpoints, checkpoints.bf16([1.0]), words)
        assert equal_bits(matrix_source(store, "p.weight", words.shape).values(), E4M3[words])


class TestBlockFp8:
    def store(self, encoded, open_tensors, rows, columns, dtype="F32", config=FP8_CONFIG, **replaced):
        codes = encoded.fp8_codes(rows, columns)
        blocks = (-(-rows // 128), -(-columns // 128))
        scales = encoded.random.integers(1, 100, blocks).astype(np.float32) / 64
        table = encoded.make.stored("F32", scales) if dtype == "F32" else encoded.make.bf16(scales)
        tensors = {"p.weight": encoded.make.stored("F8_E4M3", codes), "p.weight_scale_inv": table}
        tensors |= {name.replace("__", "."): tensor for name, tensor in replaced.items()}
        spread = scales.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
        return open_tensors(tensors, config), E4M3[codes].astype(np.float32) * spread

    @pytest.mark.parametrize("dtype", ["F32", "BF16"])
    @pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1), (257, 384)])
    def test_values(self, shape, dtype, encoded, open_tensors):
        store, expected = self.store(encoded, open_tensors, *shape, dtype)
        source = matrix_source(store, "p.weight", shape)
        assert equal_bits(source.values(), expected)
        begin = shape[0] * shape[1] // 3
        assert equal_bits(source.values(begin), expected.reshape(-1)[begin:])
        with pytest.raises(ValueError, match="does not provide encoded rows"):
            source.read_encoded(0, 1)
        with pytest.raises(ValueError, match="does not provide weight_divisor"):
            source.weight_divisor()

    def test_selected_rows_keep_their_blocks_and_read_no_others(self, encoded, open_tensors):
        store, expected = self.store(encoded, open_tensors, 600, 130)
        source = select_rows(matrix_source(store, "p.weight", (600, 130)), ((250, 400), (3, 5)))
        assert equal_bits(source.values(), np.concatenate([expected[250:400], expected[3:5]]))
        assert equal_bits(source.values(130 * 149, 130 * 151), np.concatenate([expected[399], expected[3]]))
        lengths = [part.region.length for part in source.description.parts]
        assert lengths == [152 * 130, (3 + 1) * 2 * 4]
        rows = encoded.random.permutation(600)
        gathered = gather_source(matrix_source(store, "p.weight", (600, 130)), rows)
        assert equal_bits(gathered.values(), expected[rows])

    def test_bad_words(self, encoded, open_tensors, checkpoints):
        cases = [
            ({"p__weight": checkpoints.stored("F8_E4M3", np.full((2, 3), 0x7F, np.uint8))}, "codes must be finite"),
            ({"p__weight_scale_inv": checkpoints.stored("F32", [[f32("nan")]])}, "finite and nonnegative"),
            ({"p__weight_scale_inv": checkpoints.stored("F32", [[f32(-1)]])}, "finite and nonnegative"),
            ({"p__weight_scale_inv": checkpoints.stored("F32", [[f32(3e38)]])}, "overflow FP32"),
            ({"p__weight_scale_inv": checkpoints.stored("F16", [[np.float16(1)]])}, "expected BF16 or F32 scales"),
            ({"p__weight_scale_inv": checkpoints.stored("F32", [f32(1)])}, r"expected F32\(1, 1\), got F32\(1,\)"),
        ]
        for replaced, message in cases:
            store, _ = self.store(encoded, open_tensors, 2, 3, **replaced)
            with pytest.raises(ValueError, match=message):
                matrix_source(store, "p.weight", (2, 3)).values()

    def test_contract_and_explicit_format(self, encoded, open_tensors):
        for config in ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}):
            store, _ = self.store(encoded, open_tensors, 2, 3, config=config)
            with pytest.raises(ValueError, match="requires the HF fp8 128x128 weight contract"):
                matrix_source(store, "p.weight", (2, 3)).values()
        store, _ = self.store(encoded, open_tensors, 2, 3)
        with pytest.raises(ValueError, match="not encoded row import"):
            matrix_source(store, "p.weight", (2, 3), "nvfp4").read_encoded(0, 1)


class TestMatrixSource:
    def test_plain(self, open_tensors, checkpoints):
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        store = open_tensors({"p.weight": checkpoints.bf16(values)})
        source = matrix_source(store, "p.weight", (3, 4))
        assert source.label == f"{store.path}:p.weight"
        assert source.values().dtype == torch.bfloat16
        assert source.values().tolist() == list(range(12))
        for read in (lambda: source.read_encoded(0, 1), source.weight_divisor, source.input_divisor):
            with pytest.raises(ValueError, match="does not provide"):
                read()
        with pytest.raises(ValueError, match="expected source shape"):
            matrix_source(store, "p.weight", (4, 3)).values()

    def test_nothing_is_looked_at_before_it_is_used(self, open_tensors):
        class Untouchable(SafetensorsSource):
            tensor = SafetensorsSource.tensor

            def has(self, name):
                raise AssertionError

            describe = has

        source = matrix_source(Untouchable(open_tensors({}).path), "p.weight", (4, 32), "unknown")
        assert select_rows(source, ((0, 1),)).shape == (1, 32)
        with pytest.raises(AssertionError):
            source.values()

    def test_explicit_format(self, encoded, open_tensors):
        tensors, *_ = encoded.nvfp4("p", 4, 32)
        store = open_tensors(tensors)
        assert matrix_source(store, "p.weight", (4, 32), "nvfp4").read_encoded(0, 4).format == "nvfp4"
        with pytest.raises(ValueError, match="unsupported encoded source format q4"):
            matrix_source(store, "p.weight", (4, 32), "q4").values()

    def test_row_selection_of_nvfp4_passes_the_divisors_on(self, encoded, open_tensors):
        tensors, codes, _, values = encoded.nvfp4("p", 8, 32)
        source = select_rows(matrix_source(open_tensors(tensors), "p.weight", (8, 32)), ((4, 6), (0, 1)))
        assert source.weight_divisor() == struct.pack("<f", 2.0)
        assert source.input_divisor() == struct.pack("<f", 1.5)
        assert np.array_equal(source.read_encoded(0, 3).codes.numpy(), codes[[4, 5, 0]])
        assert equal_bits(source.values(), values[[4, 5, 0]])
        for bounds in ((0, 4), (1, 1), (-1, 1)):
            with pytest.raises(ValueError, match="invalid encoded rows"):
                source.read_encoded(*bounds)

    def test_transposed_nvfp4_has_values_only(self, encoded, open_tensors):
        tensors, _, _, values = encoded.nvfp4("p", 4, 32)
        turned = transpose_source(matrix_source(open_tensors(tensors), "p.weight", (4, 32)), (1, 0), (32, 4))
        assert turned.read_encoded is None
        assert turned.description.encoding is None
        assert equal_bits(turned.values(), values.T)

    def test_a_store_that_offers_values_only(self, encoded, open_tensors, checkpoints):
        class Mine:
            def __init__(self, store):
                self.store, self.path = store, Path("mine")

            def __getattr__(self, name):
                return getattr(self.store, name)

        tensors, *_ = encoded.nvfp4("p", 4, 32)
        store = Mine(open_tensors(tensors | {"m.weight": checkpoints.bf16(np.ones((2, 2)))}))
        source = matrix_source(store, "m.weight", (2, 2))
        assert (source.label, source.description) == ("mine:m.weight", None)
        assert source.values().tolist() == [1, 1, 1, 1]
        with pytest.raises(ValueError, match="does not provide"):
            source.read_encoded(0, 1)
        with pytest.raises(ValueError, match="offers plain tensors only"):
            matrix_source(store, "p.weight", (4, 32)).values()


def reads_of(count: int, data: st.DataObject) -> list[int]:
    sizes = []
    while count:
        sizes.append(data.draw(st.integers(0, count)))
        count -= sizes[-1]
        if len(sizes) > 6:
            sizes.append(count)
            count = 0
    return sizes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(("plain", "nvfp4", "fp8_row", "fp8_scalar", "fp8_block", "turned")), data=st.data(),
       tile=st.sampled_from((1, 40, 1 << 18)))  # fmt: skip
def test_streams_read_every_byte_once_in_order(kind, data, tile, checkpoints, tmp_path_factory):
    encoded = Files(checkpoints, seed=3)
    rows, columns = data.draw(st.integers(1, 9)), 32
    config = None
    if kind == "nvfp4":
        tensors, *_ = encoded.nvfp4("p", rows, columns)
    elif kind in ("plain", "turned"):
        tensors = {"p.weight": checkpoints.bf16((np.arange(rows * columns) % 256).reshape(rows, columns))}
    else:
        tensors = {"p.weight": checkpoints.stored("F8_E4M3", encoded.fp8_codes(rows, columns))}
        if kind == "fp8_block":
            tensors["p.weight_scale_inv"] = checkpoints.stored("F32", np.ones((1, 1), np.float32))
            config = FP8_CONFIG
        else:
            count = rows if kind == "fp8_row" else 1
            tensors["p.weight_scale"] = checkpoints.bf16(np.arange(1, count + 1))
    directory = checkpoints.write_directory(tmp_path_factory.mktemp("c"), tensors, config)
    source = matrix_source(SafetensorsSource(directory), "p.weight", (rows, columns))
    if kind == "turned":
        source = transpose_source(source, (1, 0), (columns, rows))
    description = source.description

    seen = [bytearray() for _ in description.parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "TILE", tile)
        stream = open_values(description, lambda index, piece: seen[index].extend(piece))
        pieces = []
        for size in reads_of(description.elements, data):
            out = torch.empty(size, dtype=stream.dtype) if data.draw(st.booleans()) else None
            pieces.append(stream.read(size, out))
            assert out is None or pieces[-1].data_ptr() == out.data_ptr()
    assert torch.equal(torch.cat(pieces), source.values())
    stored = [region_bytes(part.region) for part in description.parts]
    assert [bytes(part) for part in seen] == stored
    with pytest.raises(ValueError, match="are left"):
        stream.read(1)

    if description.encoding is not None:
        seen = [bytearray() for _ in description.parts]
        rows_stream = open_encoded(description, lambda index, piece: seen[index].extend(piece))
        blocks = [rows_stream.read(size) for size in reads_of(rows, data) if size]
        whole = source.read_encoded(0, rows)
        assert torch.equal(torch.cat([block.codes for block in blocks]), whole.codes)
        assert torch.equal(
            torch.cat([block.scales.view(torch.uint8) for block in blocks]), whole.scales.view(torch.uint8)
        )
        assert [bytes(part) for part in seen] == stored
    else:
        with pytest.raises(ValueError, match="does not provide encoded rows"):
            open_encoded(description)


def region_bytes(region) -> bytes:
    data = b""
    for span in region.spans:
        buffer = bytearray(span.end - span.begin)
        span.file.read_into(span.begin, memoryview(buffer))
        data += buffer
    return data
