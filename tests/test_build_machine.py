"""Random histories of a checkpoint, a recipe and a cache: every build gives what a clean build of the same state gives.

Each run is a world of its own: a checkpoint, a recipe file with helpers, two targets, a cache. The seed is printed at
the end; ``BUILD_MACHINE_SEED`` repeats it, ``BUILD_MACHINE_RUNS`` and ``BUILD_MACHINE_STEPS`` say how much is done (see
``make soak``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
import errno
import os
from pathlib import Path
import random
import shutil
import signal
import tempfile
from typing import Any, TypeVar

from fixtures import interruption, micro
from fixtures.clean_build import Files, clean_build
from fixtures.micro_recipe import (
    CHOICES,
    GROUPS,
    LOOKED_AT,
    OBSERVATIONS,
    RULES,
    SOURCES,
    TWINS,
    Choices,
    Code,
    Options,
    consistent,
)
from fixtures.micro_world import CLOCK, TARGETS, World
from hypothesis import HealthCheck, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
import pytest
import torch
import xxhash

from ninferbuild import build, plan
from ninferbuild.build import BuildResult
from ninferbuild.cache import Cache, Limits, api
from ninferbuild.errors import NinferbuildError, SourceChangedError
from ninferbuild.progress import QuietProgress

T = TypeVar("T")
PARTS = 4
"""Tests that share the runs, so that several cores can."""

RUNS = int(os.environ.get("BUILD_MACHINE_RUNS", "200"))
STEPS = int(os.environ.get("BUILD_MACHINE_STEPS", "30"))
LIMITS = Limits(
    index_map=1 << 30, segment_map=1 << 28, segment_bytes=120_000, transaction_bytes=20_000, queue_bytes=60_000
)
"""So small that a few builds fill several segments."""

REFUSALS = (NinferbuildError, ValueError, TypeError, OSError)
MATRICES = tuple(micro.MATRICES)
WAYS = ("renamed", "copied", "hard-linked", "symlinked")
DAMAGES = ("flip", "overwrite", "truncate", "remove")
CONSTANTS = ("scale", "gain", "default", "offset", "table", "late", "member", "data", "comment")
POLICIES = ("A16Only", "AllowA8", "AllowA4")
DIGITS = st.integers(10, 99)
ROWS = st.tuples(st.integers(0, 31), st.integers(1, 32)).map(lambda pair: (min(pair), max(pair[1], pair[0] + 1)))
CUSTOM = [choice for choice in CHOICES if choice[1] == "custom"]
USED = (*MATRICES, "fp8", "nvfp4")

Edit = tuple[str, tuple[Any, ...]]
"""Name and arguments of a method of :mod:`fixtures.micro_recipe`'s values that returns a changed one."""

EDITS: dict[type, dict[str, tuple[Any, ...]]] = {
    Choices: {
        "assign": (st.lists(st.sampled_from(MATRICES), min_size=1, max_size=3), st.sampled_from(CHOICES)),
        "give_parameters": (
            st.sampled_from(MATRICES),
            st.dictionaries(st.sampled_from(["k", "other"]), st.sampled_from([0, 1, 2, 0.0, 1.0, True]), max_size=2),
        ),
        "split": (st.sampled_from(MATRICES), ROWS, st.sampled_from(list(RULES))),
        "group": (st.sampled_from(GROUPS), st.sampled_from(CHOICES)),
        "keep_separate": (st.sampled_from(MATRICES),),
        "share": (st.sampled_from(TWINS),),
        "set_policy": (st.sampled_from(USED), st.sampled_from(POLICIES)),
        "supply": (st.sampled_from(["divisors", "calibrations"]), st.sampled_from(USED), st.integers(1, 3)),
        "take_from": (
            st.sampled_from([name for name in MATRICES if micro.MATRICES[name][0] == 32]),
            st.sampled_from(list(SOURCES)),
            st.sampled_from(CHOICES),
        ),
        "drop": (st.sampled_from(["rows", "sources", "groups", "shares", "divisors", "calibrations", "parameters"]),),
    },
    Code: {
        "set": (
            st.sampled_from(CONSTANTS),
            DIGITS,
        ),
        "turn": (),
        "observe": (st.sampled_from(list(OBSERVATIONS)),),
    },
    Options: {
        "set": (st.just("name"), st.sampled_from([None, "x", "another name"])),
        "cut": (st.sampled_from([None, 12_000, 16_384, 40_000]),),
        "chunk": (st.sampled_from([None, 1, 5, 100]),),
        "toggle": (st.sampled_from(["resource", "over"]),),
        "assign": (
            st.lists(
                st.tuples(st.sampled_from(["*", "norm", "gate", "*e*"]), st.sampled_from(["bf16", "fp32"])), max_size=2
            ),
        ),
    },
}


