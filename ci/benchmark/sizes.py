"""Sizes of the two artifacts that are made of the mixture of experts, class by class; see ``ci/release_sizes``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import subprocess
import sys
import tempfile
from typing import Any

from benchmark.checkpoint import write_sparse
from benchmark.geometry import EXPERTS, Geometry
from benchmark.release import VISION, Release
from ninferbuild.models.resources import TEXT_RESOURCES, VISION_RESOURCES

PUBLISHED = {"qwen3_6_35b_a3b_nvfp4": 21_759_564_036, "qwen3_6_35b_a3b": 22_244_450_816}
"""Recipe → bytes of the artifact as it is published: text, Vision and MTP."""

RESOURCES, REST = "tokenizer and processor files", "header, directory, alignment"
"""The classes that do not follow from shapes: a stand-in's files are shorter than a release's."""

_CLASSES = (
    ("mtp/", "MTP"),
    ("vision/", "Vision"),
    ("text/token_embedding", "token embedding"),
    ("text/output_head", "output head"),
    ("/moe/experts/0/gate", "routed experts, gate and up"),
    ("/moe/experts/0/down", "routed experts, down"),
    ("/moe/shared/gate", "shared experts, gate and up"),
    ("/moe/shared/down", "shared experts, down"),
    ("/moe/router", "routers and gates, BF16"),
    ("/gdn/a_projection", "routers and gates, BF16"),
    ("", "attention and delta nets, norms"),
)
"""Part of a parent's first parameter → class; the first that fits."""

_PROCESSOR = {
    "patch_size": VISION["patch_size"],
    "temporal_patch_size": VISION["temporal_patch_size"],
    "merge_size": VISION["spatial_merge_size"],
}


def account(plan: Mapping[str, Any], resources: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Class → (objects, bytes) of what ``plan --json`` printed; the bytes add up to those of the file.

    Args:
        resources: objects and bytes of the files that the artifact carries as they are.
    """
    classes: dict[str, tuple[int, int]] = {}

    def add(name: str, count: int, size: int) -> None:
        before = classes.get(name, (0, 0))
        classes[name] = before[0] + count, before[1] + size

    for action in plan["actions"]:
        name = action["parameters"][0]
        add(next(label for part, label in _CLASSES if part in name), 1, action["bytes"])
    tensors = [(item["objects"], item["bytes"]) for item in plan["formats"].values()]
    known = [sum(column) for column in zip(*classes.values(), strict=True)]
    count, size = (sum(column) for column in zip(*tensors, strict=True))
    add("activation divisors", count - known[0], size - known[1])
    add(RESOURCES, *resources)
    add(REST, 0, plan["file_bytes"] - size - resources[1])
    return classes


def planned(directory: Path, recipe: str, geometry: Geometry) -> dict[str, tuple[int, int]]:
    """The classes of a recipe's artifact, planned from header-only files below ``directory``."""
    quantised = recipe.endswith("_nvfp4")
    model = directory / ("nvfp4" if quantised else "bf16")
    write_sparse(model, Release(geometry, quantised), marked=False)
    for name in VISION_RESOURCES:
        (model / name).write_text(json.dumps(_PROCESSOR))
    command = [sys.executable, "-m", "ninferbuild", "plan", "--model", str(model), "--recipe", recipe]
    command += ["--components", "text,vision,mtp", "--json"]
    if quantised:
        command += ["--source", f"quantized={model}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    carried = [model / name for name in (*TEXT_RESOURCES, *VISION_RESOURCES)]
    return account(json.loads(done.stdout), (len(carried), sum(path.stat().st_size for path in carried)))


def report(recipe: str, classes: Mapping[str, tuple[int, int]], published: int) -> list[str]:
    """A table of the classes.

    The published artifact has the same tensors. What it has besides is put down to its files, of which nothing is known
    but that they are the same in all artifacts of a release; its directory may be longer or shorter by a few pages.
    """
    total = sum(size for _, size in classes.values())
    lines = [recipe, f"  {'class':<40}{'objects':>9}{'planned bytes':>17}{'published bytes':>17}{'difference':>13}"]
    for name, (count, size) in classes.items():
        there = published - (total - size) if name == RESOURCES else size
        objects = str(count) if count else ""
        lines.append(f"  {name:<40}{objects:>9}{size:>17,}{there:>17,}{there - size:>13,}")
    lines.append(f"  {'file':<40}{'':>9}{total:>17,}{published:>17,}{published - total:>13,}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="where header-only files are written for the time of the run")
    parser.add_argument("--json", metavar="FILE", help="write the classes of each recipe too")
    options = parser.parse_args(arguments)
    found = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as made:
        for recipe, published in PUBLISHED.items():
            found[recipe] = planned(Path(made), recipe, EXPERTS)
            print(*report(recipe, found[recipe], published), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(found))
    return 0
