"""``import_encoded``: words stored unchanged, divisors, auxiliaries, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.method import AuxiliaryValue
from ninferbuild.rules import import_encoded
from ninferbuild.rules.encoded_words import PACKERS
from ninferbuild.rules.import_encoded import IMPORTABLE
from ninferbuild.sources.description import Description
from ninferbuild.sources.logical import EncodedRows, LogicalSource, StoredReader, select_rows

FP8 = "fp8_e4m3fn_row_bf16"
T2 = "t2_g128_fp16"
ROLE = "activation_input_divisor"


def fp32(value: float) -> bytes:
    return struct.pack("<f", value)


def no_values(begin: int, end: int) -> torch.Tensor:
    raise AssertionError("values are never read")


def encoded(
    format: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    divisor: bytes | None = None,
    **accessors: Any,
) -> LogicalSource:
    """An opaque source of encoded rows alone."""

    def read(begin: int, end: int) -> EncodedRows:
        return EncodedRows(format, codes[begin:end], scales[begin:end], divisor)

    return LogicalSource((codes.shape[0], columns), "encoded", no_values, read, **accessors)


def nvfp4(
    rows: int = 128,
    columns: int = 64,
    *,
    shift: int = 0,
    divisor: float = 2.0,
    input_divisor: float | None = None,
    **changes: Any,
) -> LogicalSource:
    """Code bytes and natural scale words that count up from ``shift``."""
    codes = ((torch.arange(rows * columns // 2) + shift) % 256).to(torch.uint8).reshape(rows, columns // 2)
    scales = ((torch.arange(rows * columns // 16) + shift) % 127).to(torch.uint8).reshape(rows, columns // 16)
    accessors: dict[str, Any] = {"weight_divisor": lambda: fp32(divisor)}
    if input_divisor is not None:
        accessors["input_divisor"] = lambda: fp32(input_divisor)
    return encoded("nvfp4", codes, scales, columns, fp32(divisor), **{**accessors, **changes})


def fp8(codes: list[list[int]], scales: list[int]) -> LogicalSource:
    words = torch.from_numpy(np.array(scales, np.uint16).view(np.int16)).view(torch.bfloat16)
    return encoded(FP8, torch.tensor(codes, dtype=torch.uint8), words, len(codes[0]))


def test_nvfp4_object(harness, device) -> None:
    request = harness.request(nvfp4(), "nvfp4", device=device)
    payload = harness.payload(import_encoded, request)
    assert len(payload) == 4612
    assert hashlib.sha256(payload).hexdigest() == "b813eb6d226c19610ae03daef4b53d1c1409319793582edd8e4658b577d6dc9f"
    assert payload[4096:].hex().startswith("000102030102030402030405030405060405060705060708060708090708090a")
    assert payload[-4:] == fp32(2.0)
    assert harness.assembled(import_encoded, request) == payload


def test_nvfp4_inputs_of_one_divisor_follow_each_other(harness, device) -> None:
    request = harness.request([nvfp4(), nvfp4(shift=17)], "nvfp4", device=device)
    payload = harness.payload(import_encoded, request)
    assert len(payload) == 9220
    assert hashlib.sha256(payload).hexdigest() == "3148b17e09dca4a25bbc3824c76dfc78a14985ecabbcf262a000a623a2fcd10d"
    assert harness.assembled(import_encoded, request) == payload


@pytest.mark.parametrize("rows_per_chunk", [1, 200, 512, 4096])
def test_nvfp4_chunks_are_whole_tiles(harness, rows_per_chunk) -> None:
    request = harness.request([nvfp4(256), nvfp4(128, shift=3)], "nvfp4", rows_per_chunk=rows_per_chunk)
    payload = harness.payload(import_encoded, request)
    assert (
        hashlib.sha256(payload).hexdigest()
        == hashlib.sha256(
            harness.payload(import_encoded, harness.request([nvfp4(256), nvfp4(128, shift=3)], "nvfp4"))
        ).hexdigest()
    )
    assert [first % 128 for first, _ in import_encoded.blocks(request)] == [0] * len(
        list(import_encoded.blocks(request))
    )


@pytest.mark.parametrize("rows_per_chunk", [1, 128, 4096])
def test_nvfp4_stack_keeps_a_divisor_for_each_matrix(harness, device, rows_per_chunk) -> None:
    sources = [nvfp4(256, divisor=2.0), nvfp4(256, divisor=2.0, shift=5), nvfp4(256, divisor=4.0, shift=9)]
    request = harness.request(sources, "nvfp4", divisors=3, rows_per_chunk=rows_per_chunk, device=device)
    payload = harness.payload(import_encoded, request)
    assert payload[-12:] == fp32(2.0) + fp32(2.0) + fp32(4.0)
    assert harness.assembled(import_encoded, request) == payload
    single = harness.payload(import_encoded, harness.request([replace_divisor(s) for s in sources], "nvfp4"))
    assert single[:-4] == payload[:-12]


def replace_divisor(source: LogicalSource) -> LogicalSource:
    read = source.read_encoded
    return replace(source, read_encoded=lambda begin, end: replace(read(begin, end), weight_divisor=fp32(1.0)))


def test_nvfp4_divisors_of_a_plain_parent_must_agree(harness) -> None:
    with pytest.raises(ValueError, match="weight divisors differ"):
        import_encoded(harness.request([nvfp4(divisor=2.0), nvfp4(divisor=4.0)], "nvfp4"))


@pytest.mark.parametrize("word", [None, b"\0\0\0\0", fp32(-1.0), fp32(float("inf")), fp32(float("nan")), b"\0\0\x80"])
def test_nvfp4_divisor_must_be_a_positive_number(harness, word) -> None:
    source = nvfp4(weight_divisor=None)
    read = source.read_encoded
    bad = replace(source, read_encoded=lambda begin, end: replace(read(begin, end), weight_divisor=word))
    with pytest.raises(ValueError, match="weight divisor must be finite and positive"):
        import_encoded(harness.request(bad, "nvfp4"))


def test_nvfp4_divisor_may_come_from_the_accessor_alone(harness) -> None:
    source = nvfp4(divisor=8.0)
    read = source.read_encoded
    silent = replace(source, read_encoded=lambda begin, end: replace(read(begin, end), weight_divisor=None))
    request = harness.request(silent, "nvfp4")
    assert import_encoded.check(request).facts == (f"weight_divisors: {fp32(8.0).hex()}",)
    assert harness.assembled(import_encoded, request)[-4:] == fp32(8.0)


def test_nvfp4_divisor_must_not_change_between_blocks(harness) -> None:
    source = nvfp4(256)
    read = source.read_encoded
    drifting = replace(
        source, read_encoded=lambda begin, end: replace(read(begin, end), weight_divisor=fp32(2.0 + begin))
    )
    with pytest.raises(ValueError, match="weight divisor changed"):
        harness.payload(import_encoded, harness.request(drifting, "nvfp4", rows_per_chunk=128))


def test_nvfp4_blocks_must_be_whole_tiles(harness) -> None:
    request = harness.request([nvfp4(), nvfp4(divisor=4.0)], "nvfp4", divisors=2)
    checked, cpu = import_encoded.check(request), torch.device("cpu")
    block = nvfp4(256).read_encoded(0, 256)
    for rows, first in ((slice(0, 64), 0), (slice(0, 128), 32)):
        piece = replace(block, codes=block.codes[rows], scales=block.scales[rows])
        with pytest.raises(ValueError, match="whole 128-row tiles"):
            import_encoded.encode(piece, request.target, checked, first, cpu)
    with pytest.raises(ValueError, match="two separately quantised sources"):
        import_encoded.encode(block, request.target, checked, 0, cpu)


@pytest.mark.parametrize("word", [0x7F, 0x80, 0xFF])
def test_nvfp4_scales_are_checked(harness, device, word) -> None:
    source = nvfp4()
    scales = source.read_encoded(0, 128).scales
    scales[77, 2] = word
    with pytest.raises(ValueError, match="nonnegative finite E4M3FN"):
        harness.payload(import_encoded, harness.request(source, "nvfp4", device=device))


def test_fp8_object(harness, device) -> None:
    codes = [[0x00, 0x80, 0x38, 0xB8, 0x01], [0x7E, 0xFE, 0x07, 0x08, 0x40], [0x00, 0x80, 0x80, 0x00, 0x00]]
    request = harness.request(fp8(codes, [0x3F80, 0x3E9A, 0x0000]), FP8, device=device, rows_per_chunk=2)
    payload = harness.payload(import_encoded, request)
    assert payload.hex() == "008038b801" + "7efe070840" + "0080800000" + "00" * 241 + "803f9a3e0000"
    assert hashlib.sha256(payload).hexdigest() == "667d839ff6ce806adc7d347a7b23832f26589ca554c3fd03368e0ac48009da3e"
    assert harness.assembled(import_encoded, request) == payload


@pytest.mark.parametrize(
    ("code", "scale", "message"),
    [
        (0x7F, 0x3F80, "finite E4M3FN"),
        (0xFF, 0x3F80, "finite E4M3FN"),
        (0x01, 0x7F80, "nonnegative finite BF16"),
        (0x01, 0x8000, "nonnegative finite BF16"),
        (0x01, 0xBF80, "nonnegative finite BF16"),
        (0x01, 0x0000, "zero row scale"),
    ],
)
def test_fp8_words_are_checked(harness, device, code, scale, message) -> None:
    source = fp8([[0x38, 0x38, 0x38], [0, 0, code]], [0x3F80, scale])
    with pytest.raises(ValueError, match=message):
        harness.payload(import_encoded, harness.request(source, FP8, device=device))


def ternary(rows: int = 3, columns: int = 200) -> LogicalSource:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-1, 2, (rows, 2, 128), generator=generator).to(torch.int8)
    scales = torch.rand(rows, 2, generator=generator).half()
    return encoded(T2, codes, scales, columns)


def test_ternary_object(harness, device) -> None:
    codes = torch.zeros(1, 1, 128, dtype=torch.int8)
    codes[0, 0, :8] = torch.tensor([-1, 0, 1, 1, 0, -1, -1, 1])
    source = encoded(T2, codes, torch.tensor([[0.333251953125]]).half(), 8)
    payload = harness.payload(import_encoded, harness.request(source, T2, device=device))
    assert payload.hex() == "537c" + "00" * 254 + "5535"
    request = harness.request([ternary(), ternary(2)], T2, rows_per_chunk=2, device=device)
    assert harness.assembled(import_encoded, request) == harness.payload(import_encoded, request)


@pytest.mark.parametrize(
    ("value", "scale", "message"),
    [
        (2, 1.0, r"codes must be in -1\.\.1"),
        (-2, 1.0, r"codes must be in -1\.\.1"),
        (1, float("nan"), "scales must be finite"),
        (1, -0.0, "scales must not be -0"),
    ],
)
def test_ternary_words_are_checked(harness, device, value, scale, message) -> None:
    source = ternary()
    block = source.read_encoded(0, 3)
    block.codes[1, 0, 3] = value
    block.scales[1, 0] = scale
    with pytest.raises(ValueError, match=message):
        harness.payload(import_encoded, harness.request(source, T2, device=device))


def packed(block: EncodedRows) -> EncodedRows:
    """The same rows with the bytes of the base plane for codes."""
    base, _ = row_split.pack_rows(block.codes, block.scales, T2)
    return replace(block, codes=base.view(*block.scales.shape, 32), packed=True)


def test_ternary_codes_that_are_packed_already(harness, device) -> None:
    source = ternary(5)
    request = harness.request(source, T2, rows_per_chunk=2, device=device)
    expected = harness.payload(import_encoded, request)
    already = replace(source, read_encoded=lambda begin, end: packed(source.read_encoded(begin, end)))
    assert harness.payload(import_encoded, harness.request(already, T2, rows_per_chunk=3, device=device)) == expected


@pytest.mark.parametrize("form", [packed, lambda block: block])
@pytest.mark.parametrize(
    ("word", "scale", "message"),
    [
        (0x40, 0.0, "codes under a scale of 0 must be 0"),
        (0x40, -0.0, "scales must not be -0"),
        (0x00, float("inf"), "scales must be finite"),
        (0x00, 0.0, None),
        (0x40, 6e-8, None),
        (0x40, -0.5, None),
    ],
)
def test_ternary_scales_of_zero_and_beyond(harness, device, form, word, scale, message) -> None:
    codes = torch.zeros(2, 1, 128, dtype=torch.int8)
    codes[1, 0, 3] = 1 if word else 0
    block = form(EncodedRows(T2, codes, torch.tensor([[1.0], [scale]]).half()))
    source = replace(ternary(2, 128), read_encoded=lambda begin, end: block)
    request = harness.request(source, T2, device=device)
    if message is None:
        assert harness.payload(import_encoded, request)[32:64] == word.to_bytes(1) + bytes(31)
    else:
        with pytest.raises(ValueError, match=message):
            harness.payload(import_encoded, request)


@pytest.mark.parametrize("byte", [0x02, 0x08, 0x20, 0x80, 0xA9])
def test_packed_ternary_codes_are_checked(harness, device, byte) -> None:
    codes = torch.zeros(1, 1, 32, dtype=torch.uint8)
    codes[0, 0, 17] = byte
    block = EncodedRows(T2, codes, torch.ones(1, 1).half(), packed=True)
    source = replace(ternary(1, 128), read_encoded=lambda begin, end: block)
    with pytest.raises(ValueError, match=r"codes must be in -1\.\.1"):
        harness.payload(import_encoded, harness.request(source, T2, device=device))


@pytest.mark.parametrize("source", [nvfp4(), fp8([[1] * 64] * 128, [0x3F80] * 128), ternary(128, 64)])
def test_blocks_of_other_types_are_refused(harness, source) -> None:
    block = source.read_encoded(0, 128)
    request = harness.request(source, block.format)
    checked = import_encoded.check(request)
    for wrong in (replace(block, codes=block.codes.float()), replace(block, scales=block.scales.float())):
        with pytest.raises(TypeError):
            import_encoded.encode(wrong, request.target, checked, 0, torch.device("cpu"))
    narrow = replace(block, codes=block.codes[..., :-1])
    with pytest.raises(TypeError):
        import_encoded.encode(narrow, request.target, checked, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="differ from target"):
        import_encoded.encode(replace(block, format="other"), request.target, checked, 0, torch.device("cpu"))


def test_refuses_other_targets_and_sources(harness, opaque) -> None:
    with pytest.raises(ValueError, match="known encoded matrix target"):
        import_encoded(harness.request(nvfp4(), "q4_g64_fp16"))
    with pytest.raises(ValueError, match="known encoded matrix target"):
        import_encoded(harness.request(ternary(1, 128), T2, shape=(128,)))
    with pytest.raises(ValueError, match="p0: encoded rows are unavailable"):
        import_encoded(harness.request(opaque(torch.ones(128, 64)), "nvfp4"))
    with pytest.raises(ValueError, match="p0: encoded rows are unavailable"):
        import_encoded(harness.request(torch.ones(128, 64), "nvfp4"))
    with pytest.raises(ValueError, match="p1: source nvfp4 differs from target"):
        import_encoded(harness.request([fp8([[1] * 64] * 2, [1, 1]), nvfp4()], FP8))
    with pytest.raises(ValueError, match="complete rows"):
        import_encoded(harness.request(nvfp4(128, 128), "nvfp4", shape=(256, 64)))
    with pytest.raises(ValueError, match="no numerical parameters"):
        import_encoded(harness.request(nvfp4(), "nvfp4", parameters={"a": 1}))
    with pytest.raises(ValueError, match="source counts differ"):
        import_encoded(harness.request(nvfp4(), "nvfp4", shape=(256, 64)))
    with pytest.raises(ValueError, match="as many inputs"):
        import_encoded(harness.request(nvfp4(256), "nvfp4", divisors=2))


def test_every_importable_format_has_a_packer() -> None:
    assert tuple(PACKERS) == IMPORTABLE


def described(encoding: str | None, words: tuple[tuple[str, bytes], ...] = ()) -> LogicalSource:
    description = Description((128, 64), "F32", "nvfp4", (), words, encoding=encoding)
    reader = StoredReader(lambda: description, shape=(128, 64))
    return LogicalSource((128, 64), "stored", reader.read_values, reader.read_encoded)


def test_described_sources_are_checked_without_reading(harness) -> None:
    source = described("nvfp4", (("weight_divisor", fp32(3.0)),))
    for candidate in (source, select_rows(source, ((0, 128),))):
        checked = import_encoded.check(harness.request(candidate, "nvfp4"))
        assert checked.state.weight_divisors == (fp32(3.0),)
        assert checked.facts == ()
    with pytest.raises(ValueError, match="does not provide encoded rows"):
        import_encoded.check(harness.request(described(None), "nvfp4"))
    with pytest.raises(ValueError, match=f"source {FP8} differs from target nvfp4"):
        import_encoded.check(harness.request(described(FP8), "nvfp4"))


class TestActivationDivisors:
    """One FP32 scalar for each use that allows 4-bit activations or has an override."""

    def auxiliaries(self, harness, sources, policies, overrides=None) -> dict[str, float]:
        request = harness.request(
            sources,
            "nvfp4",
            policies={(f"p{index}", "input"): policy for index, policy in enumerate(policies)},
            auxiliary_overrides={
                (name, "input", ROLE): AuxiliaryValue.activation_divisor(value)
                for name, value in (overrides or {}).items()
            },
        )
        prepared = import_encoded(request)
        assert all(key[1:] == ("input", ROLE) for key in prepared.auxiliaries)
        assert all((value.format, value.shape) == ("fp32", ()) for value in prepared.auxiliaries.values())
        return {key[0]: struct.unpack("<f", value.data)[0] for key, value in prepared.auxiliaries.items()}

    def test_of_a_single_source(self, harness) -> None:
        assert self.auxiliaries(harness, [nvfp4(input_divisor=7)], ["AllowA4"]) == {"p0": 7}

    def test_is_the_smallest_of_the_parent(self, harness) -> None:
        sources = [nvfp4(input_divisor=d) for d in (7, 5, 9)]
        assert self.auxiliaries(harness, sources, ["AllowA4"] * 3) == {"p0": 5, "p1": 5, "p2": 5}
        assert self.auxiliaries(harness, sources, ["AllowA4", "AllowA8", "A16Only"]) == {"p0": 5}

    def test_of_a_source_without_one_is_that_of_the_others(self, harness) -> None:
        sources = [nvfp4(), nvfp4(input_divisor=6)]
        assert self.auxiliaries(harness, sources, ["AllowA4"] * 2) == {"p0": 6, "p1": 6}

    def test_override_wins_for_its_use(self, harness) -> None:
        sources = [nvfp4(input_divisor=d) for d in (7, 5)]
        assert self.auxiliaries(harness, sources, ["AllowA4"] * 2, {"p0": 3.0}) == {"p0": 3, "p1": 5}
        assert self.auxiliaries(harness, sources, ["A16Only"] * 2, {"p0": 3.0}) == {"p0": 3}
        assert self.auxiliaries(harness, [nvfp4()], ["AllowA4"], {"p0": 3.0}) == {"p0": 3}

    def test_other_policies_need_none(self, harness) -> None:
        def unavailable() -> bytes:
            raise AssertionError("not needed")

        assert self.auxiliaries(harness, [nvfp4(), nvfp4()], ["A16Only", "AllowA8"]) == {}
        assert self.auxiliaries(harness, [replace(nvfp4(), input_divisor=unavailable)], ["A16Only"]) == {}

    def test_missing_or_invalid(self, harness) -> None:
        with pytest.raises(ValueError, match="p0: supply an activation divisor for AllowA4"):
            self.auxiliaries(harness, [nvfp4()], ["AllowA4"])
        with pytest.raises(ValueError, match="positive finite FP32"):
            self.auxiliaries(harness, [nvfp4(input_divisor=7), nvfp4(input_divisor=float("nan"))], ["AllowA4"] * 2)

    def test_other_formats_have_none(self, harness) -> None:
        request = harness.request(fp8([[1]], [0x3F80]), FP8, policies={("p0", "input"): "AllowA4"})
        assert import_encoded(request).auxiliaries == {}
