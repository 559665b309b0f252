"""``graft``: one artifact with a component of another, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fixtures import donor
from fixtures.donor import write_donor
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import ResourceSpec, TensorSpec
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.cli import main
from ninferbuild.digest import digest_of
from ninferbuild.grafting import FIRST_ID

RENAMED = {name: f"weight/{FIRST_ID + index}" for index, name in enumerate(donor.GRAFTED)}


def write_base(path: Path, **changes: Any) -> dict[str, bytes]:
    """An artifact with heads and no draft; its payloads by object id."""
    specs = (
        ResourceSpec("resource/text/tokenizer.json", 7),
        TensorSpec("weight/000000", (16, 1024), "q8_g32_fp16", "row_split_k128_v1"),
        TensorSpec("auxiliary/000000", (1024,), "bf16", "contiguous_le_v1"),
    )
    bound = {"object": "weight/000000"}
    rotated = {"hadamard_signs": {"object": "auxiliary/000000"}}
    directory: dict[str, Any] = {
        "components": {"text": {"config": {"hidden_size": donor.HIDDEN}}},
        "bindings": {"text/output_head": bound, "proposal/head": bound},
        "uses": [{"parameter": "text/output_head", "input": "text/final_hidden", "auxiliaries": rotated}],
        "metadata": {"name": "base"},
        "provenance": {"converter": "somebody"},
        **changes,
    }
    with ArtifactWriter(path, specs, **directory) as writer:
        payloads = {item.id: bytes([item.offset % 97]) * item.bytes for item in writer.objects}
        payloads |= {
            "weight/000000": bytes(writer.by_id["weight/000000"].bytes),
            "auxiliary/000000": b"\x80\x3f" * 1024,
        }
        for identifier, data in payloads.items():
            writer.write_object(identifier, data)
    return payloads


def write_second(path: Path) -> None:
    """Another donor, of a component with one norm."""
    text = TensorSpec("weight/000000", (64,), "bf16", "contiguous_le_v1")
    with ArtifactWriter(
        path,
        [text],
        components={"text": {"config": {}}, "other": {"config": {}, "target": "text"}},
        bindings={"other/norm": {"object": "weight/000000"}},
    ) as writer:
        writer.write_object("weight/000000", bytes(range(128)))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


GRAFT = ("graft", "base.ninfer", "--component", "draft", "--from", "donor.ninfer", "--out", "out.ninfer")


@pytest.mark.parametrize("limit", [None, "12288"])
def test_writes_one_artifact_of_two(desk: Path, run: Any, limit: str | None) -> None:
    kept = write_base(desk / "base.ninfer")
    taken = write_donor(desk / "donor.ninfer", max_file_bytes=limit and int(limit))
    ran = run(*GRAFT, "--json", *(("--max-file-bytes", limit) if limit else ()))
    assert ran.code == 0, ran
    result = json.loads(ran.out)
    expected = {**kept, "resource/draft/notes.txt": b"notes", **{new: taken[old] for old, new in RENAMED.items()}}
    with Artifact(desk / "out.ninfer") as artifact, Artifact(desk / "donor.ninfer") as other:
        payloads = {item.id: artifact.read_object(item.id) for item in artifact.objects}
        directory = artifact.directory
        assert directory.components["draft"] == other.directory.components["draft"]
        assert result["artifact_id"] == artifact.artifact_id.hex()
    assert payloads == expected
    assert list(payloads) == list(expected)
    assert directory.metadata == {"name": "base"}
    assert next(item for item in directory.objects if item.id == RENAMED["weight/000001"]).divisors == 2  # type: ignore[union-attr]
    assert result["grafted"]["draft"]["objects"] == len(RENAMED) + 1
    assert len(result["files"]) == (1 if limit is None else 4)
    assert main(["verify", "out.ninfer", "-q", "--against", "out.ninfer.conversion.json"]) == 0
    report = json.loads((desk / "out.ninfer.conversion.json").read_text())
    assert report["provenance"]["sources"]["draft"]["path"] == "donor.ninfer"
    digests = {entry["object"]: entry["digest"] for entry in report["methods"]}
    assert digests[RENAMED["weight/000003"]] == digest_of(taken["weight/000003"]).hex()


def test_heads_multiply_the_states_of_the_component(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    ran = run(*GRAFT, "--name", "both")
    assert ran.code == 0, ran
    assert ran.out.splitlines()[-1].startswith("wrote out.ninfer: 9 objects, 1 files, ")
    with Artifact(desk / "out.ninfer") as artifact:
        directory = artifact.directory
    assert directory.metadata == {"name": "both"}
    heads = [use for use in directory.uses if use["input"] == "draft/final_hidden"]
    assert heads == [
        {
            "parameter": "text/output_head",
            "input": "draft/final_hidden",
            "activation_policy": "AllowA8",
            # The head's rows are rotated, whatever is multiplied by them.
            "auxiliaries": {"hadamard_signs": {"object": "auxiliary/000000"}},
        },
        {"parameter": "proposal/head", "input": "draft/final_hidden", "activation_policy": "A16Only"},
    ]


def test_the_same_inputs_give_the_same_bytes(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    assert run(*GRAFT).code == 0
    first = (desk / "out.ninfer").read_bytes()
    assert run(*GRAFT).code == 0  # replaces what was made here
    assert (desk / "out.ninfer").read_bytes() == first


def test_its_report_describes_no_target(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    assert run(*GRAFT).code == 0
    run("init", "again", "--from", "out.ninfer.conversion.json").failed(2, "--from", "is of 'ninferbuild graft'")


def test_two_components_one_after_the_other(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    assert run(*GRAFT).code == 0
    write_second(desk / "second.ninfer")
    ran = run("graft", "out.ninfer", "--component", "other", "--from", "second.ninfer", "--out", "three.ninfer", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    with Artifact(desk / "three.ninfer") as artifact:
        assert artifact.directory.bindings["other/norm"] == {"object": f"weight/{FIRST_ID + len(RENAMED)}"}
        assert artifact.read_object(f"weight/{FIRST_ID + len(RENAMED)}") == bytes(range(128))


def test_refusals(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    before = sorted(path.name for path in desk.iterdir())
    run(*GRAFT[:2], "--component", "mtp", *GRAFT[4:]).failed(1, "donor.ninfer", "no component 'mtp'", "text, draft")
    run(*GRAFT[:2], "--component", "text", *GRAFT[4:]).failed(1, "there is a component 'text' already")
    run(*GRAFT[:-1], "base.ninfer").failed(2, "--out: base.ninfer would be written and is read, as the artifact")
    run(*GRAFT[:-1], "donor.ninfer").failed(2, "--out: donor.ninfer would be written and is read, as the donor")
    run(*GRAFT, "--max-file-bytes", "5").failed(2, "--max-file-bytes")
    run(*GRAFT, "--name", "").failed(2, "--name: must not be empty")
    run("graft", "none.ninfer", *GRAFT[2:]).failed(1, "none.ninfer")
    ran = run("graft", "base.ninfer", "--from", "donor.ninfer", "--out", "out.ninfer")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "error: Missing option '--component'.")
    (desk / "out.ninfer").write_text("mine")
    run(*GRAFT).failed(1, "out.ninfer exists and is not an artifact made by ninferbuild", "--overwrite")
    assert (desk / "out.ninfer").read_text() == "mine"
    (desk / "out.ninfer").unlink()
    assert sorted(path.name for path in desk.iterdir()) == before


def test_resources_of_one_name_must_be_the_same(desk: Path, run: Any) -> None:
    notes = ResourceSpec("resource/draft/notes.txt", 5)
    for data, code in ((b"notes", 0), (b"other", 1)):
        with ArtifactWriter(desk / "base.ninfer", [notes], components={"text": {"config": {}}}, bindings={}) as writer:
            writer.write_object(notes.id, data)
        if not code:
            write_donor(desk / "donor.ninfer")
        ran = run(*GRAFT)
        assert ran.code == code, ran
        (desk / "base.ninfer").unlink()
    assert "resource resource/draft/notes.txt (notes) differs from that of base.ninfer" in ran.err


def test_a_damaged_input_leaves_nothing_behind(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer", max_file_bytes=12288)
    part = desk / "donor.ninfer.part-0002"
    part.write_bytes(part.read_bytes()[:-1])
    before = sorted(path.name for path in desk.iterdir())
    run(*GRAFT).failed(1, "donor.ninfer.part-0002")
    assert sorted(path.name for path in desk.iterdir()) == before


def test_damaged_payloads_are_not_copied(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    before = sorted(path.name for path in desk.iterdir())
    for path, object_id in (("donor.ninfer", "weight/000002"), ("base.ninfer", "weight/000000")):
        scale = donor.damage(desk / path, object_id, -1, b"\0\x7c")
        run(*GRAFT).failed(1, f"{path}: object '{object_id}'", "scales, row 0", "the artifact is damaged; get it again")
        assert sorted(path.name for path in desk.iterdir()) == before
        donor.damage(desk / path, object_id, -1, scale)
    assert run(*GRAFT).code == 0


def test_a_base_made_here_is_held_to_its_digest(desk: Path, run: Any) -> None:
    write_base(desk / "base.ninfer")
    write_donor(desk / "donor.ninfer")
    assert run(*GRAFT).code == 0
    write_second(desk / "second.ninfer")
    again = ("graft", "out.ninfer", "--component", "other", "--from", "second.ninfer", "--out", "three.ninfer")
    legal = donor.damage(desk / "out.ninfer", RENAMED["weight/000003"], 0, b"\1")
    run(*again).failed(1, "out.ninfer: provenance.payload is", "the artifact is damaged; get it again")
    assert not (desk / "three.ninfer").exists()
    donor.damage(desk / "out.ninfer", RENAMED["weight/000003"], 0, legal)
    assert run(*again).code == 0


def test_refuses_a_head_of_which_no_divisor_is_known(desk: Path, run: Any) -> None:
    divisor = {"activation_input_divisor": {"object": "auxiliary/000000"}}
    use = {"parameter": "text/output_head", "input": "text/final_hidden", "activation_policy": "AllowA4"}
    write_base(desk / "base.ninfer", uses=[{**use, "auxiliaries": divisor}])
    write_donor(desk / "donor.ninfer", head_policy="AllowA4")
    run(*GRAFT).failed(1, "base.ninfer: text/output_head would need an activation divisor for draft/final_hidden")
    (desk / "donor.ninfer").unlink()
    write_donor(desk / "donor.ninfer")
    assert run(*GRAFT).code == 0
    with Artifact(desk / "out.ninfer") as artifact:
        uses = {(item["parameter"], item["input"]): item for item in artifact.directory.uses}
    assert "auxiliaries" not in uses["text/output_head", "draft/final_hidden"]
