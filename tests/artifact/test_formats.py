from __future__ import annotations

import hashlib
from itertools import pairwise
import struct
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from ninferbuild.artifact import formats, layouts

GGUF = {
    "gguf_q4_0": (2, 32, 18),
    "gguf_q5_0": (6, 32, 22),
    "gguf_q8_0": (8, 32, 34),
    "gguf_q2_k": (10, 256, 84),
    "gguf_q3_k": (11, 256, 110),
    "gguf_q4_k": (12, 256, 144),
    "gguf_q5_k": (13, 256, 176),
    "gguf_q6_k": (14, 256, 210),
    "gguf_iq2_xxs": (16, 256, 66),
    "gguf_iq2_xs": (17, 256, 74),
    "gguf_iq3_xxs": (18, 256, 98),
    "gguf_iq1_s": (19, 256, 50),
    "gguf_iq4_nl": (20, 32, 18),
    "gguf_iq3_s": (21, 256, 110),
    "gguf_iq2_s": (22, 256, 82),
    "gguf_iq4_xs": (23, 256, 136),
    "gguf_iq1_m": (29, 256, 56),
    "gguf_q2_0": (42, 64, 18),
}
"""Name → (ggml type, values of a block, bytes of a block)."""

NAMES = {
    "bf16": "contiguous_le_v1",
    "fp32": "contiguous_le_v1",
    "int32": "contiguous_le_v1",
    "q4_g64_fp16": "row_split_k128_v1",
    "q5_g64_fp16": "row_split_k128_v1",
    "q6_g64_fp16": "row_split_k128_v1",
    "q8_g32_fp16": "row_split_k128_v1",
    "t2_g128_fp16": "row_split_k128_v1",
    "nvfp4": "block_scale_k16_m128x4_v1",
    "fp8_e4m3fn_row_bf16": "row_scale_v1",
    **dict.fromkeys(GGUF, "gguf_blocks_v1"),
}


def test_registered_formats_and_their_layouts():
    assert {name: formats.default_layout(name) for name in formats.NUMERIC_FORMATS} == NAMES
    assert set(layouts.LAYOUTS) == set(NAMES.values())
    assert layouts.CODEC_VERSIONS.keys() == layouts.LAYOUTS.keys()


@pytest.mark.parametrize("name", ["BF16", "fp16", "int8", "q8_0", "NVFP4", "", "raw_bytes_v1", None, 5, ["bf16"]])
def test_other_format_names_are_refused(name):
    with pytest.raises(ValueError, match="unknown numeric format"):
        formats.get_format(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [*layouts.LAYOUTS, "raw_bytes_v1", "row_split_panel4_v1"])
def test_a_format_belongs_to_one_layout(name, layout):
    if layout == NAMES[name]:
        assert layouts.encoded_size(layout, name, (128, 256)) > 0
    else:
        with pytest.raises(ValueError, match=layout):
            layouts.encoded_size(layout, name, (128, 256))


def test_unknown_names_are_in_the_message():
    with pytest.raises(ValueError, match="row_split_panel4_v1"):
        layouts.get_layout("row_split_panel4_v1")
    with pytest.raises(ValueError, match="q3_g64"):
        layouts.encoded_size("row_split_k128_v1", "q3_g64", (1, 1))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q4_g64_fp16", (8,)),
        ("q4_g64_fp16", (2, 2, 2)),
        ("fp8_e4m3fn_row_bf16", (8,)),
        ("nvfp4", (64, 64)),
        ("nvfp4", (128, 32)),
        ("q4_g64_fp16", (0, 8)),
        ("q4_g64_fp16", (True, 8)),
        ("q4_g64_fp16", (8, -1)),
        ("q4_g64_fp16", (8, 2.0)),
        ("gguf_q4_k", (8, 128)),
        ("gguf_q8_0", (64,)),
        ("gguf_q8_0", (2, 2, 64)),
        ("gguf_q8_0", (0, 64)),
        ("bf16", (1, 0)),
        ("bf16", (True,)),
        ("bf16", (1,) * 17),
    ],
)
def test_illegal_shapes(name, shape):
    with pytest.raises(ValueError):
        layouts.encoded_size(NAMES[name], name, shape)


