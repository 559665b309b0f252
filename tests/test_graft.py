"""Components taken from another artifact: what a build makes of them, what runs again, and what is refused."""

from __future__ import annotations

from dataclasses import replace
import json
import os
from pathlib import Path
from typing import Any

from fixtures import donor, synthetic
from fixtures.donor import write_donor
import pytest
import torch

from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.build import BuildResult, build, parameters, plan
from ninferbuild.errors import SourceChangedError
from ninferbuild.grafting import FIRST_ID
from ninferbuild.models.model import Model
from ninferbuild.plan import plan_parents, prepare
from ninferbuild.recipe import Recipe
from ninferbuild.rules.graft import graft
from ninferbuild.rules.rule import RuleCheck
from ninferbuild.sources.artifact import ArtifactSource
from ninferbuild.sources.safetensors import SafetensorsSource
from ninferbuild.target import CacheSettings, Target
from ninferbuild.target_schema import OptionError
from ninferbuild.verify import verify

GEOMETRY = synthetic.text_geometry(2, h=64, inter=128, heads=2, d=32, vocab=128, gk=1, gkd=32, gv=2, gvd=32, interval=2)

RENAMED = {name: f"weight/{FIRST_ID + index}" for index, name in enumerate(donor.GRAFTED)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint") / "base"
    synthetic.write_base(root, GEOMETRY, 1, with_vision=False, with_mtp=False)
    synthetic.write_ranking(root / "ranking.i64", GEOMETRY["vocab_size"], 1)
    for file in root.iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))
    return root


@pytest.fixture
def target(tmp_path: Path, checkpoint: Path) -> Target:
    return Target(
        name="grafted",
        identity=str(tmp_path / "grafted.ninfer"),
        file=None,
        model=checkpoint,
        recipe="qwen3_6_27b",
        out=tmp_path / "grafted.ninfer",
        grafts={"draft": tmp_path / "donor.ninfer"},
        device="cpu",
        cache=CacheSettings(dir=tmp_path / "cache"),
    )


def read(path: Path) -> tuple[Any, dict[str, bytes]]:
    """Directory and payloads of an artifact."""
    with Artifact(path) as artifact:
        return artifact.directory, {item.id: artifact.read_object(item.id) for item in artifact.objects}


@pytest.mark.parametrize("max_file_bytes", [None, 12288])
def test_a_component_is_taken_byte_for_byte(target: Target, max_file_bytes: int | None) -> None:
    taken = write_donor(target.grafts["draft"], max_file_bytes=max_file_bytes)
    result = build(target)
    assert verify(target.out).exit_code == 0
    directory, payloads = read(target.out)
    assert {new: payloads[new] for new in RENAMED.values()} == {new: taken[old] for old, new in RENAMED.items()}
    assert payloads["resource/draft/notes.txt"] == b"notes"
    donated, _ = read(target.grafts["draft"])
    assert directory.components["draft"] == donated.components["draft"]
    kinds = [item.id.partition("/")[0] for item in directory.objects]
    assert kinds == sorted(kinds, key=["resource", "weight", "auxiliary"].index)
    assert [item.id for item in directory.objects][-5:] == list(RENAMED.values())
    stored = {item.id: item for item in directory.objects}
    for old, new in RENAMED.items():
        before = next(spec for spec in donor.SPECS if spec.id == old)
        assert isinstance(before, TensorSpec)
        after = stored[new]
        assert (after.shape, after.format, after.layout, after.divisors) == (
            *(before.shape, before.format, before.layout, before.divisors),
        )
    assert result.executed == result.total


def test_bindings_and_uses_follow(target: Target) -> None:
    write_donor(target.grafts["draft"])
    build(target)
    directory, _ = read(target.out)
    stack, divisor, vector = RENAMED["weight/000001"], RENAMED["auxiliary/000000"], RENAMED["auxiliary/000001"]
    assert directory.bindings["draft/gate"] == {"parts": [{"object": stack, "range": [8192, 16384]}]}
    assert directory.bindings["draft/down"] == directory.bindings["draft/shared_down"]
    uses = {(use["parameter"], use["input"]): use for use in directory.uses}
    divisors = {name: uses[name, "draft/states"]["auxiliaries"]["activation_input_divisor"] for name in donor.STACK}
    assert divisors == {
        "draft/gate": {"object": divisor},
        "draft/up": {"parts": [{"object": vector, "range": [1, 2]}]},
    }
    assert uses["text/output_head", "draft/final_hidden"]["activation_policy"] == "AllowA8"
    assert ("proposal/head", "draft/final_hidden") not in uses


