"""Shapes of the Qwen3.5 hybrids that exporters write to GGUF, and the row orders that differ from the checkpoint's.

The exporter moves the value heads of the delta net: grouped head ``h = k·R + r`` (``R`` value heads share key head
``k``) goes to position ``r·Hk + k``, so that repeating the key heads pairs them. It also keeps the query and gate rows
of each attention head side by side. Row maps say where the rows of a logical parameter lie in the file: half-open
ranges of stored rows, in logical order.
"""

from __future__ import annotations

from dataclasses import dataclass
import struct
from typing import TYPE_CHECKING

from ninferbuild.sources.ranges import Range, coalesce

if TYPE_CHECKING:
    from ninferbuild.sources.description import Description

Rows = tuple[Range, ...]
"""A row map."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward.

    Attributes:
        count: routed experts of a layer.
        width: intermediate size of a routed expert.
        shared_width: intermediate size of the expert that every token passes through.
    """

    count: int
    width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The text model: delta-net layers with full attention every ``interval`` layers.

    Attributes:
        attention_dim: columns of an attention head.
        key_heads, value_heads: heads of the delta net; ``value_heads`` is a multiple of ``key_heads``.
        gdn_dim: columns of a delta-net head.
        taps: length of the causal convolution.
        feed_forward: intermediate size of a dense feed-forward, or its experts.
        label: what messages call the geometry.
    """

    hidden: int
    layers: int
    vocabulary: int
    attention_heads: int
    key_value_heads: int
    attention_dim: int
    key_heads: int
    value_heads: int
    gdn_dim: int
    taps: int
    feed_forward: int | Experts
    interval: int = 4
    label: str = "model's"

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads")

    @property
    def query_rows(self) -> int:
        """Rows of the attention query, and of its output gate."""
        return self.attention_heads * self.attention_dim

    @property
    def key_value_rows(self) -> int:
        """Rows of the attention key, and of its value."""
        return self.key_value_heads * self.attention_dim

    @property
    def key_dim(self) -> int:
        """Rows of the delta net's query, and of its key."""
        return self.key_heads * self.gdn_dim

    @property
    def value_dim(self) -> int:
        """Rows of the delta net's value, and columns of its output."""
        return self.value_heads * self.gdn_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: query, key and value."""
        return 2 * self.key_dim + self.value_dim

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    def full_attention(self, layer: int) -> bool:
        """Whether a text layer is full attention; the others are delta nets."""
        return layer % self.interval == self.interval - 1

    @property
    def value_head_positions(self) -> tuple[int, ...]:
        """For each grouped value head its position in the file."""
        return tuple(head % self.ratio * self.key_heads + head // self.ratio for head in range(self.value_heads))

    def attention_rows(self, *, gate: bool = False) -> Rows:
        """Rows of the attention query, or of its output gate, in the matrix that alternates between them."""
        dim = self.attention_dim
        begins = range(dim if gate else 0, 2 * self.query_rows, 2 * dim)
        return coalesce((begin, begin + dim) for begin in begins)

    def untiled_rows(self, base: int = 0, head_rows: int | None = None) -> Rows:
        """Rows of grouped value heads, ``head_rows`` (a head's columns by default) each, that begin at row ``base``."""
        size = self.gdn_dim if head_rows is None else head_rows
        begins = (base + position * size for position in self.value_head_positions)
        return coalesce((begin, begin + size) for begin in begins)

    def untile(self, stored: Description) -> Description:
        """``stored`` with the value heads along its leading axis, an entry each, in grouped order.

        Raises:
            ValueError: the axis has not an entry for each value head.
        """
        found = stored.shape[0] if stored.shape else 0
        if found != self.value_heads:
            raise ValueError(f"axis 0 has {found} entries, expected {self.value_heads}")
        return stored.select_rows(self.untiled_rows(head_rows=1))

    def channel_rows(self) -> Rows:
        """Rows of the convolution's grouped channels: query and key as they lie, then the value heads."""
        return coalesce((*rows(2 * self.key_dim), *self.untiled_rows(2 * self.key_dim)))

    @property
    def input_columns(self) -> bytes:
        """The grouped activation element that each stored column of the delta net's output matrix multiplies.

        Columns were tiled like value heads, and row copies cannot move them back: the runtime gathers activations
        instead, ``y = Σ W[:, c] · x[columns[c]]``. Little-endian int32 ``[value_dim]``, a permutation.
        """
        heads = (tile % self.key_heads * self.ratio + tile // self.key_heads for tile in range(self.value_heads))
        columns = [head * self.gdn_dim + element for head in heads for element in range(self.gdn_dim)]
        return struct.pack(f"<{len(columns)}i", *columns)


def rows(count: int, base: int = 0) -> Rows:
    """``count`` consecutive rows from row ``base``."""
    return ((base, base + count),)


QWEN_27B = Geometry(
    hidden=5120,
    layers=64,
    vocabulary=248320,
    attention_heads=24,
    key_value_heads=4,
    attention_dim=256,
    key_heads=16,
    value_heads=48,
    gdn_dim=128,
    taps=4,
    feed_forward=17408,
    label="27B dense",
)
"""Qwen3.5, Qwen3.6 and Qwen3.8 27B."""

QWEN_35B_A3B = Geometry(
    hidden=2048,
    layers=40,
    vocabulary=248320,
    attention_heads=16,
    key_value_heads=2,
    attention_dim=256,
    key_heads=16,
    value_heads=32,
    gdn_dim=128,
    taps=4,
    feed_forward=Experts(count=256, width=512, shared_width=512),
    label="35B-A3B",
)
"""Qwen3.5 and Qwen3.6 35B-A3B."""
