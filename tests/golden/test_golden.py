"""Artifacts equal the reference converter's: directories, payloads, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import hashlib
import json

from fixtures.golden import CASES, DEVICES, expected
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build, plan
from ninferbuild.target import Target

COMPARED = ("components", "objects", "bindings", "uses")


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
