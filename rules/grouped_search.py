"""``grouped_search``: the scale of each group is searched for; columns may weigh differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import xxhash

from ninferbuild.artifact.formats import T2_G128_FP16, QuantFormat
from ninferbuild.rules.grouped_absmax import require_grouped_matrix
from ninferbuild.rules.preflight import check_counts, check_readable
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags
    from ninferbuild.rules.importance import ImportanceFile

IMATRIX, NEGATIVE_SCALES = "imatrix", "negative_scales"

IMPORTANCE_FACT = "importance vector"
"""How the manifest calls the digest of the vector that weighs a parent's columns."""


@dataclass(frozen=True, slots=True)
class SearchState:
    """What the search needs besides the weights.

    Attributes:
        importance: float32 ``[K]`` as little-endian bytes, None for equal weights.
        file: where it was looked for, whether or not the parent has a vector in it; None for a parent without a file.
    """

    format: QuantFormat
    negative_scales: bool
    importance: bytes | None = None
    file: ImportanceFile | None = None


class GroupedSearch(Rule):
    """Codes and one binary16 scale for each group, like ``grouped_absmax`` and never with a larger weighted error.

    The arithmetic is in :mod:`ninferbuild.rules.scale_search`.

    Parameters:
        imatrix: path of a Safetensors file with importance vectors, see :mod:`ninferbuild.rules.importance`. A parent
            takes the mean of the vectors that the file has for its input parameters; without any, columns weigh alike.
        negative_scales: whether scales may be negative, false by default.
    """

    name: ClassVar[str] = "grouped_search"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded"]] = "values"

    def check(self, request: PrepareRequest) -> RuleCheck:
        format = require_grouped_matrix(self.name, request.target)
        if format is T2_G128_FP16:
            raise ValueError(f"{self.name} requires a grouped-integer matrix target of 4 to 8 bits, not {format.name}")
        where, parameters = request.target.id, request.parameters
        unknown = sorted(parameters.keys() - {IMATRIX, NEGATIVE_SCALES}, key=str)
        if unknown:
            raise ValueError(
                f"{where}: unknown {self.name} parameters {unknown}; there are {IMATRIX} and {NEGATIVE_SCALES}"
            )
        negative = parameters.get(NEGATIVE_SCALES, False)
        if not isinstance(negative, bool):
            raise ValueError(f"{self.name} {NEGATIVE_SCALES} must be a bool, not {negative!r}")
        check_counts(request, f"{where}: ")
        check_readable(request)
        path = parameters.get(IMATRIX)
        if not path:
            return RuleCheck(state=SearchState(format, negative))
        return _with_importance(request, format, path, negative)

    def keyed_parameters(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Only what changes bytes: the file enters as the vector that was found in it, and false is the default."""
        return {NEGATIVE_SCALES: True} if parameters.get(NEGATIVE_SCALES) is True else {}

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.rules.scale_search import encode_matrix

        state: SearchState = checked.state
        if not block.is_floating_point():
            raise TypeError(f"{self.name} source must provide floating-point values, not {block.dtype}")
        return encode_matrix(
            block.to(device, non_blocking=True),
            state.format,
            _importance(state, device),
            errors,
            negative_scales=state.negative_scales,
        )


def _with_importance(request: PrepareRequest, format: QuantFormat, path: Any, negative: bool) -> RuleCheck:
    """Look up the parent's vector. Its bytes are what the key holds and what the search weighs with."""
    import numpy as np

    from ninferbuild.rules.importance import mean_importance, open_importance

    if not isinstance(path, str):
        raise ValueError(f"{GroupedSearch.name} {IMATRIX} must be a path, not {path!r}")
    file = open_importance(path)
    try:
        vector = mean_importance(file, (item.parameter for item in request.inputs), request.target.shape[1])
    except ValueError as error:
        raise ValueError(f"{request.target.id}: {error}") from error
    if vector is None:
        return RuleCheck(state=SearchState(format, negative, file=file))
    if not (np.isfinite(vector).all() and (vector >= 0).all()):
        raise ValueError(f"{request.target.id}: importance must be finite and nonnegative; import {path} again")
    data = vector.astype("<f4").tobytes()
    facts = (f"{IMPORTANCE_FACT}: {xxhash.xxh3_128_hexdigest(data)}",)
    return RuleCheck(facts=facts, state=SearchState(format, negative, data, file))


def _importance(state: SearchState, device: torch.device) -> torch.Tensor | None:
    """The vector as the search takes it: float64 ``[K]`` on ``device``."""
    if state.importance is None:
        return None
    import torch

    if state.file is not None:
        state.file.require_unchanged()
    vector = torch.frombuffer(bytearray(state.importance), dtype=torch.float32)
    return vector.to(device).double()


grouped_search = GroupedSearch()
