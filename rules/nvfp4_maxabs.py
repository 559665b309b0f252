"""``nvfp4_maxabs``: floating-point weights as NVFP4, scaled by the largest magnitude of the whole parent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.artifact.formats import Nvfp4Format, get_format
from ninferbuild.artifact.layouts import SCALE_TILE_ROWS
from ninferbuild.rules.import_encoded import ALLOW_A4, DIVISOR_ROLE
from ninferbuild.rules.preflight import check_counts, check_readable, refuse_parameters
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags

PROFILE = "NVFP4_MAXABS_DIVISOR_RNE_V1"
"""Name of the arithmetic, which is in :mod:`ninferbuild.rules.nvfp4_words`; part of every key."""


class Nvfp4Maxabs(Rule):
    """Packed parameters share one divisor, so a parent is read twice: for its largest magnitude, then to encode it.

    Activation divisors cannot be derived from weights: each use that allows 4-bit activations is given its own by the
    recipe.
    """

    name: ClassVar[str] = "nvfp4_maxabs"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "values"
    surveys: ClassVar[bool] = True

    def check(self, request: PrepareRequest) -> RuleCheck:
        target = request.target
        if not isinstance(get_format(target.format), Nvfp4Format) or len(target.shape) != 2:
            raise ValueError(
                f"{self.name} requires an NVFP4 matrix target, not {target.format} of shape {tuple(target.shape)}"
            )
        refuse_parameters(self.name, request)
        rows, columns = target.shape
        if rows % SCALE_TILE_ROWS or columns % 16:
            raise ValueError(
                f"NVFP4 parent requires complete {SCALE_TILE_ROWS}-row and 16-column tiles, not [{rows}, {columns}]"
            )
        if target.divisors != 1:
            raise ValueError(f"{self.name} gives a parent one divisor, not {target.divisors}")
        check_counts(request)
        check_readable(request)
        return RuleCheck(_activation_divisors(request), (f"profile: {PROFILE}",))

    def block_rows(self, target: TensorSpec, rows_per_chunk: int) -> int:
        return max(SCALE_TILE_ROWS, rows_per_chunk // SCALE_TILE_ROWS * SCALE_TILE_ROWS)

    def survey_block(self, block: Any, seen: Any, device: torch.device) -> Any:
        """The largest magnitude so far, float32 0-D on ``device``."""
        from ninferbuild.rules.nvfp4_words import largest_magnitude

        here = largest_magnitude(block.to(device, non_blocking=True))
        return here if seen is None else here.maximum(seen)

    def surveyed(self, checked: RuleCheck, seen: Any, errors: ErrorFlags) -> RuleCheck:
        """``checked`` with the parent's divisor, float32 0-D, as its state."""
        from ninferbuild.rules.nvfp4_words import weight_divisor

        return replace(checked, state=weight_divisor(seen, errors))

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.artifact.codecs.buffers import as_bytes
        from ninferbuild.rules.nvfp4_words import encode_rows

        divisor = checked.state
        word = as_bytes(divisor.reshape(1))
        return (*encode_rows(block.to(device, non_blocking=True), divisor), word if first_row == 0 else word[:0])


def _activation_divisors(request: PrepareRequest) -> dict[AuxiliaryKey, AuxiliaryValue]:
    """What the recipe supplied. Raises ``ValueError`` for a use that needs a divisor and was given none."""
    found: dict[AuxiliaryKey, AuxiliaryValue] = {}
    for item in request.inputs:
        for use in item.uses:
            key = (*use, DIVISOR_ROLE)
            if key in request.auxiliary_overrides:
                found[key] = request.auxiliary_overrides[key]
            elif request.policies.get(use) == ALLOW_A4:
                raise ValueError(
                    f"{item.parameter}: a calibrated activation divisor is required for {ALLOW_A4} of {use[1]}; give "
                    f"it with recipe.use(..., auxiliaries={{{DIVISOR_ROLE!r}: ...}}) or ninferbuild.calibration"
                )
    return found


nvfp4_maxabs = Nvfp4Maxabs()
