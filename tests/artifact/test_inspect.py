from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from ninferbuild.artifact import inspect
from ninferbuild.artifact.reader import Artifact


@pytest.mark.parametrize(
    ("flags", "digest"),
    [
        ([], "08561c64e30a90e6cbe62c56b583546d955f7b124ad5eb50f78d3531ee24d58e"),
        (["--objects", "--bindings"], "e2c7280bf111467145aaf8ecdb204f902ecff793750406050fc10fb5f2428210"),
        (["--json"], "c7cc0bc30d633d69f246f1db3b4965cd195bb0b77c839b3d6ef32a171fcd136f"),
        (["--objects", "--bindings", "--json"], "12d83b62b14e49eef0fad5c64bfd5145e57e090a949372c09098db9ece23230c"),
    ],
)
def test_output(demo, monkeypatch, capsys, flags, digest):
    monkeypatch.chdir(demo.parent)
    assert inspect.main(["demo.ninfer", *flags]) == 0
    assert hashlib.sha256(capsys.readouterr().out.encode()).hexdigest() == digest


def test_object_lines(demo, capsys):
    inspect.main([str(demo), "--objects"])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "             0              3 resource raw_bytes_v1                               note",
        "           256             12 tensor   bf16/contiguous_le_v1 [2, 3]               m",
        "           512              4 tensor   fp32/contiguous_le_v1 []                   d",
    ]


def test_readable_summary(demo):
    with Artifact(demo) as artifact:
        lines = dict(line.split(": ", 1) for line in inspect.summary_lines(artifact))
        assert list(lines) == list(inspect.artifact_summary(artifact))
        assert lines["name"] == "demo"
        assert lines["components"] == ", ".join(artifact.directory.components)
        assert lines["formats"] == "bf16 1, fp32 1"
        del artifact.directory.metadata["name"]
        assert "name: (none)" in list(inspect.summary_lines(artifact))


def test_unknown_formats_and_missing_parts_are_listed(split_set, demo, capsys):
    os.unlink(f"{split_set}.part-0001")
    assert inspect.main([str(split_set), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 3
    demo.write_bytes(demo.read_bytes().replace(b'"bf16"', b'"bf15"'))
    assert inspect.main([str(demo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"] == {"bf15": 1, "fp32": 1}


def test_errors_are_one_line(tmp_path, demo, capsys):
    for path in (tmp_path / "missing", tmp_path, demo):
        demo.write_bytes(b"x")
        assert inspect.main([str(path)]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert str(path) in output.err
        assert output.err.count("\n") == 1


def test_bad_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        inspect.main(["--nonsense"])
    assert caught.value.code == 2


def test_runs_as_a_module(demo):
    result = subprocess.run(
        [sys.executable, "-m", "ninferbuild.artifact.inspect", str(demo), "--json"], capture_output=True, check=True
    )
    assert json.loads(result.stdout)["name"] == "demo"
