"""The text of manifests, pinned under the version of their text.

A failure means that unchanged inputs get other keys, so that every cached result would be made again, for everybody. If
that is meant, raise ``MANIFEST_VERSION`` and pin the new text in a file of that version's name; files of earlier
versions never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
import re
import sys
from typing import Any

from fixtures.rm4 import rm4
import pytest

from ninferbuild import recipe_file
from ninferbuild.manifest import MANIFEST_VERSION
from ninferbuild.recipe import Recipe

USER_RECIPE = """
from pathlib import Path

from tools.convert.sources.logical import LogicalSource

LIMIT = 3


def limited(request):
    def produce(output):
        output.write_values(0, request.values(0, 512).clamp(-LIMIT, LIMIT).bfloat16())
    return request.job(produce=produce)


def read(begin, end):
    import torch
    return torch.ones(end - begin)


def configure(model, recipe, sources):
    recipe.assign(
        "query", method=limited, parameters={"scale": (0.5, 1)}, activation_policy="AllowA8"
    )
    recipe.use("query", "input", auxiliaries={"activation_input_divisor": 2.0})
    declared = Path(__file__).with_name("declared.bin")
    recipe.assign("key", source=LogicalSource((4, 128), "declared", read, files=[declared]))
    recipe.assign("gate", source=LogicalSource((4, 128), "promised", read, fingerprint="all ones"))
    recipe.separate("*")
"""

FACTS = re.compile(
    r"manifest|codec|format|layout|shape|divisors|method|fact\.\d{3}"
    r"|input\.\d{5}(\.(values|codes|scales|blocks|stored|positions|weight_divisor|scale_dtype|step\.\d+))?"
)
"""The names of all facts that a built-in method's manifest may hold."""


def sections(manifests: dict[str, str]) -> str:
    return "\n".join(f"[{name}]\n{text}" for name, text in manifests.items())


@pytest.fixture
def user_manifests(layer: Any, tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "declared.bin").write_bytes(b"ones")
    (tmp_path / "recipe.py").write_text(USER_RECIPE)
    recipe = Recipe(rm4())
    recipe_file.load(str(tmp_path / "recipe.py"))(recipe.model, recipe, {})
    yield {f"user {role}": text for role, text in layer.by_role(layer.actions_of(recipe, "cpu")).items()}
    recipe_file.purge()


def with_versions_left_out(manifests: dict[str, str]) -> dict[str, str]:
    """Without what differs between installations: versions, and digests of code, which is parsed by Python."""
    facts = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    facts |= {name: version(name) for name in ("torch", "numpy")}
    found = {}
    for role, text in manifests.items():
        for name, value in facts.items():
            text = text.replace(f"{name}: {value}\n", f"{name}: *\n")
        found[role] = re.sub(r"(code = |package \w+ ).*", r"\1*", text)
    return found


def test_the_text_is_pinned(layer: Any, user_manifests: dict[str, str], tmp_path: Path) -> None:
    now = sections({**layer.manifests(tmp_path), **with_versions_left_out(user_manifests)})
    (tmp_path / "now.txt").write_text(now)
    pinned = Path(__file__).with_name(f"v{MANIFEST_VERSION}.txt").read_text()
    assert now == pinned, f"what it is now: {tmp_path / 'now.txt'}"


def test_built_in_methods_name_nothing_of_their_surroundings(layer: Any, tmp_path: Path) -> None:
    around = layer.Surroundings(policy="AllowA8", divisor=2.0, device="cuda:1", rows_per_chunk=384)
    manifests = layer.manifests(tmp_path, around)
    names = {line.partition(": ")[0] for text in manifests.values() for line in text.splitlines()}
    assert [name for name in names if not FACTS.fullmatch(name)] == []
    forbidden = [
        *(part for part in tmp_path.parts if len(part) > 1),
        *(
            around.directory,
            ".safetensors",
            "model.",
            "layers",
            "blk.",
            ".gguf",
            "experts",
            "weight_scale",
            "global_scale",
        ),
        *("gate", "gathered", "turned", "computed", around.label, "weight/0", "text/"),
        *(around.policy, "00000040", around.device, "cuda", str(around.rows_per_chunk)),
        *(version("torch"), version("numpy"), f"{sys.version_info.major}.{sys.version_info.minor}"),
    ]
    values = [line.partition(": ")[2] for text in manifests.values() for line in text.splitlines()]
    spoken = "\n".join(re.sub(r"\b[0-9a-f]{32}\b", "", value) for value in values)
    assert [word for word in forbidden if word in spoken] == []