def test_the_directory_names_what_was_consumed_and_the_report_the_file(target: Target) -> None:
    write_donor(target.grafts["draft"])
    build(target)
    directory, _ = read(target.out)
    assert set(directory.provenance["sources"]) == {"base", "draft"}
    assert str(target.grafts["draft"]) not in json.dumps(directory.to_json())
    report = json.loads(target.out.with_name(target.out.name + ".conversion.json").read_text())
    with Artifact(target.grafts["draft"]) as artifact:
        expected = {"path": str(target.grafts["draft"]), "artifact_id": artifact.artifact_id.hex()}
    assert report["provenance"]["grafts"] == {"draft": expected}
    methods = {entry["object"]: entry for entry in report["methods"]}
    entry = methods[RENAMED["weight/000001"]]
    assert (entry["method"], entry["parameters"]) == ("graft", ["draft/gate", "draft/up"])
    assert entry["sources"] == [f"{target.grafts['draft']}:weight/000001"]
    assert report["parameters"] == len(directory.bindings)


def test_parameters_of_the_component_are_listed(target: Target) -> None:
    write_donor(target.grafts["draft"])
    listed = {row["name"]: row for row in parameters(target, "draft/*")}
    assert list(listed) == [name for name in donor.BINDINGS if name.startswith("draft/")]
    stack = RENAMED["weight/000001"]
    assert listed["draft/up"] == {
        "name": "draft/up",
        "shape": [128 * 64],
        "inputs": ["draft/states"],
        "format": "nvfp4",
        "method": "graft",
        "parent": stack,
        "auxiliaries": ["activation_input_divisor"],
    }
    assert listed["draft/shared_down"]["shape"] == [3, 64]
    (head,) = parameters(target, "text/output_head")
    assert head["inputs"] == ["text/final_hidden", "draft/final_hidden"]


def ran(result: BuildResult, target: Target) -> set[str]:
    """Objects whose actions ran, by the report."""
    assert result.executed
    report = json.loads(target.out.with_name(target.out.name + ".conversion.json").read_text())
    return {entry["object"] for entry in report["methods"] if entry["state"] == "executed"}


def test_only_changed_objects_are_read_into_the_cache_again(target: Target) -> None:
    donor_path = target.grafts["draft"]
    write_donor(donor_path)
    build(target)
    again = build(target)
    assert (again.executed, again.up_to_date) == (0, True)
    donor_path.unlink()
    write_donor(donor_path, salt=3)
    result = build(target)
    assert ran(result, target) == {RENAMED["weight/000001"], RENAMED["weight/000003"]}
    assert build(target).executed == 0


def test_the_same_objects_elsewhere_are_cached(target: Target, tmp_path: Path) -> None:
    write_donor(target.grafts["draft"])
    build(target)
    write_donor(tmp_path / "moved" / "other.name", max_file_bytes=12288, resources=False)
    moved = replace(target, grafts={"draft": tmp_path / "moved" / "other.name"})
    assert build(moved).executed == 0


def test_the_key_knows_nothing_but_the_content(target: Target) -> None:
    write_donor(target.grafts["draft"])
    actions = {action.objects[0]: action for action in plan(target, hash_sources=True).actions}
    assert actions[RENAMED["weight/000001"]].parameters == ("draft/gate", "draft/up")
    assert actions[RENAMED["auxiliary/000000"]].name == "draft/gate × draft/states activation_input_divisor"
    with ArtifactSource(target.grafts["draft"]) as source:
        recipe = Recipe(Model({"text": {"config": {}}}))
        recipe.graft("draft", source)
        planned = plan_parents(recipe)
        assert [parent.target.id for parent in planned.parents] == list(RENAMED.values())
        assert planned.weights == []
        from ninferbuild.manifest import template

        lines = template(planned.parents[2]).lines
    assert sorted(lines) == [
        "codec: block_scale_k16_m128x4_v1 v1",
        "divisors: 2",
        "format: nvfp4",
        "input.00000: U8 [9224] plain v1",
        "layout: block_scale_k16_m128x4_v1",
        "manifest: v1",
        "method: graft v1",
        "shape: [256, 64]",
    ]


