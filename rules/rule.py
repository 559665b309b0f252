"""What an encode rule is.

Users read *method*; *rule* is the internal word for a built-in one. A rule is split so that planning and key making
never touch a tensor: :meth:`Rule.check` looks at shapes, names and scalars, :meth:`Rule.encode` at tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PreparedMethod, PrepareRequest

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.sources.logical import EncodedRows


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """The result of a successful check.

    Attributes:
        auxiliaries: values that the rule computes from scalars at plan time.
        facts: manifest lines for what the rule looked up by name (a digest of the bytes found, never a path).
        state: handed to :meth:`Rule.encode` unchanged.
    """

    auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    state: Any = None


class Rule:
    """A built-in method. Instances are callables with the documented method interface."""

    name: ClassVar[str]
    version: ClassVar[int]
    reads: ClassVar[Literal["values", "encoded"]]

    @property
    def __name__(self) -> str:
        return self.name

    def check(self, request: PrepareRequest) -> RuleCheck:
        """Everything that can be refused without reading a payload. Never imports torch for stored sources.

        Raises:
            ValueError: the target, the inputs or the parameters do not suit the rule.
        """
        raise NotImplementedError

    def encode(
        self,
        block: torch.Tensor | EncodedRows,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
    ) -> tuple[torch.Tensor, ...]:
        """Encode consecutive rows to the final bytes of each plane of the layout.

        Args:
            block: for ``reads == "values"`` a floating tensor ``[rows, K]`` (direct formats: 1-D elements) on the
                host or on ``device``; for ``"encoded"`` an :class:`EncodedRows` on the host.
            first_row: index of the first row in the parent (direct formats: of the first element).

        Returns:
            one 1-D uint8 tensor for each plane, on ``device``: the bytes that these rows append to the plane.
        """
        raise NotImplementedError

    def __call__(self, request: PrepareRequest) -> PreparedMethod:
        """The method interface: check now, encode through ``TensorOutput`` later."""
        raise NotImplementedError
