"""Explanations: lines from two manifests, parents of the last build, and what builds and plans say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
import json
from pathlib import Path
import shutil
import struct
import time
from types import SimpleNamespace
from typing import Any

from fixtures import fx
import pytest

from ninferbuild import explain
from ninferbuild.bindings import Fragment
from ninferbuild.build import build, plan
from ninferbuild.cache import BuildRecord, Cache
from ninferbuild.history import FIRST_BUILD, PRUNED, RERUN, Explanation, History, parents_table, text_lines
from ninferbuild.manifest import Slot, Template, parse
from ninferbuild.memo import SETTLED_NS
from ninferbuild.target import Assign, CacheSettings, Target

NAMES = ("text/layers/3/mlp/gate", "text/layers/3/mlp/up")


def manifest(**changed: str | None) -> str:
    """A manifest of two inputs. ``__`` in a name stands for a dot, ``_`` at its end for nothing."""
    facts = {
        "codec": "row_split_k128_v1 v1",
        "divisors": "1",
        "format": "q4_g64_fp16",
        "input.00000": "BF16 [256, 128] plain v1",
        "input.00000.values": "65536 bytes " + "1" * 32,
        "input.00001": "BF16 [256, 128] plain v1",
        "input.00001.values": "65536 bytes " + "2" * 32,
        "layout": "row_split_k128_v1",
        "manifest": "v1",
        "method": "grouped_absmax v1",
        "shape": "[512, 128]",
    }
    facts |= {name.replace("__", "."): value for name, value in changed.items()}  # type: ignore[misc]
    return "".join(sorted(f"{name}: {value}\n" for name, value in facts.items() if value is not None))


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, []),
        ({"format": "q6_g64_fp16"}, ["format: q4_g64_fp16 → q6_g64_fp16"]),
        (
            {"format": "fp8_row", "layout": "row_scale_v1", "codec": "row_scale_v1 v1"},
            ["format: q4_g64_fp16 → fp8_row", "layout: row_split_k128_v1 → row_scale_v1"],
        ),
        ({"codec": "row_split_k128_v1 v2"}, ["layout codec: row_split_k128_v1 v1 → row_split_k128_v1 v2"]),
        ({"method": "grouped_absmax v2"}, ["grouped_absmax v1 → v2"]),
        ({"method": "cast_direct v1"}, ["method: grouped_absmax → cast_direct"]),
        ({"shape": "[256, 256]", "divisors": "2"}, ["shape: [512, 128] → [256, 256]", "divisors: 1 → 2"]),
        ({"manifest": "v2"}, ["manifest: v1 → v2"]),
        ({"input__00001__values": "65536 bytes " + "3" * 32}, [f"source bytes changed: {NAMES[1]}"]),
        (
            {"input__00000__values": "65536 bytes " + "3" * 32, "input__00001__values": "65536 bytes " + "4" * 32},
            [f"source bytes changed: {NAMES[0]}, {NAMES[1]}"],
        ),
        ({"input__00001__values": "65536 bytes"}, [f"source not hashed yet: {NAMES[1]}"]),
        ({"input__00001__values": "32768 bytes"}, [f"source bytes changed: {NAMES[1]}"]),
        ({"input__00000": "F32 [256, 128] plain v1"}, [f"source type: BF16 → F32: {NAMES[0]}"]),
        ({"input__00000": "BF16 [256, 128] plain v2"}, [f"decoder: plain v1 → plain v2: {NAMES[0]}"]),
        ({"input__00000": "[256, 128] read by a function"}, [f"source now read by a function: {NAMES[0]}"]),
        ({"input__00000__step__0": "('rows',)"}, [f"transformation of the source changed: {NAMES[0]}"]),
        ({"input__00000__weight_divisor": "0000803f"}, [f"weight divisor: none → 0000803f: {NAMES[0]}"]),
        ({"parameter__steps": "int 5"}, ["parameter steps: none → int 5"]),
        ({"fact__000": "importance: " + "a" * 32}, ["importance: none → …"]),
        ({"uncacheable": "5" * 32}, []),
    ],
)
def test_lines_of_a_built_in_method(changed: dict[str, str], lines: list[str]) -> None:
    assert explain.changes(manifest(), manifest(**changed), NAMES) == lines


def test_values_too_long_to_read_have_merely_changed() -> None:
    old, new = manifest(fact__000="importance: " + "a" * 32), manifest(fact__000="importance: " + "b" * 32)
    assert explain.changes(old, new, NAMES) == ["importance changed"]
    assert explain.change("x", "z" * 61, "2") == "x changed"
    assert explain.change("x", "z" * 60, "2") == "x: " + "z" * 60 + " → 2"


def test_many_parameters_are_cut_short() -> None:
    slots = {f"input__{index:05}__values": "8 bytes " + "9" * 32 for index in range(300)}
    names = [f"experts/{index}" for index in range(300)]
    (line,) = explain.changes(manifest(), manifest(**slots), names)[-1:]
    assert line == "source bytes changed: experts/0, experts/1, experts/2, experts/3 and 296 more"


def test_codes_and_scales_are_one_change() -> None:
    encoded: dict[str, str | None] = {"input__00000__values": None}
    old = manifest(**encoded, input__00000__codes="8 bytes " + "1" * 32, input__00000__scales="2 bytes " + "1" * 32)
    both = manifest(**encoded, input__00000__codes="8 bytes " + "2" * 32, input__00000__scales="2 bytes " + "2" * 32)
    scales = manifest(**encoded, input__00000__codes="8 bytes " + "1" * 32, input__00000__scales="2 bytes " + "2" * 32)
    assert explain.changes(old, both, NAMES) == [f"source bytes changed: {NAMES[0]}"]
    assert explain.changes(old, scales, NAMES) == [f"source bytes changed (scales): {NAMES[0]}"]


USER = {"method": None, "torch": "2.12.0", "python": "3.11", "device": "cpu", "rows per chunk": "512"}


def user(*code: str, **changed: str | None) -> str:
    lines = {f"code__{number:04}": line for number, line in enumerate(code)}
    return manifest(**{**USER, **lines, **changed})


SCALE = ("fingerprint 1", "global helpers.LIMIT = int 3", "helpers.scale code = " + "a" * 32, "subject function r.f")


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (SCALE, []),
        (("fingerprint 1", "a first line", *SCALE[1:]), ["now depends on a"]),
        ((*SCALE[:2], "helpers.scale code = " + "b" * 32, SCALE[3]), ["code of helpers.scale changed"]),
        (
            (*SCALE[:1], "helpers.scale code = " + "b" * 32, "global helpers.NEW = int 4", SCALE[3]),
            ["code of helpers.scale changed"],
        ),
        ((SCALE[0], "global helpers.LIMIT = int 4", *SCALE[2:]), ["helpers.LIMIT: int 3 → int 4"]),
        ((*SCALE, "helpers.scale default n = int 4"), ["default of n in helpers.scale: none → int 4"]),
        ((*SCALE, "package scipy 1.11 " + "c" * 32), ["now depends on package scipy"]),
    ],
)
def test_lines_of_a_users_function(code: tuple[str, ...], lines: list[str]) -> None:
    assert explain.changes(user(*SCALE), user(*code), NAMES) == lines


def test_packages_and_surroundings() -> None:
    old, new = "package scipy 1.11 " + "c" * 32, "package scipy 1.12 " + "d" * 32
    assert explain.code_changes([old], [new]) == ["package scipy: 1.11 → 1.12"]
    assert explain.code_changes([old], ["package scipy 1.11 " + "d" * 32]) == ["files of package scipy 1.11 changed"]
    assert explain.code_changes([old], []) == ["no longer depends on package scipy"]
    changed = {"torch": "2.13.0", "device": "cuda NVIDIA H200"}
    assert explain.changes(user(), user(**changed), NAMES) == [
        "device: cpu → cuda NVIDIA H200",
        "torch: 2.12.0 → 2.13.0",
    ]


def test_a_function_in_place_of_a_built_in_method_is_one_line() -> None:
    assert explain.changes(manifest(), user(*SCALE), NAMES) == ["method: grouped_absmax → a function of the recipe"]
    assert explain.changes(user(*SCALE), manifest(), NAMES) == ["method: a function of the recipe → grouped_absmax"]


def test_every_difference_of_text_gives_a_line() -> None:
    """Whatever line of a manifest changes, vanishes or is new: something is said."""
    text = user(*SCALE, parameter__n="int 1", input__00000__label="x", input__00000__use="('a', 'b') A16Only")
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        if "subject" in value:
            continue
        for other in (text.replace(line, f"{name}: {value}x"), text.replace(line + "\n", "")):
            assert explain.changes(text, other, NAMES), (line, other)
            assert explain.changes(other, text, NAMES), (line, other)


def test_manifests_with_repeated_names_and_odd_values_are_read() -> None:
    assert parse("use: a\nuse: b\nodd\n") == {"use": "a; b", "odd": ""}


def test_partly_known_templates() -> None:
    template = Template(
        ("format: bf16",), (Slot("input.00000.values", "4 bytes"), Slot("input.00001.values", "8 bytes"))
    )
    text = template.fill_known([None, bytes(16)])
    assert text.splitlines() == [
        "format: bf16",
        "input.00000.values: 4 bytes",
        f"input.00001.values: 8 bytes {'00' * 16}",
    ]
    assert template.fill_known([bytes(16)] * 2) == template.fill([bytes(16)] * 2)
    assert template.fill_known([None] * 2) == template.stem()


# Parents of the last build


def parent(*fragments: tuple[str, int, int]) -> Any:
    cursor, parts = 0, []
    for name, begin, count in fragments:
        parts.append(Fragment(name, begin, cursor, cursor + count))
        cursor += count
    return SimpleNamespace(fragments=tuple(parts), names=tuple(part.parameter for part in parts))


def record(*parents: Any, **changed: Any) -> BuildRecord:
    keys = tuple(index.to_bytes(16, "big") for index in range(len(parents)))
    return BuildRecord("t", changed.pop("keys", keys), "", 0.0, extra=changed.pop("extra", parents_table(parents)))


def test_parents_are_found_by_what_they_hold() -> None:
    gate, up, down = ("gate", 0, 8), ("up", 0, 8), ("down", 0, 8)
    top, rest = ("head", 0, 4), ("head", 4, 12)
    found = History([record(parent(gate, up), parent(down), parent(top), parent(rest))])
    assert found.match(parent(gate, up)) == ("same", bytes(16))
    assert found.match(parent(down)) == ("same", (1).to_bytes(16, "big"))
    assert found.match(parent(rest)) == ("same", (3).to_bytes(16, "big"))
    assert found.match(parent(up, gate)) == ("reordered", None)
    assert found.match(parent(gate)) == ("smaller", None)
    assert found.match(parent(gate, up, down)) == ("apart", None)
    assert found.match(parent(gate, ("new", 0, 8))) == ("apart", None)
    assert found.match(parent(("new", 0, 8))) == ("new", None)
    assert found.match(parent(("head", 0, 16))) == ("new", None)


def test_records_without_a_fitting_table_are_passed_over() -> None:
    gate = parent(("gate", 0, 8))
    good = record(gate)
    strange: list[dict[str, Any]] = [{}, {"names": ["gate"]}, {"fragments": b"x", "counts": [1]}]
    for extra in strange:
        assert History([record(gate, extra=extra)]).build is None
        assert History([record(gate, extra=extra), good]).build is good
    assert History([record(gate, keys=())]).build is None
    assert History([]).match(gate) == ("new", None)


def test_the_table_is_compact() -> None:
    parents = [parent((f"text/layers/{index}/mlp/down", 0, 1 << 20)) for index in range(1000)]
    table = parents_table(parents)
    assert len(table["fragments"]) + len(table["counts"]) == 9000
    found = History([record(*parents)])
    assert [found.match(item)[1] for item in parents] == list(record(*parents).keys)


def test_text_of_explanations() -> None:
    def item(name: str, *lines: str) -> Explanation:
        return Explanation(name, (name,), "run", lines)

    assert text_lines([]) == []
    assert text_lines([item("a", "x"), item("b", "x"), item("c", "y", "z")]) == ["a", "b", "  x", "c", "  y", "  z"]
    assert text_lines([item("a", FIRST_BUILD), item("b", FIRST_BUILD)]) == ["2 actions: first build of this target"]
    assert text_lines([item("a", FIRST_BUILD)]) == ["a", "  first build of this target"]


# Builds and plans

DOWN = "text/layers/3/mlp/down"
GATE_UP = "text/layers/3/mlp/gate (+1)"


@dataclass
class Notes:
    """A progress that keeps notes and explanations."""

    lines: list[str] = field(default_factory=list)

    def note(self, message: str) -> None:
        self.lines.append(message)

    explanation = note

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@dataclass
class Bench:
    target: Target

    def with_(self, **changes: Any) -> Target:
        return replace(self.target, **changes)

    def assigned(self, select: str, **values: Any) -> Target:
        return self.with_(assigns=(Assign((select,), **values),))

    def explained(self, target: Target, *, hash_sources: bool = True) -> dict[str, tuple[str, ...]]:
        """What a plan says, by name."""
        explanations = plan(target, explain=True, hash_sources=hash_sources).explanations
        assert explanations is not None
        return {item.name: item.lines for item in explanations}

    def overwrite(self, tensor: str, at: int, data: bytes) -> None:
        """Change bytes of a tensor, in a copy of the checkpoint that takes its place."""
        model = self.target.out.with_name("changed")
        shutil.copytree(self.target.model, model)
        self.target = self.with_(model=model)
        path = model / "model.safetensors"
        content = bytearray(path.read_bytes())
        (size,) = struct.unpack("<Q", content[:8])
        begin = 8 + size + json.loads(content[8 : 8 + size])[tensor]["data_offsets"][0]
        content[begin + at : begin + at + len(data)] = data
        path.write_bytes(content)


def target_in(root: Path) -> Target:
    return Target(
        name="t",
        identity="explained",
        file=None,
        model=root / "fx",
        recipe="qwen3_6_27b",
        components=("text",),
        out=root / "t.ninfer",
        device="cpu",
        cache=CacheSettings(dir=root / "cache", trust_stat=True),
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a target was built for the first time, from files old enough to be remembered."""
    root = tmp_path_factory.mktemp("built")
    fx.write_dense(root / "fx")
    time.sleep(SETTLED_NS / 1e9 + 0.1)
    notes = Notes()
    first = build(target_in(root), explain=True, progress=notes)
    assert first.explanations is not None
    assert {item.lines for item in first.explanations} == {(FIRST_BUILD,)}
    assert f"{first.total} actions: {FIRST_BUILD}" in notes.lines
    return root


