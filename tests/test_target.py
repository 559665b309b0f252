"""Targets from ``ninferbuild.toml``."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

from ninferbuild.errors import UsageError
from ninferbuild.target import (
    Assign,
    CacheSettings,
    MissingFileError,
    Proposal,
    TargetFile,
    convert_target,
    find_file,
    load_target,
    load_targets,
    parse_assign,
)

MINIMAL = '[targets.a]\nmodel = "model"\nrecipe = "qwen3_6_27b"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a checkpoint directory and the usual files, as working directory."""
    (tmp_path / "model").mkdir()
    for name in ("mine.py", "over.py", "chat.jinja", "rank.i64"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NINFER_ROOT", raising=False)
    return tmp_path


def write(directory: Path, text: str) -> Path:
    path = directory / "ninferbuild.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(project: Path, text: str, *parts: str, name: str | None = None, **changes: Any) -> str:
    """The message with which loading is refused; it names the file and holds ``parts``."""
    path = write(project, text)
    with pytest.raises(UsageError) as caught:
        load_target(name, **changes)
    message = str(caught.value)
    assert "\n" not in message
    if "sets" not in changes and "assigns" not in changes:
        assert str(path) in message
    for part in parts:
        assert part in message
    return message


def test_minimal(project: Path) -> None:
    path = write(project, MINIMAL)
    target = load_target("a")
    assert (target.name, target.file, target.model) == ("a", path, project / "model")
    assert target.identity == f"{os.path.realpath(path)}#a"
    assert target.out == project / "a.ninfer"
    assert (target.recipe, target.overrides, target.components) == ("qwen3_6_27b", (), None)
    assert (target.sources, target.resources, target.proposal, target.artifact_name) == ({}, {}, None, None)
    assert (target.max_file_bytes, target.device, target.rows_per_chunk, target.workers) == (None, None, 512, None)
    assert (target.assigns, target.cache) == ((), CacheSettings())


def test_every_key(project: Path) -> None:
    for name in ("draft", "q"):
        (project / name).mkdir()
    write(
        project,
        """
        [cache]
        dir = "store"
        max_size = "200Gi"
        trust_stat = true
        [targets.a]
        model = "model"
        recipe = "mine.py:small"
        overrides = ["over.py", "qwen3_8_27b"]
        components = ["text", "mtp"]
        sources = { mtp = "draft", quantized = "q" }
        resources = { "chat_template.jinja" = "chat.jinja" }
        proposal = { rows = 96, ranking = "rank.i64" }
        name = "A model"
        out = "out/a.ninfer"
        max_file_bytes = "32G"
        device = "cuda:1"
        rows_per_chunk = 64
        workers = 3
        [[targets.a.assign]]
        select = "text/layers/*/mlp/down"
        format = "q6_g64_fp16"
        [[targets.a.assign]]
        select = ["x", "y"]
        method = "grouped_search"
        layout = "auto"
        rows = [0, 64]
        parameters = { clip = 0.5, table = [1, { a = "b" }] }
        activation_policy = "AllowA8"
        """,
    )
    target = load_target()
    assert target.cache == CacheSettings(project / "store", 200 * 2**30, True)
    assert target.recipe == f"{project}/mine.py:small"
    assert target.overrides == (f"{project}/over.py", "qwen3_8_27b")
    assert target.components == ("text", "mtp")
    assert target.sources == {"mtp": project / "draft", "quantized": project / "q"}
    assert target.resources == {"chat_template.jinja": project / "chat.jinja"}
    assert target.proposal == Proposal(96, project / "rank.i64")
    assert (target.artifact_name, target.out, target.device) == ("A model", project / "out/a.ninfer", "cuda:1")
    assert (target.max_file_bytes, target.rows_per_chunk, target.workers) == (32 * 10**9, 64, 3)
    first, second = target.assigns
    assert first == Assign(("text/layers/*/mlp/down",), format="q6_g64_fp16")
    assert first.arguments() == {"format": "q6_g64_fp16"}
    assert "targets.a.assign[0]" in first.origin
    assert second.select == ("x", "y")
    assert second.arguments() == {
        "method": "grouped_search",
        "layout": "auto",
        "rows": (0, 64),
        "parameters": {"clip": 0.5, "table": [1, {"a": "b"}]},
        "activation_policy": "AllowA8",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", Proposal()),
        ("false", None),
        ("4096", Proposal(4096)),
        ("{}", Proposal()),
        ("{ rows = 5 }", Proposal(5)),
    ],
)
def test_proposals(project: Path, text: str, expected: Proposal | None) -> None:
    write(project, MINIMAL + f"proposal = {text}\n")
    assert load_target().proposal == expected
    assert Proposal().rows == 131072