def edits_of(kind: type) -> st.SearchStrategy[Edit]:
    return st.one_of([st.tuples(st.just(name), st.tuples(*arguments)) for name, arguments in EDITS[kind].items()])


def apply(edit: Edit, value: T) -> T:
    changed: T = getattr(value, edit[0])(*edit[1])
    return changed


class Notes(QuietProgress):
    """Keeps what a build says, in whatever thread, for the account of a failing run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


class BuildMachine(RuleBasedStateMachine):
    """The state of the world is what files and recipes are now; ``clean`` knows what each state must give."""

    def __init__(self) -> None:
        super().__init__()
        base = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(prefix="build-machine-", dir=base if os.access(base, os.W_OK) else None))
        self.world = World(self.root)
        self.past = [deepcopy(self.world.state)]
        self.clean: dict[bytes, Files | None] = {}
        self.outputs: dict[str, list[Files] | None] = {name: [{}] for name in TARGETS}
        """What may lie at each output: a set that was published, or nothing; None for what the test damaged."""
        self.orphans: dict[str, set[str]] = {name: set() for name in TARGETS}
        self.sound = True  # nobody damaged the cache
        self.versions = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def wanted(self, name: str) -> Files | None:
        """The files of a clean build of the state; None when such a build is refused."""
        target = self.world.target(name)
        key = xxhash.xxh3_128(name.encode())
        for piece in self.world.inputs():
            key.update(len(piece).to_bytes(8, "little") + piece)
        if key.digest() not in self.clean:
            try:
                self.clean[key.digest()] = clean_build(target)
            except REFUSALS as error:
                note(f"    a clean build is refused: {error}")
                self.clean[key.digest()] = None
        return self.clean[key.digest()]

    def found(self, name: str) -> Files:
        """What lies in the directory of an output, the report aside."""
        folder = self.world.outputs(name)
        if not folder.exists():
            return {}
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        files.pop(f"{name}.ninfer.conversion.json", None)
        return files

    @initialize(
        observes=st.sampled_from(list(OBSERVATIONS)),
        name=st.sampled_from(MATRICES),
        choice=st.sampled_from(CUSTOM),
        source=st.sampled_from([None, *SOURCES]),
    )
    def begin(self, observes: str, name: str, choice: tuple[str, str], source: str | None) -> None:
        """Each run has its theme: what the function looks at, and a source that is not the model's."""
        state = self.world.state
        state.code = state.code.observe(observes)
        state.choices = state.choices.assign([name], choice)
        if source is not None:
            state.choices = state.choices.take_from("up", source, ("q8_g32_fp16", "grouped_absmax"))
        self.edited()

    # Edits of recipe, code and options

    @rule(
        what=st.sampled_from(["looked at", "source", "scale", "gain", "default", "offset"]),
        value=DIGITS,
        then_build=st.sampled_from([None, *TARGETS]),
    )
    def change_what_matters(self, what: str, value: int, then_build: str | None) -> None:
        """Change what the function looks at now, what it computes with, or what a source is read from."""
        state = self.world.state
        if what == "looked at":
            what = LOOKED_AT.get(state.code.observes, state.code.observes)
        if what == "source":
            state.code = state.code.set("data", value)
            self.world.overwrite_other(value % 4)
        elif what == "the environment":
            state.shift = value % 10
        elif what in CONSTANTS:
            state.code = state.code.set(what, value)
        else:
            changed = state.choices.set_policy("query", POLICIES[value % 3]).give_parameters("down", {"k": value % 4})
            state.choices = consistent(changed)
        self.edited()
        if then_build is not None:
            self.built(then_build, jobs=1)

    @rule(edits=st.lists(edits_of(Choices), min_size=1, max_size=3))
    def edit_recipe(self, edits: list[Edit]) -> None:
        state = self.world.state
        for edit in edits:
            state.choices = apply(edit, state.choices)
        self.world.state.choices = consistent(state.choices)
        self.edited()

    @rule(edits=st.lists(edits_of(Code), min_size=1, max_size=2), custom=st.sampled_from([None, *MATRICES]))
    def edit_code(self, edits: list[Edit], custom: str | None) -> None:
        state = self.world.state
        for edit in edits:
            state.code = apply(edit, state.code)
        if custom is not None:
            state.choices = consistent(apply(("assign", ([custom], ("q6_g64_fp16", "custom"))), state.choices))
        self.edited()

    @rule(edits=st.lists(edits_of(Options), min_size=1, max_size=2), name=st.sampled_from(TARGETS))
    def edit_target(self, edits: list[Edit], name: str) -> None:
        for edit in edits:
            self.world.state.options[name] = apply(edit, self.world.state.options[name])
        self.edited()

    @rule(max_size=st.sampled_from([None, None, 10_000, 60_000, 200_000]), shift=st.integers(0, 3))
    def change_surroundings(self, max_size: int | None, shift: int) -> None:
        self.world.state.max_size, self.world.state.shift = max_size, shift
        self.edited()

    @rule(index=st.integers(0, 7))
    def go_back(self, index: int) -> None:
        self.world.restore(self.past[index % len(self.past)])

    def edited(self) -> None:
        """Write the state's texts and remember the state."""
        self.world.write_texts()
        self.past = [*self.past[-7:], deepcopy(self.world.state)]

    # Edits of sources

    @rule(names=st.lists(st.sampled_from(list(micro.TENSORS)), min_size=1, max_size=2), known=st.booleans())
    def change_tensors(self, names: list[str], known: bool) -> None:
        for name in names:
            self.versions += 1
            self.world.overwrite(name, self.versions % 2 if known else self.versions)
        self.edited()

    @rule(other=st.integers(0, 3), notes=DIGITS)
    def change_other_files(self, other: int, notes: int) -> None:
        self.world.overwrite_other(other)
        self.world.write_notes(notes)
        self.edited()

    @rule(
        change=st.one_of(
            st.tuples(st.just("reshard"), st.tuples(st.integers(1, 4))),
            st.tuples(st.just("move"), st.tuples(st.sampled_from(["m0", "m1", "model-22"]), st.sampled_from(WAYS))),
            st.tuples(st.just("touch"), st.tuples(st.sampled_from([1, 10**18, 4 * 10**18]))),
        )
    )
    def rearrange(self, change: Edit) -> None:
        """The same bytes in other files, elsewhere, or with other times."""
        getattr(self.world, change[0])(*change[1])
        self.edited()

    @rule()
    def let_time_pass(self) -> None:
        self.world.wait()

    # Builds

    @rule(
        name=st.sampled_from(TARGETS),
        jobs=st.integers(1, 3),
        rerun=st.sampled_from([False, False, False, True]),
        rehash=st.sampled_from([False, False, False, True]),
        link=st.sampled_from([True, True, True, False]),
    )
    def build(self, name: str, jobs: int, rerun: bool, rehash: bool, link: bool) -> None:
        self.built(name, jobs=jobs, rerun=rerun, rehash=rehash, link=link)

    @rule(name=st.sampled_from(TARGETS))
    def build_in_order(self, name: str) -> None:
        self.built(name, jobs=1)

    @precondition(lambda self: self.world.state.max_size is None)
    @rule(name=st.sampled_from(TARGETS))
    def build_twice(self, name: str) -> None:
        """What was built is found again, unless nothing can vouch for it."""
        if self.built(name, jobs=2) is None:
            return
        uncacheable = self.world.state.code.observes == "the environment"
        planned = plan(self.world.target(name), hash_sources=True)
        missing = [action.name for action in planned.actions if action.state != "cached" and action.method != "custom"]
        assert not missing, f"what was just built is not cached: {missing}"
        again = self.built(name, jobs=2)
        assert again is not None
        assert again.up_to_date
        assert uncacheable or again.executed == 0

    def built(self, name: str, **options: object) -> BuildResult | None:
        """Build and compare; None when both builds are refused."""
        wanted = self.wanted(name)
        target, notes = self.world.target(name), Notes()
        # An entry that does not certify itself any more is a foreign file.
        overwrite = self.outputs[name] is None
        result, refusal = None, None
        try:
            result = build(target, progress=notes, overwrite=overwrite, **options)  # type: ignore[arg-type]
        except REFUSALS as error:
            refusal = error
        for line in notes.lines:
            note(f"    {line}")
        if wanted is None:
            assert result is None, "a build succeeds that is refused with a clean cache"
            return None
        assert result is not None, f"a build is refused that is not with a clean cache: {refusal}"
        assert result.executed + result.cached == result.total
        if result.out is not None:
            self.compare(name, wanted)
            assert result.artifact_id == wanted[target.out.name][16:32].hex()
            assert [path.name for path, _ in result.files] == sorted(wanted)
        return result

    def compare(self, name: str, wanted: Files) -> None:
        found = self.found(name)
        if self.outputs[name] is None:  # what belonged to an entry that is gone or unreadable belongs to nobody
            self.orphans[name] |= found.keys()
        self.orphans[name] -= wanted.keys()
        assert found.keys() - self.orphans[name] == wanted.keys()
        for file, data in wanted.items():
            assert found[file] == data, f"{file} differs from a clean build: {difference(found[file], data)}"
        self.outputs[name] = [wanted]

    def interrupted(self, name: str, wanted: Files | None) -> None:
        """After a build that may have ended anywhere, the output is a whole set or absent."""
        allowed = self.outputs[name]
        if allowed is None:
            return
        if wanted is not None and wanted not in allowed:
            allowed.append(wanted)
        found = self.found(name)
        entry = f"{name}.ninfer"
        if entry in found:
            assert any(
                entry in files and all(found.get(file) == data for file, data in files.items()) for files in allowed
            ), "the output is no complete set"

    @rule(name=st.sampled_from(TARGETS), jobs=st.integers(1, 2), step=st.integers(0, 120), rerun=st.booleans())
    def kill(self, name: str, jobs: int, step: int, rerun: bool) -> None:
        """Kill a building process before one of its steps."""
        wanted = self.wanted(name)

        def act() -> None:
            with interruption.at_step(step, interruption.kill):
                build(self.world.target(name), jobs=jobs, rerun=rerun, overwrite=self.outputs[name] is None)

        status = interruption.in_child(act)
        if os.WIFEXITED(status):
            assert (os.WEXITSTATUS(status) == 0) == (wanted is not None)
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL
        self.interrupted(name, wanted)

    @rule(
        name=st.sampled_from(TARGETS),
        jobs=st.integers(1, 2),
        step=st.integers(0, 120),
        error=st.sampled_from([OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]),
    )
    def abort(self, name: str, jobs: int, step: int, error: BaseException) -> None:
        """Raise in one step of a build."""
        wanted = self.wanted(name)

        def act() -> None:
            raise error

        raised: BaseException | None = None
        try:
            with interruption.at_step(step, act):
                build(self.world.target(name), jobs=jobs, rerun=True, overwrite=self.outputs[name] is None)
        except (*REFUSALS, KeyboardInterrupt, MemoryError) as error_raised:
            raised = error_raised
            note(f"    {type(raised).__name__}: {raised}")
        assert getattr(raised, "errno", None) != errno.EBADF, "a descriptor is used that is closed"
        self.interrupted(name, wanted)

    @rule(name=st.sampled_from(TARGETS), step=st.integers(0, 120), tensor=st.sampled_from(list(micro.TENSORS)))
    def change_while_building(self, name: str, step: int, tensor: str) -> None:
        """A tensor changes in the middle of a build, which fails, or gives all of what was there before or after."""
        before = self.wanted(name)
        self.versions += 1
        raised: Exception | None = None
        try:
            with interruption.at_step(step, lambda: self.world.overwrite(tensor, self.versions)):
                build(self.world.target(name), jobs=1, rerun=True, overwrite=self.outputs[name] is None)
        except REFUSALS as error:
            note(f"    {type(error).__name__}: {error}")
            raised = error
        self.edited()
        after = self.wanted(name)
        if raised is None:
            wanted = after if self.found(name) == after else before
            assert wanted is not None
            self.compare(name, wanted)
        else:
            assert isinstance(raised, SourceChangedError) or before is None or after is None, raised
            self.interrupted(name, before)

    # The cache

    @rule(
        work=st.one_of(
            st.fixed_dictionaries(
                {
                    "max_size": st.sampled_from([None, 0, 20_000, 80_000]),
                    "older_than": st.sampled_from([None, 0.0, 0.05]),
                    "keep_builds": st.sampled_from([None, 0, 1]),
                }
            ),
            st.sampled_from(["compact", "clear", "verify", "repair"]),
            st.integers(0, 30),
        )
    )
    def maintain(self, work: dict[str, Any] | str | int) -> None:
        """Prune, compact, clear, verify, or remove one action."""
        with Cache.open(self.world.cache) as cache:
            if isinstance(work, dict):
                result = cache.prune(**work)
                assert not result.obstacles, result.obstacles
                assert work["max_size"] is None or work["keep_builds"] or result.live_bytes <= work["max_size"]
            elif isinstance(work, int):
                keys = sorted(cache.matching(""))
                assert not keys or cache.remove(keys[work % len(keys)])
            elif work in ("compact", "clear"):
                obstacles = getattr(cache, work)().obstacles
                assert not obstacles, obstacles
            else:
                problems = cache.verify(repair=work == "repair").problems
                assert not (self.sound and problems), problems

    @rule(
        kind=st.sampled_from(DAMAGES),
        payload=st.booleans(),
        index=st.integers(0, 40),
        where=st.integers(0, 2**32),
        then_build=st.booleans(),
    )
    def damage_cache(self, kind: str, payload: bool, index: int, where: int, then_build: bool) -> None:
        """Damage any file of the cache; ``payload`` damages bytes of one that holds payloads."""
        found = self.world.cache.glob("segments/*/data.mdb") if payload else self.world.cache.rglob("*")
        if damage_one(found, "overwrite" if payload else kind, index, where):
            self.sound = False
            if then_build:
                self.built(TARGETS[where % 2], jobs=1)

    @rule(
        kind=st.sampled_from(DAMAGES),
        name=st.sampled_from(TARGETS),
        index=st.integers(0, 3),
        where=st.integers(0, 2**32),
        then_build=st.booleans(),
    )
    def damage_output(self, kind: str, name: str, index: int, where: int, then_build: bool) -> None:
        """Damage a file of an artifact, or its report."""
        if damage_one(self.world.outputs(name).glob("*"), kind, index, where):
            self.outputs[name] = None
            if then_build:
                self.built(name, jobs=1)