@pytest.fixture
def bench(built: Path, tmp_path: Path) -> Bench:
    """A target that was built once, with a cache of its own."""
    for name in ("cache", "t.ninfer", "t.ninfer.conversion.json"):
        copy = shutil.copytree if name == "cache" else shutil.copyfile
        copy(built / name, tmp_path / name)
    return Bench(replace(target_in(tmp_path), model=built / "fx"))


def test_plan_and_build_name_the_changed_choice(bench: Bench) -> None:
    target = bench.assigned("text/layers/3/mlp/*", format="q6_g64_fp16")
    wanted = {
        GATE_UP: ("format: q4_g64_fp16 → q6_g64_fp16",),
        DOWN: ("format: q5_g64_fp16 → q6_g64_fp16",),
    }
    assert bench.explained(target) == wanted
    notes = Notes()
    result = build(target, explain=True, progress=notes)
    assert result.explanations is not None
    assert {item.name: item.lines for item in result.explanations} == wanted
    assert notes.lines[:2] == [GATE_UP, "  format: q4_g64_fp16 → q6_g64_fp16"]
    assert [entry["name"] for entry in result.to_json()["explain"]] == list(wanted)
    again = build(target, explain=True, progress=notes)
    assert again.explanations == ()
    assert notes.lines[-1] == "no action runs: every payload is cached"
    assert "explain" not in build(target).to_json()
    assert "explain" not in plan(target).to_json()
    back = build(bench.target, explain=True)  # cached from the build before the last
    assert back.explanations == ()


