"""What the pages say is done: every block of shell, TOML and Python in them is run, in order, page by page.

Each page gets a working directory in which a small checkpoint goes by the names that the text uses.

- ``sh``: run as it stands.
- ``toml``: what ``ninferbuild.toml`` holds by then, or what is added to it (a block that begins with ``[[``), or the
  whole file.
- ``python``: a block that begins with ``# NAME.py`` is that file, and a later ``sh`` block has to use it; any other
  is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import os
from pathlib import Path
import re
import shlex
import struct
import subprocess
import sys
import tomllib

from fixtures import gguf_export, synthetic, ternary_released
from fixtures.command_server import serving
from fixtures.gguf_files import write_gguf
import numpy as np
import pytest

from ninferbuild import compat
from ninferbuild.rules import METHODS
from ninferbuild.target import TargetFile
from ninferbuild.target_schema import _ASSIGN_KEYS, CACHE_KEYS, PROPOSAL_ROWS, TARGET_KEYS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/targets.md",
    "docs/recipes.md",
    "docs/from-a-checkpoint.md",
    "docs/from-a-gguf.md",
    "docs/with-an-importance-matrix.md",
    "docs/ternary.md",
)

NOT_RUN = {
    "pip install .": "would replace the installation under test",
    "pip install '.[cpu]'": "would replace the installation under test",
    "make demo": "sets up an environment of its own; CI runs it",
    "make test": "runs this test",
    "ninferbuild convert --model Qwen3.6-27B --recipe qwen3_8_27b_gguf --source gguf=27b-Q4_K.gguf --out 27b.ninfer": (
        "takes an export of the released model, and nothing smaller"
    ),
    "ninferbuild build bonsai": "would encode a model of 27 billion weights",
}
"""Shell lines that are left out, each with the reason."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that it begins on."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    ]


def write_checkpoint(root: Path, tokens: int, *, exported: bool) -> None:
    """Text, vision and MTP under the names of two releases, and what else the pages name; ``exported``: as GGUF files
    too."""
    geometry = synthetic.text_geometry(4, h=64, vocab=tokens)
    synthetic.write_base(root / "Qwen3.6-27B", geometry, salt=1, shards=2)
    (root / "Qwen3.8-27B").symlink_to("Qwen3.6-27B")
    write_importance(root, geometry["hidden_size"], geometry["intermediate_size"])
    if exported:
        gguf_export.export(root / "Qwen3.6-27B", root / "model.gguf")
        gguf_export.export_vision(root / "Qwen3.6-27B", root / "mmproj.gguf")
    synthetic.write_ranking(root / "ranking.i64", geometry["vocab_size"], salt=1)
    shape = (geometry["hidden_size"], geometry["intermediate_size"])
    np.save(root / "down.npy", np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape))
    (root / "template.jinja").write_text("{{ messages }}")