def test_defaults_and_extends(project: Path) -> None:
    """Scalars and lists are replaced, tables merge: defaults, then what is extended, then the target's own keys."""
    for name in ("s1", "s2", "s3"):
        (project / name).mkdir()
    write(
        project,
        """
        [defaults]
        model = "model"
        rows_per_chunk = 64
        components = ["text", "vision"]
        sources = { one = "s1", two = "s1" }
        [targets.a]
        recipe = "qwen3_6_27b"
        rows_per_chunk = 32
        sources = { two = "s2" }
        [[targets.a.assign]]
        select = "x"
        format = "bf16"
        [targets.b]
        extends = "a"
        components = ["text"]
        sources = { three = "s3" }
        [targets.c]
        extends = "b"
        recipe = "qwen3_8_27b"
        [[targets.c.assign]]
        select = "y"
        format = "fp32"
        """,
    )
    a, b, c = load_targets(["a", "b", "c"])
    assert (a.rows_per_chunk, a.components) == (32, ("text", "vision"))
    assert a.sources == {"one": project / "s1", "two": project / "s2"}
    assert (b.rows_per_chunk, b.components, b.recipe) == (32, ("text",), "qwen3_6_27b")
    assert b.sources == {"one": project / "s1", "two": project / "s2", "three": project / "s3"}
    assert b.assigns == a.assigns
    assert (c.recipe, c.components, c.sources) == ("qwen3_8_27b", ("text",), b.sources)
    assert [assign.select for assign in c.assigns] == [("y",)]
    assert [target.out.name for target in (a, b, c)] == ["a.ninfer", "b.ninfer", "c.ninfer"]


def test_extends_cycle_and_unknown(project: Path) -> None:
    text = '[targets.a]\nextends = "b"\n[targets.b]\nextends = "c"\n[targets.c]\nextends = "b"\n'
    refused(project, text, "targets.c.extends", "cycle", "b → c → b", name="a")
    refused(
        project, '[targets.abc]\nextends = "abd"\n[targets.abe]\n', "targets.abc.extends", "'abd'", "abc", name="abc"
    )
    refused(project, "[targets.a]\nextends = 3\n", "targets.a.extends", "name of a target", name="a")


def test_two_targets_cannot_write_one_file(project: Path) -> None:
    text = '[defaults]\nmodel = "model"\nrecipe = "r"\n[targets.a]\nout = "x"\n[targets.b]\nextends = "a"\n'
    refused(project, text, "targets.b.out", "'a'", name="b")
    write(project, text + 'out = "./y"\n')
    assert load_target("b").out.name == "y"


