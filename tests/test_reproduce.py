"""Building a target again from nothing, and comparing it object by object and byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import os
from pathlib import Path
import tempfile

from fixtures import fx
import pytest

from ninferbuild.build import build
from ninferbuild.cache import Cache
from ninferbuild.errors import NinferbuildError, UsageError
from ninferbuild.lock import LockedAction
from ninferbuild.locking import lock
from ninferbuild.reproduce import Reproduction, first_difference, reference, reproduce
from ninferbuild.target import Target, load_target

DOWN = "text/layers/1/mlp/down"

UNSTEADY = """
import random
from tools.convert.official_recipes import qwen3_6_27b


def unsteady(request):
    def produce(output):
        values = request.values(0, request.target.shape[0]).clone()
        output.write_values(0, values.fill_(random.random()))

    return request.job(produce=produce)


def configure(model, recipe, sources):
    qwen3_6_27b(model, recipe, sources)
    recipe.assign("text/final_norm", method=unsteady)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a locked target ``locked``, and ``other`` and ``split``, which are built; not to be written to."""
    root = tmp_path_factory.mktemp("built")
    fx.write_dense(root / "model")
    (root / "ninferbuild.toml").write_text(
        '[cache]\ndir = "cache"\n[defaults]\nmodel = "model"\nrecipe = "qwen3_6_27b"\ncomponents = ["text"]\n'
        'device = "cpu"\n[targets.locked]\n[targets.other]\n[targets.split]\nmax_file_bytes = 300000\n'
        f'[[targets.other.assign]]\nselect = "{DOWN}"\nformat = "q6_g64_fp16"\n[targets.unbuilt]\n'
    )
    environment = os.environ.pop("NINFERBUILD_CACHE", None)
    try:
        lock(load_target("locked", root))
        build(load_target("other", root))
        build(load_target("split", root))
    finally:
        if environment is not None:
            os.environ["NINFERBUILD_CACHE"] = environment
    return root


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    monkeypatch.delenv("NINFERBUILD_CACHE", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def target(built: Path) -> Callable[[str], Target]:
    return lambda name: load_target(name, built)


def lines(found: Reproduction) -> list[str]:
    return [line for difference in found.differences for line in difference.lines()]


def kept_actions(found: Reproduction) -> list[LockedAction]:
    """The actions that the lock names for what was reproduced."""
    return list(reference(found.target).content.actions.values())


def copied(entry: Path, directory: Path) -> Path:
    """A copy of an artifact's single file."""
    copy = directory / entry.name
    copy.write_bytes(entry.read_bytes())
    return copy


def test_against_the_lock(
    built: Path, target: Callable[[str], Target], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = temporary / "environment"
    monkeypatch.setenv("NINFERBUILD_CACHE", str(elsewhere))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in built.iterdir())
    wanted = reference(target("locked"))
    assert (wanted.path, wanted.entry) == (built / "ninferbuild.lock", None)
    found = reproduce(target("locked"), wanted)
    assert found.reproduced, lines(found)
    assert found.artifact_id == wanted.content.artifact_id
    assert (found.objects, dict(found.files)) == (len(wanted.content.objects), wanted.content.files)
    assert not elsewhere.exists()
    assert not list(temporary.iterdir())
    assert sorted((path.name, path.stat().st_mtime_ns) for path in built.iterdir()) == before


def test_against_the_output(built: Path, target: Callable[[str], Target]) -> None:
    wanted = reference(target("split"))
    assert wanted.entry == built / "split.ninfer"
    found = reproduce(target("split"), wanted, rows_per_chunk=3, jobs=1)
    assert found.reproduced, lines(found)
    assert len(found.files) > 1


def test_what_is_kept(target: Callable[[str], Target], temporary: Path) -> None:
    found = reproduce(target("locked"), reference(target("locked")), keep=True)
    assert found.kept is not None
    assert [found.kept] == list(temporary.iterdir())
    assert {path.name for path in found.kept.iterdir()} == {
        *("cache", "locked.ninfer", "locked.ninfer.conversion.json"),
    }
    with Cache.open(found.kept / "cache", read_only=True) as cache:
        assert cache.stats().actions == len({action.key for action in kept_actions(found)})


