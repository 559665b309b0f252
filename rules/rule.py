"""What an encode rule is.

Users read *method*; *rule* is the internal word for a built-in one. A rule is split so that planning and key making
never touch a tensor: :meth:`Rule.check` looks at shapes, names and scalars, :meth:`Rule.encode` at tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PreparedMethod, PrepareRequest
from ninferbuild.rules.error_flags import ErrorFlags

__all__ = ["ErrorFlags", "Rule", "RuleCheck"]

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.artifact.tensor_output import TensorOutput
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
    """A built-in method. Instances are callables with the documented method interface.

    A subclass sets the class variables and implements :meth:`check` and :meth:`encode_block`. Its bytes must not
    depend on how rows are cut into blocks, nor on the device.

    Attributes:
        name: what recipes call the method.
        version: part of every key; it changes when the bytes for any input change.
        reads: what :meth:`encode` takes: decoded values, codes and scales as they are stored, or the bytes of a whole
            payload (which only the rule behind grafted components does).
        surveys: the rule has to see the whole parent before it can encode any of it. The parent is then read twice:
            each block goes to :meth:`survey_block` first, and :meth:`encode` gets what :meth:`surveyed` made of that.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    reads: ClassVar[Literal["values", "encoded", "payload"]]
    surveys: ClassVar[bool] = False

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<method {self.name}>"

    def check(self, request: PrepareRequest) -> RuleCheck:
        """Everything that can be refused without reading a payload. Never imports torch for stored sources.

        Raises:
            ValueError: the target, the inputs or the parameters do not suit the rule.
        """
        raise NotImplementedError

    def require_sound(self, checked: RuleCheck) -> None:
        """Look at what will be encoded, for damage that encoding itself would not meet. Called once before it begins.

        Raises:
            ValueError: there is some.
        """

    def keyed_parameters(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters that enter the key: without those that only name what :attr:`RuleCheck.facts` hold."""
        return parameters

    def block_rows(self, target: TensorSpec, rows_per_chunk: int) -> int:
        """Rows of one block of an encoded format when about ``rows_per_chunk`` are wanted."""
        return rows_per_chunk

    def survey_block(self, block: Any, seen: Any, device: torch.device) -> Any:
        """What a surveying rule knows of its parent after one more block. Must not wait for ``device``.

        Args:
            block: as :meth:`encode` takes it.
            seen: what the block before gave; None for the first.
        """
        raise NotImplementedError

    def surveyed(self, checked: RuleCheck, seen: Any, errors: ErrorFlags) -> RuleCheck:
        """``checked`` with the state that encoding needs, once every block was surveyed."""
        raise NotImplementedError

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        """What :meth:`encode` does; invalid data go to ``errors``. Must not wait for ``device``."""
        raise NotImplementedError

    def encode(
        self,
        block: torch.Tensor | EncodedRows,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Encode consecutive rows to the final bytes of each plane of the layout.

        Args:
            block: for ``reads == "values"`` a tensor ``[rows, K]`` (direct formats: elements, any shape) on the
                host or on ``device``; for ``"encoded"`` an :class:`EncodedRows` on the host or on ``device``.
            first_row: index of the first row in the parent (direct formats: of the first element).
            errors: where invalid data are reported; the caller asks it before it uses the bytes. None: they are
                raised here, which waits for ``device``.

        Returns:
            one 1-D uint8 tensor for each plane, on ``device``: the bytes that these rows append to the plane. The
            tensor may share memory with ``block``.

        Raises:
            ValueError: the data cannot be encoded (without ``errors``, or on the host).
            TypeError: the element type does not suit the rule.
        """
        import torch

        flags = ErrorFlags(device) if errors is None else errors
        with torch.no_grad():
            planes = self.encode_block(block, target, checked, first_row, device, flags)
        if errors is None:
            flags.raise_if_any()
        return planes

    def blocks(self, request: PrepareRequest) -> Iterator[tuple[int, torch.Tensor | EncodedRows]]:
        """The parent in blocks as :meth:`encode` takes them, each with its first row."""
        rows, columns = request.target.shape
        step = self.block_rows(request.target, request.rows_per_chunk)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield begin, request.values(begin * columns, end * columns).reshape(end - begin, columns)

    def survey(
        self, request: PrepareRequest, checked: RuleCheck, device: torch.device, errors: ErrorFlags
    ) -> RuleCheck:
        """Read the parent of a surveying rule once; what :meth:`encode` needs to know of it."""
        seen = None
        for _, block in self.blocks(request):
            seen = self.survey_block(block, seen, device)
        return self.surveyed(checked, seen, errors)

    def __call__(self, request: PrepareRequest) -> PreparedMethod:
        """The method interface: check now, encode through ``TensorOutput`` later."""
        checked = self.check(request)

        def produce(output: TensorOutput) -> None:
            from ninferbuild.rules.devices import pick_device

            device = pick_device(request.device)
            errors = ErrorFlags(device)
            known = self.survey(request, checked, device, errors) if self.surveys else checked
            for first_row, block in self.blocks(request):
                planes = self.encode(block, request.target, known, first_row, device, errors)
                output.write_planes(first_row, planes)
            errors.raise_if_any()

        return request.job(produce=produce, auxiliaries=checked.auxiliaries)