def test_variables_and_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "home" / "ck").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(project / "home"))
    monkeypatch.setenv("WHERE", "home")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    write(
        project,
        '[targets.a]\nmodel = "~/ck"\nrecipe = "r"\nsources = { x = "${WHERE}/ck" }\n'
        'name = "${UNSET:-some name} ${EMPTY:-more} ${EMPTY}$WHERE"\ndevice = "${UNSET:-}cpu"\n',
    )
    target = load_target()
    assert target.model == project / "home" / "ck"
    assert target.sources == {"x": project / "home" / "ck"}
    assert (target.artifact_name, target.device) == ("some name more $WHERE", "cpu")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('device = "${NB_UNSET_VARIABLE}"', ("targets.a.device", "NB_UNSET_VARIABLE is not set", ":-DEFAULT")),
        ('device = "${1}"', ("targets.a.device", "${VAR}")),
        ('device = "x${"', ("targets.a.device", "${VAR}")),
        ('device = ""', ("targets.a.device", "empty")),
        ('resources = { r = "${NB_UNSET_VARIABLE}" }', ("targets.a.resources.r", "NB_UNSET_VARIABLE")),
        ('sources = { r = "~nosuchuser-nb/x" }', ("targets.a.sources.r", "~nosuchuser-nb")),
        ("rows_per_chunks = 5", ("targets.a.rows_per_chunks", "did you mean 'rows_per_chunk'")),
        ("zzz = 5", ("targets.a.zzz", "unknown key", "known are")),
        ('rows_per_chunk = "5"', ("targets.a.rows_per_chunk", "must be an integer, not a string")),
        ("rows_per_chunk = true", ("targets.a.rows_per_chunk", "must be an integer, not a boolean")),
        ("rows_per_chunk = 0", ("targets.a.rows_per_chunk", "at least 1")),
        ("workers = -1", ("targets.a.workers", "at least 1")),
        ('max_file_bytes = "big"', ("targets.a.max_file_bytes", "'big'", "200Gi")),
        ("max_file_bytes = 1.5", ("targets.a.max_file_bytes", "not a number")),
        ("name = 5", ("targets.a.name", "must be a string, not an integer")),
        ('components = "text"', ("targets.a.components", "must be a list, not a string")),
        ('components = ["text", 1]', ("targets.a.components[1]", "must be a string")),
        ('components = ["text", "mtp", "text"]', ("targets.a.components", "must not repeat 'text'")),
        ('overrides = "over.py"', ("targets.a.overrides", "must be a list")),
        ('sources = ["x"]', ("targets.a.sources", "must be a table, not a list")),
        ("sources = { x = 3 }", ("targets.a.sources.x", "must be a string")),
        ('sources = { base = "model" }', ("targets.a.sources", "'base'", "'model'")),
        ('proposal = "yes"', ("targets.a.proposal", "true, a number of rows, or a table")),
        ("proposal = 0", ("targets.a.proposal", "at least 1")),
        ("proposal = { row = 5 }", ("targets.a.proposal.row", "did you mean 'rows'")),
        ('assign = { select = "x" }', ("targets.a.assign", "must be a list")),
        ('assign = [{ format = "bf16" }]', ("targets.a.assign[0]", "'select' is missing")),
        ('assign = [{ select = [], format = "bf16" }]', ("targets.a.assign[0]", "'select' is missing")),
        ('assign = [{ select = "x" }]', ("targets.a.assign[0]", "changes nothing")),
        ('assign = [{ select = "x", rows = [0, 1] }]', ("targets.a.assign[0]", "changes nothing")),
        ('assign = [{ select = "x", formt = "q" }]', ("targets.a.assign[0].formt", "did you mean 'format'")),
        ('assign = [{ select = 3, format = "q" }]', ("targets.a.assign[0].select", "must be a list")),
        ('assign = [{ select = [3], format = "q" }]', ("targets.a.assign[0].select", "must be a selector")),
        ('assign = [{ select = "x", format = "q", rows = [1] }]', ("targets.a.assign[0].rows", "two bounds")),
        ('assign = [{ select = "x", format = "q", rows = [true, 2] }]', ("targets.a.assign[0].rows", "two bounds")),
        ('assign = [{ select = "x", parameters = 1 }]', ("targets.a.assign[0].parameters", "must be a table")),
        (
            'assign = [{ select = "x", parameters = { a = [2020-01-01] } }]',
            ("targets.a.assign[0].parameters.a[0]", "not date"),
        ),
    ],
)
def test_refused_values(project: Path, line: str, parts: tuple[str, ...]) -> None:
    refused(project, MINIMAL + line + "\n", *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[target.a]\n", ("target: unknown key", "did you mean 'targets'")),
        ("targets = 5\n", ("targets: must be a table",)),
        ("targets = { a = 5 }\n", ("targets.a: must be a table",)),
        ("[[cache]]\n", ("cache: must be a table",)),
        ("a = \n", ("not valid TOML", "line 1")),
        ('[targets.a]\nmodel = "model"\n', ("targets.a.recipe", "required")),
        ('[targets.a]\nrecipe = "r"\n', ("targets.a.model", "required")),
        (MINIMAL + "[defaults]\nmodle = 3\n", ("defaults.modle", "did you mean 'model'")),
        (MINIMAL + "[defaults]\nworkers = 'x'\n", ("defaults.workers", "must be an integer")),
        (MINIMAL + "[cache]\nmaxsize = 3\n", ("cache.maxsize", "did you mean 'max_size'")),
        (MINIMAL + "[cache]\ntrust_stat = 1\n", ("cache.trust_stat", "must be true or false")),
        ('default = ["aa"]\n' + MINIMAL, ("default", "unknown target 'aa'")),
        ('default = "a"\n' + MINIMAL, ("default", "must be a list")),
        ('[targets."a/b"]\nmodel = "model"\nrecipe = "r"\n', ("targets.a/b", "'/'")),
        ("", ("defines no target",)),
        (MINIMAL + "[targets.b]\n", ("choose one of a, b",)),
    ],
)
def test_refused_files(project: Path, text: str, parts: tuple[str, ...]) -> None:
    refused(project, text, *parts)


