"""Encoded matrices of compressed-tensors and ModelOpt checkpoints.

============== ============================================= ==================================================
encoding       compressed-tensors                            ModelOpt
============== ============================================= ==================================================
NVFP4 codes    ``P.weight_packed`` U8 ``(N, K/2)``           ``P.weight`` U8 ``(N, K/2)``
block scales   ``P.weight_scale`` F8_E4M3 ``(N, K/16)``      the same
weight         ``P.weight_global_scale``, a divisor          ``P.weight_scale_2``, a multiplier
activation     ``P.input_global_scale``, a divisor           ``P.input_scale``, a multiplier
row FP8        ``P.weight`` F8_E4M3 ``(N, K)`` with ``P.weight_scale``: N multipliers, or one for all rows
block FP8      ``P.weight`` F8_E4M3 with ``P.weight_scale_inv``: one multiplier for a 128 × 128 block
============== ============================================= ==================================================

Multipliers of NVFP4 become divisors by one rounding; all other words pass unchanged. Nothing is read before values,
rows or a divisor are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite, prod
import struct
from typing import TYPE_CHECKING, Any

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.dtypes import WORD_BYTES
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.safetensors import SafetensorsSource, is_described_store, tensor_source
from ninferbuild.sources.stored import StoredReader

if TYPE_CHECKING:
    import torch

__all__ = ["ENCODINGS", "compressed_matrix_source", "has_matrix", "matrix_source"]

NVFP4 = "nvfp4"
FP8_ROW = "fp8_e4m3fn_row_bf16"
GROUP = 16
BLOCK = 128

_MEND = "download the checkpoint again, or take the matrix from another one"
"""What to do about numbers that no quantiser writes."""


def matrix_source(store: Any, name: str, shape: tuple[int, int], format: str | None = None) -> LogicalSource:
    """The matrix ``name`` of ``shape`` ``(N, K)``, in whatever encoding the store holds it.

    The encoding is found at the first use: block FP8 where ``P.weight_scale_inv`` exists, else ``format``, else NVFP4
    where ``P.weight_packed`` exists or ``name`` has type U8, else row FP8 where it has type F8_E4M3, else none.
    ``P`` is ``name`` without ``.weight``. The source always has encoded rows and divisors to ask for; asking raises
    ``ValueError`` when the resolved encoding lacks them.
    """
    shape = (shape[0], shape[1])
    label = f"{store.path}:{name}"
    if is_described_store(store, name):
        reader = StoredReader(
            partial(_describe_matrix, store, name, shape, format),
            shape=shape,
            name=name,
            input_divisor_reader=partial(_matrix_input_divisor, store, name, format),
        )
        return _encoded_source(shape, label, reader)
    values = _PlainMatrix(store, name, shape, format)
    return LogicalSource(
        shape, label, values.read_values, values.read_encoded, values.weight_divisor, values.input_divisor
    )


def has_matrix(store: Any, name: str) -> bool:
    """Whether the store holds the matrix ``name``, plain or in an encoding that :func:`matrix_source` recognises."""
    return bool(store.has(name) or store.has(name.removesuffix(".weight") + ".weight_packed"))


def compressed_matrix_source(
    store: SafetensorsSource, prefix: str, shape: tuple[int, int], format: str
) -> LogicalSource:
    """The matrix of ``shape`` ``(N, K)`` stored under ``prefix`` in the encoding ``format``.

    Raises:
        ValueError: the format is none of :data:`ENCODINGS`, or does not suit the shape.
    """
    shape = (shape[0], shape[1])
    if format not in ENCODINGS:
        raise ValueError(f"{prefix}: unsupported encoded source format {format}; known: {', '.join(ENCODINGS)}")
    if format == NVFP4:
        _require_groups(prefix, shape)
    reader = StoredReader(
        partial(_describe_encoding, store, prefix, shape, format),
        shape=shape,
        name=prefix,
        input_divisor_reader=partial(_nvfp4_input_divisor, store, prefix) if format == NVFP4 else None,
    )
    return _encoded_source(shape, f"{store.path}:{prefix} ({format})", reader)


def _encoded_source(shape: tuple[int, int], label: str, reader: StoredReader) -> LogicalSource:
    return LogicalSource(
        shape, label, reader.read_values, reader.read_encoded, reader.weight_divisor, reader.input_divisor
    )


class _PlainMatrix:
    """A matrix of a store that offers values only, such as one that renames or transforms tensors."""

    def __init__(self, store: Any, name: str, shape: tuple[int, int], format: str | None):
        self._store = store
        self._name = name
        self._format = format
        self._source = tensor_source(store, name, shape)

    def read_values(self, begin: int, end: int) -> torch.Tensor:
        encoding = _resolve(self._store, self._name, self._format)
        if encoding is not None:
            raise ValueError(
                f"{self._name}: {type(self._store).__name__} offers plain tensors only, not {encoding} weights"
            )
        return self._source.read_values(begin, end)

    def read_encoded(self, begin: int, end: int) -> Any:
        raise ValueError(f"{self._name}: selected source does not provide encoded rows")

    def weight_divisor(self) -> bytes:
        raise ValueError(f"{self._name}: selected source does not provide weight_divisor")

    def input_divisor(self) -> bytes:
        raise ValueError(f"{self._name}: selected source does not provide input_divisor")


def _prefix(name: str) -> str:
    return name.removesuffix(".weight")


def _resolve(store: Any, name: str, format: str | None) -> str | None:
    """The encoding of the stored matrix ``name``: a key of :data:`ENCODINGS`, ``"block FP8"``, or None."""
    prefix = _prefix(name)
    if store.has(f"{prefix}.weight_scale_inv"):
        if format is not None:
            raise ValueError(f"{name}: block FP8 supports decoded values, not encoded row import")
        return "block FP8"
    if format is not None:
        if format not in ENCODINGS:
            raise ValueError(f"{name}: unsupported encoded source format {format}; known: {', '.join(ENCODINGS)}")
        return format
    if store.has(f"{prefix}.weight_packed"):
        return NVFP4
    return {"U8": NVFP4, "F8_E4M3": FP8_ROW}.get(store.describe(name).dtype)


def _describe_matrix(store: SafetensorsSource, name: str, shape: tuple[int, int], format: str | None) -> Description:
    encoding = _resolve(store, name, format)
    if encoding is None:
        description = store.tensor(name)
        if description.shape != shape:
            raise ValueError(
                f"{store.path}: {name}: expected source shape {shape}, got {description.shape}; "
                "the weights are not those that config.json describes"
            )
        return description
    if encoding == "block FP8":
        return _describe_block_fp8(store, name, shape)
    return _describe_encoding(store, _prefix(name), shape, encoding)


def _matrix_input_divisor(store: SafetensorsSource, name: str, format: str | None) -> bytes:
    if _resolve(store, name, format) != NVFP4:
        raise ValueError(f"{name}: selected source does not provide input_divisor")
    return _nvfp4_input_divisor(store, _prefix(name))


def _describe_encoding(store: SafetensorsSource, prefix: str, shape: tuple[int, int], encoding: str) -> Description:
    if store.has(f"{prefix}.pre_quant_scale"):
        raise ValueError(f"{prefix}: pre_quant_scale is not supported: an artifact cannot hold a scale of activations")
    return ENCODINGS[encoding](store, prefix, shape)


def _part(
    store: SafetensorsSource, role: str, name: str, dtype: str, shape: tuple[int, ...], row_bytes: int, rows: int = 1
) -> Part:
    """The whole stored tensor as a part; its type and shape must be as given."""
    found = store.tensor(name)
    if (found.dtype, found.shape) != (dtype, shape):
        where = store.describe(name).file
        raise ValueError(f"{where}: {name}: expected {dtype}{shape}, got {found.dtype}{found.shape}")
    return Part(role, found.parts[0].region, row_bytes, rows=rows, name=name)


def _scalar(store: SafetensorsSource, name: str) -> tuple[bytes, float]:
    """The FP32 word of a one-element tensor that has to be a divisor or its reciprocal."""
    found = store.tensor(name)
    if found.dtype != "F32" or prod(found.shape) != 1:
        where = store.describe(name).file
        raise ValueError(f"{where}: {name}: expected a source FP32 scalar, got {found.dtype}{found.shape}; {_MEND}")
    word = _word(found)
    value: float = struct.unpack("<f", word)[0]
    if not (isfinite(value) and value > 0):
        where = store.describe(name).file
        raise ValueError(f"{where}: {name}: divisor must be finite and positive, not {value}; {_MEND}")
    return word, value


def _word(scalar: Description) -> bytes:
    """The bytes of a stored tensor of one element."""
    (span,) = scalar.parts[0].region.spans
    data = bytearray(span.end - span.begin)
    span.file.read_into(span.begin, memoryview(data))
    return bytes(data)


def _require_common_scale(store: SafetensorsSource, name: str) -> None:
    """Refuse a scale of a whole FP8 matrix that no row can have; zero suits a matrix of zeros."""
    found = store.tensor(name)
    word = int.from_bytes(_word(found), "little") << (0 if found.dtype == "F32" else 16)
    rounded = word + 0x7FFF + (word >> 16 & 1)  # to nearest BF16, ties to even; NaN stays above infinity
    if rounded >> 16 >= 0x7F80:  # the sign bit is above infinity too
        (value,) = struct.unpack("<f", word.to_bytes(4, "little"))
        where = store.describe(name).file
        raise ValueError(f"{where}: {name}: expected nonnegative finite BF16 row scales, not {value}; {_MEND}")


def _reciprocal(store: SafetensorsSource, name: str) -> bytes:
    """``f32(1 / f64(word))`` of a multiplier, as a divisor."""
    _, value = _scalar(store, name)
    try:
        word = struct.pack("<f", 1.0 / value)
    except OverflowError:
        word = b""
    if not word or struct.unpack("<f", word)[0] <= 0:
        where = store.describe(name).file
        raise ValueError(f"{where}: {name}: reciprocal of {value} is not finite and positive in FP32; {_MEND}")
    return word


def _require_groups(prefix: str, shape: tuple[int, int]) -> None:
    if shape[1] % GROUP:
        raise ValueError(f"{prefix}: NVFP4 source K must be divisible by {GROUP}, not {shape[1]}")


def _is_model_opt(store: SafetensorsSource, prefix: str) -> bool:
    """Whether an NVFP4 matrix has ModelOpt's names, which the name of its codes tells.

    The scalars of the other tool are never taken in their place: they go the other way.

    Raises:
        ValueError: there is no NVFP4 matrix.
    """
    if store.has(f"{prefix}.weight_packed"):
        return False
    if store.has(f"{prefix}.weight") and store.describe(f"{prefix}.weight").dtype == "U8":
        return True
    raise ValueError(f"{prefix}: no NVFP4 encoded source found in {store.path}")


def _describe_nvfp4(store: SafetensorsSource, prefix: str, shape: tuple[int, int]) -> Description:
    _require_groups(prefix, shape)
    rows, columns = shape
    model_opt = _is_model_opt(store, prefix)
    packed = f"{prefix}.weight" if model_opt else f"{prefix}.weight_packed"
    codes = _part(store, "codes", packed, "U8", (rows, columns // 2), columns // 2)
    groups = columns // GROUP
    scales = _part(store, "scales", f"{prefix}.weight_scale", "F8_E4M3", (rows, groups), groups)
    if model_opt:
        divisor = _reciprocal(store, f"{prefix}.weight_scale_2")
    else:
        divisor, _ = _scalar(store, f"{prefix}.weight_global_scale")
    return Description(
        shape=shape,
        dtype="F32",
        decoder="nvfp4",
        parts=(codes, scales),
        words=(("weight_divisor", divisor),),
        encoding=NVFP4,
    )


def _nvfp4_input_divisor(store: SafetensorsSource, prefix: str) -> bytes:
    if _is_model_opt(store, prefix):
        return _reciprocal(store, f"{prefix}.input_scale")
    return _scalar(store, f"{prefix}.input_global_scale")[0]


def _describe_row_fp8(store: SafetensorsSource, prefix: str, shape: tuple[int, int]) -> Description:
    rows, columns = shape
    codes = _part(store, "codes", f"{prefix}.weight", "F8_E4M3", shape, columns)
    name = f"{prefix}.weight_scale"
    found = store.describe(name)
    if found.dtype not in ("BF16", "F32"):
        raise ValueError(f"{found.file}: {name}: expected BF16 or F32 scales, got {found.dtype}{found.shape}")
    count = prod(found.shape)
    if count not in (rows, 1):
        raise ValueError(
            f"{found.file}: {name}: expected one BF16 scale per row: expected one scale per row or one global scale, "
            f"got {found.dtype}{found.shape} for {rows} rows"
        )
    if count == 1:
        _require_common_scale(store, name)
    row_bytes = WORD_BYTES[found.dtype] if count == rows else 0
    scales = _part(store, "scales", name, found.dtype, found.shape, row_bytes)
    return Description(
        shape=shape,
        dtype="F32",
        decoder="fp8_row",
        parts=(codes, scales),
        words=(("scale_dtype", found.dtype.encode()),),
        encoding=FP8_ROW,
    )


def _describe_block_fp8(store: SafetensorsSource, name: str, shape: tuple[int, int]) -> Description:
    quantization = store.config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    if quantization.get("quant_method") != "fp8" or quantization.get("weight_block_size") != [BLOCK, BLOCK]:
        raise ValueError(
            f"{name}: block FP8 requires the HF fp8 128x128 weight contract: quant_method 'fp8' and "
            f"weight_block_size [128, 128] in the quantization_config of {store.root / 'config.json'}"
        )
    rows, columns = shape
    codes = _part(store, "codes", name, "F8_E4M3", shape, columns)
    table = f"{_prefix(name)}.weight_scale_inv"
    found = store.describe(table)
    if found.dtype not in ("BF16", "F32"):
        raise ValueError(f"{found.file}: {table}: expected BF16 or F32 scales, got {found.dtype}{found.shape}")
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = _part(store, "scales", table, found.dtype, blocks, blocks[1] * WORD_BYTES[found.dtype], BLOCK)
    return Description(
        shape=shape,
        dtype="F32",
        decoder="fp8_block",
        parts=(codes, scales),
        words=(("scale_dtype", found.dtype.encode()),),
    )


ENCODINGS: dict[str, Callable[[SafetensorsSource, str, tuple[int, int]], Description]] = {
    NVFP4: _describe_nvfp4,
    FP8_ROW: _describe_row_fp8,
}
"""Encoded row format → how a prefix of a store is described in it."""
