"""``cast_direct``: elements in a direct format, converted where the source has another type."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.artifact.formats import DirectFormat, get_format
from ninferbuild.rules.preflight import check_counts, check_readable, refuse_parameters
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags


class CastDirect(Rule):
    """Rounding to the element type; the arithmetic is in :mod:`ninferbuild.rules.casting`.

    Unlike other converters it refuses NaN that needs a conversion (its bits are not defined) and a binary32 ``2^31``
    for ``int32`` (which wraps). NaN in a source of the target's own type is copied.
    """

    name: ClassVar[str] = "cast_direct"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "values"

    def check(self, request: PrepareRequest) -> RuleCheck:
        if not isinstance(get_format(request.target.format), DirectFormat):
            raise ValueError(f"{self.name} requires a direct target format, not {request.target.format}")
        refuse_parameters(self.name, request)
        check_counts(request)
        check_readable(request)
        return RuleCheck()

    def blocks(self, request: PrepareRequest) -> Iterator[tuple[int, torch.Tensor]]:
        """Runs of elements of one input each: gluing inputs of several types together could round them."""
        shape = request.target.shape
        step = request.rows_per_chunk * (shape[-1] if len(shape) >= 2 else 1)
        offsets = request.source_offsets
        for first, last in pairwise(offsets):
            for begin in range(first, last, step):
                yield begin, request.values(begin, min(begin + step, last))

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.artifact.codecs import direct
        from ninferbuild.rules.casting import cast_elements

        return (direct.pack(cast_elements(block.to(device, non_blocking=True), target.format, errors)),)


cast_direct = CastDirect()
