from __future__ import annotations

from itertools import permutations
import struct

from fixtures.memory_writer import MemoryWriter
import numpy as np
import pytest
import torch

from ninferbuild.artifact.codecs import direct, fp8_row, gguf_blocks, nvfp4, row_split
from ninferbuild.artifact.formats import GGUF_FORMATS, QUANT_FORMATS, default_layout
from ninferbuild.artifact.schema import ArtifactError, ResourceSpec, TensorSpec
from ninferbuild.artifact.tensor_output import TensorOutput


def output(format: str, shape: tuple[int, ...], divisors: int = 1) -> TensorOutput:
    return TensorOutput(MemoryWriter(TensorSpec("w", shape, format, default_layout(format), divisors)), "w")


PARTITIONS = [[(0, 3)], *([list(order) for order in permutations([(0, 1), (1, 3)])]), [(2, 3), (0, 1), (1, 2)]]


class TestCodes:
    @pytest.mark.parametrize("blocks", PARTITIONS)
    @pytest.mark.parametrize("name", QUANT_FORMATS)
    def test_any_row_partition_of_grouped_formats(self, name, blocks, patterns):
        codes, scales = patterns.grouped(name)
        expected = row_split.encode_row_split(codes, scales, name, (3, 130))
        out, planes = output(name, (3, 130)), output(name, (3, 130))
        for begin, end in blocks:
            out.write_codes(begin, codes[begin:end], scales[begin:end])
            planes.write_planes(begin, row_split.pack_rows(codes[begin:end], scales[begin:end], name))
        assert out.writer.payload() == planes.writer.payload() == expected

    @pytest.mark.parametrize("blocks", [[(3, 4), (0, 2), (2, 3)], [(0, 4)]])
    def test_any_row_partition_of_fp8(self, blocks, patterns):
        codes, scales = patterns.fp8()
        out, planes = output("fp8_e4m3fn_row_bf16", (4, 100)), output("fp8_e4m3fn_row_bf16", (4, 100))
        for begin, end in blocks:
            out.write_codes(begin, codes[begin:end], scales[begin:end])
            planes.write_planes(begin, fp8_row.pack_rows(codes[begin:end], scales[begin:end]))
        expected = fp8_row.encode_fp8_row_scaled(codes, scales, (4, 100))
        assert out.writer.payload() == planes.writer.payload() == expected

    @pytest.mark.parametrize("blocks", [[(3, 4), (0, 2), (2, 3)], [(0, 4)]])
    @pytest.mark.parametrize("name", GGUF_FORMATS)
    def test_any_row_partition_of_blocks(self, name, blocks):
        record = GGUF_FORMATS[name]
        rows = torch.arange(4 * 2 * record.block_bytes).mul(37).to(torch.uint8).reshape(4, -1)
        shape = (4, 2 * record.block_elements)
        out, planes = output(name, shape), output(name, shape)
        for begin, end in blocks:
            out.write_codes(begin, rows[begin:end], torch.empty(0, dtype=torch.float16))
            planes.write_planes(begin, gguf_blocks.pack_rows(rows[begin:end]))
        expected = gguf_blocks.encode_gguf_blocks(rows, name, shape)
        assert out.writer.payload() == planes.writer.payload() == expected == rows.numpy().tobytes()
        assert torch.equal(gguf_blocks.decode_gguf_blocks(expected, name, shape), rows)

    def test_rows_of_blocks_have_one_type_and_length(self):
        out, empty = output("gguf_q4_k", (4, 512)), torch.empty(0, dtype=torch.float16)
        for wrong in (torch.zeros(2, 287, dtype=torch.uint8), torch.zeros(2, 288, dtype=torch.int8)):
            with pytest.raises(ValueError, match=r"\[rows, 288\], not torch\.u?int8 \[2, 28[78]\]"):
                out.write_codes(0, wrong, empty)
        rows = torch.zeros(2, 288, dtype=torch.uint8)
        for first in (-1, 3, 4):
            with pytest.raises(ValueError, match=r"invalid encoded row origin|exceed"):
                out.write_codes(first, rows, empty)
        with pytest.raises(ValueError, match="2 rows of blocks for a matrix of 3 rows"):
            gguf_blocks.encode_gguf_blocks(rows, "gguf_q4_k", (3, 512))
        with pytest.raises(TypeError, match="write_codes"):
            out.write_values(0, rows)

    @pytest.mark.parametrize("divisors", [1, 3])
    @pytest.mark.parametrize("blocks", [[(0, 128), (128, 256), (256, 384)], [(256, 384), (0, 128), (128, 256)]])
    def test_any_row_partition_of_nvfp4(self, blocks, divisors, patterns):
        codes, scales = patterns.nvfp4(384, 64)
        words = [struct.pack("<f", 1.5 + i) for i in range(divisors)]
        out, planes = output("nvfp4", (384, 64), divisors), output("nvfp4", (384, 64), divisors)
        for begin, end in blocks:
            word = words[begin * divisors // 384]
            out.write_codes(begin, codes[begin:end], scales[begin:end], word)
            pieces = nvfp4.pack_rows(codes[begin:end], scales[begin:end])
            if begin % (384 // divisors) == 0:
                pieces = (*pieces, torch.frombuffer(bytearray(word), dtype=torch.uint8))
            planes.write_planes(begin, pieces)
        expected = nvfp4.encode_nvfp4(codes, scales, b"".join(words), (384, 64), divisors)
        assert out.writer.payload() == planes.writer.payload() == expected

    def test_planes_of_several_stacked_matrices_at_once(self, patterns):
        codes, scales = patterns.nvfp4(384, 64)
        words = b"".join(struct.pack("<f", 1.5 + i) for i in range(3))
        tail = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        out = output("nvfp4", (384, 64), 3)
        out.write_planes(0, (*nvfp4.pack_rows(codes, scales), tail))
        assert out.writer.payload() == nvfp4.encode_nvfp4(codes, scales, words, (384, 64), 3)

    def test_nvfp4_blocks_that_are_refused(self, patterns):
        codes, scales = patterns.nvfp4(256, 64)
        one, two = struct.pack("<f", 1), struct.pack("<f", 2)
        out = output("nvfp4", (256, 64))
        for begin, rows, word in ((64, 128, one), (0, 64, one), (0, 128, None)):
            with pytest.raises(ValueError, match="whole 128-row tiles and weight divisor"):
                out.write_codes(begin, codes[:rows], scales[:rows], word)
        with pytest.raises(ValueError, match="finite and positive"):
            out.write_codes(0, codes[:128], scales[:128], bytes(4))
        out.write_codes(0, codes[:128], scales[:128], one)
        with pytest.raises(ValueError, match="weight divisor changed"):
            out.write_codes(128, codes[128:], scales[128:], two)
        out.write_codes(128, codes[128:], scales[128:], one)
        assert out.writer.payload() == nvfp4.encode_nvfp4(codes, scales, one, (256, 64))
        stack = output("nvfp4", (256, 64), 2)
        with pytest.raises(ValueError, match="may not span two separately quantised sources"):
            stack.write_codes(0, codes, scales, one)

    @pytest.mark.parametrize(
        ("begin", "rows", "message"),
        [
            (3, 1, "invalid encoded row origin"),
            (-1, 1, "invalid encoded row origin"),
            (0, 0, "invalid"),
            (2, 2, "exceed"),
        ],
    )
    def test_rows_outside_the_object(self, begin, rows, message, patterns):
        codes, scales = patterns.grouped("q4_g64_fp16")
        with pytest.raises(ValueError, match=message):
            output("q4_g64_fp16", (3, 130)).write_codes(begin, codes[:rows], scales[:rows])

    def test_illegal_words_leave_the_object_alone(self, patterns):
        codes, scales = patterns.grouped("q4_g64_fp16")
        out = output("q4_g64_fp16", (3, 130))
        with pytest.raises(ValueError, match="codes must be in"):
            out.write_codes(0, torch.full_like(codes, 9), scales)
        with pytest.raises(TypeError, match="int8"):
            out.write_codes(0, codes[:, :2], scales[:, :2])
        out.write_codes(0, codes, scales)
        assert out.writer.payload() == row_split.encode_row_split(codes, scales, "q4_g64_fp16", (3, 130))

    def test_direct_formats_have_no_codes(self):
        with pytest.raises(TypeError, match="write_values"):
            output("bf16", (3, 4)).write_codes(0, torch.zeros(3, 4), torch.zeros(3))


class TestPlanes:
    def test_pieces_that_do_not_fit(self, patterns):
        codes, scales = patterns.grouped("q5_g64_fp16")
        base, high, scale = row_split.pack_rows(codes, scales, "q5_g64_fp16")
        out = output("q5_g64_fp16", (3, 130))
        for pieces in ((base, high), (base, high, scale, scale), (base, high, scale[:-2]), (base[1:], high, scale)):
            with pytest.raises(ValueError, match="plane pieces"):
                out.write_planes(0, pieces)
        for first in (-1, 1):
            with pytest.raises(ValueError, match="exceed parent"):
                out.write_planes(first, (base, high, scale))
        out.write_planes(0, (base, high, scale))
        assert out.writer.payload() == row_split.encode_row_split(codes, scales, "q5_g64_fp16", (3, 130))

    def test_nvfp4_rows_are_whole_tiles(self, patterns):
        codes, scales = patterns.nvfp4(128, 64)
        pieces = tuple(piece[: piece.numel() // 2] for piece in nvfp4.pack_rows(codes, scales))
        with pytest.raises(ValueError, match="whole 128-row tiles"):
            output("nvfp4", (128, 64)).write_planes(0, pieces)

    def test_elements_of_direct_formats(self):
        out = output("int32", (2, 3))
        values = torch.arange(6, dtype=torch.int32)
        out.write_planes(4, (direct.pack(values[4:]),))
        out.write_planes(0, (direct.pack(values[:4]),))
        assert out.writer.payload() == struct.pack("<6i", *range(6))


class TestValues:
    def test_blocks_in_any_order(self):
        out = output("fp32", (3, 2))
        out.write_values(2, np.array([[2, 3], [4, 5]], dtype=np.float32))
        out.write_values(0, torch.tensor([0.0, 1.0]))
        assert out.writer.payload() == struct.pack("<6f", *range(6))

    def test_a_scalar(self):
        out = output("fp32", ())
        out.write_values(0, torch.tensor(2.5))
        assert out.writer.payload() == struct.pack("<f", 2.5)

    def test_refusals(self):
        with pytest.raises(TypeError, match="write_codes"):
            output("q4_g64_fp16", (3, 130)).write_values(0, torch.zeros(3))
        with pytest.raises(TypeError, match="float64"):
            output("fp32", (4,)).write_values(0, torch.zeros(3, dtype=torch.float64))
        for begin in (-1, 2):
            with pytest.raises(ValueError, match="exceed"):
                output("fp32", (4,)).write_values(begin, torch.zeros(3))

    def test_raw_bytes(self):
        out = output("bf16", (2,))
        out.write_bytes(2, b"\x80\x3f")
        out.write_bytes(0, memoryview(b"\x00\x40"))
        assert out.writer.payload() == b"\x00\x40\x80\x3f"


def test_only_known_tensors():
    writer = MemoryWriter(ResourceSpec("note", 3))
    for name in ("note", "other"):
        with pytest.raises(ArtifactError, match=name):
            TensorOutput(writer, name)
