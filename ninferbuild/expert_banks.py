"""What the engine asks of a layer's NVFP4 experts, checked while a plan costs seconds and an artifact hours.

The kernels of a mixture quantise one activation for all experts of a layer: routed and shared matrices with the same
role must be given one activation divisor. Each parent already has the smallest of its sources, so a disagreement is
one between parents, or an override of a single use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
import struct
from typing import TYPE_CHECKING, NamedTuple

from ninferbuild.recipe import ACTIVATION_DIVISOR

if TYPE_CHECKING:
    from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, MethodInput
    from ninferbuild.plan import Parent

__all__ = ["check_expert_banks"]

_EXPERTS = ("/moe/experts/", "/moe/shared/")

Bank = tuple[str, str]
"""A layer's prefix, and the role of the matrices of its experts: ``"gate and up"`` or ``"down"``."""


class _Member(NamedTuple):
    """A use of an expert's matrix; ``given`` is the FP32 word of its activation divisor."""

    input: MethodInput
    given: bytes
    overridden: bool


def check_expert_banks(parents: Iterable[Parent], auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue]) -> None:
    """Refuse layers whose experts were given several activation divisors.

    Args:
        auxiliaries: what is known of the auxiliaries of uses.

    Raises:
        ValueError: every matrix that parts its bank is named, with its divisor.
    """
    banks: dict[Bank, list[_Member]] = {}
    for parent in parents:
        if parent.target.format != "nvfp4" or not any(part in parent.names[0] for part in _EXPERTS):
            continue
        overrides = parent.request.auxiliary_overrides
        for item in parent.request.inputs:
            for use in item.uses:
                key = (*use, ACTIVATION_DIVISOR)
                if key in auxiliaries:
                    member = _Member(item, auxiliaries[key].data, key in overrides)
                    banks.setdefault(_bank(item.parameter), []).append(member)
    torn = {bank: members for bank, members in banks.items() if len({member.given for member in members}) > 1}
    if torn:
        raise ValueError(
            "the engine binds no experts whose activation divisors disagree: "
            f"{'; '.join(_disagreement(bank, members) for bank, members in torn.items())}. Give all uses of a bank one "
            f"value: recipe.use(NAME, INPUT, auxiliaries={{{ACTIVATION_DIVISOR!r}: VALUE}})"
        )


def _bank(parameter: str) -> Bank:
    layer, _, _ = parameter.partition("/moe/")
    return layer, "down" if parameter.endswith("/down") else "gate and up"


def _disagreement(bank: Bank, members: Iterable[_Member]) -> str:
    """The divisor of most matrices, and the matrices because of which others have another one.

    A matrix with a larger divisor than its parent was given is no reason for anything.
    """
    rows = [(member.input.parameter, _own_divisor(member), _value(member.given)) for member in members]
    ((usual, _),) = Counter(given for _, own, given in rows if own == given).most_common(1)
    others = ", ".join(
        f"{name} {own:g}" for name, own, given in rows if given != usual and (own < usual or given > usual)
    )
    return f"{bank[0]} {bank[1]}: {usual:g}, but {others}"


def _own_divisor(member: _Member) -> float:
    """What the recipe gave this use, else what the matrix's source has, else what it got from its parent."""
    accessor = member.input.source.input_divisor
    return _value(member.given if member.overridden or accessor is None else accessor())


def _value(word: bytes) -> float:
    value: float = struct.unpack("<f", word)[0]
    return value
