"""``grouped_absmax``: round to nearest with the scale of each group's largest magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.artifact.formats import QuantFormat, get_format
from ninferbuild.rules.preflight import check_counts, check_readable, refuse_parameters
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags


def require_grouped_matrix(rule: str, target: TensorSpec) -> QuantFormat:
    """The format of ``target``. Raises ``ValueError`` unless it is a matrix in a grouped-integer format."""
    format = get_format(target.format)
    if not isinstance(format, QuantFormat) or len(target.shape) != 2:
        raise ValueError(
            f"{rule} requires a grouped-integer matrix target, not {target.format} of shape {tuple(target.shape)}"
        )
    return format


class GroupedAbsmax(Rule):
    """Codes and one binary16 scale for each group; the arithmetic is in :mod:`ninferbuild.rules.groupwise`."""

    name: ClassVar[str] = "grouped_absmax"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "values"

    def check(self, request: PrepareRequest) -> RuleCheck:
        format = require_grouped_matrix(self.name, request.target)
        refuse_parameters(self.name, request)
        check_counts(request)
        check_readable(request)
        return RuleCheck(state=format)

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.rules.groupwise import encode_matrix

        return encode_matrix(block.to(device, non_blocking=True), checked.state, errors)


grouped_absmax = GroupedAbsmax()
