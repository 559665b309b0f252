"""``fp8_row_maxabs``: E4M3FN codes with the scale of each row's largest magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.artifact.formats import Fp8RowFormat, get_format
from ninferbuild.rules.preflight import check_counts, check_readable, refuse_parameters
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags


class Fp8RowMaxabs(Rule):
    """Codes and one bfloat16 scale for each row; the arithmetic is in :mod:`ninferbuild.rules.fp8_words`."""

    name: ClassVar[str] = "fp8_row_maxabs"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "values"

    def check(self, request: PrepareRequest) -> RuleCheck:
        target = request.target
        if not isinstance(get_format(target.format), Fp8RowFormat) or len(target.shape) != 2:
            raise ValueError(
                f"{self.name} requires a row-scaled FP8 matrix format, "
                f"not {target.format} of shape {tuple(target.shape)}"
            )
        refuse_parameters(self.name, request)
        check_counts(request)
        check_readable(request)
        return RuleCheck()

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.rules.fp8_words import encode_matrix

        return encode_matrix(block.to(device, non_blocking=True), errors)


fp8_row_maxabs = Fp8RowMaxabs()