def test_not_utf8(project: Path) -> None:
    (project / "ninferbuild.toml").write_bytes(b'[targets.a]\nname = "\xff"\n')
    with pytest.raises(UsageError, match=r"ninferbuild\.toml: not UTF-8.*byte 20"):
        load_target()


@pytest.mark.parametrize(
    ("line", "key", "missing"),
    [
        ('model = "nowhere"\nrecipe = "r"', "model", "nowhere"),
        ('model = "model"\nrecipe = "no.py:f"', "recipe", "no.py"),
        ('model = "model"\nrecipe = "r"\noverrides = ["no.py"]', "overrides", "no.py"),
        ('model = "model"\nrecipe = "r"\nsources = { q = "no" }', "sources.q", "no"),
        ('model = "model"\nrecipe = "r"\nresources = { "c.jinja" = "no" }', "resources.c.jinja", "no"),
        ('model = "model"\nrecipe = "r"\nproposal = { ranking = "no" }', "proposal.ranking", "no"),
    ],
)
def test_missing_files(project: Path, line: str, key: str, missing: str) -> None:
    text = f"[targets.a]\n{line}\n"
    message = refused(project, text, f"targets.a.{key}: no such file", str(project / missing))
    assert message.endswith(missing)
    with pytest.raises(FileNotFoundError):
        load_target("a")
    assert TargetFile(project / "ninferbuild.toml").target("a").name == "a"  # listing targets needs no checkpoint


def test_unknown_target(project: Path) -> None:
    refused(project, MINIMAL.replace("targets.a", "targets.qwen"), "'qwem'", "did you mean 'qwen'", name="qwem")


def test_default_targets(project: Path) -> None:
    write(project, f'default = ["b", "a", "b"]\n{MINIMAL}{MINIMAL.replace("targets.a", "targets.b")}')
    assert [target.name for target in load_targets()] == ["b", "a"]
    assert [target.name for target in load_targets(["a", "a"])] == ["a"]
    with pytest.raises(UsageError, match="several default targets: b, a"):
        load_target()


