from __future__ import annotations

import hashlib
import struct

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from ninferbuild.artifact.codecs import direct, fp8_row, nvfp4, row_split
from ninferbuild.artifact.formats import QUANT_FORMATS, decode_e2m1_word, decode_e4m3fn_word
from ninferbuild.artifact.layouts import align_up, encoded_size, row_split_geometry


def sha(data: bytes | torch.Tensor) -> str:
    if isinstance(data, torch.Tensor):
        data = direct.pack(data).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def words(text: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor from hexadecimal words."""
    size = dtype.itemsize
    data = b"".join(int(word, 16).to_bytes(size, "little") for word in text.split())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def runs(text: str) -> bytes:
    """Bytes from hexadecimal text in which ``252*00`` stands for 252 zeros."""
    out = b""
    for item in text.split():
        count, _, value = item.rpartition("*")
        out += bytes.fromhex(value) * int(count or 1)
    return out


class TestDirect:
    @pytest.mark.parametrize(
        ("name", "values", "expected"),
        [
            (
                "bf16",
                words("0000 8000 0001 3f80 c049 7f80 7fc1 ff81", torch.bfloat16),
                "00 00 00 80 01 00 80 3f 49 c0 80 7f c1 7f 81 ff",
            ),
            (
                "bf16",
                torch.tensor([[1, 2, 3], [-1, -2, -3]], dtype=torch.bfloat16),
                "80 3f 00 40 40 40 80 bf 00 c0 40 c0",
            ),
            (
                "fp32",
                words("00000000 80000000 00000001 3f800000 7f800000 7fc01234", torch.float32),
                "00 00 00 00 00 00 00 80 01 00 00 00 00 00 80 3f 00 00 80 7f 34 12 c0 7f",
            ),
            ("fp32", torch.tensor(2.5), "00 00 20 40"),
            (
                "int32",
                torch.tensor([0, 1, -1, -(2**31), 2**31 - 1, 305419896], dtype=torch.int32),
                "00 00 00 00 01 00 00 00 ff ff ff ff 00 00 00 80 ff ff ff 7f 78 56 34 12",
            ),
        ],
    )
    def test_bytes_and_round_trip(self, name, values, expected):
        payload = direct.encode_direct(values, name)
        assert payload == bytes.fromhex(expected)
        again = direct.decode_direct(payload, name, values.shape)
        assert again.shape == values.shape
        assert direct.encode_direct(again, name) == payload

    def test_strided_values_are_stored_in_c_order(self):
        values = torch.arange(6, dtype=torch.int32).reshape(2, 3)
        assert direct.encode_direct(values.t(), "int32") == struct.pack("<6i", 0, 3, 1, 4, 2, 5)

    def test_nothing_is_converted(self):
        with pytest.raises(TypeError, match=r"torch\.float32"):
            direct.encode_direct(torch.zeros(3), "bf16")
        with pytest.raises(TypeError, match="tensor"):
            direct.encode_direct([1.0], "fp32")

    def test_illegal_arguments(self):
        with pytest.raises(ValueError, match="rank 17"):
            direct.encode_direct(torch.zeros((1,) * 17), "fp32")
        with pytest.raises(ValueError, match="positive"):
            direct.encode_direct(torch.zeros((0, 2)), "fp32")
        with pytest.raises(ValueError, match="q4_g64_fp16"):
            direct.encode_direct(torch.zeros(2), "q4_g64_fp16")
        with pytest.raises(ValueError, match="7 bytes"):
            direct.decode_direct(bytes(7), "fp32", (2,))

    def test_decodes_a_tensor_at_an_odd_offset(self):
        storage = torch.tensor([9, 0, 0, 128, 63], dtype=torch.uint8)
        assert direct.decode_direct(storage[1:], "fp32", ()).item() == 1.0


OBJECTS = {
    "q4_g64_fp16": (
        "8401d8c0af7645fd979211fd6e8d2fa2a5bb30273cd173ca97d2a2859e3b39ef",
        "60e2ad6bcea78a214d40ac0abb937dce8bbfa2bd3d3ae11f6860e53bb045a424",
        "5b0cd44039fc89f11dd815b0dba1d13c7530b2af45fc4444d2ca366ca8fa817d",
        "d199ed595b10a5b1d7d781d7f63830fe80f24564fee2666d99b226e410a78621",
        "75dd74f7c1728808c3b88b1a01a520c24b3d2bfca1c454795c3632e93a7da29a",
        (-1, -0.125, 0.75),
    ),
    "q5_g64_fp16": (
        "471c00e66b9e7d9fcf58822a130b6271ea2687a69f2f379ba342bca6c219dea3",
        "c2ac3bb3a6e27b2b900c833a73b2fdf9243978b9cc00247f3cdafe06b086e1bd",
        "0da8b4312afeb67ec0c4f07dcbfa91511ae98654a78eaefaf0a51ef48c23c709",
        "6ed1d28df275ca47768a30f5d4be10079d0e45ce17fadb67c370dadc2423ddd4",
        "8130293493f4557fcefcf1fa1344446e12eeb1fa24768f711ca194bd6956b65b",
        (-2, -1.125, -0.25),
    ),
    "q6_g64_fp16": (
        "416056f4b3cad58130f7f9993ad5cfde7a61db2428230ad754ab875b0fe3a5fa",
        "92205723c3ba566b73f2b6d18cb8b472c30d4c35412863ec4af404728eb996a6",
        "55fe62bcfabb88a55be92c465fa32dc0bb956bc59d9184f5460b2fdc84ed755f",
        "b0a3034725a8f2d8bf82e9a87e9ef2ec0fcbd2222acce074468eac2c67522c75",
        "54646b23d384277e4e0bceaff2c8e1ee32c738f2db71e158c3fa2ac079c68351",
        (-4, -3.125, -2.25),
    ),
    "q8_g32_fp16": (
        "0580868429211a94848bc4812556ae3eaa0c42256a1adc438fb8348900630497",
        "81d65b920c10f32fd15b689af81a1553be01314f480b86298a0c8b76aec897be",
        "3a340ed1180ce651b8b6d038c0d6c13dd9cce2488a4971cee133f312405c53ed",
        "4e83da4f21771c87c9ca2ea330d4bcbd18c7cf3979bc1e0f8df774eeea561120",
        "67b49d8b65d26de7f4a586b704dc92038d5c4a209563b31b79c500ad593d2028",
        (-15.875, -15, -14.125),
    ),
    "t2_g128_fp16": (
        "d59c5d43243fb5140718ed56380b8563aaf05d0d150a6132e1e6f6b0cc858e34",
        "7b28fa7d6ed953fdfa0a34c528c416ff7e7ef50533bd04a6c7beba758f4e5ef9",
        "509a0827637d78421ebd668238c26cc5e762853c2f0a7e18a5998c353020c29c",
        "90800761d5a488eb84a8a1677efc001f065321df13a5c319e8b84e085c5e97a8",
        "8d0f541981528be9b704e5ca293d9da3588fc6d8049c4d48f5110e59c9429953",
        (-0.125, 0, 0.125),
    ),
}


class TestRowSplit:
    @pytest.mark.parametrize(
        ("name", "codes", "expected"),
        [
            ("q4_g64_fp16", [-8, -1, 0, 7, 3, -4, 1, -7], "f8 70 c3 91 252*00 55 35 00 00"),
            ("q5_g64_fp16", [-16, -1, 0, 15, 8, -9, 1, -2], "f0 f0 78 e1 252*00 a3 255*00 55 35 00 00"),
            ("q6_g64_fp16", [-32, -1, 0, 31, 16, -17, 5, -6], "f0 f0 f0 a5 252*00 4e c9 254*00 55 35 00 00"),
            ("q8_g32_fp16", [-127, -1, 0, 127, 64, -65, 1, -2], "81 ff 00 7f 40 bf 01 fe 248*00 55 35 6*00"),
            ("t2_g128_fp16", [-1, 0, 1, 1, 0, -1, -1, 1], "53 7c 254*00 55 35"),
        ],
    )
    def test_one_row(self, name, codes, expected):
        geometry = row_split_geometry(name, (1, 8))
        padded = torch.zeros(1, geometry.groups, QUANT_FORMATS[name].group_size, dtype=torch.int8)
        padded[0, 0, :8] = torch.tensor(codes)
        scales = torch.zeros(1, geometry.groups, dtype=torch.float16)
        scales[0, 0] = 0.333251953125
        payload = row_split.encode_row_split(padded, scales, name, (1, 8))
        assert payload == runs(expected)
        values = row_split.dequantize_row_split(payload, name, (1, 8), dtype=torch.float32)
        assert values.tolist() == [[0.333251953125 * code for code in codes]]

    def test_values_in_bfloat16(self):
        payload = runs("f8 70 c3 91 252*00 55 35 00 00")
        values = row_split.dequantize_row_split(payload, "q4_g64_fp16", (1, 8))
        assert values.tolist() == [[-2.671875, -0.333984375, 0, 2.328125, 1, -1.3359375, 0.333984375, -2.328125]]

    @pytest.mark.parametrize("name", OBJECTS)
    def test_matrix(self, name, patterns):
        codes, scales = patterns.grouped(name)
        payload = row_split.encode_row_split(codes, scales, name, (3, 130))
        whole, part, gathered, fp32, bf16, first = OBJECTS[name]
        assert sha(payload) == whole
        rows = row_split.split_row_planes(payload, name, (3, 130), 1, 2)
        assert sha(row_split.assemble_row_planes(rows, name, 130)) == part
        rows = row_split.gather_row_planes(payload, name, (3, 130), [2, 0, 2])
        assert sha(row_split.assemble_row_planes(rows, name, 130)) == gathered
        values = row_split.dequantize_row_split(payload, name, (3, 130), dtype=torch.float32)
        assert sha(values) == fp32
        assert tuple(values[0, :3].tolist()) == first
        assert sha(row_split.dequantize_row_split(payload, name, (3, 130), compiled=True)) == bf16
        again = row_split.decode_row_split_codes(payload, name, (3, 130))
        assert torch.equal(again[0], scales)
        assert torch.equal(again[1], codes)

    def test_row_selection_errors(self, patterns):
        name, shape = "q5_g64_fp16", (3, 130)
        payload = row_split.encode_row_split(*patterns.grouped(name), name, shape)
        for begin, count in ((-1, 1), (0, 0), (2, 2), (3, 1)):
            with pytest.raises(IndexError):
                row_split.split_row_planes(payload, name, shape, begin, count)
        with pytest.raises(ValueError, match="no rows"):
            row_split.gather_row_planes(payload, name, shape, [])
        for index in (1.0, True, "1", torch.tensor(True)):
            with pytest.raises(TypeError):
                row_split.gather_row_planes(payload, name, shape, [index])
        for index in (-1, 3):
            with pytest.raises(IndexError):
                row_split.gather_row_planes(payload, name, shape, [0, index])
        with pytest.raises(ValueError, match="791 bytes"):
            row_split.gather_row_planes(payload[:-1], name, shape, [0])
        with pytest.raises(ValueError, match="planes"):
            row_split.assemble_row_planes(row_split.split_row_planes(payload, name, shape, 0, 1), name, 400)

    def test_negative_scale(self):
        codes = torch.ones(1, 2, 64, dtype=torch.int8)
        scales = words("b000 0000", torch.float16).reshape(1, 2)
        codes[0, 1] = 0
        payload = row_split.encode_row_split(codes, scales, "q4_g64_fp16", (1, 64))
        assert payload[256:258] == b"\x00\xb0"
        values = row_split.dequantize_row_split(payload, "q4_g64_fp16", (1, 64), dtype=torch.float32)
        assert values.tolist() == [[-0.125] * 64]

    @pytest.mark.parametrize(("name", "code"), [("q4_g64_fp16", 8), ("q8_g32_fp16", -128), ("t2_g128_fp16", -2)])
    def test_codes_outside_the_interval(self, name, code, patterns):
        codes, scales = patterns.grouped(name)
        codes[1, 0, 3] = code
        with pytest.raises(ValueError, match=f"{name} codes must be in"):
            row_split.encode_row_split(codes, scales, name, (3, 130))

    @pytest.mark.parametrize(("scale", "message"), [(-0.0, "-0"), (float("inf"), "finite"), (float("nan"), "finite")])
    def test_illegal_scales(self, scale, message, patterns):
        codes, scales = patterns.grouped("q4_g64_fp16")
        scales[0, 1] = scale
        with pytest.raises(ValueError, match=message):
            row_split.encode_row_split(codes, scales, "q4_g64_fp16", (3, 130))

    def test_types_and_shapes(self, patterns):
        codes, scales = patterns.grouped("q4_g64_fp16")
        for bad in ((codes.int(), scales), (codes, scales.float()), (codes[:2], scales[:2]), (codes, scales[:, :3])):
            with pytest.raises(TypeError):
                row_split.encode_row_split(*bad, "q4_g64_fp16", (3, 130))
        with pytest.raises(TypeError, match="floating"):
            row_split.dequantize_row_split(bytes(260), "q4_g64_fp16", (1, 8), dtype=torch.int32)
        with pytest.raises(ValueError, match="bf16"):
            row_split.encode_row_split(codes, scales, "bf16", (3, 130))

    def test_packing_a_view_at_an_odd_offset(self, patterns):
        for name in OBJECTS:
            codes, scales = patterns.grouped(name)
            shifted = torch.cat((torch.zeros(1, dtype=torch.int8), codes.reshape(-1)))[1:].reshape(codes.shape)
            assert shifted.storage_offset() == 1
            for left, right in zip(
                row_split.pack_rows(codes, scales, name), row_split.pack_rows(shifted, scales, name), strict=True
            ):
                assert torch.equal(left, right)

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.sampled_from(sorted(OBJECTS)), st.integers(1, 6), st.integers(1, 400))
    def test_against_a_scalar_implementation(self, data, name, rows, columns):
        record = QUANT_FORMATS[name]
        padded = align_up(columns, 128)
        groups = padded // record.group_size
        seed = data.draw(st.integers(0, 2**32 - 1))
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(record.qmin, record.qmax + 1, (rows, padded), dtype=torch.int8, generator=generator)
        codes[:, columns:] = 0
        scale_words = torch.randint(1, 0x7C00, (rows, groups), dtype=torch.int16, generator=generator)
        grouped = codes.reshape(rows, groups, record.group_size)
        payload = row_split.encode_row_split(grouped, scale_words.view(torch.float16), name, (rows, columns))
        assert payload == scalar_row_split(codes.tolist(), scale_words.tolist(), record, rows, groups)
        scales, again = row_split.decode_row_split_codes(payload, name, (rows, columns))
        assert torch.equal(again, grouped)
        assert torch.equal(scales.view(torch.int16), scale_words)


def scalar_row_split(codes, scale_words, record, rows, groups) -> bytes:
    """The layout written down word by word."""
    size, bits = record.group_size, record.bits
    base_bytes = {2: size // 4, 8: size}.get(bits, size // 2)
    high_bytes = size * (bits - 4) // 8 if bits in (5, 6) else 0
    high_offset = align_up(rows * groups * base_bytes, 256)
    scale_offset = high_offset + align_up(rows * groups * high_bytes, 256)
    out = bytearray(scale_offset + rows * groups * 2)
    for t in range(rows * groups):
        n, g = divmod(t, groups)
        for i in range(size):
            word = codes[n][g * size + i] % (1 << bits)
            if bits == 8:
                out[t * base_bytes + i] = word
            elif bits == 2:
                out[t * base_bytes + i // 4] |= word << 2 * (i % 4)
            else:
                out[t * base_bytes + i // 2] |= (word & 15) << 4 * (i % 2)
                for r in range(bits - 4):
                    position = i * (bits - 4) + r
                    out[high_offset + t * high_bytes + position // 8] |= (word >> 4 + r & 1) << position % 8
        out[scale_offset + 2 * t : scale_offset + 2 * t + 2] = scale_words[n][g].to_bytes(2, "little")
    return bytes(out)


class TestFp8Rows:
    CODES = "00 80 38 b8 01 7e fe 07 08 40 00 80 80 00 00"

    def test_small_matrix(self):
        codes, scales = words(self.CODES, torch.uint8).reshape(3, 5), words("3f80 3e9a 0000", torch.bfloat16)
        payload = fp8_row.encode_fp8_row_scaled(codes, scales, (3, 5))
        assert payload == runs(f"{self.CODES} 241*00 80 3f 9a 3e 00 00")
        assert sha(payload) == "667d839ff6ce806adc7d347a7b23832f26589ca554c3fd03368e0ac48009da3e"
        values = fp8_row.dequantize_fp8_row_scaled(payload, (3, 5), dtype=torch.float32)
        assert values[0].tolist() == [0, -0.0, 1, -1, 0.001953125]
        assert values[1].tolist() == [134.75, -134.75, 0.00411224365234375, 0.00469970703125, 0.6015625]
        again = fp8_row.decode_fp8_row_scaled_words(payload, (3, 5))
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)

    def test_pattern(self, patterns):
        payload = fp8_row.encode_fp8_row_scaled(*patterns.fp8(), (4, 100))
        assert len(payload) == 520
        assert payload[:8].hex(" ") == "80 07 0e 95 1c 23 aa 31"
        assert payload[512:].hex(" ") == "00 3c 11 3c 22 3c 33 3c"
        assert sha(payload) == "b3878caf853f0f713ef3c1e0657d7e81f7051998405ebdd6ed38e13ea19c76a5"
        values = fp8_row.dequantize_fp8_row_scaled(payload, (4, 100), dtype=torch.float32)
        assert sha(values) == "16a2d9a0f943f3ef6acaf42ef2343b0e55ff104be0fcaebe74bd6689bc75c73f"

    @pytest.mark.parametrize(
        ("code", "scale", "phrase"),
        [
            ("7f", "3f80", "finite E4M3FN"),
            ("ff", "3f80", "finite E4M3FN"),
            ("01", "8000", "nonnegative finite BF16"),
            ("01", "bf80", "nonnegative finite BF16"),
            ("01", "7f80", "nonnegative finite BF16"),
            ("01", "7fc0", "nonnegative finite BF16"),
            ("01", "0000", "zero row scale"),
            ("81", "0000", "zero row scale"),
        ],
    )
    def test_illegal_words(self, code, scale, phrase):
        codes, scales = words(f"00 {code}", torch.uint8).reshape(1, 2), words(scale, torch.bfloat16)
        with pytest.raises(ValueError, match=phrase):
            fp8_row.encode_fp8_row_scaled(codes, scales, (1, 2))
        with pytest.raises(ValueError, match=phrase):
            fp8_row.validate_fp8_row_words(codes, scales)
        payload = bytes.fromhex(f"00{code}") + bytes(254) + int(scale, 16).to_bytes(2, "little")
        with pytest.raises(ValueError, match=phrase):
            fp8_row.decode_fp8_row_scaled_words(payload, (1, 2))

    def test_zero_scale_with_signed_zeros(self):
        codes, scales = words("00 80", torch.uint8).reshape(1, 2), words("0000", torch.bfloat16)
        assert fp8_row.encode_fp8_row_scaled(codes, scales, (1, 2))[:2] == b"\x00\x80"

    def test_types_and_shapes(self, patterns):
        codes, scales = patterns.fp8()
        for bad in (
            (codes.view(torch.int8), scales),
            (codes, scales.float()),
            (codes[:3], scales),
            (codes, scales[:3]),
        ):
            with pytest.raises(TypeError):
                fp8_row.encode_fp8_row_scaled(*bad, (4, 100))

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 6), st.integers(1, 400), st.integers(0, 2**32 - 1))
    def test_round_trip(self, rows, columns, seed):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=generator)
        codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7
        scales = torch.randint(1, 0x7F80, (rows,), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        payload = fp8_row.encode_fp8_row_scaled(codes, scales, (rows, columns))
        start = align_up(rows * columns, 256)
        assert payload[: rows * columns] == codes.numpy().tobytes()
        assert not any(payload[rows * columns : start])
        assert payload[start:] == scales.view(torch.uint8).numpy().tobytes()
        values = fp8_row.dequantize_fp8_row_scaled(payload, (rows, columns), dtype=torch.float32)
        expected = torch.tensor([[decode_e4m3fn_word(word) for word in row] for row in codes.tolist()])
        assert torch.equal(values, expected * scales.float().unsqueeze(1))


class TestNvfp4:
    @pytest.mark.parametrize(
        ("shape", "divisors", "whole", "fp32"),
        [
            (
                (128, 64),
                (2.5,),
                "16c00e08e69c84fcadbb17503fa7f03c7bde07eca17a1e7d024351d5e84adca1",
                "ef6890d237c2823f1e163c6971c6fbbe34519af1434eaad924818712fa6925db",
            ),
            (
                (256, 128),
                (448,),
                "078e30f5094eca1a176c794cc1256e3c77470ed444128868d483cf7af2d4feb3",
                "76beafe7f4a7eea5183c1a8a762057ec3cf2956693f9caf1d9c867de48c5544c",
            ),
            (
                (256, 64),
                (2.5, 448),
                "903bcc787f60bb5159836bde0e30335eb7edcdb0939811ac8893e7f3d8bfe3de",
                "1344372a16a1a5df26394c87bdb09ee7069563242c3ca9d92b93a355dfb4e56f",
            ),
        ],
    )
    def test_pattern(self, shape, divisors, whole, fp32, patterns):
        codes, scales = patterns.nvfp4(*shape)
        count = len(divisors)
        tail = struct.pack(f"<{count}f", *divisors)
        payload = nvfp4.encode_nvfp4(codes, scales, tail, shape, count)
        assert len(payload) == encoded_size("block_scale_k16_m128x4_v1", "nvfp4", shape, count)
        assert sha(payload) == whole
        assert payload[:8].hex(" ") == "03 08 0d 12 17 1c 21 26"
        start = shape[0] * shape[1] // 2
        if shape == (128, 64):
            expected = "01 20 3f 5e 63 03 22 41 46 65 05 24 29 48 67 07 0c 2b 4a 69"
            assert payload[start : start + 20].hex(" ") == expected
        assert payload.endswith(tail)
        assert nvfp4.encode_nvfp4(codes, scales, torch.tensor(divisors, dtype=torch.float32), shape, count) == payload
        values = nvfp4.dequantize_nvfp4(payload, shape, count, dtype=torch.float32)
        assert sha(values) == fp32
        again = nvfp4.decode_nvfp4_words(payload, shape, count)
        assert torch.equal(again.codes, codes)
        assert torch.equal(again.scales, scales)
        assert again.divisors == tuple(struct.pack("<f", value) for value in divisors)

    def test_decoded_values(self, patterns):
        payload = nvfp4.encode_nvfp4(*patterns.nvfp4(128, 64), struct.pack("<f", 2.5), (128, 64))
        values = nvfp4.dequantize_nvfp4(payload, (128, 64), dtype=torch.float32)
        assert values[0, :4].tolist() == [0.0011718750465661287, 0, -0.0, 0]
        assert values[127, 63] == torch.tensor(5.6)

    def test_methods_example(self):
        codes = (torch.arange(128 * 32) % 256).to(torch.uint8).reshape(128, 32)
        scales = (torch.arange(128 * 4) % 127).to(torch.uint8).reshape(128, 4)
        payload = nvfp4.encode_nvfp4(codes, scales, struct.pack("<f", 2), (128, 64))
        assert sha(payload) == "b813eb6d226c19610ae03daef4b53d1c1409319793582edd8e4658b577d6dc9f"

    @settings(max_examples=15, deadline=None)
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
    def test_against_a_scalar_implementation(self, tiles, blocks, seed):
        rows, columns = 128 * tiles, 64 * blocks
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8, generator=generator)
        natural = scales.tolist()
        stored = bytearray(rows * columns // 16)
        for n in range(rows):
            for g in range(columns // 16):
                stored[((n // 128) * (columns // 64) + g // 4) * 512 + n % 32 * 16 + n % 128 // 32 * 4 + g % 4] = (
                    natural[n][g]
                )
        word = struct.pack("<f", 1.5)
        payload = nvfp4.encode_nvfp4(codes, scales, word, (rows, columns))
        assert payload == codes.numpy().tobytes() + bytes(stored) + word
        swizzled = nvfp4.swizzle_nvfp4_scales(scales)
        assert torch.equal(nvfp4.unswizzle_nvfp4_scales(swizzled, (rows, columns)), scales)
        values = nvfp4.dequantize_nvfp4(payload, (rows, columns), dtype=torch.float32)
        n, k = rows - 1, columns - 5
        code = codes[n, k // 2].item() >> 4 * (k % 2) & 15
        product = torch.tensor(decode_e2m1_word(code) * decode_e4m3fn_word(natural[n][k // 16]))
        assert values[n, k] == product / torch.tensor(1.5)

    @pytest.mark.parametrize("scale", [0x80, 0x7F, 0xFF])
    def test_illegal_scales(self, scale, patterns):
        codes, scales = patterns.nvfp4(128, 64)
        payload = bytearray(nvfp4.encode_nvfp4(codes, scales, struct.pack("<f", 1), (128, 64)))
        payload[4096 + 17] = scale
        with pytest.raises(ValueError, match="nonnegative finite E4M3FN"):
            nvfp4.decode_nvfp4_words(payload, (128, 64))
        scales[5, 1] = scale
        with pytest.raises(ValueError, match="nonnegative finite E4M3FN"):
            nvfp4.encode_nvfp4(codes, scales, struct.pack("<f", 1), (128, 64))

    @pytest.mark.parametrize("divisor", [0.0, -0.0, -1.0, float("inf"), float("nan")])
    def test_illegal_divisors(self, divisor, patterns):
        codes, scales = patterns.nvfp4(128, 64)
        payload = nvfp4.encode_nvfp4(codes, scales, struct.pack("<f", 1), (128, 64))
        for value in (struct.pack("<f", divisor), torch.tensor([divisor])):
            with pytest.raises(ValueError, match="finite and positive"):
                nvfp4.encode_nvfp4(codes, scales, value, (128, 64))
        with pytest.raises(ValueError, match="finite and positive"):
            nvfp4.decode_nvfp4_words(payload[:-4] + struct.pack("<f", divisor), (128, 64))

    def test_other_divisors(self, patterns):
        codes, scales = patterns.nvfp4(128, 64)
        with pytest.raises(ValueError, match="finite and positive"):
            nvfp4.encode_nvfp4(codes, scales, b"\x00\x00\x80", (128, 64))
        with pytest.raises(TypeError):
            nvfp4.encode_nvfp4(codes, scales, 2.5, (128, 64))
        with pytest.raises(TypeError):
            nvfp4.encode_nvfp4(codes, scales, torch.tensor(2.5, dtype=torch.float64), (128, 64))
        subnormal = (1).to_bytes(4, "little")
        assert nvfp4.encode_nvfp4(codes, scales, subnormal, (128, 64)).endswith(subnormal)

    def test_types_and_shapes(self, patterns):
        codes, scales = patterns.nvfp4(128, 64)
        one = struct.pack("<f", 1)
        for bad in (
            (codes.view(torch.int8), scales),
            (codes, scales.short()),
            (codes[:64], scales),
            (codes, scales[:64]),
        ):
            with pytest.raises(TypeError):
                nvfp4.encode_nvfp4(*bad, one, (128, 64))
        with pytest.raises(ValueError, match="128"):
            nvfp4.swizzle_nvfp4_scales(scales[:64])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestDevices:
    @pytest.mark.parametrize("name", OBJECTS)
    def test_grouped(self, name, patterns):
        codes, scales = patterns.grouped(name)
        pieces = row_split.pack_rows(codes.cuda(), scales.cuda(), name)
        for piece, expected in zip(pieces, row_split.pack_rows(codes, scales, name), strict=True):
            assert piece.is_cuda
            assert torch.equal(piece.cpu(), expected)
        assert not any(flag.item() for flag, _ in row_split.word_faults(codes.cuda(), scales.cuda(), name))
        payload = row_split.encode_row_split(codes.cuda(), scales.cuda(), name, (3, 130))
        values = row_split.dequantize_row_split(payload, name, (3, 130), "cuda", dtype=torch.float32)
        assert sha(values.cpu()) == OBJECTS[name][3]

    def test_fp8(self, patterns):
        codes, scales = (tensor.cuda() for tensor in patterns.fp8())
        payload = fp8_row.encode_fp8_row_scaled(codes, scales, (4, 100))
        assert payload == fp8_row.encode_fp8_row_scaled(codes.cpu(), scales.cpu(), (4, 100))
        values = fp8_row.dequantize_fp8_row_scaled(payload, (4, 100), "cuda", dtype=torch.float32)
        assert torch.equal(values.cpu(), fp8_row.dequantize_fp8_row_scaled(payload, (4, 100), dtype=torch.float32))

    def test_nvfp4(self, patterns):
        codes, scales = (tensor.cuda() for tensor in patterns.nvfp4(256, 128))
        word = struct.pack("<f", 448)
        payload = nvfp4.encode_nvfp4(codes, scales, word, (256, 128))
        assert payload == nvfp4.encode_nvfp4(codes.cpu(), scales.cpu(), word, (256, 128))
        values = nvfp4.dequantize_nvfp4(payload, (256, 128), device="cuda", dtype=torch.float32)
        assert torch.equal(values.cpu(), nvfp4.dequantize_nvfp4(payload, (256, 128), dtype=torch.float32))


class TestPayloads:
    def test_tensors_and_buffers_decode_alike(self, patterns):
        payload = fp8_row.encode_fp8_row_scaled(*patterns.fp8(), (4, 100))
        tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        expected = fp8_row.decode_fp8_row_scaled_words(payload, (4, 100))
        for form in (bytearray(payload), memoryview(payload), tensor):
            codes, scales = fp8_row.decode_fp8_row_scaled_words(form, (4, 100))
            assert torch.equal(codes, expected[0])
            assert torch.equal(scales, expected[1])

    def test_a_tensor_of_another_type(self):
        with pytest.raises(TypeError, match="uint8"):
            direct.decode_direct(torch.zeros(1), "fp32", ())
