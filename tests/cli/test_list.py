"""``list``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_targets(project: Path, run: Any) -> None:
    with (project / "ninferbuild.toml").open("a") as file:
        file.write('[targets.broken]\ndevice = "${NB_UNSET_VARIABLE}"\n')
    rows = json.loads(run("list", "targets", "--json").out)
    assert [row["name"] for row in rows] == ["a", "b", "broken"]
    assert rows[0] == {
        "name": "a",
        "default": True,
        "recipe": "qwen3_6_27b",
        "model": str(project / "model"),
        "out": str(project / "a.ninfer"),
        "problem": None,
    }
    assert "NB_UNSET_VARIABLE" in rows[2]["problem"]
    header, first, *_ = run("list", "targets").out.splitlines()
    assert header.split() == ["name", "default", "recipe", "model", "out", "problem"]
    assert first.split()[:3] == ["a", "yes", "qwen3_6_27b"]


def test_the_only_target_is_the_default(project: Path, run: Any) -> None:
    (project / "ninferbuild.toml").write_text('[targets.only]\nmodel = "model"\nrecipe = "qwen3_6_27b"\n')
    (row,) = json.loads(run("list", "targets", "--json").out)
    assert (row["name"], row["default"]) == ("only", True)


def test_what_is_registered(run: Any) -> None:
    def names(what: str) -> set[str]:
        return {row["name"] for row in json.loads(run("list", what, "--json").out)}

    assert {"qwen3_6_27b", "qwen3_8_27b", "qwen3_6_35b_a3b", "qwen3_6_27b_nvfp4", "qwen3_8_27b_nvfp4"} <= names(
        "recipes"
    )
    assert {"cast_direct", "grouped_absmax", "fp8_row_maxabs", "import_encoded"} <= names("methods")
    assert {"bf16", "q4_g64_fp16", "nvfp4"} <= names("formats")
    formats = {row["name"]: row for row in json.loads(run("list", "formats", "--json").out)}
    assert formats["q5_g64_fp16"]["bits_per_weight"] == 5 + 16 / 64
    assert formats["bf16"]["layout"] == "contiguous_le_v1"


def test_unknown_list(run: Any) -> None:
    ran = run("list", "recipe")
    assert ran.code == 2
    assert "'recipe'" in ran.err