def test_discovery(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = project / "x" / "y"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_file() is None or find_file() != project / "ninferbuild.toml"
    write(project, MINIMAL)
    assert find_file() == project / "ninferbuild.toml"
    assert load_target().model == project / "model"  # relative to the file, not to the working directory
    nearer = write(project / "x", MINIMAL.replace("targets.a", "targets.near").replace('"model"', '"../model"'))
    assert find_file() == nearer
    assert load_target().name == "near"
    assert load_target(file=project).name == load_target(file="../../ninferbuild.toml").name == "a"
    with pytest.raises(MissingFileError, match=r"nothing\.toml"):
        load_target(file="nothing.toml")


def test_no_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ninferbuild.target.find_file", lambda start=None: None)
    with pytest.raises(UsageError, match=r"ninferbuild init.*ninferbuild convert"):
        load_target("a")


def test_one_identity_through_links(project: Path) -> None:
    write(project, MINIMAL)
    link = project / "linked"
    link.symlink_to(project, target_is_directory=True)
    assert load_target("a", link / "ninferbuild.toml").identity == load_target("a").identity


def test_resources_under_ninfer_root(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project / "root"
    (root / "t").mkdir(parents=True)
    (root / "t" / "only.jinja").touch()
    (root / "chat.jinja").touch()
    write(project, MINIMAL + 'resources = { a = "t/only.jinja", b = "chat.jinja" }\n')
    with pytest.raises(MissingFileError, match=r"resources\.a"):
        load_target()
    monkeypatch.setenv("NINFER_ROOT", str(root))
    assert load_target().resources == {"a": root / "t" / "only.jinja", "b": project / "chat.jinja"}


def test_set(project: Path) -> None:
    (project / "other").mkdir()
    write(project, MINIMAL + 'proposal = { rows = 5, ranking = "rank.i64" }\n[cache]\nmax_size = 5\n')
    target = load_target(
        sets=[
            "rows_per_chunk=64",
            "recipe=qwen3_8_27b",
            "components=text,mtp",
            'overrides = ["over.py"]',
            "resources.chat_template.jinja=chat.jinja",
            'resources."x.y"=chat.jinja',
            "sources.q = other",
            "proposal.rows=96",
            "max_file_bytes=1k",
            "device=cuda:0",
            "name=2020-01-01",
            "cache.max_size=200G",
            "cache.trust_stat=true",
            'assign=[{select="x", format="bf16"}]',
        ],
        assigns=["y/*=q4_g64_fp16:grouped_absmax", "z=:cast_direct"],
    )
    assert (target.rows_per_chunk, target.recipe, target.components) == (64, "qwen3_8_27b", ("text", "mtp"))
    assert target.overrides == (f"{project}/over.py",)
    assert target.resources == {"chat_template.jinja": project / "chat.jinja", "x.y": project / "chat.jinja"}
    assert target.sources == {"q": project / "other"}
    assert target.proposal == Proposal(96, project / "rank.i64")
    assert (target.max_file_bytes, target.device, target.artifact_name) == (1000, "cuda:0", "2020-01-01")
    assert target.cache == CacheSettings(None, 200 * 10**9, True)
    assert target.assigns == (
        Assign(("x",), format="bf16"),
        Assign(("y/*",), format="q4_g64_fp16", method="grouped_absmax"),
        Assign(("z",), method="cast_direct"),
    )
    assert load_target().rows_per_chunk == 512


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rows_per_chunk", ("write KEY=VALUE",)),
        ("=3", ("write KEY=VALUE",)),
        ("rows_per_chunk=many", ("--set rows_per_chunk", "must be an integer, not a string")),
        ("rows=3", ("--set rows", "unknown key", "rows_per_chunk")),
        ("a b=3", ("--set a b", "not a key")),
        ("cache=3", ("--set cache", "must be a table")),
        ("cache.dirs=3", ("--set cache.dirs", "did you mean 'dir'")),
        ("cache.max_size=3X", ("--set cache.max_size", "'3X'")),
        ("sources.base=x", ("--set sources", "'base'")),
    ],
)
def test_refused_sets(project: Path, text: str, parts: tuple[str, ...]) -> None:
    refused(project, MINIMAL, *parts, sets=[text])


