"""Comparing artifacts and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
import json
from pathlib import Path
import shutil
import struct
from typing import Any

from fixtures import fx
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import ArtifactError
from ninferbuild.build import build
from ninferbuild.diff import Comparison, compare
from ninferbuild.sides import artifact_side, target_side
from ninferbuild.target import Assign, CacheSettings, Target

DOWN = "text/layers/3/mlp/down"
Q6 = (Assign((DOWN,), format="q6_g64_fp16"),)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target that is built."""
    root = tmp_path_factory.mktemp("diff")
    fx.write_all(root / "fx")
    target = Target(
        name="base",
        identity="base",
        file=None,
        model=root / "fx" / "dense",
        recipe="qwen3_6_27b",
        components=("text",),
        artifact_name="one",
        out=root / "base.ninfer",
        device="cpu",
        cache=CacheSettings(dir=root / "cache"),
    )
    build(target)
    return target


def variant(base: Target, name: str, **changes: Any) -> Target:
    return replace(base, name=name, identity=name, out=base.out.with_name(f"{name}.ninfer"), **changes)


def built(base: Target, name: str, **changes: Any) -> Path:
    target = variant(base, name, **changes)
    if not target.out.exists():
        build(target)
    return target.out


Differ = Callable[..., Comparison]


@pytest.fixture
def differ() -> Iterator[Differ]:
    with ExitStack() as stack:

        def differ(a: Target | Path, b: Target | Path, *, hash_sources: bool = True, **options: Any) -> Comparison:
            sides = [
                target_side(side, hash_sources=hash_sources)
                if isinstance(side, Target)
                else artifact_side(stack.enter_context(Artifact(side)))
                for side in (a, b)
            ]
            return compare(*sides, **options)

        yield differ


def lines(found: Comparison) -> dict[str, tuple[str, ...]]:
    return {item.name: item.differences for item in found.objects}


def test_equal_artifacts(base: Target, differ: Differ) -> None:
    split = built(base, "split", max_file_bytes=200_000)
    found = differ(base.out, split)
    assert found.equal
    assert found.same == len(found.a.directory.objects)
    assert found.provenance == []
    assert found.to_json()["equal"] is True


def test_a_target_and_what_it_was_built_to(base: Target, differ: Differ) -> None:
    for found in (differ(base, base.out), differ(base.out, base), differ(base, base)):
        assert found.equal, found.to_json()
        assert found.provenance == []


def test_one_other_format(base: Target, differ: Differ) -> None:
    wanted = {DOWN: ("format: q5_g64_fp16 → q6_g64_fp16", "bytes: 21504 → 25600")}
    other = variant(base, "q6", assigns=Q6)
    path = built(base, "q6", assigns=Q6)
    for found in (differ(base, other), differ(base.out, other), differ(base, path), differ(base.out, path)):
        assert not found.equal
        assert lines(found) == wanted
        (item,) = found.objects
        assert (item.status, item.explain) == ("differs", ())
        assert (found.bindings, found.uses, found.components, found.metadata) == ([], [], [], [])
    assert lines(differ(path, base.out)) == {DOWN: ("format: q6_g64_fp16 → q5_g64_fp16", "bytes: 25600 → 21504")}


def test_ids_do_not_matter(base: Target, differ: Differ) -> None:
    more = built(base, "more", components=("text", "vision"))
    found = differ(base.out, more)
    assert found.objects == []
    assert found.same == len(found.a.directory.objects)
    assert found.only_a == []
    assert {item.name for item in found.only_b} >= {"vision/merger/fc1", "resource vision preprocessor_config.json"}
    (packed,) = [item for item in found.only_b if item.name == "vision/layers/0/attention/query (+2)"]
    assert packed.parameters == tuple(f"vision/layers/0/attention/{part}" for part in ("query", "key", "value"))
    assert found.components == ["only in B: components.vision"]
    assert (found.bindings, found.uses) == ([], [])
    assert differ(more, base.out).only_b == []


