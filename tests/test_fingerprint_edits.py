"""What changes a fingerprint and what does not: each case is an edit of a recipe file or of what it reaches."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from ninferbuild import recipe_file
from ninferbuild.fingerprint import Fingerprint, Fingerprints, fingerprint

RECIPE = '''
"""A recipe."""
import functools
import math
import numpy as np
import edit_helper
from edit_helper import scale_of

LIMIT = 0.5
TABLE = np.arange(6, dtype=np.float32)
UNUSED = 1
NAMES = {"b", "a", "c"}


def unrelated(value):
    return value + UNUSED


def inner_helper(value, factor=2):
    # a comment
    return value * factor + LIMIT


def method(request, offset=1.0, *, power=2):
    """Documented."""

    def produce(output):
        """Documented too."""
        total = inner_helper(3) + scale_of(request) + TABLE.sum() + edit_helper.shared.CONSTANT + offset
        return math.sqrt(total) ** power, "a" in NAMES, [x for x in (1, 2.0)]

    return request.job(produce=produce)


def make(bits, table):
    def closure(request):
        return bits, table
    return closure


class Base:
    STEP = 3

    def run(self):
        return self.STEP


class Method(Base):
    """A callable."""

    def __init__(self, bits):
        self.bits = bits

    def __call__(self, request):
        return self.run() + self.bits

    @property
    def doubled(self):
        return self.bits * 2


def doubling(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) * 2
    return wrapper


@doubling
def decorated(request):
    return 7


chosen = lambda request: LIMIT
nested = make(4, np.ones(3))
instance = Method(4)
bound = instance.run
partial = functools.partial(make, 4, table=[1, 2])
'''

HELPER = """
from edit_package import shared

FACTOR = 3


def scale_of(value):
    return deeper(value) * FACTOR


def deeper(value):
    return 1 if value is None else 2


def not_reached(value):
    return FACTOR
