"""``verify``: what is printed, as text and as JSON, and the exit codes."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
import struct
from typing import Any

import pytest

from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.artifact.schema import ResourceSpec, TensorSpec
from ninferbuild.artifact.writer import ArtifactWriter

IDENTITY = bytes(range(16))
FORMAT, LAYOUT, SHAPE = "q8_g32_fp16", "row_split_k128_v1", (2, 128)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a sound artifact ``m.ninfer`` of 528 payload bytes, and its SHA-256 sum."""
    monkeypatch.chdir(tmp_path)
    specs = [ResourceSpec("note", 256), TensorSpec("w", SHAPE, FORMAT, LAYOUT)]
    with ArtifactWriter(
        "m.ninfer", specs, components={"text": {"config": {}}}, bindings={}, artifact_id=IDENTITY
    ) as writer:
        writer.write_object("note", b"x" * 256)
        writer.write_object("w", bytes(256) + struct.pack("<H", 0x3C00) * 8)
    assert encoded_size(LAYOUT, FORMAT, SHAPE) == 272
    write_sums(tmp_path)
    return tmp_path


def write_sums(folder: Path) -> None:
    sums = hashlib.sha256((folder / "m.ninfer").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sums}  m.ninfer\n")


def patch(folder: Path, logical: int, data: bytes) -> None:
    with (folder / "m.ninfer").open("r+b") as file:
        file.seek(4096 + logical)
        file.write(data)


def test_sound(here: Path, run: Callable[..., Any]) -> None:
    ran = run("verify", "m.ninfer")
    assert (ran.code, ran.out, ran.err) == (0, "m.ninfer is valid: 2 objects, 1 file, 528 B\n", "")
    ran = run("verify", "m.ninfer", "--against", "SHA256SUMS")
    assert (ran.code, ran.out) == (0, "m.ninfer is valid, as SHA256SUMS says: 2 objects, 1 file, 528 B\n")
    ran = run("verify", "m.ninfer", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_invalid(here: Path, run: Callable[..., Any]) -> None:
    patch(here, 256 + 128 + 5, b"\x80")
    patch(here, 256 + 256 + 2, b"\x00\xfc")
    lines = [
        "object 'w', codes, row 1, column 5, byte 133: code word 0x80 is illegal in q8_g32_fp16",
        "object 'w', scales, row 0, column 32, byte 258: scale word 0xfc00 is infinite",
    ]
    ran = run("verify", "m.ninfer")
    assert ran.code == 1
    assert ran.out.splitlines() == [*lines, "m.ninfer is not valid: 2 findings"]
    ran = run("verify", "-q", "m.ninfer")
    assert (ran.code, ran.out.splitlines()) == (1, lines)


def test_differs(here: Path, run: Callable[..., Any]) -> None:
    before = hashlib.sha256((here / "m.ninfer").read_bytes()).hexdigest()
    patch(here, 256, b"\x05")
    after = hashlib.sha256((here / "m.ninfer").read_bytes()).hexdigest()
    ran = run("verify", "m.ninfer", "--against", "SHA256SUMS")
    assert ran.code == 3
    assert ran.out.splitlines() == [
        f"m.ninfer: SHA-256 {after}, expected {before}",
        "m.ninfer is valid but not what SHA256SUMS says: 1 finding",
    ]


def test_invalid_and_different(here: Path, run: Callable[..., Any]) -> None:
    patch(here, 256, b"\x80")
    ran = run("verify", "m.ninfer", "--against", "SHA256SUMS")
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == "m.ninfer is not valid and not what SHA256SUMS says: 2 findings"


def test_json(here: Path, run: Callable[..., Any]) -> None:
    ran = run("verify", "m.ninfer", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == {
        "artifact": "m.ninfer",
        "artifact_id": IDENTITY.hex(),
        "files": ["m.ninfer"],
        "objects": 2,
        "payload_bytes": 528,
        "unchecked": 0,
        "against": None,
        "valid": True,
        "equal": None,
        "invalid": 0,
        "different": 0,
        "findings": [],
        "more": {},
    }
    patch(here, 256, b"\x80" * 9)
    ran = run("verify", "m.ninfer", "--json", "--limit", "2", "--against", "SHA256SUMS")
    assert ran.code == 1
    result = json.loads(ran.out)
    assert (result["valid"], result["equal"], result["invalid"], result["different"]) == (False, False, 9, 1)
    assert result["more"] == {"w": 7}
    assert [finding["differs"] for finding in result["findings"]] == [False, False, True]
    assert result["findings"][1] == {
        "problem": "code word 0x80 is illegal in q8_g32_fp16",
        "file": None,
        "object": "w",
        "plane": "codes",
        "row": 0,
        "column": 1,
        "offset": 1,
        "differs": False,
    }


def test_limit(here: Path, run: Callable[..., Any]) -> None:
    patch(here, 256, b"\x80" * 20)
    lines = run("verify", "m.ninfer", "--limit", "3").out.splitlines()
    assert len(lines) == 5
    assert lines[-2:] == ["w: 17 more", "m.ninfer is not valid: 20 findings"]
    assert len(run("verify", "m.ninfer").out.splitlines()) == 12
    assert run("verify", "m.ninfer", "--limit", "0").code == 2


def test_a_damaged_entry(here: Path, run: Callable[..., Any]) -> None:
    (here / "m.ninfer").write_bytes((here / "m.ninfer").read_bytes()[:-1])
    ran = run("verify", "m.ninfer")
    assert ran.code == 1
    first, last = ran.out.splitlines()
    assert first == "m.ninfer: the file has 4623 bytes; its directory declares 4624"
    assert last == "m.ninfer is not valid: 1 finding"
    assert json.loads(run("verify", "m.ninfer", "--json").out)["artifact_id"] is None


def test_unreadable_objects_are_counted(here: Path, run: Callable[..., Any]) -> None:
    data = (here / "m.ninfer").read_bytes()
    (here / "m.ninfer").write_bytes(data.replace(b"q8_g32_fp16", b"q9_g32_fp16"))
    ran = run("verify", "m.ninfer")
    assert ran.code == 1
    assert "object 'w': unknown numeric format 'q9_g32_fp16'" in ran.out
    assert "1 object could not be read and was not checked" in ran.out


def test_failures(here: Path, run: Callable[..., Any]) -> None:
    run("verify", "none.ninfer").failed(1, "none.ninfer")
    run("verify", "m.ninfer", "--against", "none").failed(1, "none")
    (here / "odd").write_text("odd")
    run("verify", "m.ninfer", "--against", "odd").failed(1, "odd", "no conversion report, lock or sha256sum file")
    run("verify", ".").failed(1, ".")
    assert run("verify").code == 2


def test_a_built_artifact_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    from fixtures import fx

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    fx.write_all(tmp_path / "fx")
    options = ("--model", "fx/dense", "--recipe", "qwen3_6_27b", "--components", "text", "--device", "cpu")
    assert run("convert", *options, "--out", "m.ninfer", "-q").code == 0
    report = "m.ninfer.conversion.json"
    assert run("verify", "m.ninfer", "--against", report).code == 0
    assert run("convert", *options, "--out", "n.ninfer", "-q", "--assign", "text/final_norm=fp32").code == 0
    ran = run("verify", "n.ninfer", "--against", report)
    assert ran.code == 3
    assert "artifact id" in ran.out
    assert ran.out.splitlines()[-1].startswith(f"n.ninfer is valid but not what {report} says: ")