def test_ranks_of_direct_formats():
    assert layouts.encoded_size("contiguous_le_v1", "bf16", ()) == 2
    assert layouts.encoded_size("contiguous_le_v1", "int32", (1,) * 15 + (3,)) == 12


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("q4_g64_fp16", (7168, 5120), 19496960),
        ("q5_g64_fp16", (7168, 5120), 24084480),
        ("q5_g64_fp16", (2, 130), 528),
        ("q6_g64_fp16", (248320, 5120), 993280000),
        ("q6_g64_fp16", (5, 129), 1320),
        ("q8_g32_fp16", (248320, 5120), 1350860800),
        ("q8_g32_fp16", (1, 257), 536),
        ("t2_g128_fp16", (17408, 5120), 23674880),
        ("q4_g64_fp16", (1, 1), 260),
        ("q8_g32_fp16", (1, 1), 264),
        ("t2_g128_fp16", (1, 1), 258),
        ("fp8_e4m3fn_row_bf16", (14336, 5120), 73428992),
        ("fp8_e4m3fn_row_bf16", (256, 64), 16896),
        ("fp8_e4m3fn_row_bf16", (2, 4), 260),
        ("fp8_e4m3fn_row_bf16", (1, 1), 258),
        ("nvfp4", (14336, 5120), 41287684),
        ("nvfp4", (384, 192), 41476),
        ("gguf_iq3_s", (248320, 5120), 546304000),
        ("gguf_q4_k", (34816, 5120), 100270080),
        ("gguf_q8_0", (5120, 10240), 55705600),
        ("gguf_q2_0", (5120, 17408), 25067520),
        ("gguf_q6_k", (14336, 5120), 60211200),
        ("gguf_iq1_m", (512, 2048), 229376),
        ("gguf_q4_k", (3, 512), 864),
        ("gguf_q8_0", (3, 512), 1632),
        ("gguf_q2_0", (3, 512), 432),
    ],
)
def test_encoded_sizes(name, shape, size):
    assert layouts.encoded_size(NAMES[name], name, shape) == size


def test_block_formats():
    found = {f.name: (f.ggml_type, f.block_elements, f.block_bytes) for f in formats.GGUF_FORMATS.values()}
    assert found == GGUF
    assert {kind: f.name for kind, f in formats.GGUF_FORMATS_BY_TYPE.items()} == {
        kind: name for name, (kind, _, _) in GGUF.items()
    }


@pytest.mark.parametrize("name", GGUF)
def test_geometry_of_blocks(name):
    _, values, size = GGUF[name]
    geometry = layouts.geometry("gguf_blocks_v1", name, (3, 4 * values))
    assert geometry == layouts.gguf_blocks_geometry(name, (3, 4 * values))
    assert (geometry.blocks_per_row, geometry.row_bytes) == (4, 4 * size)
    assert geometry.planes == (layouts.Plane(0, 12 * size, 12 * size),)
    assert layouts.get_layout("gguf_blocks_v1").alignment == 256
    with pytest.raises(ValueError, match="one divisor"):
        layouts.geometry("gguf_blocks_v1", name, (4, values), 2)
    with pytest.raises(ValueError, match=f"{name} stores blocks of {values} values.* K = {values + 16}"):
        layouts.gguf_blocks_geometry(name, (3, values + 16))


def test_offsets_of_planes():
    q6 = layouts.row_split_geometry("q6_g64_fp16", (3, 130))
    assert (q6.groups, q6.high_offset, q6.scale_offset) == (4, 512, 768)
    assert layouts.row_split_geometry("q8_g32_fp16", (3, 130)).high_offset == 768
    block = layouts.block_scale_geometry((256, 128))
    assert (block.scale_offset, block.divisor_offset) == (16384, 18432)
    assert layouts.row_scale_geometry((4, 100)).scale_offset == 512