"""

FILES = {
    "r.py": RECIPE,
    "edit_helper.py": HELPER,
    "edit_package/__init__.py": "",
    "edit_package/shared.py": "CONSTANT = 5\nOTHER = 6\n",
}
SUBJECTS = ("method", "chosen", "nested", "instance", "bound", "partial", "decorated", "Method", "inner_helper")


class Tree:
    """A recipe with its siblings, and the fingerprints of what it defines."""

    def __init__(self, root: Path):
        self.root = root
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def fingerprints(self) -> dict[str, Fingerprint]:
        recipe_file.purge()
        return {name: fingerprint(recipe_file.load(f"r.py:{name}", self.root).function) for name in SUBJECTS}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        stat = path.stat()
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))
        # The times stay, and where the size does too, nothing but the text says that the file changed.
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def changed(self, *edits: tuple[str, str, str]) -> set[str]:
        before = self.fingerprints()
        for edit in edits:
            self.edit(*edit)
        after = self.fingerprints()
        assert all(not found.uncacheable for found in (*before.values(), *after.values()))
        return {name for name in SUBJECTS if before[name] != after[name]}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield Tree(tmp_path)
    recipe_file.purge()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("r.py", "    # a comment\n", ""),
        ("r.py", "# a comment", "# x comment"),
        ("r.py", '"""Documented."""', '"""Documented at length.\n\n    With lines."""'),
        ("r.py", '        """Documented too."""\n', ""),
        ("r.py", '"""A callable."""', '"""A method."""'),
        ("r.py", '"""A recipe."""', "# none\n\n\n"),
        ("r.py", "return value + UNUSED", "return value - UNUSED"),
        ("r.py", "UNUSED = 1", "UNUSED = 2"),
        ("r.py", '{"b", "a", "c"}', '{"a", "b", "c"}'),
        ("r.py", "inner_helper(3) + scale_of", "inner_helper( 3 ) + scale_of"),
        ("edit_helper.py", "def not_reached(value):\n    return FACTOR", "def not_reached(value):\n    return 99999"),
        ("edit_package/shared.py", "OTHER = 6", "OTHER = 7"),
        ("edit_helper.py", "\nFACTOR = 3\n", "\n\n\nFACTOR = 3\n"),
    ],
)
def test_edits_without_effect_change_nothing(tree: Tree, name: str, old: str, new: str) -> None:
    assert tree.changed((name, old, new)) == set()


def test_the_order_of_definitions_changes_nothing(tree: Tree) -> None:
    helper = "def deeper(value):\n    return 1 if value is None else 2\n\n\n"
    move = (("edit_helper.py", helper, ""), ("edit_helper.py", "def scale_of", helper + "def scale_of"))
    assert tree.changed(*move) == set()


def test_moving_the_files_changes_nothing(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert tree.fingerprints() == Tree(tmp_path_factory.mktemp("elsewhere")).fingerprints()


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("r.py", "LIMIT = 0.5", "LIMIT = 0.6", {"method", "chosen", "inner_helper"}),
        ("r.py", "dtype=np.float32)", "dtype=np.float64)", {"method"}),
        ("r.py", "np.arange(6,", "np.arange(7,", {"method"}),
        ("r.py", '"a", "c"}', '"a", "d"}', {"method"}),
        ("r.py", "value * factor", "value / factor", {"method", "inner_helper"}),
        ("r.py", "factor=2", "factor=3", {"method", "inner_helper"}),
        ("r.py", "offset=1.0", "offset=1.5", {"method"}),
        ("r.py", "offset=1.0", "offset=1", {"method"}),
        ("r.py", "power=2", "power=3", {"method"}),
        ("r.py", "(1, 2.0)", "(1, 2)", {"method"}),
        ("r.py", "job(produce=produce)", "job(reduce=produce)", {"method"}),
        ("edit_helper.py", "FACTOR = 3", "FACTOR = 4", {"method"}),
        ("edit_helper.py", "value is None", "value is True", {"method"}),
        ("edit_package/shared.py", "CONSTANT = 5", "CONSTANT = 6", {"method"}),
        ("r.py", "make(4, np.ones(3))", "make(5, np.ones(3))", {"nested"}),
        ("r.py", "np.ones(3)", "np.ones(4)", {"nested"}),
        ("r.py", "return bits, table", "return table, bits", {"nested", "partial"}),
        ("r.py", "table=[1, 2]", "table=(1, 2)", {"partial"}),
        ("r.py", "instance = Method(4)", "instance = Method(5)", {"instance", "bound"}),
        ("r.py", "STEP = 3", "STEP = 4", {"instance", "bound", "Method"}),
        ("r.py", "return self.STEP", "return -self.STEP", {"instance", "bound", "Method"}),
        ("r.py", "kwargs) * 2", "kwargs) * 3", {"decorated"}),
        ("r.py", "return 7", "return 8", {"decorated"}),
        ("r.py", "chosen = lambda request: LIMIT", "chosen = lambda request: TABLE", {"chosen"}),
    ],
)
def test_edits_with_an_effect_change_exactly_what_they_reach(
    tree: Tree, name: str, old: str, new: str, expected: set[str]
) -> None:
    assert tree.changed((name, old, new)) == expected


def test_lines_say_what_changed(tree: Tree) -> None:
    before = tree.fingerprints()["method"]
    tree.edit("edit_helper.py", "FACTOR = 3", "FACTOR = 4")
    after = tree.fingerprints()["method"]
    assert sorted(set(before.lines) ^ set(after.lines)) == [
        "global edit_helper.FACTOR = int 3",
        "global edit_helper.FACTOR = int 4",
    ]


def test_packages_count_by_version_and_the_standard_library_by_python(tree: Tree) -> None:
    lines = tree.fingerprints()["method"].lines
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in lines
    assert any(line.startswith(f"package numpy {np.__version__} ") for line in lines)


def test_two_closures_of_one_function_are_told_apart(tree: Tree) -> None:
    make = recipe_file.load("r.py:make", tree.root).function
    table = np.zeros(2)
    assert fingerprint(make(4, table)) == fingerprint(make(4, table.copy()))  # type: ignore[call-arg]
    assert fingerprint(make(4, table)) != fingerprint(make(5, table))  # type: ignore[call-arg]
    assert fingerprint(make(make(1, 2), make(2, 1))) != fingerprint(make(make(2, 1), make(1, 2)))  # type: ignore[call-arg]


def test_lambdas_of_one_line_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("first, second = lambda r: 1, lambda r: 2\n")
    found = [fingerprint(recipe_file.load(f"r.py:{name}", tmp_path).function) for name in ("first", "second", "first")]
    assert found[0] != found[1]
    assert found[0] == found[2]


def test_fingerprints_are_the_same_in_every_process(tree: Tree) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from ninferbuild import recipe_file
        from ninferbuild.fingerprint import fingerprint
        for name in sys.argv[2:]:
            print(*fingerprint(recipe_file.load(f"r.py:{name}", Path(sys.argv[1])).function).lines, sep="\\n")
        """
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, str(tree.root), *SUBJECTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    here = "".join(line + "\n" for name in SUBJECTS for line in tree.fingerprints()[name].lines)
    assert outputs == {here.encode()}


