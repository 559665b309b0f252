"""Which words are legal in the planes of an object, checked plane by plane in bounded memory.

:data:`RULES` has one row for each class of formats. A row makes, for one tensor object, the :class:`WordRules` that are
fed its planes in pieces. Pieces begin at multiples of 4 KiB within their plane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ninferbuild.artifact.findings import Finding, Findings
from ninferbuild.artifact.formats import (
    DirectFormat,
    Fp8RowFormat,
    GgufFormat,
    NumericFormat,
    Nvfp4Format,
    QuantFormat,
    get_format,
    valid_positive_fp32_word,
)
from ninferbuild.artifact.layouts import (
    SCALE_TILE_ROWS,
    Plane,
    block_scale_geometry,
    planes,
    row_scale_geometry,
    row_split_geometry,
)
from ninferbuild.artifact.objects import TensorObject

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


class WordRules:
    """The rules of one object; this base accepts every word.

    Attributes:
        names: of the planes, in file order.
        reading_order: indices of the planes. Scales are read before the codes that they allow or forbid, so that only
            one bit for each scale has to be remembered.
    """

    names: tuple[str, ...] = ("values",)

    def __init__(self, item: TensorObject, findings: Findings):
        self.item = item
        self.planes: tuple[Plane, ...] = planes(item.layout, item.format, item.shape, item.divisors)
        self.findings = findings

    @property
    def reading_order(self) -> tuple[int, ...]:
        return tuple(range(len(self.planes)))

    def check(self, plane: int, begin: int, data: Bytes) -> None:
        """Check ``data``, the bytes of plane number ``plane`` from ``begin`` on; reports to the findings."""

    def _report(
        self, plane: int, positions: NDArray[np.int64], describe: Callable[[int], tuple[str, int, int]]
    ) -> None:
        """Report bytes of a plane. ``describe``: byte position in the plane → (problem, row, column or −1)."""

        def finding(position: int) -> Finding:
            problem, row, column = describe(position)
            return Finding(
                problem,
                object=self.item.id,
                plane=self.names[plane],
                row=row,
                column=column if column >= 0 else None,
                offset=self.planes[plane].offset + position,
            )

        self.findings.add_each(positions, finding)


class Marks:
    """A set of indices below ``count``, one bit each once there is a member."""

    def __init__(self, count: int):
        self._count = count
        self._bits: Bytes | None = None

    def add(self, begin: int, flags: NDArray[np.bool_]) -> None:
        """Add ``begin + i`` where ``flags[i]``; ``begin`` is a multiple of 8."""
        if self._bits is None:
            if not flags.any():
                return
            self._bits = np.zeros(-(-self._count // 8), np.uint8)
        packed = np.packbits(flags)
        self._bits[begin // 8 : begin // 8 + len(packed)] = packed

    def flags(self, begin: int, end: int) -> NDArray[np.bool_] | None:
        """Which of ``[begin, end)`` are members; None if none is."""
        if self._bits is None:
            return None
        packed = self._bits[begin // 8 : -(-end // 8)]
        if not packed.any():
            return None
        return np.unpackbits(packed)[begin % 8 : begin % 8 + end - begin].astype(np.bool_)


class GroupedRules(WordRules):
    """``row_split_k128_v1``: integer codes with a binary16 scale for each group.

    A scale is finite and not −0; under a scale of +0 all codes are 0. Columns and groups beyond ``K`` are 0.
    """

    def __init__(self, item: TensorObject, findings: Findings):
        super().__init__(item, findings)
        record = get_format(item.format)
        assert isinstance(record, QuantFormat)
        geometry = row_split_geometry(record, item.shape)
        self._format = record
        self._groups = geometry.groups
        self._logical_groups = -(-geometry.columns // record.group_size)
        self._group_bytes = (record.base_bytes, *([record.high_bytes] if record.high_bytes else []))
        self.names = ("codes", "high bits", "scales") if record.high_bytes else ("codes", "scales")
        self._padding = [self._padding_masks(size, geometry.columns) for size in self._group_bytes]
        self._zero_scales = Marks(geometry.rows * geometry.groups)

    def _padding_masks(self, group_bytes: int, columns: int) -> list[tuple[int, Bytes]]:
        """For each group of a row that has lanes beyond ``K``: its number, and a mask of those lanes' bits."""
        lanes = self._format.group_size
        lane_bits = group_bytes * 8 // lanes
        masks = []
        for group in range(columns // lanes, self._groups):
            bits = np.arange(lanes * lane_bits) >= max(0, columns - group * lanes) * lane_bits
            masks.append((group, np.packbits(bits, bitorder="little")))
        return masks

    @property
    def reading_order(self) -> tuple[int, ...]:
        last = len(self.planes) - 1
        return last, *range(last)

    def check(self, plane: int, begin: int, data: Bytes) -> None:
        if plane == len(self._group_bytes):
            self._check_scales(begin // 2, data.view("<u2"))
            return
        if plane == 0:
            self._check_words(begin, data)
        size = self._group_bytes[plane]
        groups = data.reshape(-1, size)
        self._check_padding(plane, begin // size, groups)
        self._check_zero_scales(plane, begin // size, groups)

    def _check_scales(self, begin: int, words: NDArray[np.uint16]) -> None:
        plane = len(self._group_bytes)
        # NaN, infinities and −0 are 0x7c00..0x8000 and 0xfc00..0xffff; comparing is much faster than masking.
        bad = ((words >= 0x7C00) & (words <= 0x8000)) | (words >= 0xFC00)
        if bad.any():
            positions = np.flatnonzero(bad)

            def describe(position: int) -> tuple[str, int, int]:
                word = int(words[position // 2 - begin])
                kind = "negative zero" if word == 0x8000 else "NaN" if word & 0x3FF else "infinite"
                return f"scale word {word:#06x} is {kind}", *self._first_column(position // 2)

            self._report(plane, (begin + positions) * 2, describe)
        zero = words == 0
        for group in range(self._logical_groups, self._groups):
            first = (group - begin) % self._groups
            positions = first + self._groups * np.flatnonzero(words[first :: self._groups])
            self._report(
                plane,
                (begin + positions) * 2,
                lambda position: (
                    f"scale word {int(words[position // 2 - begin]):#06x} of a group beyond K is not zero",
                    *self._first_column(position // 2),
                ),
            )
            zero[first :: self._groups] = False
        self._zero_scales.add(begin, zero)

    def _first_column(self, index: int) -> tuple[int, int]:
        """Row and first column of group ``index`` of the plane."""
        row, group = divmod(index, self._groups)
        return row, group * self._format.group_size

    def _check_words(self, begin: int, data: Bytes) -> None:
        find = _ILLEGAL_CODES.get((self._format.bits, self._format.qmin))
        if find is None:
            return
        lanes = find(data)
        if not len(lanes):
            return
        per_byte = 8 // self._format.bits
        word = 1 << (self._format.bits - 1)
        places = begin * per_byte + lanes

        def describe(place: int) -> Finding:
            row, column = divmod(place, self._groups * self._format.group_size)
            return Finding(
                f"code word {word:#x} is illegal in {self._format.name}",
                object=self.item.id,
                plane=self.names[0],
                row=row,
                column=column,
                offset=place // per_byte,
            )

        self.findings.add_each(places, describe)

    def _check_padding(self, plane: int, begin: int, groups: Bytes) -> None:
        size = groups.shape[1]
        for group, mask in self._padding[plane]:
            first = (group - begin) % self._groups
            found = groups[first :: self._groups] & mask
            if not found.any():
                continue
            rows, places = np.nonzero(found)
            self._report(
                plane,
                (begin + first + rows * self._groups) * size + places,
                lambda position: ("code in a column beyond K is not zero", *self._column(plane, position)),
            )

    def _check_zero_scales(self, plane: int, begin: int, groups: Bytes) -> None:
        flags = self._zero_scales.flags(begin, begin + len(groups))
        if flags is None:
            return
        size = groups.shape[1]
        marked = np.flatnonzero(flags)
        found = groups[marked]
        bad = found.any(axis=1)
        if bad.any():
            positions = (begin + marked[bad]) * size + (found[bad] != 0).argmax(axis=1)
            self._report(
                plane,
                positions,
                lambda position: ("code under a scale of zero is not zero", *self._column(plane, position)),
            )

    def _column(self, plane: int, position: int) -> tuple[int, int]:
        """Row and first column of a byte of a code plane."""
        size = self._group_bytes[plane]
        row, column = self._first_column(position // size)
        return row, column + position % size * self._format.group_size // size


def _illegal_bytes(data: Bytes) -> Positions:
    """Lanes of 8-bit codes with the word 0x80."""
    return np.flatnonzero(data == 0x80)


def _illegal_pairs(data: Bytes) -> Positions:
    """Lanes of 2-bit codes with the word 2: the upper bit set, the lower one clear."""
    words = data.view(np.uint64)  # groups are whole words, and the shift moves no bit into an upper bit's place
    upper = words & ~(words << np.uint64(1)) & np.uint64(0xAAAA_AAAA_AAAA_AAAA)
    if not upper.any():
        return np.empty(0, np.int64)
    return np.flatnonzero(np.unpackbits(upper.view(np.uint8), bitorder="little")[1::2])


_ILLEGAL_CODES: dict[tuple[int, int], Callable[[Bytes], Positions]] = {
    (8, -127): _illegal_bytes,
    (2, -1): _illegal_pairs,
}
"""(bits, smallest code) → finder of illegal words, for formats that do not use every word."""


class Nvfp4Rules(WordRules):
    """``block_scale_k16_m128x4_v1``: scales are nonnegative finite E4M3FN, divisors finite and positive binary32."""

    names = ("codes", "scales", "divisors")

    def check(self, plane: int, begin: int, data: Bytes) -> None:
        if plane == 1:
            positions = begin + np.flatnonzero(data >= 0x7F)
            self._report(
                plane,
                positions,
                lambda position: (
                    f"scale word {int(data[position - begin]):#04x} is not a nonnegative finite E4M3FN number",
                    *self._place(position),
                ),
            )
        elif plane == 2:
            words = data.view("<u4")
            geometry = block_scale_geometry(self.item.shape, self.item.divisors)
            bad = [index for index, word in enumerate(words.tolist()) if not valid_positive_fp32_word(word)]
            self._report(
                plane,
                begin + 4 * np.array(bad, np.int64),
                lambda position: (
                    f"divisor word {int(words[(position - begin) // 4]):#010x} is not finite and positive",
                    position // 4 * geometry.rows_per_divisor,
                    -1,
                ),
            )

    def _place(self, position: int) -> tuple[int, int]:
        """Row and first column of a byte of the swizzled scale plane."""
        columns = self.item.shape[1]
        tile, inside = divmod(position, 512)
        line, cell = divmod(inside, 16)
        row_tile, group_tile = divmod(tile, columns // 64)
        return row_tile * SCALE_TILE_ROWS + cell // 4 * 32 + line, (group_tile * 4 + cell % 4) * 16


class Fp8RowRules(WordRules):
    """``row_scale_v1``: finite E4M3FN codes, nonnegative finite bfloat16 scales, codes of ±0 in rows of scale zero."""

    names = ("codes", "scales")

    def __init__(self, item: TensorObject, findings: Findings):
        super().__init__(item, findings)
        self._columns = row_scale_geometry(item.shape).columns
        self._zero_rows = Marks(item.shape[0])

    @property
    def reading_order(self) -> tuple[int, ...]:
        return 1, 0

    def check(self, plane: int, begin: int, data: Bytes) -> None:
        if plane == 1:
            self._check_scales(begin // 2, data.view("<u2"))
        else:
            self._check_codes(begin, data)

    def _check_scales(self, begin: int, words: NDArray[np.uint16]) -> None:
        positions = (begin + np.flatnonzero(words >= 0x7F80)) * 2
        self._report(
            1,
            positions,
            lambda position: (
                f"scale word {int(words[position // 2 - begin]):#06x} is not a nonnegative finite BF16 number",
                position // 2,
                -1,
            ),
        )
        self._zero_rows.add(begin, words == 0)

    def _check_codes(self, begin: int, data: Bytes) -> None:
        positions = begin + np.flatnonzero((data == 0x7F) | (data == 0xFF))
        self._report(
            0,
            positions,
            lambda position: (
                f"code word {int(data[position - begin]):#04x} is not a finite E4M3FN number",
                *divmod(position, self._columns),
            ),
        )
        first, last = begin // self._columns, (begin + len(data) - 1) // self._columns
        zero = self._zero_rows.flags(first, last + 1)
        if zero is None:
            return
        ends = np.clip(np.arange(first, last + 2) * self._columns - begin, 0, len(data))
        positions = begin + np.flatnonzero((data != 0) & (data != 0x80) & np.repeat(zero, np.diff(ends)))
        self._report(
            0,
            positions,
            lambda position: (
                f"code word {int(data[position - begin]):#04x} in a row with a zero row scale",
                *divmod(position, self._columns),
            ),
        )


class GgufBlockRules(WordRules):
    """``gguf_blocks_v1``: any bit pattern is legal, scales that are not finite too."""

    names = ("blocks",)


RULES: dict[type[NumericFormat], Callable[[TensorObject, Findings], WordRules]] = {
    DirectFormat: WordRules,
    QuantFormat: GroupedRules,
    Nvfp4Format: Nvfp4Rules,
    Fp8RowFormat: Fp8RowRules,
    GgufFormat: GgufBlockRules,
}


def rules_of(item: TensorObject, findings: Findings) -> WordRules:
    """The rules for an object of a registered format whose encoding was checked."""
    return RULES[type(get_format(item.format))](item, findings)