def test_other_ways_of_packing(bench: Bench, tmp_path: Path) -> None:
    override = tmp_path / "apart.py"
    override.write_text(f'def configure(model, recipe, sources):\n    recipe.separate(["{NAMES[0]}", "{NAMES[1]}"])\n')
    found = bench.explained(bench.with_(overrides=(str(override),)))
    stored = "not built before in this target: new parent, whose parameters were stored together with others of "
    assert found == {name: (stored + name,) for name in NAMES}


def test_more_components_are_new_parents(bench: Bench) -> None:
    found = bench.explained(bench.with_(components=("text", "vision")))
    assert found
    assert all(name.startswith("vision/") for name in found)
    assert found["vision/merger/fc1"] == ("not built before in this target: new parent of vision/merger/fc1",)


TENSOR = "model.language_model.layers.3.mlp.down_proj.weight"


def test_changed_bytes_that_samples_do_not_show(bench: Bench) -> None:
    bench.overwrite(TENSOR, 10000, b"\x00\x3f")
    found = bench.explained(bench.target, hash_sources=False)
    assert found[DOWN] == (f"source not hashed yet: {DOWN}",)
    assert bench.explained(bench.target) == {DOWN: (f"source bytes changed: {DOWN}",)}
    result = build(bench.target, explain=True)
    assert result.explanations is not None
    assert [(item.name, item.lines) for item in result.explanations] == [(DOWN, (f"source bytes changed: {DOWN}",))]