def test_stacked_divisors():
    block, shape = "block_scale_k16_m128x4_v1", (256, 64)
    assert layouts.encoded_size(block, "nvfp4", shape, 2) == 9224
    with pytest.raises(ValueError, match="whole number of 128-row scale tiles"):
        layouts.encoded_size(block, "nvfp4", shape, 4)
    with pytest.raises(ValueError, match="must divide the plane's rows"):
        layouts.encoded_size(block, "nvfp4", shape, 3)
    for count in (0, True, -1, 2.0):
        with pytest.raises(ValueError, match="positive integer"):
            layouts.encoded_size(block, "nvfp4", shape, count)
    for name, layout in NAMES.items():
        if name != "nvfp4":
            with pytest.raises(ValueError, match="stores one divisor, not 2"):
                layouts.encoded_size(layout, name, shape, 2)


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(NAMES)),
    rows=st.integers(1, 700),
    columns=st.integers(1, 3000),
)
def test_planes_cover_the_object(name, rows, columns):
    if name == "nvfp4":
        rows, columns = rows * 128, columns * 64
    elif name in GGUF:
        columns *= GGUF[name][1]
    planes = layouts.planes(NAMES[name], name, (rows, columns))
    size = layouts.encoded_size(NAMES[name], name, (rows, columns))
    assert sum(plane.extent for plane in planes) == size
    assert planes[0].offset == 0
    for plane, following in pairwise(planes):
        assert plane.bytes <= plane.extent < plane.bytes + 256
        assert plane.offset + plane.extent == following.offset
    assert planes[-1].bytes == planes[-1].extent
    data = planes[:2] if name == "nvfp4" else planes
    assert all(plane.bytes % rows == 0 for plane in data)


def test_e2m1_words():
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = [formats.decode_e2m1_word(word) for word in range(16)]
    assert values == magnitudes + [-value for value in magnitudes]
    assert str(values[8]) == "-0.0"


def test_e4m3fn_words():
    values = [formats.decode_e4m3fn_word(word) for word in range(256)]
    assert [word for word, value in enumerate(values) if value != value] == [0x7F, 0xFF]
    packed = struct.pack("<256f", *(0.0 if value != value else value for value in values))
    assert hashlib.sha256(packed).hexdigest() == "0c5d81084420441d5c98db2c276b865fc29738d60fba9c32b55aa8214762b794"
    assert (values[1], values[7], values[8], values[0x38], values[0x7E]) == (2**-9, 0.013671875, 0.015625, 1, 448)


@pytest.mark.parametrize("decode", [formats.decode_e2m1_word, formats.decode_e4m3fn_word])
@pytest.mark.parametrize("word", [-1, 256, True, 1.0, None])
def test_words_that_are_none(decode, word):
    with pytest.raises(ValueError):
        decode(word)


def test_predicates_of_words():
    assert [w for w in range(-1, 257) if formats.valid_nvfp4_scale_word(w)] == list(range(0x7F))
    assert [w for w in range(257) if not formats.valid_fp8_weight_word(w)] == [0x7F, 0xFF, 256]
    row = formats.valid_fp8_row_scale_word
    assert [row(w) for w in (0, 1, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0x10000, True)] == [True] * 3 + [False] * 5
    fp32 = formats.valid_positive_fp32_word
    words = (1, 0x7F7FFFFF, 0, 0x7F800000, 0x7FC00000, 0x80000001, 1 << 32, 1.0)
    assert [fp32(w) for w in words] == [True] * 2 + [False] * 6


def test_the_container_imports_no_numerical_library():
    modules = ["formats", "layouts", "schema", "framing", "writer", "reader", "inspect", "tensor_output", "codecs"]
    code = "import sys\n" + "".join(f"import ninferbuild.artifact.{name}\n" for name in modules)
    code += "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
