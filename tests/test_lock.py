"""Locks: what they say, how they are written, and builds that are held to them."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
import os
from pathlib import Path
import shutil
import struct
import subprocess
import tomllib

from fixtures import fx
from hypothesis import given
from hypothesis import strategies as st
import pytest

from ninferbuild.artifact.labels import labels_of
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import parse_directory
from ninferbuild.build import BuildResult, build
from ninferbuild.differences import BytesDifferError
from ninferbuild.errors import UsageError
from ninferbuild.job import Job
from ninferbuild.lock import (
    Information,
    LockedAction,
    LockedFile,
    LockedObject,
    LockedTarget,
    kept_targets,
    lock_text,
    locked_target,
    read_lock,
    sums_text,
    update_lock,
)
from ninferbuild.locked import LockGate
from ninferbuild.locking import lock
from ninferbuild.target import Target, load_target

DOWN = "text/layers/1/mlp/down"

METHOD = """
from tools.convert.official_recipes import qwen3_6_27b
from tools.convert.methods import grouped_absmax


def mine(request):
    return grouped_absmax(request)


def configure(model, recipe, sources):
    qwen3_6_27b(model, recipe, sources)
    recipe.assign("text/layers/1/mlp/down", method=mine)
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fx.write_dense(tmp_path_factory.mktemp("checkpoint") / "dense")