@pytest.mark.parametrize("text", ["x", "=q4", "x=", "x=q4:", "x=:", ""])
def test_refused_assigns(text: str) -> None:
    with pytest.raises(UsageError, match="SELECTOR=FORMAT:METHOD"):
        parse_assign(text)


def test_selector_with_equals_sign() -> None:
    assert parse_assign("a=b=bf16").select == ("a=b",)


def test_cache_settings_alone(project: Path) -> None:
    path = write(project, '[cache]\ndir = "c"\nmax_size = "1Gi"\n')
    file = TargetFile(path)
    assert file.names == ()
    assert file.cache_settings() == CacheSettings(project / "c", 2**30, False)
    assert file.cache_settings(["cache.max_size=7"]).max_size == 7


def test_cache_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment goes before the file, the file before the platform's directory."""
    monkeypatch.setenv("NINFERBUILD_CACHE", str(project / "env"))
    assert CacheSettings(Path("c")).directory() == project / "env"
    monkeypatch.setenv("NINFERBUILD_CACHE", "")
    assert CacheSettings(Path("c")).directory() == Path("c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "xdg"))
    assert project / "xdg" in CacheSettings().directory().parents
    path = write(project, MINIMAL + "[cache]\nallow_foreign_fs = true\n")
    assert load_target(file=path).cache.allow_foreign_fs


def test_settings_give_the_target_back(project: Path) -> None:
    (project / "q").mkdir()
    write(
        project,
        MINIMAL + 'overrides = ["over.py:f"]\ncomponents = ["text"]\nsources = { q = "q" }\nworkers = 2\nname = "n"\n'
        'proposal = { ranking = "rank.i64" }\nresources = { "c.jinja" = "chat.jinja" }\nrows_per_chunk = 7\n'
        'assign = [{ select = "x", rows = [0, 3], format = "bf16", parameters = { a = 1 } }]\n',
    )
    target = load_target()
    again = convert_target(target.settings())
    assert again.settings() == target.settings()
    for name in ("model", "recipe", "overrides", "sources", "resources", "proposal", "assigns", "out", "workers"):
        assert getattr(again, name) == getattr(target, name), name


def test_convert_keeps_paths_as_given(project: Path) -> None:
    settings = {
        "model": "model",
        "recipe": "mine.py:f",
        "sources": {"x": "missing"},
        "out": "o/z.ninfer",
        "name": "${X}",
    }
    target = convert_target(settings, sets=["workers=2"], assigns=["a=bf16"])
    assert (str(target.model), target.recipe, str(target.out)) == ("model", "mine.py:f", "o/z.ninfer")
    assert target.identity == os.path.realpath("o/z.ninfer")
    assert (target.name, target.file, target.workers, target.artifact_name) == ("z.ninfer", None, 2, "${X}")
    assert target.sources == {"x": Path("missing")}  # never opened, perhaps
    assert target.assigns == (Assign(("a",), format="bf16"),)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"model": "no"}, ("--model: no such file", "no")),
        ({"recipe": "no.py"}, ("--recipe: no such file", "no.py")),
        ({"overrides": ["no.py"]}, ("--override", "no.py")),
        ({"resources": {"x.json": "no"}}, ("--resource x.json", "no")),
        ({"proposal": {"ranking": "no"}}, ("--ranking", "no")),
        ({"rows_per_chunk": 0}, ("--rows-per-chunk", "at least 1")),
        ({"components": ["text", ""]}, ("--components", "must not be empty")),
        ({"sources": {"base": "x"}}, ("--source", "with --model")),
    ],
)
def test_convert_names_the_option(project: Path, settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        convert_target({"model": "model", "recipe": "r", "out": "o"} | settings)
    for part in parts:
        assert part in str(caught.value)


def test_loading_is_light(project: Path) -> None:
    """Loading a target imports neither torch nor numpy."""
    write(project, MINIMAL)
    code = (
        "import sys, ninferbuild\n"
        "ninferbuild.load_target('a')\n"
        "assert not {'torch', 'numpy', 'rich', 'networkx'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project)