def test_changed_bytes_that_are_known_only_when_they_were_read(bench: Bench) -> None:
    bench.overwrite(TENSOR, 0, b"\x00\x3f")
    notes = Notes()
    result = build(bench.target, explain=True, progress=notes)
    assert result.explanations is not None
    assert [(item.name, item.lines) for item in result.explanations] == [(DOWN, (f"source bytes changed: {DOWN}",))]
    assert notes.lines[:2] == [DOWN, f"  source not hashed yet: {DOWN}"]
    assert notes.lines[-2:] == [DOWN, f"  source bytes changed: {DOWN}"]


def test_pruned_payloads(bench: Bench) -> None:
    before = plan(bench.target, hash_sources=True)
    (key,) = (action.key for action in before.actions if action.name == DOWN)
    assert key is not None
    with Cache.open(bench.target.cache.dir) as cache:  # type: ignore[arg-type]
        assert cache.remove(bytes.fromhex(key))
    assert bench.explained(bench.target) == {DOWN: (PRUNED,)}
    result = build(bench.target, explain=True)
    assert result.explanations is not None
    assert [(item.name, item.lines) for item in result.explanations] == [(DOWN, (PRUNED,))]


def test_rerun_says_that_it_was_asked_for(bench: Bench) -> None:
    result = build(bench.target, rerun=True, explain=True, link=False)
    assert result.explanations is not None
    assert {item.lines for item in result.explanations} == {(RERUN,)}


