"""``verify`` on artifacts that ninferbuild made: what they say of themselves, and reports, locks and sums."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
import re
import shutil
from typing import Any

from fixtures import fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorObject
from ninferbuild.build import build
from ninferbuild.describe import describe_artifact
from ninferbuild.expected import read_expected
from ninferbuild.lock import lock_text
from ninferbuild.target import CacheSettings, Target
from ninferbuild.verify import Verification, verify

PART = "m.ninfer.part-0001"
REPORT = "m.ninfer.conversion.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a built set of two files, its report, a lock and SHA-256 sums."""
    root = tmp_path_factory.mktemp("made")
    fx.write_all(root / "fx")
    out = root / "out" / "m.ninfer"
    build(
        Target(
            name="m",
            identity=str(out),
            file=None,
            model=root / "fx" / "dense",
            recipe="qwen3_6_27b",
            components=("text",),
            max_file_bytes=300_000,
            out=out,
            device="cpu",
            cache=CacheSettings(dir=root / "cache"),
        )
    )
    files = (out, out.with_name(PART))
    (out.parent / "ninferbuild.lock").write_text(lock_text({"m": describe_artifact(out)}))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out.parent / "SHA256SUMS").write_text("".join(sums))
    return out.parent


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def check(folder: Path, against: str | None = None) -> Verification:
    entry = folder / "m.ninfer"
    return verify(entry, against=None if against is None else read_expected(folder / against, entry))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def place(folder: Path, logical: int) -> tuple[Path, int]:
    """The file and the offset in it of a payload byte."""
    with Artifact(folder / "m.ninfer") as artifact:
        first = artifact.directory.files[0].payload_bytes
        if logical < first:
            return folder / "m.ninfer", artifact.payload_offset + logical
    return folder / PART, 4096 + logical - first


AGAINST = (REPORT, "ninferbuild.lock", "SHA256SUMS")


@pytest.mark.parametrize("against", [None, *AGAINST])
def test_as_built(made: Path, against: str | None) -> None:
    result = check(made, against)
    assert (result.findings, result.exit_code) == ((), 0)
    assert result.to_json()["equal"] is (None if against is None else True)


@pytest.mark.parametrize("against", AGAINST)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_the_payload_is_found(made: Path, against: str, data: st.DataObject) -> None:
    """In objects and between them, whatever the rules of the format allow."""
    with Artifact(made / "m.ninfer") as artifact:
        total = artifact.payload_bytes
    path, offset = place(made, data.draw(st.integers(0, total - 1)))
    bit = data.draw(st.integers(0, 7))
    flip(path, offset, bit)
    try:
        assert check(made).exit_code == 1
        assert check(made, against).exit_code != 0
    finally:
        flip(path, offset, bit)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_the_framing_is_found(made: Path, data: st.DataObject) -> None:
    with Artifact(made / "m.ninfer") as artifact:
        lengths = {made / "m.ninfer": artifact.payload_offset, made / PART: 4096}
    path = data.draw(st.sampled_from(sorted(lengths)))
    offset, bit = data.draw(st.integers(0, lengths[path] - 1)), data.draw(st.integers(0, 7))
    flip(path, offset, bit)
    try:
        result = check(made, REPORT)
        assert result.exit_code != 0, (path.name, offset, bit)
    finally:
        flip(path, offset, bit)


def test_which_object_differs(here: Path) -> None:
    with Artifact(here / "m.ninfer") as artifact:
        item = next(item for item in artifact.objects if isinstance(item, TensorObject) and item.format == "bf16")
    flip(*place(here, item.offset))
    result = check(here)
    (finding,) = result.findings
    assert "provenance.payload" in finding.problem
    for against in (REPORT, "ninferbuild.lock"):
        result = check(here, against)
        differing = [finding for finding in result.findings if finding.differs]
        assert differing[0].object == item.id
        assert re.match(r"digest [0-9a-f]{32}, expected [0-9a-f]{32}", differing[0].problem)
        assert (result.exit_code, result.invalid) == (1, 1)
        assert result.different == len(differing)


