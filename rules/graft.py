"""``graft``: the payload of a tensor object of another artifact, byte for byte.

No recipe chooses this rule: it stands behind components that are taken from an artifact, whose objects need no
parameters, no values and no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.artifact.layouts import encoded_size, planes
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.reader import Artifact
    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where a payload is from: the state of a check."""

    artifact: Artifact
    id: str


class Graft(Rule):
    """Its one input is the payload, ``U8 [bytes]``; a block is any range of it, and its first row the first byte."""

    name: ClassVar[str] = "graft"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "payload"

    def check(self, request: PrepareRequest) -> RuleCheck:
        target = request.target
        size = encoded_size(target.layout, target.format, target.shape, target.divisors)
        if request.source.shape != (size,):
            raise ValueError(f"{request.source.label}: {request.source.shape[0]} bytes, the object has {size}")
        return RuleCheck()

    def require_sound(self, checked: RuleCheck) -> None:
        """Hold the object to the rules of its format: it is copied, and nothing else looks at its words."""
        from ninferbuild.verify import copy_sound

        stored: StoredObject = checked.state
        copy_sound(stored.artifact, stored.id, lambda offset, data: None)

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        end = first_row + block.numel()
        bounds = (
            (max(plane.offset, first_row), min(plane.offset + plane.extent, end))
            for plane in planes(target.layout, target.format, target.shape, target.divisors)
        )
        return tuple(block[begin - first_row : max(begin, last) - first_row] for begin, last in bounds)


graft = Graft()