METHOD = """
import helpers
from tools.convert.quantization.groupwise import quantize_matrix


def scaled(request):
    rows, width = request.target.shape

    def produce(output):
        block = request.values(0, rows * width).reshape(rows, width) * helpers.scale()
        words = quantize_matrix(block, request.target.format, device=request.device)
        output.write_codes(0, words.codes, words.scales)

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign("text/layers/3/mlp/down", method=scaled, parameters={"n": 1})
"""

HELPERS = """
from pathlib import Path

LIMIT = 2


def scale():
    return float(Path(__file__).with_name("scale.txt").read_text()) * LIMIT
"""


def test_users_functions(bench: Bench, tmp_path: Path) -> None:
    recipe, helpers, opened = (tmp_path / name for name in ("own.py", "helpers.py", "scale.txt"))
    recipe.write_text(METHOD)
    helpers.write_text(HELPERS)
    opened.write_text("0.5")
    target = bench.with_(overrides=(str(recipe),))
    assert bench.explained(target)[DOWN] == (
        "method: grouped_absmax → a function of the recipe",
        "parameter n: none → int 1",
    )
    build(target)
    assert bench.explained(target) == {}
    for file, text, line in (
        (helpers, HELPERS.replace("* LIMIT", "+ LIMIT"), "code of helpers.scale changed"),
        (helpers, HELPERS.replace("LIMIT = 2", "LIMIT = 3"), "helpers.LIMIT: int 2 → int 3"),
        (recipe, METHOD.replace('"n": 1', '"n": 2'), "parameter n: int 1 → int 2"),
        (opened, "0.25", f"{opened} changed"),
    ):
        before = file.read_text()
        file.write_text(text)
        assert bench.explained(target) == {DOWN: (line,)}
        file.write_text(before)
        assert bench.explained(target) == {}


def test_uncacheable_functions_say_so(bench: Bench, tmp_path: Path) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(METHOD.replace("import helpers", "import time").replace("helpers.scale()", "min(1, time.time())"))
    target = bench.with_(overrides=(str(recipe),))
    for _ in range(2):
        result = build(target, explain=True)
        assert result.explanations is not None
        (item,) = result.explanations
        assert item.lines[0].startswith("uncacheable: ")
        assert "clock" in item.lines[0]