def write_importance(root: Path, hidden: int, intermediate: int) -> None:
    """An importance matrix in both forms of llama.cpp: the same for the feed-forward of every layer."""
    matrices = {
        f"blk.{layer}.ffn_{role}.weight": np.linspace(1, 2, width, dtype="<f4").tobytes()
        for layer in range(4)
        for role, width in (("gate", hidden), ("up", hidden), ("down", intermediate))
    }
    count = struct.pack("<f", 1.0)
    tensors = [(f"{name}.in_sum2", (1, len(raw) // 4), 0, raw) for name, raw in matrices.items()]
    tensors += [(f"{name}.counts", (1, 1), 0, count) for name in matrices]
    write_gguf(root / "qwen.imatrix.gguf", {"general.type": "imatrix"}, tensors)
    entries = [
        struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(raw) // 4) + raw
        for name, raw in matrices.items()
    ]
    (root / "imatrix.dat").write_bytes(struct.pack("<i", len(entries)) + b"".join(entries))


def write_ternary(root: Path) -> None:
    """What docs/ternary.md names; there is room for none of it but the headers."""
    ternary_released.write_base(root / "Qwen3.8-27B")
    ternary_released.write_gguf(root / "Ternary-Bonsai-2-27B-PQ2_0.gguf")
    ternary_released.write_mtp(root / "model_mtp.safetensors")


@dataclass
class Desk:
    """A working directory for one page."""

    directory: Path
    environment: dict[str, str]

    def run(self, command: list[str], what: str) -> None:
        done = subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{what}\n{done.stdout}{done.stderr}"

    def shell(self, block: Block, what: str) -> str:
        """Run a block, but for the lines of :data:`NOT_RUN`; what was run."""
        lines = [line for line in block.text.splitlines() if line.partition("#")[0].strip() not in NOT_RUN]
        script = "\n".join(lines)
        if script.strip():
            self.run(["sh", "-eu", "-c", script], what)
        return script

    def toml(self, block: Block) -> None:
        file = self.directory / "ninferbuild.toml"
        held = file.read_text() if file.exists() else ""
        if block.text not in held:
            file.write_text(f"{held}\n{block.text}" if block.text.startswith("[[") else block.text)
        targets = TargetFile(file)
        assert targets.names
        for name in targets.names:
            targets.target(name).check_files()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What stands for ``ninferbuild`` in the shell: processes of their own that do not load torch each time."""
    with serving(tmp_path_factory.mktemp("server") / "s") as command:
        yield command


@pytest.fixture
def desk(page: str, command: list[str], tmp_path: Path) -> Desk:
    here = tmp_path / "here"
    here.mkdir()
    text = (ROOT / page).read_text()
    if page == "docs/ternary.md":
        write_ternary(here)
    else:  # a proposal head without a number of rows needs that many tokens
        write_checkpoint(here, PROPOSAL_ROWS + 512 if "--proposal " in text else 2048, exported="model.gguf" in text)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "ninferbuild").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (commands / "ninferbuild").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NINFER")}
    environment |= {
        "PATH": f"{commands}{os.pathsep}{environment['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    return Desk(here, environment)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str, desk: Desk) -> None:
    files: set[str] = set()
    scripts: list[str] = []
    for block in blocks(page):
        what = f"{page}:{block.line}"
        if block.language == "sh":
            scripts.append(desk.shell(block, what))
        elif block.language == "toml":
            desk.toml(block)
        elif block.language == "python":
            name = re.match(r"# (\w+\.py)\n", block.text)
            if name is not None:
                files.add(name[1])
                (desk.directory / name[1]).write_text(block.text)
            else:
                desk.run([sys.executable, "-c", block.text], what)
        else:
            raise AssertionError(f"{what}: a block in {block.language or 'no language'} that nothing runs")
    assert scripts
    for file in files:
        assert any(file in script for script in scripts), f"{page}: nothing uses {file}"


def test_lines_that_are_not_run_exist() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in block.text.splitlines()]
    assert NOT_RUN.keys() <= {line.partition("#")[0].strip() for line in lines}


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Heading → key → (default, example), of the tables of keys in docs/targets.md."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    heading = ""
    for line in (ROOT / "docs" / "targets.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 5:
            found.setdefault(heading, {})[cells[0].strip("`| ")] = (cells[2], cells[4].strip("`| "))
    return found


def test_every_key_of_a_target_is_described() -> None:
    described = tables()
    assert list(described["Keys of a target"]) == [*TARGET_KEYS, "extends"]
    assert list(described["Assignments"]) == list(_ASSIGN_KEYS)
    assert list(described["Keys of [cache]".replace("[cache]", "`[cache]`")]) == list(CACHE_KEYS)


@pytest.mark.parametrize(
    ("heading", "frame"),
    [
        ("Keys of a target", "[targets.qwen]\n{}[targets.x]\n{}{example}\n"),
        ("Assignments", "[targets.x]\n{}[[targets.x.assign]]\n{select}{change}{example}\n"),
        ("Keys of `[cache]`", "[targets.x]\n{}[cache]\n{example}\n"),
    ],
)
def test_examples_of_keys_are_accepted(heading: str, frame: str, tmp_path: Path) -> None:
    required = {"model": 'model = "m"\n', "recipe": 'recipe = "r"\n'}
    for key, (_, example) in tables()[heading].items():
        assert list(tomllib.loads(example)) == [key]
        given = "".join(text for name, text in required.items() if name != key)
        select = "" if key == "select" else 'select = "x"\n'
        change = "" if key == "format" else 'format = "bf16"\n'
        whole = "".join(required.values())
        first = whole if heading == "Keys of a target" else given
        text = frame.format(first, given, example=example, select=select, change=change)
        target = TargetFile(tmp_path / "ninferbuild.toml", text).target("x")
        assert target.model.name


def test_defaults_of_keys_are_the_defaults(tmp_path: Path) -> None:
    minimal = TargetFile(tmp_path / "ninferbuild.toml", '[targets.x]\nmodel = "m"\nrecipe = "r"\n').target("x")
    described = {key: default.strip("`") for key, (default, _) in tables()["Keys of a target"].items()}
    assert int(described["rows_per_chunk"]) == minimal.rows_per_chunk
    assert (described["proposal"], minimal.proposal) == ("false", None)
    assert (described["overrides"], minimal.overrides) == ("[]", ())
    assert (described["sources"], minimal.sources) == ("{}", {})
    assert minimal.out == tmp_path / "x.ninfer"
    cache = {key: default.strip("`") for key, (default, _) in tables()["Keys of `[cache]`"].items()}
    assert (cache["trust_stat"], cache["allow_foreign_fs"]) == ("false", "false")
    assert not minimal.cache.trust_stat
    assert not minimal.cache.allow_foreign_fs


def test_import_names_and_methods_are_described() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    told = set(re.findall(r"`(tools\.[a-z0-9_.]+)`", text)) - {"tools.convert", "tools.artifact"}
    available = set()
    with compat.active():
        for module in compat.MODULES:
            if __import__(module, fromlist=["__all__"]).__all__:
                available.add(module)
    assert told == available
    for line in text.splitlines():
        cells = line.strip("|").split("|")
        if line.startswith("| `tools.") and len(cells) == 2:
            modules = re.findall(r"`(tools\.[a-z0-9_.]+)`", cells[0])
            names = re.findall(r"[A-Za-z]\w+", " ".join(re.findall(r"`([^`]+)`", cells[1])))
            for name in names:
                assert any(name in compat.MODULES[module] for module in modules), name
    for method in METHODS:
        assert f"`{method}`" in text


def test_links_lead_somewhere() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