def change_report(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / REPORT
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("change", "object", "part"),
    [
        (lambda report: report.update(artifact_id="0" * 32), None, f"expected {'0' * 32}"),
        (lambda report: report.update(payload_bytes=5), None, "payload bytes, expected 5"),
        (lambda report: report["files"].pop(), None, "files with"),
        (lambda report: report["methods"][3].update(digest="f" * 32), 3, f"expected {'f' * 32}"),
        (lambda report: report["methods"][3].update(object="other"), "other", "missing"),
    ],
)
def test_differing_reports(
    here: Path, change: Callable[[dict[str, Any]], None], object: str | int | None, part: str
) -> None:
    if isinstance(object, int):
        object = json.loads((here / REPORT).read_text())["methods"][object]["object"]
    change_report(here, change)
    result = check(here, REPORT)
    (finding,) = result.findings
    assert (finding.object, finding.differs) == (object, True)
    assert part in finding.problem
    assert (result.exit_code, result.invalid, result.different) == (3, 0, 1)
    assert (result.to_json()["valid"], result.to_json()["equal"]) == (True, False)


def change_lock(folder: Path, pattern: str, replacement: str) -> None:
    path = folder / "ninferbuild.lock"
    text, count = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("pattern", "replacement", "parts"),
    [
        (r'artifact_id = "[0-9a-f]{8}', 'artifact_id = "00000000', ["expected 00000000"]),
        (r'("text/final_norm" = .*digest = )"[0-9a-f]{8}', r'\1"00000000', ["expected 00000000"]),
        (r'^"text/final_norm" = ', '"text/other" = ', ["is missing", "is not expected"]),
        (r'("m.ninfer" = .*sha256 = )"[0-9a-f]{8}', r'\1"00000000', ["expected 00000000"]),
        (r'("m.ninfer.part-0001" = .*bytes = )\d+', r"\g<1>77", ["expected 77"]),
        (r'^("m.ninfer.part-000)1("[^\n]*)', r"\g<1>1\2\n\g<1>2\2", ["no such file"]),
        (r'^"m.ninfer.part-0001".*\n', "", ["not listed"]),
    ],
)
def test_differing_locks(here: Path, pattern: str, replacement: str, parts: list[str]) -> None:
    change_lock(here, pattern, replacement)
    result = check(here, "ninferbuild.lock")
    assert (result.exit_code, result.invalid, result.different) == (3, 0, len(parts))
    for finding, part in zip(result.findings, parts, strict=True):
        assert part in finding.problem


def test_lock_of_several_targets(here: Path) -> None:
    path = here / "ninferbuild.lock"
    table = path.read_text().partition("\n\n")[2]
    path.write_text(path.read_text() + "\n" + table.replace("[targets.m", "[targets.n").replace("m.ninfer", "n.ninfer"))
    assert check(here, "ninferbuild.lock").exit_code == 0
    path.write_text(path.read_text().replace("n.ninfer", "m.ninfer"))
    with pytest.raises(ValueError, match=r"several targets write m\.ninfer"):
        check(here, "ninferbuild.lock")
    path.write_text(path.read_text().replace("m.ninfer", "x.ninfer"))
    with pytest.raises(ValueError, match=r"no target writes m\.ninfer"):
        check(here, "ninferbuild.lock")