def test_a_proposal_head_multiplies_the_states_too(target: Target) -> None:
    from ninferbuild.target import Proposal

    # Only drafts that the converter knows by name have a proposal head.
    path = target.grafts["draft"]
    write_donor(path)
    build(replace(target, proposal=Proposal(16)))
    directory, _ = read(target.out)
    assert {use["input"] for use in directory.uses if use["parameter"] == "text/output_head"} == {
        "text/final_hidden",
        "draft/final_hidden",
    }


@pytest.mark.parametrize(
    ("object_id", "plane", "word", "problem"),
    [("weight/000002", 2, b"\0\x7c", "scales, row 0"), ("weight/000001", 1, b"\xff", "row 0")],
)
def test_refuses_damage_that_a_format_shows(
    target: Target, object_id: str, plane: int, word: bytes, problem: str
) -> None:
    path = target.grafts["draft"]
    write_donor(path)
    before = donor.damage(path, object_id, plane, word)
    with pytest.raises(
        ValueError, match=rf"^draft/.*{path}: object '{object_id}', .*{problem}.*: the artifact is damaged"
    ):
        build(target)
    assert not target.out.exists()
    donor.damage(path, object_id, plane, before)
    build(target)
    assert verify(target.out).exit_code == 0


@pytest.mark.parametrize("chunk", [1, 100, 9224])
def test_a_payload_is_cut_at_its_planes(chunk: int) -> None:
    spec = next(item for item in donor.SPECS if item.id == "weight/000001")
    assert isinstance(spec, TensorSpec)
    geometry = planes(spec.layout, spec.format, spec.shape, spec.divisors)
    data = torch.arange(9224).to(torch.uint8)
    pieces: list[list[torch.Tensor]] = [[] for _ in geometry]
    for first in range(0, 9224, chunk):
        encoded = graft.encode(data[first : first + chunk], spec, RuleCheck(), first, torch.device("cpu"))
        for piece, plane in zip(pieces, encoded, strict=True):
            piece.append(plane)
    assert [torch.cat(piece).numel() for piece in pieces] == [plane.extent for plane in geometry]
    assert torch.equal(torch.cat([torch.cat(piece) for piece in pieces]), data)


def test_refuses_a_component_twice(target: Target) -> None:
    write_donor(target.grafts["draft"])
    with pytest.raises(OptionError, match=r"--graft draft: there is a source of this name"):
        build(replace(target, sources={"draft": target.model}))
    with pytest.raises(OptionError, match=r"--graft text: the component is built from the checkpoint"):
        build(replace(target, grafts={"text": target.grafts["draft"]}))
    with pytest.raises(OptionError, match=r"--graft draft: .* is the output too"):
        build(replace(target, out=target.grafts["draft"]), overwrite=True)


def test_refuses_artifacts_that_do_not_suit(target: Target) -> None:
    path = target.grafts["draft"]
    write_donor(path)
    with pytest.raises(ValueError, match=r"donor.ninfer: the artifact has no component 'dflash2'; it has text, draft"):
        build(replace(target, grafts={"dflash2": path}))
    path.unlink()
    write_donor(path, hidden=32)
    with pytest.raises(ValueError, match="'draft' was made for hidden_size 32, this model has 64"):
        build(target)
    path.write_bytes(b"no artifact")
    with pytest.raises(ValueError, match=r"donor\.ninfer"):
        build(target)


def test_refuses_a_part_that_is_missing_or_foreign(target: Target) -> None:
    path = target.grafts["draft"]
    write_donor(path, max_file_bytes=12288)
    part = path.with_name(path.name + ".part-0002")
    data = part.read_bytes()
    part.write_bytes(data[:16] + bytes(16) + data[32:])
    with pytest.raises(ValueError, match="part-0002"):
        build(target)
    part.unlink()
    with pytest.raises(FileNotFoundError, match="part-0002"):
        build(target)