def test_taking_a_fingerprint_twice_gives_the_same(tree: Tree) -> None:
    functions = [recipe_file.load(f"r.py:{name}", tree.root).function for name in SUBJECTS]
    assert [fingerprint(function) for function in functions] == [fingerprint(function) for function in functions]


def test_nothing_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import torch\nimport torch as t\ndef method(request):\n    return torch.zeros(3), t.nn\n"
    )
    script = (
        "import sys\nfrom pathlib import Path\nfrom ninferbuild import recipe_file\n"
        "from ninferbuild.fingerprint import fingerprint\n"
        "found = fingerprint(recipe_file.load('r.py:method', Path(sys.argv[1])).function)\n"
        "packages = [line.split()[1] for line in found.lines if line.startswith('package')]\n"
        "print('torch' in sys.modules, packages, found.uncacheable)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False ['torch'] ()"


@pytest.mark.parametrize(
    ("body", "edit"),
    [
        ("import late_helper\n    return late_helper.value()", "value"),
        ("import late_helper as h\n    return h.value()", "value"),
        ("from late_helper import value\n    return value()", "value"),
        ("from late_helper import value as v\n    return [v() for _ in range(2)]", "value"),
        ("import late_pack.inner\n    return late_pack.inner.value()", "inner"),
        ("import late_pack.inner as i\n    return (lambda: i.value())()", "inner"),
        ("from late_pack import inner\n    return inner.value()", "inner"),
    ],
)
def test_imports_inside_functions_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, edit: str
) -> None:
    library = tmp_path / "lib"
    (library / "late_pack").mkdir(parents=True)
    (library / "late_pack" / "__init__.py").write_text("")
    text = "K = 1\ndef value(): return K\ndef other(): return 1\n"
    (library / "late_helper.py").write_text(text)
    (library / "late_pack" / "inner.py").write_text(text)
    monkeypatch.syspath_prepend(str(library))
    (tmp_path / "r.py").write_text(f"def method(request):\n    {body}\n")

    def taken() -> Fingerprint:
        recipe_file.purge()
        return fingerprint(recipe_file.load("r.py:method", tmp_path).function)

    before = taken()
    target = library / ("late_helper.py" if edit == "value" else "late_pack/inner.py")
    target.write_text(text.replace("def other(): return 1", "def other(): return 2"))
    assert taken() == before
    target.write_text(text.replace("K = 1", "K = 2"))
    assert taken() != before
    assert not before.uncacheable


def test_relative_imports_in_a_sibling_package(tmp_path: Path) -> None:
    pack = tmp_path / "relative_pack"
    pack.mkdir()
    (pack / "__init__.py").write_text("from .main import run\n")
    (pack / "main.py").write_text(
        "def run(r):\n    from .values import K\n    from . import values\n    return K, values.L\n"
    )
    (tmp_path / "r.py").write_text("from relative_pack import run\n")

    def taken(values: str) -> Fingerprint:
        recipe_file.purge()
        (pack / "values.py").write_text(values)
        return fingerprint(recipe_file.load("r.py:run", tmp_path).function)

    first = taken("K = 1\nL = 1\nM = 1\n")
    assert taken("K = 1\nL = 1\nM = 2\n") == first
    assert taken("K = 1\nL = 2\nM = 1\n") != first
    assert taken("K = 2\nL = 1\nM = 1\n") != first
    assert not first.uncacheable


def classes(text: str, tmp_path: Path, name: str = "method") -> Fingerprint:
    recipe_file.purge()
    (tmp_path / "r.py").write_text(textwrap.dedent(text))
    return fingerprint(recipe_file.load(f"r.py:{name}", tmp_path).function)