def test_nothing_is_left_after_a_failure(target: Callable[[str], Target], temporary: Path) -> None:
    wanted = reference(target("locked"))
    with pytest.raises(ValueError, match="no such device"):
        reproduce(target("locked"), wanted, device="abacus", keep=True)
    assert not list(temporary.iterdir())


def test_another_format_is_named(built: Path, target: Callable[[str], Target]) -> None:
    wanted = reference(target("locked"), built / "other.ninfer")
    found = lines(reproduce(target("locked"), wanted))
    at = next(index for index, line in enumerate(found) if line.startswith(f"{DOWN}: payload "))
    assert "  format: q6_g64_fp16 → q5_g64_fp16" in found[at:]
    assert [line for line in found if ": payload " in line] == [found[at]]
    assert any(line.startswith("file locked.ninfer: bytes ") for line in found)
    assert found[-1].startswith("artifact: id ")


def test_bytes_between_objects_count(built: Path, target: Callable[[str], Target], tmp_path: Path) -> None:
    copy = copied(built / "locked.ninfer", tmp_path)
    data = bytearray(copy.read_bytes())
    from ninferbuild.artifact.reader import Artifact

    with Artifact(copy) as artifact:
        ends = [item.offset + item.bytes for item in artifact.objects]
        begins = [item.offset for item in artifact.objects[1:]]
        gap = next(end for end, begin in zip(ends, begins, strict=False) if end < begin)
        position = artifact.payload_offset + gap
    data[position] ^= 1
    copy.write_bytes(data)
    found = reproduce(target("locked"), reference(target("locked"), copy))
    (difference,) = found.differences
    assert (difference.subject, difference.fact) == ("file locked.ninfer", "SHA-256")
    assert difference.because == (f"first differing byte: {position}",)


def test_a_damaged_reference(built: Path, target: Callable[[str], Target], tmp_path: Path) -> None:
    copy = copied(built / "locked.ninfer", tmp_path)
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with pytest.raises(NinferbuildError, match=r"locked\.ninfer: the payload is damaged"):
        reference(target("locked"), copy)


def test_nothing_to_compare_with(built: Path, target: Callable[[str], Target], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unbuilt is neither locked nor built"):
        reference(target("unbuilt"))
    with pytest.raises(UsageError, match="'other' is not locked"):
        reference(target("other"), built / "ninferbuild.lock")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError, match="not a lock"):
        reference(target("locked"), tmp_path / "text")


def test_a_target_of_options_goes_by_its_output(target: Callable[[str], Target]) -> None:
    options = replace(target("locked"), file=None)
    assert reference(options).entry == options.out
    with pytest.raises(UsageError, match="only targets of a file can be locked"):
        lock(options)


def test_a_method_that_is_not_deterministic(built: Path, tmp_path: Path) -> None:
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    (tmp_path / "ninferbuild.toml").write_text(
        f'[cache]\ndir = "cache"\n[targets.t]\nmodel = "{built / "model"}"\nrecipe = "unsteady.py"\n'
        'components = ["text"]\ndevice = "cpu"\n'
    )
    target = load_target("t", tmp_path)
    lock(target)
    found = lines(reproduce(target, reference(target)))
    at = next(index for index, line in enumerate(found) if line.startswith("text/final_norm: payload "))
    assert "a function of the recipe is not deterministic" in found[at + 1]


def test_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninferbuild.reproduce.CHUNK_BYTES", 4)
    one, other = tmp_path / "one", tmp_path / "other"
    for ours, theirs, position in (
        (b"", b"", None),
        (b"abcdefgh", b"abcdefgh", None),
        (b"abcdefgh", b"abcdefXh", 6),
        (b"abcdefgh", b"abcdef", 6),
        (b"abcd", b"abcdefgh", 4),
    ):
        one.write_bytes(ours)
        other.write_bytes(theirs)
        assert first_difference(one, other) == position