def test_other_packing(base: Target, differ: Differ, tmp_path: Path) -> None:
    override = tmp_path / "apart.py"
    override.write_text("def configure(model, recipe, sources):\n    recipe.separate('text/layers/3/mlp/*')\n")
    found = differ(base, variant(base, "apart", overrides=(str(override),)))
    (item,) = found.objects
    assert item.name == "text/layers/3/mlp/gate (+1)"
    assert item.differences[0] == "only in A it also holds: text/layers/3/mlp/up"
    assert "shape: [512, 128] → [256, 128]" in item.differences
    assert [lone.name for lone in found.only_b] == ["text/layers/3/mlp/up"]
    assert found.bindings == ["stored elsewhere: text/layers/3/mlp/up"]


def test_policies_names_and_resources(base: Target, differ: Differ, tmp_path: Path) -> None:
    override = tmp_path / "policy.py"
    override.write_text(
        "def configure(model, recipe, sources):\n"
        f"    recipe.use('{DOWN}', 'text/layers/3/mlp/product', activation_policy='AllowA8')\n"
    )
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ other }}")
    other = variant(
        base, "policy", overrides=(str(override),), artifact_name="two", resources={"chat_template.jinja": template}
    )
    for found in (differ(base.out, other), differ(base.out, built(base, **vars_of(other)))):
        assert found.uses == [f"activation policy of {DOWN} × text/layers/3/mlp/product: A16Only → AllowA8"]
        assert found.metadata == ['metadata.name: "one" → "two"']
        assert [item.name.split()[-1] for item in found.objects] == ["chat_template.jinja"]
        assert not found.equal
        assert "only in B: provenance.overrides" in found.provenance


def vars_of(target: Target) -> dict[str, Any]:
    names = ("name", "overrides", "artifact_name", "resources")
    return {name: getattr(target, name) for name in names}


def test_changed_source_bytes(base: Target, differ: Differ, tmp_path: Path) -> None:
    model = tmp_path / "dense"
    shutil.copytree(base.model, model)
    data = bytearray((model / "model.safetensors").read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    tensor = json.loads(data[8 : 8 + size])["model.language_model.layers.3.mlp.down_proj.weight"]
    at = 8 + size + tensor["data_offsets"][0]
    data[at : at + 2] = b"\x00\x3f"
    (model / "model.safetensors").write_bytes(data)
    whole, other = variant(base, "whole"), variant(base, "touched", model=model)
    found = differ(whole, other)
    assert not found.equal
    assert [(item.name, item.status) for item in found.objects] == [(DOWN, "unknown")]
    assert found.objects[0].explain == (f"source not hashed yet: {DOWN}",)
    build(whole)
    build(other)
    found = differ(whole, other)
    (item,) = found.objects
    assert (item.name, item.status, item.differences) == (DOWN, "differs", ("payload differs",))
    assert item.explain == (f"source bytes changed: {DOWN}",)
    assert lines(differ(whole.out, other.out)) == {DOWN: ("payload differs",)}
    assert differ(whole.out, other.out, payloads=False).equal


def test_nothing_is_known_of_a_target_that_is_not_built(base: Target, differ: Differ) -> None:
    fresh = variant(base, "fresh", cache=CacheSettings(dir=base.out.with_name("empty")))
    found = differ(base.out, fresh)
    assert not found.equal
    assert {item.status for item in found.objects} == {"unknown"}
    assert found.objects[0].differences == ("payload not known: not built yet from the sources of fresh",)
    # The same action over the same bytes gives the same payload, built or not.
    assert differ(fresh, variant(fresh, "again")).equal


def test_a_damaged_payload_differs(base: Target, differ: Differ) -> None:
    copy = base.out.with_name("damaged.ninfer")
    shutil.copyfile(base.out, copy)
    with Artifact(copy) as artifact:
        item = next(item for item in artifact.objects if item.id == "weight/000003")
        at = artifact.payload_offset + item.offset
    data = bytearray(copy.read_bytes())
    data[at] ^= 1
    copy.write_bytes(data)
    found = differ(base.out, copy)
    assert [(item.b, item.differences) for item in found.objects] == [("weight/000003", ("payload differs",))]
    assert differ(base.out, copy, payloads=False).equal


def test_missing_parts_are_an_error(base: Target, differ: Differ) -> None:
    split = built(base, "parts", max_file_bytes=200_000)
    next(split.parent.glob("parts.ninfer.part-*")).unlink()
    with pytest.raises((ArtifactError, OSError), match="part"):
        differ(base.out, split)
    assert differ(base.out, split, payloads=False).equal