CASES: dict[str, tuple[str, str, str]] = {
    "dataclass default": ("@dataclass\nclass C:\n    x: int = 1\nmethod = lambda r: C().x", "= 1", "= 2"),
    "dataclass factory": (
        "@dataclass\nclass C:\n    x: list = field(default_factory=lambda: [1])\nmethod = lambda r: C().x",
        "[1]",
        "[2]",
    ),
    "dataclass field type": ("@dataclass\nclass C:\n    x: int\nmethod = lambda r: C(1).x", "x: int", "x: float"),
    "slots": (
        "class C:\n    __slots__ = ('x',)\n    def __init__(self): self.x = 1\nc = C()\nmethod = lambda r: c.x",
        "x = 1",
        "x = 2",
    ),
    "enum": ("class E(enum.Enum):\n    A = 1\n    B = 2\nmethod = lambda r: E.A", "A = 1", "A = 3"),
    "enum member": (
        "class E(enum.IntEnum):\n    A = 1\n    B = 2\nD = E.A\nmethod = lambda r: D",
        "D = E.A",
        "D = E.B",
    ),
    "namedtuple": ("P = namedtuple('P', 'a b')\np = P(1, 2)\nmethod = lambda r: p.a", "P(1, 2)", "P(1, 3)"),
    "namedtuple fields": ("P = namedtuple('P', 'a b')\np = P(1, 2)\nmethod = lambda r: p.a", "'a b'", "'b a'"),
    "dict order": ("D = {'a': 1, 'b': 2}\nmethod = lambda r: list(D)", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    "dict subclass": ("class M(dict): pass\nm = M(a=1)\nmethod = lambda r: m['a']", "a=1", "a=2"),
    "list subclass": ("class M(list): pass\nm = M([1])\nmethod = lambda r: m[0]", "[1]", "[2]"),
    "int subclass": ("class M(int): pass\nm = M(1)\nmethod = lambda r: m", "M(1)", "M(2)"),
    "array subclass": ("class M(np.ndarray): pass\nm = np.ones(2).view(M)\nmethod = lambda r: m", "ones", "zeros"),
    "defaultdict": ("m = defaultdict(lambda: 1)\nmethod = lambda r: m['a']", "lambda: 1", "lambda: 2"),
    "ordered": ("m = OrderedDict(a=1)\nmethod = lambda r: m['a']", "a=1", "a=2"),
    "regex": ("m = re.compile('a+')\nmethod = lambda r: m.match('a')", "a+", "a*"),
    "fraction": ("m = Fraction(1, 3)\nmethod = lambda r: m", "1, 3", "1, 4"),
    "itemgetter": ("m = operator.itemgetter(1)\nmethod = lambda r: m(r)", "(1)", "(2)"),
    "object array": ("m = np.array([1, 'a'], object)\nmethod = lambda r: m", "'a'", "'b'"),
    "vectorize": ("m = np.vectorize(lambda x: x + 1)\nmethod = lambda r: m(r)", "x + 1", "x + 2"),
    "staticmethod": (
        "class C:\n    @staticmethod\n    def f(): return 1\nmethod = lambda r: C.f()",
        "return 1",
        "return 2",
    ),
    "classmethod": ("class C:\n    @classmethod\n    def f(cls): return 1\nmethod = C.f", "return 1", "return 2"),
    "property": (
        "class C:\n    @property\n    def f(self): return 1\nc = C()\nmethod = lambda r: c.f",
        "return 1",
        "return 2",
    ),
    "cached property": (
        "class C:\n    @functools.cached_property\n    def f(self): return 1\nc = C()\nmethod = lambda r: c.f",
        "return 1",
        "return 2",
    ),
    "metaclass": (
        "class M(type):\n    def k(cls): return 1\nclass C(metaclass=M): pass\nmethod = lambda r: C.k()",
        "return 1",
        "return 2",
    ),
    "context manager": (
        "@contextlib.contextmanager\ndef c():\n    yield 1\ndef method(r):\n    with c() as x: return x",
        "yield 1",
        "yield 2",
    ),
    "generator function": ("def g():\n    yield 1\nmethod = lambda r: list(g())", "yield 1", "yield 2"),
    "function attribute": ("def f(): return f.k\nf.k = 1\nmethod = lambda r: f()", "k = 1", "k = 2"),
    "shared list": ("a = [1]\nb = [1]\nm = (a, b)\nmethod = lambda r: m[0].append(1) or m[1]", "b = [1]", "b = a"),
    "inner class": ("def method(r):\n    class C:\n        K = 1\n    return C.K", "K = 1", "K = 2"),
    "star arguments": ("def f(*args): return args\nmethod = lambda r: f(1)", "*args", "**args"),
    "try": ("def method(r):\n    try: return int(r)\n    except ValueError: return 1", "ValueError", "TypeError"),
    "with order": ("def method(r):\n    return r[1:2], r[0]", "r[1:2]", "r[1:3]"),
    "f-string": ("def method(r):\n    return f'{r:.3f}'", ".3f", ".4f"),
    "comparison": ("def method(r):\n    return r < 1", "r < 1", "r <= 1"),
    "operator": ("def method(r):\n    return r << 1", "<<", ">>"),
    "keyword names": ("def method(r):\n    return r(a=1, b=2)", "a=1, b=2", "b=1, a=2"),
    "jump": ("def method(r):\n    while r:\n        if r: break\n        r = 1", "break", "continue"),
    "generic alias": ("A = list[int]\nmethod = lambda r: A", "list[int]", "list[str]"),
    "path": ("P = pathlib.Path('a')\nmethod = lambda r: P", "'a'", "'b'"),
    "ufunc from a function": ("u = np.frompyfunc(lambda x: 1, 1, 1)\nmethod = lambda r: u(r)", "x: 1", "x: 2"),
}

PREAMBLE = (
    "import contextlib, enum, functools, operator, pathlib, re\nimport numpy as np\n"
    "from collections import OrderedDict, defaultdict, namedtuple\nfrom dataclasses import dataclass, field\n"
    "from fractions import Fraction\n"
)
"""Modules that the cases use; the cases are about what is made of them."""


@pytest.mark.parametrize("case", sorted(CASES))
def test_values_and_classes(tmp_path: Path, case: str) -> None:
    text, old, new = CASES[case]
    assert text.count(old) == 1
    first = classes(PREAMBLE + text, tmp_path)
    again = classes(PREAMBLE + "\n# moved down\n\n" + text, tmp_path)
    edited = classes(PREAMBLE + text.replace(old, new), tmp_path)
    if case == "ufunc from a function":  # numpy hides the function: not to be seen is not to be kept
        assert first.uncacheable
        return
    assert first.uncacheable == ()
    assert first == again
    assert first != edited


def test_names_that_are_missing_count_when_they_appear(tmp_path: Path) -> None:
    text = "def method(r):\n    try: return OPTIONAL\n    except NameError: return 1\n"
    assert classes(text, tmp_path) != classes(text + "OPTIONAL = 2\n", tmp_path)


def test_a_global_that_hides_a_builtin(tmp_path: Path) -> None:
    text = "def method(r):\n    return len(r)\n"
    hidden = classes(text + "def len(x): return 1\n", tmp_path)
    assert hidden != classes(text, tmp_path)
    assert hidden != classes(text + "def len(x): return 2\n", tmp_path)


def test_recursion_and_cycles_end(tmp_path: Path) -> None:
    text = "def method(r): return other(r)\ndef other(r): return method(r) + K\nK = []\nK.append(K)\n"
    assert classes(text, tmp_path) == classes(text, tmp_path)


def test_helpers_of_this_project_count_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninferbuild import own_versions, rules

    text = "from tools.convert.methods import grouped_absmax\ndef method(r): return grouped_absmax(r)\n"
    first = classes(text, tmp_path)
    assert f"rule grouped_absmax {rules.grouped_absmax.version}" in " ".join(first.lines)
    assert first.uncacheable == ()
    own_versions.version_lines.cache_clear()
    monkeypatch.setattr(type(rules.grouped_absmax), "version", 99)
    assert classes(text, tmp_path) != first
    own_versions.version_lines.cache_clear()


def test_an_array_source_counts_by_content(tmp_path: Path) -> None:
    text = (
        "import numpy as np\nfrom tools.convert.sources.logical import array_source\n"
        "S = array_source(np.ones((2, 3), np.float32), 'ones')\ndef method(r): return S.values()\n"
    )
    first = classes(text, tmp_path)
    assert first.uncacheable == ()
    assert classes(text, tmp_path) == first
    assert classes(text.replace("np.ones((", "2 * np.ones(("), tmp_path) != first


def test_an_attribute_that_a_recipe_puts_into_a_package_is_followed(tmp_path: Path) -> None:
    text = (
        "import numpy as np\nimport xml.dom\ndef mine(x): return 1\nxml.dom.mine_for_tests = mine\n"
        "def method(r): return xml.dom.mine_for_tests(r)\n"
    )
    assert classes(text, tmp_path) != classes(text.replace("return 1", "return 2"), tmp_path)


def test_global_settings_of_torch_count(tmp_path: Path) -> None:
    import torch

    text = "import torch\ndef method(r): return torch.zeros(1)\n"
    before = classes(text, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        assert classes(text, tmp_path) != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert classes(text, tmp_path) == before


def test_one_function_is_looked_at_once(tmp_path: Path) -> None:
    recipe_file.purge()
    (tmp_path / "r.py").write_text("K = 1\ndef method(r): return K\n")
    function = recipe_file.load("r.py:method", tmp_path).function
    taken = Fingerprints()
    first = taken.of(function)
    function.__globals__["K"] = 2
    assert taken.of(function) is first
    assert Fingerprints().of(function) != first