def test_sums(here: Path) -> None:
    sums = here / "SHA256SUMS"
    text = sums.read_text()
    for spelling in (
        text.replace("  ", " *"),
        "# made by hand\n\n" + text.upper().replace("M.NINFER.PART", "m.ninfer.part").replace("M.NINFER", "m.ninfer"),
        re.sub(r"(\w{64})  (.*)", r"SHA256 (\2) = \1", text),
        re.sub(r"(\w{64})  (.*)", r"\\\1  \2", text),
        text.replace("  ", "  ./") + f"{'0' * 64}  elsewhere/m.ninfer\n",
        text.replace("  ", "  where/it/was/made/"),
    ):
        sums.write_text(spelling)
        assert check(here, "SHA256SUMS").exit_code == 0, spelling
    sums.write_text("0" * 64 + text[64:])
    (finding,) = check(here, "SHA256SUMS").findings
    assert (finding.file, finding.differs) == ("m.ninfer", True)
    sums.write_text(text.splitlines()[0])
    result = check(here, "SHA256SUMS")
    assert [(finding.file, finding.problem) for finding in result.findings] == [(PART, "the file is not listed")]
    assert result.exit_code == 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no conversion report, lock or sha256sum file"),
        ("hello", "no conversion report, lock or sha256sum file"),
        ("{", "no conversion report of ninferbuild"),
        ("{}", "no conversion report of ninferbuild"),
        ('{"methods": [{"object": "a"}]}', "no conversion report of ninferbuild"),
        ("0" * 64 + "  other\n", "does not list m.ninfer"),
        ("0" * 64 + "  m.ninfer\nnot a sum\n", ":2: expected a SHA-256"),
        (f"{'0' * 64}  a/m.ninfer\n{'1' * 64}  b/m.ninfer\n", "several files called m.ninfer"),
    ],
)
def test_what_cannot_be_compared_with(here: Path, text: str, part: str) -> None:
    (here / "against").write_text(text)
    with pytest.raises(ValueError, match=re.escape(part)) as error:
        check(here, "against")
    assert "against" in str(error.value)


def rename_converter(data: bytes) -> bytes:
    assert data.count(b'"converter":"ninferbuild"') == 1
    return data.replace(b'"converter":"ninferbuild"', b'"converter":"somebody_el"')


def test_identity_is_that_of_artifacts_made_here(here: Path) -> None:
    """An edited directory is found; one that names another converter is held to the container's rules alone."""
    entry = here / "m.ninfer"
    before = entry.read_bytes()
    entry.write_bytes(before.replace(b'"hidden_size":128', b'"hidden_size":129'))
    assert entry.read_bytes() != before
    (finding,) = check(here).findings
    assert re.match(r"artifact id [0-9a-f]{32}, but the directory gives [0-9a-f]{32}", finding.problem)
    entry.write_bytes(rename_converter(before))
    assert check(here).findings == ()
    (finding,) = check(here, REPORT).findings
    assert finding.differs
    assert "not made by ninferbuild" in finding.problem


def test_root_digest(here: Path) -> None:
    entry = here / "m.ninfer"
    data = entry.read_bytes()
    payload = re.search(rb'"payload":"([0-9a-f]{32})"', data)
    assert payload is not None
    entry.write_bytes(data.replace(payload[1], b"0" * 32))
    first, second = check(here).findings
    assert "artifact id" in first.problem
    assert f"provenance.payload is '{'0' * 32}'" in second.problem


def test_nothing_may_hide_after_the_last_object(here: Path) -> None:
    """An artifact made here is packed: bytes that belong to no object are zero, wherever they are."""
    part = here / PART
    with Artifact(here / "m.ninfer") as artifact:
        last = artifact.directory.files[1].payload_bytes
        end = artifact.payload_bytes
    entry = here / "m.ninfer"
    old, new = f'"payload_bytes":{last}}}]}}'.encode(), f'"payload_bytes":{last + 9}}}]}}'.encode()
    assert len(old) == len(new)
    entry.write_bytes(entry.read_bytes().replace(old, new))
    part.write_bytes(part.read_bytes() + b"\0\0\0\0stash")
    problems = {finding.problem: finding for finding in check(here).findings}
    assert problems["payload between objects is not zero"].offset == end + 4


def test_a_missing_part_is_not_a_difference_of_its_objects(here: Path) -> None:
    (here / PART).unlink()
    for against in AGAINST:
        result = check(here, against)
        assert (result.exit_code, result.different) == (1, 0)
        (finding,) = result.findings
        assert (finding.file, finding.problem) == (PART, "the part is missing")
        assert result.unchecked > 1