TEXT = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("component", "base", "refused"),
    [
        # The states of Vision are its own; those that it gives away are the text's.
        ({"hidden_size": 32, "depth": 2}, TEXT, None),
        ({"hidden_size": 64, "depth": 2}, {**TEXT, "hidden_size": 32}, "hidden_size 32, this model has 64"),
        ({"hidden_size": 32, "depth": 2}, {**TEXT, "num_attention_heads": 4}, None),
        # A draft names layers of the text and tokens, and says nothing of their number.
        ({"dflash_config": {}, "num_attention_heads": 4}, TEXT, None),
        ({"dflash_config": {}}, {**TEXT, "vocab_size": 16}, "vocab_size 16, this model has 128"),
        ({"dflash_config": {}}, {**TEXT, "num_hidden_layers": 3}, "num_hidden_layers 3, this model has 2"),
        # MTP is a block like those of the text.
        ({"architectures": ["MTP"]}, {**TEXT, "num_hidden_layers": 3}, None),
        ({"architectures": ["MTP"]}, {**TEXT, "num_attention_heads": 4}, "num_attention_heads 4, this model has 2"),
        ({"architectures": ["MTP"]}, {**TEXT, "num_experts": 4}, "num_experts 4, this model has None"),
    ],
)
def test_what_a_component_extends_decides_whether_it_suits(
    component: dict[str, Any], base: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    norm = TensorSpec("weight/000000", (4,), "bf16", "contiguous_le_v1")
    components = {"text": {"config": base}, "draft": {"config": component, "target": "text"}}
    bindings = {"draft/norm": {"object": norm.id}}
    with ArtifactWriter(tmp_path / "donor.ninfer", [norm], components=components, bindings=bindings) as writer:
        writer.write_object(norm.id, bytes(8))
    with ArtifactSource(tmp_path / "donor.ninfer") as source:
        recipe = Recipe(Model({"text": {"config": TEXT}}))
        if refused is None:
            recipe.graft("draft", source)
            return
        with pytest.raises(ValueError, match=rf"donor\.ninfer: component 'draft' was made for {refused}"):
            recipe.graft("draft", source)


class TestRecipe:
    @pytest.fixture
    def source(self, tmp_path: Path) -> ArtifactSource:
        write_donor(tmp_path / "donor.ninfer")
        return ArtifactSource(tmp_path / "donor.ninfer")

    def test_refuses_what_is_no_artifact(self) -> None:
        with pytest.raises(TypeError, match="is taken from an artifact"):
            Recipe(Model({"text": {"config": {}}})).graft("draft", object())  # type: ignore[arg-type]

    def test_refuses_a_checkpoint(self, checkpoint: Path) -> None:
        with (
            SafetensorsSource(checkpoint) as source,
            pytest.raises(ValueError, match=r"from an artifact, and .*base is none; pass --source draft=FILE\.ninfer"),
        ):
            Recipe(Model({"text": {"config": {}}})).graft("draft", source)  # type: ignore[arg-type]

    def test_refuses_a_component_or_a_resource_that_the_model_has(self, source: ArtifactSource) -> None:
        recipe = Recipe(Model({"text": {"config": {}}}, resources={"resource/draft/notes.txt": b"others"}))
        with source, pytest.raises(ValueError, match=r"resource resource/draft/notes.txt \(notes\) differs"):
            recipe.graft("draft", source)
        assert "draft" not in recipe.model.components

    def test_refuses_a_component_without_what_it_extends(self, source: ArtifactSource) -> None:
        with source, pytest.raises(ValueError, match="extends 'text', and there is no such component"):
            Recipe(Model({"ngram": {"config": {}}})).graft("draft", source)

    def test_refuses_an_artifact_that_was_replaced_since_it_was_opened(self, source: ArtifactSource) -> None:
        recipe = Recipe(Model({"text": {"config": {}}}))
        with source:
            recipe.graft("draft", source)
            source.path.unlink()
            write_donor(source.path)
            with pytest.raises(SourceChangedError, match=r"donor\.ninfer"):
                plan_parents(recipe).parents[0].request.source.values()

    def test_is_put_in_once(self, source: ArtifactSource) -> None:
        recipe = Recipe(Model({"text": {"config": {}}}))
        with source:
            recipe.graft("draft", source)
            with pytest.raises(ValueError, match="there is a component 'draft' already"):
                recipe.graft("draft", source)
            with pytest.raises(ValueError, match="put in by the build"):
                prepare(recipe, device="cpu", rows_per_chunk=512)

    def test_refuses_inputs_of_unknown_parameters(self) -> None:
        with pytest.raises(ValueError, match="there is no parameter nothing to multiply x"):
            Recipe(Model({"text": {"config": {}}})).add_input("nothing", "x")