def damage_one(paths: Iterable[Path], kind: str, index: int, where: int) -> bool:
    """Damage one of the files among ``paths``; whether there is one."""
    files = sorted(path for path in paths if path.is_file())
    if files:
        note(f"    {files[index % len(files)]}")
        damage(files[index % len(files)], kind, where)
    return bool(files)


def damage(path: Path, what: str, where: int) -> None:
    """Damage a file the way disks and people do; its modification time tells."""
    if what == "remove":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if not content:
        return
    place = where % len(content)
    if what == "flip":
        content[place] ^= 1 << where % 8
    elif what == "overwrite":
        content[place : place + 512] = random.Random(where).randbytes(min(512, len(content) - place))
    else:
        del content[place:]
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def difference(found: bytes, wanted: bytes) -> str:
    """Where two files begin to differ, with what stands there."""
    place = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
    )
    around = slice(max(0, place - 40), place + 80)
    return f"{len(found)} and {len(wanted)} bytes, at {place}: {found[around]!r}, not {wanted[around]!r}"


@pytest.fixture
def _micro_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The micro family is registered, segments are small, time passes when it is told to, torch computes in one thread.

    Threads of torch would not survive a fork, and are of no use for a few KiB.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(api, "Limits", lambda: LIMITS)
    monkeypatch.setenv("MICRO_SHIFT", "0")
    with micro.registered(tmp_path / "site"), CLOCK.in_use():
        yield
    monkeypatch.undo()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_micro_family")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_build_gives_what_a_clean_build_gives(part: int, machine_seed: int) -> None:
    machine: Callable[[], BuildMachine] = seed(machine_seed + part)(BuildMachine)  # type: ignore[arg-type]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, RUNS // PARTS),
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
