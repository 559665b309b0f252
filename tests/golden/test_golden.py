"""Artifacts equal the reference converter's: directories, payloads, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import hashlib
import json
from pathlib import Path
from typing import Any

from fixtures import synthetic
import pytest
import torch

from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build, plan
from ninferbuild.target import CacheSettings, Proposal, Target

DATA = Path(__file__).with_name("data")
CASES = sorted(path.stem for path in DATA.glob("*.json"))
COMPARED = ("components", "objects", "bindings", "uses")


def expected(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return value


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Writes the checkpoint of a case once; its conversion arguments."""
    root = tmp_path_factory.mktemp("checkpoints")
    written: dict[str, dict[str, Any]] = {}

    def write(case: str) -> dict[str, Any]:
        if case not in written:
            written[case] = synthetic.write_case(case, root / case)
        return written[case]

    return write


@pytest.fixture
def target(checkpoint: Callable[[str], dict[str, Any]], tmp_path: Path) -> Callable[[str], Target]:
    def make(name: str) -> Target:
        case = expected(name)
        arguments = checkpoint(case.get("checkpoint", case["case"]))
        proposal = Proposal(arguments["proposal_rows"], arguments["ranking"]) if "ranking" in arguments else None
        return Target(
            name=name,
            identity=str(tmp_path / f"{name}.ninfer"),
            file=None,
            model=arguments["model"],
            recipe=arguments["recipe"],
            overrides=(str(DATA / case["override"]),) if case.get("override") else (),
            components=tuple(arguments["components"].split(",")),
            sources=arguments["sources"],
            proposal=proposal,
            artifact_name=case["name"],
            max_file_bytes=case.get("max_file_bytes"),
            out=tmp_path / f"{name}.ninfer",
            device="cpu",
            cache=CacheSettings(dir=tmp_path / "cache"),
        )

    return make


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_artifact_equals_the_reference(name: str, device: str, target: Callable[[str], Target]) -> None:
    case, wanted = replace(target(name), device=device), expected(name)
    planned = plan(case)
    result = build(case)
    with Artifact(case.out) as artifact:
        directory = artifact.directory.to_json()
        for member in COMPARED:
            assert json.dumps(directory[member]) == json.dumps(wanted["directory"][member]), member
        for identifier, digest in wanted["objects"].items():
            assert hashlib.sha256(artifact.read_object(identifier)).hexdigest() == digest, identifier
        assert len(artifact.objects) == len(wanted["objects"])
        payload = hashlib.sha256(artifact.read_range(0, artifact.payload_bytes)).hexdigest()
        assert payload == wanted["payload_sha256"]
        if case.max_file_bytes is None:
            assert directory["files"] == wanted["directory"]["files"]
        else:
            assert_split_by_the_rule(artifact, case.max_file_bytes)
    assert planned.file_sizes == result.files
    assert all(path.stat().st_size == size for path, size in result.files)
    assert sum(count for count, _ in planned.formats.values()) == sum(
        item["kind"] == "tensor" for item in wanted["directory"]["objects"]
    )

    before = [path.stat() for path, _ in result.files]
    again = build(case)
    assert (again.executed, again.up_to_date) == (0, True)
    after = [path.stat() for path, _ in result.files]
    assert [(s.st_ino, s.st_mtime_ns) for s in before] == [(s.st_ino, s.st_mtime_ns) for s in after]


def assert_split_by_the_rule(artifact: Artifact, limit: int) -> None:
    """Every segment but the last is filled to the largest multiple of 4096 that the limit leaves it."""
    sizes = [record.payload_bytes for record in artifact.directory.files]
    capacities = [(limit - artifact.payload_offset) // 4096 * 4096] + [(limit - 4096) // 4096 * 4096] * (len(sizes) - 1)
    assert len(sizes) > 1
    assert sizes[:-1] == capacities[:-1]
    assert 0 < sizes[-1] <= capacities[-1]
    assert sum(sizes) == artifact.payload_bytes


@pytest.mark.parametrize("name", ["dense_q6", "nvfp4_q38"])
def test_chunk_sizes_do_not_change_bytes(name: str, target: Callable[[str], Target], tmp_path: Path) -> None:
    case = target(name)
    ids = set()
    for rows in (1, 7, 512, 4096):
        varied = replace(
            case,
            rows_per_chunk=rows,
            cache=CacheSettings(dir=tmp_path / f"cache{rows}"),
            out=tmp_path / f"{rows}.ninfer",
        )
        build(varied, jobs=1 + rows % 3)
        ids.add(hashlib.sha256(varied.out.read_bytes()).hexdigest())
    assert len(ids) == 1
