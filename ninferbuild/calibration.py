"""Activation divisors that were measured elsewhere, given to the uses of a recipe.

A calibration document is JSON. Its ``measured_sites`` maps the places where activations were measured to what was found
there; all projections that read one activation share a site::

    {"measured_sites": {
        "text/layers/0/gdn/input_projection/input_scale_divisor": {"amax": 21.5, "input_scale_divisor": 125.02325},
        "text/layers/0/mlp/down_projection/input_scale_divisor": {"amax": 4.0, "input_scale_divisor": 672.0}}}

``input_scale_divisor`` is RN32(2688 / amax): what the activation is multiplied by to fill the range of NVFP4.
"""

from __future__ import annotations

from collections.abc import Iterable
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ninferbuild.method import AuxiliaryValue
from ninferbuild.recipe import ACTIVATION_DIVISOR
from ninferbuild.rules import nvfp4_maxabs

if TYPE_CHECKING:
    from ninferbuild.recipe import Recipe

_SITES = {
    "attention": dict.fromkeys(("query", "key", "gate", "value"), "input_projection") | {"output": "output_projection"},
    "gdn": dict.fromkeys(("query", "key", "value", "z", "a_projection", "b_projection"), "input_projection")
    | {"output": "output_projection"},
    "mlp": {"gate": "gate_up_projection", "up": "gate_up_projection", "down": "down_projection"},
}
"""Block → role of a projection → the site of its input."""


def site_of(parameter: str) -> str | None:
    """The site at which the input of a text projection is measured; None for a parameter that has none."""
    parts = parameter.split("/")
    if len(parts) != 5 or parts[:2] != ["text", "layers"]:
        return None
    site = _SITES.get(parts[3], {}).get(parts[4])
    return None if site is None else "/".join([*parts[:4], site, "input_scale_divisor"])


def read_calibration(path: str | os.PathLike[str]) -> dict[str, AuxiliaryValue]:
    """Site → activation divisor of a calibration document.

    Raises:
        ValueError: the file is no such document, or a divisor is not a positive finite FP32; names file and site.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: a calibration document must be JSON: {error}") from error
    sites = document.get("measured_sites") if isinstance(document, dict) else None
    if not isinstance(sites, dict):
        raise ValueError(f"{path}: a calibration document needs an object measured_sites")
    found = {}
    for site, measured in sites.items():
        divisor = measured.get("input_scale_divisor") if isinstance(measured, dict) else None
        if isinstance(divisor, bool) or not isinstance(divisor, int | float):
            raise ValueError(f"{path}: {site}: a measured site needs a number input_scale_divisor")
        try:
            found[site] = AuxiliaryValue.activation_divisor(divisor)
        except ValueError as error:
            raise ValueError(f"{path}: {site}: {error}") from error
    return found


def calibrate(recipe: Recipe, path: str | os.PathLike[str]) -> None:
    """Give the measured divisors of ``path`` to every use that needs one: of a text projection that ``nvfp4_maxabs``
    quantises and whose policy is ``AllowA4``. Call it after these choices were made.

    The document has to fit the recipe: a site more or less means that it was measured for another one. The divisors
    end up in the artifact as if :meth:`Recipe.use` had set them one by one; a use that has its own keeps it.

    Raises:
        ValueError: the sites of the document are not those of the recipe, or as :func:`read_calibration`.
    """
    measured = read_calibration(path)
    uses = [
        (site, use)
        for use, policy in recipe.policies.items()
        if policy == "AllowA4" and _quantised(recipe, use[0]) and (site := site_of(use[0])) is not None
    ]
    needed = dict.fromkeys(site for site, _ in uses)
    if needed.keys() != measured.keys():
        raise ValueError(
            f"{path}: calibration site set differs from that of the recipe: "
            f"{_listed('missing', needed.keys() - measured.keys())}; "
            f"{_listed('not quantised here', measured.keys() - needed.keys())}"
        )
    for site, (parameter, used) in uses:
        if (parameter, used, ACTIVATION_DIVISOR) not in recipe.auxiliary_overrides:
            recipe.use(parameter, used, auxiliaries={ACTIVATION_DIVISOR: measured[site]})


def _quantised(recipe: Recipe, parameter: str) -> bool:
    return any(selection.method is nvfp4_maxabs for selection in recipe.selections[parameter])


def _listed(what: str, sites: Iterable[str]) -> str:
    names = sorted(sites)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{what}: {shown or 'none'}"