@pytest.fixture
def project(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one target, and with file times that are trusted at once."""
    monkeypatch.delenv("NINFERBUILD_CACHE", raising=False)
    monkeypatch.setattr("ninferbuild.memo.SETTLED_NS", 0)
    shutil.copytree(dense, tmp_path / "model")
    write(tmp_path)
    return tmp_path


def write(project: Path, more: str = "", recipe: str = "qwen3_6_27b") -> None:
    (project / "ninferbuild.toml").write_text(
        '[cache]\ndir = "cache"\ntrust_stat = true\n'
        f'[targets.t]\nmodel = "model"\nrecipe = "{recipe}"\ncomponents = ["text"]\ndevice = "cpu"\n{more}'
    )


def assign(format_name: str, name: str = DOWN) -> str:
    return f'[[targets.t.assign]]\nselect = "{name}"\nformat = "{format_name}"\n'


def target(project: Path) -> Target:
    return load_target("t", project)


def gate(project: Path) -> LockGate:
    path = project / "ninferbuild.lock"
    return LockGate(locked_target(path, "t"), path)


def locked_build(project: Path) -> BuildResult:
    return build(target(project), gate=gate(project))


def refused(project: Path, *parts: str) -> list[str]:
    """A locked build fails with a message that holds ``parts``; the lines that explain it."""
    with pytest.raises(BytesDifferError) as caught:
        locked_build(project)
    assert caught.value.exit_code == 3
    for part in parts:
        assert part in str(caught.value)
    assert not list(project.glob(".t.ninfer*")), "a temporary was left behind"
    return [line for difference in caught.value.differences for line in difference.lines()]


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(job: Job) -> None:
        raise AssertionError("the build went on to encode")

    monkeypatch.setattr(Job, "execute", execute)


# The file


def entry(number: int, **changed: object) -> LockedTarget:
    facts: dict[str, object] = {
        "artifact_id": f"{number:032x}",
        "files": {"a.ninfer": LockedFile(bytes=number, sha256=f"{number:064x}")},
        "sources": {"base": f"{number:032x}"},
        "directory": {"components": f"{number:032x}"},
        "objects": {"x (+1)": LockedObject(digest=f"{number:032x}", bytes=8, shape=(2, 4), parameters=("x", "y"))},
        "information": Information(recipe="r", overrides=("o.py:f",)),
        "actions": {"x (+1)": LockedAction(key=f"{number:032x}", method="m v1")},
    }
    return LockedTarget(**(facts | changed))  # type: ignore[arg-type]


def test_targets_are_sorted_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "ninferbuild.lock"
    assert update_lock(path, {"b": entry(1)})
    alone = path.read_text()
    assert update_lock(path, {"a": entry(2), "c": entry(3)})
    assert list(read_lock(path)) == ["a", "b", "c"]
    body = alone.partition("\n\n")[2].rstrip("\n")
    assert body in path.read_text()
    before = path.stat()
    assert not update_lock(path, {"a": entry(2)})
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [item.name for item in tmp_path.iterdir()] == ["ninferbuild.lock"]


def test_one_changed_fact_is_one_changed_line() -> None:
    changed = LockedObject(digest="f" * 32, bytes=8, shape=(2, 4), parameters=("x", "y"))
    one = lock_text({"a": entry(1), "b": entry(2)}).splitlines()
    other = lock_text({"a": entry(1, objects={"x (+1)": changed}), "b": entry(2)}).splitlines()
    assert len(one) == len(other)
    assert [pair[1] for pair in zip(one, other, strict=True) if pair[0] != pair[1]] == [
        f'"x (+1)" = {{ digest = "{"f" * 32}", bytes = 8, shape = [2, 4], parameters = ["x", "y"] }}'
    ]


NAMES = st.text(st.sampled_from("ab/. \"'\\#=[]\n\t\x00\x7f\x9fé→😀"), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.integers(0, 2**40), max_size=3), NAMES, st.lists(NAMES, max_size=3))
def test_what_was_written_is_read(numbers: dict[str, int], label: str, parameters: list[str]) -> None:
    targets = {}
    for name, number in numbers.items():
        item = LockedObject(digest=f"{number:032x}", bytes=number, parameters=tuple(parameters))
        targets[name] = entry(number, objects={label: item})
    path = Path(os.devnull)  # only named in messages
    assert tomllib.loads(lock_text(targets))["version"] == 1
    assert read_text(path, lock_text(targets)) == targets


def read_text(path: Path, text: str) -> dict[str, LockedTarget]:
    class Text(type(path)):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            return text.encode()

    return read_lock(Text(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = ", "not a lock"),
        ("\udcff", "not a lock"),
        ("", "version"),
        ("version = 2\n[later]\n", "newer"),
        ("version = 1\n[targets.t]\nartifact_id = 1\n", "targets"),
        ("version = 1\nextra = 1\n", "extra"),
        ('version = 1\n[targets.t]\nartifact_id = ""\n', "files"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ninferbuild.lock"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message) as caught:
        read_lock(path)
    assert str(path) in str(caught.value)
    foreign = path.rename(tmp_path / "poetry.lock")
    with pytest.raises(UsageError, match=message):
        update_lock(foreign, {"t": entry(1)})
    assert foreign.read_bytes() == before


@pytest.mark.parametrize("name", ["ninferbuild.lock", "release.lock"])
@pytest.mark.parametrize("keep", [0, 70, 300], ids=["empty", "within the header", "within a target"])
def test_a_damaged_lock_is_written_anew(tmp_path: Path, name: str, keep: int) -> None:
    path = tmp_path / name
    text = lock_text({"other": entry(1)})[:keep]
    path.write_text(text)
    if name == "release.lock" and not keep:
        with pytest.raises(UsageError, match="remove it"):
            update_lock(path, {"t": entry(2)})
        return
    assert kept_targets(path) == ({}, True)
    assert update_lock(path, {"t": entry(2)})
    assert read_lock(path) == {"t": entry(2)}


def test_a_newer_lock_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ninferbuild.lock"
    path.write_text(before := "version = 2\n[later]\n")
    with pytest.raises(UsageError, match="newer"):
        update_lock(path, {"t": entry(1)})
    assert path.read_text() == before


def test_sums_escape_names(tmp_path: Path) -> None:
    names = ["plain.ninfer", "back\\slash", "new\nline", "retu\rrn", "sp ace"]
    for name in names:
        (tmp_path / name).write_text(name)
    files = {name: LockedFile(bytes=0, sha256=hashlib.sha256(name.encode()).hexdigest()) for name in names}
    (tmp_path / "sums").write_text(sums_text(files), newline="")
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "sums"], cwd=tmp_path, check=True)
    assert sums_text(files).splitlines()[1].startswith("\\")


# Labels


def test_labels_follow_parameters() -> None:
    def tensor(identifier: str, offset: int) -> dict[str, object]:
        shape = {"shape": [2, 2], "format": "bf16", "layout": "contiguous_le_v1"}
        return {"id": identifier, "kind": "tensor", "offset": offset, "bytes": 8} | shape

    scalar = {"shape": [], "format": "fp32", "layout": "contiguous_le_v1", "bytes": 4}
    directory = parse_directory(
        {
            "components": {"text": {"config": {}}},
            "objects": [
                tensor("weight/000000", 0),
                tensor("weight/000001", 256),
                tensor("weight/000002", 512),
                {"id": "auxiliary/000000", "kind": "tensor", "offset": 768} | scalar,
            ],
            "bindings": {
                "second": {"parts": [{"object": "weight/000000", "range": [2, 4]}]},
                "first": {"parts": [{"object": "weight/000000", "range": [0, 2]}]},
                "split": {
                    "parts": [
                        {"object": "weight/000001", "range": [0, 4]},
                        {"object": "weight/000002", "range": [0, 4]},
                    ]
                },
                "alias": {"parts": [{"object": "weight/000000", "range": [0, 2]}]},
            },
            "uses": [
                {
                    "parameter": "split",
                    "input": "x",
                    "activation_policy": "AllowA4",
                    "auxiliaries": {"activation_input_divisor": {"object": "auxiliary/000000"}},
                }
            ],
            "files": [{"path": None, "payload_bytes": 772}],
        }
    )
    assert labels_of(directory) == {
        "weight/000000": ("first (+2)", ("first", "alias", "second")),
        "weight/000001": ("split", ("split",)),
        "weight/000002": ("split #2", ("split",)),
        "auxiliary/000000": ("activation_input_divisor of split × x", ("split",)),
    }


# Locking


def test_a_lock_says_what_is_in_the_files(project: Path) -> None:
    write(project, 'max_file_bytes = 400000\nname = "x"\n')
    done = lock(target(project))
    assert (done.changed, done.path, done.sums) == (
        True,
        project / "ninferbuild.lock",
        project / "t.ninfer.sha256",
    )
    content = read_lock(done.path)["t"]
    assert content == done.content
    assert len(content.files) > 1
    for name, facts in content.files.items():
        data = (project / name).read_bytes()
        assert (facts.bytes, facts.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    with Artifact(project / "t.ninfer") as artifact:
        assert content.artifact_id == artifact.artifact_id.hex()
        assert content.sources == {"base": artifact.directory.provenance["sources"]["base"]["digest"]}
        assert [item.bytes for item in content.objects.values()] == [item.bytes for item in artifact.objects]
        bound = {name for item in content.objects.values() for name in item.parameters}
        assert bound == set(artifact.directory.bindings)
    assert content.information == Information(recipe="qwen3_6_27b")
    assert content.actions[DOWN].method == "grouped_absmax v1"
    assert content.actions.keys() < content.objects.keys()
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--strict", "--quiet", done.sums.name], cwd=project, check=True)

    before = done.path.stat()
    again = lock(target(project))
    assert not again.changed
    assert done.path.stat().st_mtime_ns == before.st_mtime_ns


def test_reordered_objects_keep_their_lines(project: Path) -> None:
    """A parameter stored by itself renumbers the objects after it; their lines stay."""
    lock(target(project))
    before = (project / "ninferbuild.lock").read_text().splitlines()
    (project / "apart.py").write_text(
        "def configure(model, recipe, sources):\n    recipe.separate('text/layers/0/mlp/gate')\n"
    )
    write(project, 'overrides = ["apart.py"]\n')
    lock(target(project))
    after = (project / "ninferbuild.lock").read_text().splitlines()
    new = [line for line in after if line not in set(before) and "digest" in line]
    assert [line.partition(" = ")[0] for line in new] == ['"text/layers/0/mlp/gate"', '"text/layers/0/mlp/up"']


def test_a_damaged_output_is_not_locked(project: Path) -> None:
    lock(target(project))
    flip(project / "t.ninfer", -1)
    with pytest.raises(Exception, match="damaged; remove the artifact"):
        lock(target(project))


def flip(path: Path, position: int) -> None:
    """Change one byte, and leave the times as they were."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_source(project: Path) -> None:
    """Change one element of ``DOWN`` in the checkpoint."""
    weights = project / "model" / "model.safetensors"
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    begin, _ = header["model.language_model.layers.1.mlp.down_proj.weight"]["data_offsets"]
    flip(weights, 8 + length + begin + 1)  # of its exponent
    os.utime(weights)


# Locked builds


@pytest.fixture(scope="module")
def built(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LockedTarget]:
    """A project whose target was locked, to be copied; what the lock says."""
    root = tmp_path_factory.mktemp("built")
    shutil.copytree(dense, root / "model")
    write(root)
    return root, lock(target(root)).content


@pytest.fixture
def locked(built: tuple[Path, LockedTarget], project: Path) -> LockedTarget:
    shutil.copytree(built[0], project, dirs_exist_ok=True)
    return built[1]


def test_a_build_that_matches_is_published(project: Path, locked: LockedTarget) -> None:
    data = (project / "t.ninfer").read_bytes()
    assert locked_build(project).up_to_date
    (project / "t.ninfer").unlink()
    shutil.rmtree(project / "cache")
    result = locked_build(project)
    assert result.executed
    assert (project / "t.ninfer").read_bytes() == data


def test_another_format_is_refused_before_encoding(project: Path, locked: LockedTarget, no_encoding: None) -> None:
    data = (project / "t.ninfer").read_bytes()
    write(project, assign("q6_g64_fp16"))
    lines = refused(project, "t would differ from", "nothing was encoded")
    at = lines.index(f"{DOWN}: format q5_g64_fp16 → q6_g64_fp16")
    assert lines[at + 1].startswith("  bytes: ")
    assert any(line.startswith("file t.ninfer: bytes ") for line in lines)
    assert (project / "t.ninfer").read_bytes() == data


def test_names_in_the_artifact_count(project: Path, locked: LockedTarget, no_encoding: None) -> None:
    write(project, 'name = "another"\n')
    assert any(line.startswith("directory: metadata ") for line in refused(project, "nothing was encoded"))


def test_another_recipe_with_the_same_choices(project: Path, locked: LockedTarget, no_encoding: None) -> None:
    (project / "own.py").write_text("from tools.convert.official_recipes import qwen3_6_27b as configure\n")
    write(project, recipe="own.py")
    lines = refused(project, "nothing was encoded")
    assert "  recipe: qwen3_6_27b → own.py:configure" in lines


def test_a_changed_source_that_was_seen_before(
    project: Path, locked: LockedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_source(project)
    build(load_target("t", project, sets=[f"out={project / 'other.ninfer'}"]))
    monkeypatch.setattr(Job, "execute", None)
    lines = refused(project, "nothing was encoded")
    assert lines[0].startswith(f"source base: digest {locked.sources['base']} → ")
    changed = [line for line in lines if ": payload " in line]
    assert len(changed) == 1
    assert lines[lines.index(changed[0]) + 1] == f"  source bytes changed: {DOWN}"


def test_a_changed_source_that_nobody_has_read(project: Path, locked: LockedTarget) -> None:
    change_source(project)
    shutil.rmtree(project / "cache")
    (project / "t.ninfer").unlink()
    lines = refused(project, "nothing was linked")
    assert lines[0].startswith("source base: digest ")
    assert any(line.startswith("artifact: id ") for line in lines)
    assert not (project / "t.ninfer").exists()


def edit(project: Path, change: Callable[[str], str]) -> None:
    path = project / "ninferbuild.lock"
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


def test_information_decides_nothing(project: Path, locked: LockedTarget) -> None:
    def change(text: str) -> str:
        text = text.replace('recipe = "qwen3_6_27b"', 'recipe = "elsewhere"').replace("absmax v1", "absmax v7")
        return "".join(
            line for line in text.splitlines(keepends=True) if not line.startswith('"text/layers/0/gdn/output" = { key')
        )

    edit(project, change)
    assert locked_build(project).up_to_date


def test_a_raised_method_version_that_gives_the_same_bytes(
    project: Path, locked: LockedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ninferbuild.rules import grouped_absmax

    monkeypatch.setattr(type(grouped_absmax), "version", 99)
    (project / "t.ninfer").unlink()
    assert locked_build(project).executed


def test_a_cached_payload_that_differs(project: Path, locked: LockedTarget, no_encoding: None) -> None:
    item, action = locked.objects[DOWN], locked.actions[DOWN]
    assert item.digest is not None
    edit(project, lambda text: text.replace(str(item.digest), "0" * 32))
    assert refused(project, "1 difference;", "nothing was encoded") == [
        f"{DOWN}: payload {'0' * 32} → {item.digest}",
        "  the same action gave other bytes: grouped_absmax v1 is not deterministic, or its result was damaged",
    ]
    old = f'key = "{action.key}", method = "grouped_absmax v1"'
    edit(project, lambda text: text.replace(old, f'key = "{"0" * 32}", method = "grouped_absmax v0"'))
    assert refused(project)[1:] == ["  grouped_absmax v0 → v1"]


def test_sums_are_checked_before_anything_is_published(project: Path, locked: LockedTarget) -> None:
    sha256 = str(locked.files["t.ninfer"].sha256)
    edit(project, lambda text: text.replace(sha256, "0" * 64))
    (project / "t.ninfer").unlink()
    (project / "t.ninfer.conversion.json").unlink()
    assert refused(project, "nothing was published") == [f"file t.ninfer: SHA-256 {'0' * 64} → {sha256}"]
    assert not (project / "t.ninfer").exists()
    assert not (project / "t.ninfer.conversion.json").exists()


def test_an_output_damaged_behind_the_times_is_made_again(project: Path, locked: LockedTarget) -> None:
    data = (project / "t.ninfer").read_bytes()
    flip(project / "t.ninfer", -1)
    assert not locked_build(project).up_to_date
    assert (project / "t.ninfer").read_bytes() == data


def test_unlinked_builds_are_held_to_the_lock(project: Path, locked: LockedTarget) -> None:
    assert build(target(project), gate=gate(project), link=False).out is None
    artifact_id = str(locked.artifact_id)
    edit(project, lambda text: text.replace(artifact_id, "0" * 32))
    with pytest.raises(BytesDifferError, match="nothing was linked"):
        build(target(project), gate=gate(project), link=False)


def test_a_users_method(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its auxiliary tensors are known only once it was called; everything else is compared before."""
    (project / "own.py").write_text(METHOD)
    write(project, recipe="own.py")
    data = lock(target(project))
    assert data.content.actions[DOWN].method == "a function of the recipe"
    shutil.rmtree(project / "cache")
    (project / "t.ninfer").unlink()
    assert locked_build(project).executed
    shutil.rmtree(project / "cache")
    write(project, assign("q6_g64_fp16", "text/layers/0/mlp/down"), recipe="own.py")
    monkeypatch.setattr(Job, "execute", None)
    assert refused(project, "nothing was encoded")[0] == ("text/layers/0/mlp/down: format q5_g64_fp16 → q6_g64_fp16")


def test_targets_that_are_not_locked(project: Path) -> None:
    with pytest.raises(UsageError, match=r"no lock; write it with 'ninferbuild lock t'"):
        gate(project)
    update_lock(project / "ninferbuild.lock", {"other": entry(1)})
    with pytest.raises(UsageError, match=r"the target 't' is not locked"):
        gate(project)
