"""``ninferbuild imatrix``: importance matrices of llama.cpp, in both of their forms, as vectors by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import struct
from typing import Any

from fixtures.gguf_files import Tensor, gguf_bytes, write_gguf
import numpy as np
import pytest
from safetensors import safe_open

from ninferbuild import imatrix
from ninferbuild.imatrix import TextGeometry

F32, F16, Q8_0 = 0, 1, 8

CONFIG = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 2,
}

MATRICES: dict[str, Sequence[float]] = {
    "blk.0.attn_qkv.weight": [6.0] * 4,
    "blk.0.ssm_out.weight": range(0, 16, 2),
    "blk.1.attn_q.weight": [9.0] * 4,
    "blk.1.attn_qkv.weight": [1.0] * 4,
}
"""Matrix → sums of squares over two rows."""

EXPECTED = {
    "text/layers/0/gdn/query": [3.0] * 4,
    "text/layers/0/gdn/key": [3.0] * 4,
    "text/layers/0/gdn/value": [3.0] * 4,
    "text/layers/0/gdn/output": [0.0, 1, 4, 5, 2, 3, 6, 7],
    "text/layers/1/attention/query": [4.5] * 4,
    "text/layers/1/attention/gate": [4.5] * 4,
}


def floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def sums(name: str, values: Sequence[float], counts: Sequence[float] = (2.0,)) -> list[Tensor]:
    """The two tensors of one matrix."""
    return [
        (f"{name}.in_sum2", (len(counts), len(values) // len(counts)), F32, floats(values)),
        (f"{name}.counts", (len(counts), 1), F32, floats(counts)),
    ]


def dat(entries: Mapping[str, tuple[int, Sequence[float]]], tail: bytes = b"") -> bytes:
    """An ``imatrix.dat`` of name → (calls, values)."""
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, len(values)) + floats(values)
    return data + tail


class Desk:
    """A directory with a configuration, in which matrices are written and imported."""

    def __init__(self, directory: Path, run: Any):
        self.config = directory / "config.json"
        self.out = directory / "out.safetensors"
        self.directory = directory
        self._run = run
        self.configure(CONFIG)

    def configure(self, config: Any) -> None:
        self.config.write_text(json.dumps(config))

    def gguf(self, tensors: Sequence[Tensor], **kv: Any) -> Path:
        keys = {"general.type": "imatrix", "imatrix.datasets": ["wiki"], "imatrix.chunk_count": 3, **kv}
        return write_gguf(self.directory / "model.imatrix.gguf", keys, tensors)

    def dat(self, data: bytes) -> Path:
        path = self.directory / "imatrix.dat"
        path.write_bytes(data)
        return path

    def run(self, *arguments: object) -> Any:
        return self._run("imatrix", *arguments, "--config", self.config, "--out", self.out)

    def imported(self, *arguments: object) -> tuple[dict[str, Any], dict[str, str]]:
        """The vectors, read by another reader, and the metadata."""
        ran = self.run(*arguments)
        assert ran.code == 0, ran
        with safe_open(self.out, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118

    def refused(self, *arguments: object) -> str:
        """The one line of an import that fails and writes nothing."""
        ran = self.run(*arguments)
        assert ran.code == 1, ran
        assert not self.out.exists()
        (line,) = ran.err.splitlines()
        return str(line)


@pytest.fixture
def desk(tmp_path: Path, run: Any) -> Desk:
    return Desk(tmp_path, run)


def every() -> list[Tensor]:
    return [tensor for name, values in MATRICES.items() for tensor in sums(name, values)]


def test_matrices_become_vectors_of_parameters(desk: Desk) -> None:
    vectors, metadata = desk.imported("--gguf", desk.gguf(every()))
    assert {name: vector.tolist() for name, vector in vectors.items()} == EXPECTED
    assert {vector.dtype for vector in vectors.values()} == {np.dtype(np.float32)}
    assert metadata == {"source": "model.imatrix.gguf"}
    assert sorted(path.name for path in desk.directory.iterdir()) == [
        "config.json",
        "model.imatrix.gguf",
        "out.safetensors",
    ]


def test_the_older_form_gives_the_same(desk: Desk) -> None:
    """Its values are sums divided by the rows and multiplied by the calls."""
    entries = {name: (3, [value / 2 * 3 for value in values]) for name, values in MATRICES.items()}
    vectors, metadata = desk.imported("--dat", desk.dat(dat(entries)))
    assert {name: vector.tolist() for name, vector in vectors.items()} == EXPECTED
    assert metadata == {"source": "imatrix.dat"}
    tail = struct.pack("<ii", 7, 4) + b"wiki"
    assert desk.imported("--dat", desk.dat(dat(entries, tail)))[0].keys() == EXPECTED.keys()
    never = {"blk.1.ffn_up.weight": (0, [5.0] * 4)}
    assert desk.imported("--dat", desk.dat(dat(never)))[0]["text/layers/1/mlp/up"].tolist() == [5.0] * 4


def test_what_is_said(desk: Desk) -> None:
    path = desk.gguf(every())
    assert desk.run("--gguf", path).out == f"6 parameters -> {desk.out}\n"
    ran = desk.run("--gguf", path, "--json")
    assert json.loads(ran.out) == {"out": str(desk.out), "parameters": 6, "source": "model.imatrix.gguf"}
    assert desk.run("--gguf", path, "-q").out == ""


def test_the_same_matrix_gives_the_same_bytes(desk: Desk) -> None:
    path = desk.gguf(every())
    desk.imported("--gguf", path)
    before = desk.out.read_bytes()
    desk.out.write_bytes(b"something else")
    assert "is not an importance matrix that this command wrote" in desk.run("--gguf", path).err
    assert desk.out.read_bytes() == b"something else"
    desk.imported("--gguf", path, "--overwrite")
    desk.imported("--gguf", path)  # its own file is replaced
    assert desk.out.read_bytes() == before


def test_every_role(desk: Desk) -> None:
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = [t for m in (*matrices, "ssm_beta") for t in sums(f"blk.{0}.{m}.weight", [float(len(m))] * 8)]
    more = [t for m in ("ssm_out", *matrices) for t in sums(f"blk.1.{m}.weight", [float(len(m))] * 8)]
    rest = [
        *sums("output.weight", [1.0] * 8),
        *sums("token_embd.weight", [1.0] * 8),
        *sums("blk.2.ffn_up.weight", [1.0]),
    ]
    desk.configure({**CONFIG, "layer_types": ["full_attention", "anything"]})
    vectors, _ = desk.imported("--gguf", desk.gguf([*tensors, *more, *rest]))
    first = ("attention/query", "attention/gate", "attention/key", "attention/value", "attention/output")
    second = ("gdn/query", "gdn/key", "gdn/value", "gdn/z", "gdn/output")
    mlp = ("mlp/gate", "mlp/up", "mlp/down")
    assert vectors.keys() == {
        *(f"text/layers/0/{role}" for role in (*first, *mlp)),
        *(f"text/layers/1/{role}" for role in (*second, *mlp)),
    }
    assert vectors["text/layers/1/gdn/z"][0] == len("attn_gate") / 2
    assert vectors["text/layers/0/attention/gate"][0] == len("attn_q") / 2


def test_counts_below_one_divide_by_one(desk: Desk) -> None:
    vectors, _ = desk.imported("--gguf", desk.gguf(sums("blk.1.attn_k.weight", [4.0] * 4, [0.5])))
    assert vectors["text/layers/1/attention/key"].tolist() == [4.0] * 4


def test_division_is_that_of_binary32(desk: Desk) -> None:
    values = [0.1, 1 / 3, 1e-30, 123456.789]
    vectors, _ = desk.imported("--gguf", desk.gguf(sums("blk.1.attn_k.weight", values, [7.0])))
    expected = np.array(values, np.float32) / np.float32(7)
    assert np.array_equal(vectors["text/layers/1/attention/key"], expected)


def test_a_wrapped_configuration_and_half_precision(desk: Desk) -> None:
    desk.configure({"text_config": {**CONFIG, "layer_types": ["full_attention"]}})
    halves = np.full(8, 4.0, "<f2").tobytes()
    tensors = [
        ("blk.0.ffn_down.weight.in_sum2", (1, 8), F16, halves),
        ("blk.0.ffn_down.weight.counts", (1, 1), F32, floats([2.0])),
    ]
    vectors, _ = desk.imported("--gguf", desk.gguf(tensors))
    assert {name: vector.tolist() for name, vector in vectors.items()} == {"text/layers/0/mlp/down": [2.0] * 8}


def test_tiled_value_heads_of_the_real_size() -> None:
    grouped = TextGeometry((), 16, 48, 128).untiled(np.arange(6144, dtype=np.float32))
    assert [grouped[index] for index in (0, 128, 256, 384, 6143)] == [0, 2048, 4096, 128, 6143]


# What is refused


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (sums("output.weight", [1.0] * 4), "no text-layer importance vectors matched"),
        (sums("blk.1.attn_q.weight", [1.0] * 8, [1.0, 1.0]), "blk.1.attn_q.weight needs one dense activation count"),
        (sums("blk.1.attn_q.weight", [1.0] * 8)[:1], "blk.1.attn_q.weight needs one dense activation count"),
        (sums("blk.0.ssm_out.weight", [1.0] * 6), "cannot reorder 6 input channels as 4 value heads of 2"),
        (sums("blk.1.attn_q.weight", [1.0, -1.0]), "must be finite and nonnegative"),
        (sums("blk.1.attn_q.weight", [1.0, float("nan")]), "must be finite and nonnegative"),
        (sums("blk.1.attn_q.weight", [1.0], [float("inf")]), "the activation count is inf"),
        (
            [("other.in_sum2", (1, 32), Q8_0, bytes(34)), *sums("blk.1.attn_q.weight", [1.0])],
            "other.in_sum2: Q8_0 is not a direct format",
        ),
    ],
)
def test_matrices_that_do_not_suit(desk: Desk, tensors: list[Tensor], message: str) -> None:
    path = desk.gguf(tensors)
    line = desk.refused("--gguf", path)
    assert line.startswith(f"error: {path}: ")
    assert message in line


SIZES = {"hidden_size": 4, "num_attention_heads": 3, "head_dim": 2, "intermediate_size": 5}


@pytest.mark.parametrize(
    ("matrix", "parameter", "channels"),
    [
        ("blk.0.attn_qkv", "text/layers/0/gdn/query", 4),
        ("blk.0.ssm_out", "text/layers/0/gdn/output", 8),
        ("blk.1.attn_v", "text/layers/1/attention/value", 4),
        ("blk.1.attn_output", "text/layers/1/attention/output", 6),
        ("blk.0.ffn_gate", "text/layers/0/mlp/gate", 4),
        ("blk.1.ffn_down", "text/layers/1/mlp/down", 5),
    ],
)
def test_lengths_are_those_of_the_model(desk: Desk, matrix: str, parameter: str, channels: int) -> None:
    desk.configure({"text_config": {**CONFIG, **SIZES}})
    name = f"{matrix}.weight"
    wrong = desk.refused("--gguf", desk.gguf(sums(name, [1.0] * (channels + 2))))
    assert f"model.imatrix.gguf: {name}: " in wrong
    assert f"is {desk.config} the model's?" in wrong
    if parameter.endswith("gdn/output"):
        assert "cannot reorder 10 input channels" in wrong
    else:
        assert f"{channels + 2} values, and {parameter} has {channels} input channels" in wrong
    vectors, _ = desk.imported("--gguf", desk.gguf(sums(name, [1.0] * channels)))
    assert vectors[parameter].shape == (channels,)


def test_sizes_that_are_none(desk: Desk) -> None:
    desk.configure({**CONFIG, **SIZES, "head_dim": 0})
    assert "config.json: head_dim must be a positive integer, not 0" in desk.refused("--gguf", desk.gguf(every()))
    desk.configure({**CONFIG, "head_dim": None})
    assert desk.imported("--gguf", desk.gguf(every()))[0].keys() == EXPECTED.keys()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dat({"blk.1.attn_q.weight": (1, [1.0])}), "not a GGUF file"),
        (gguf_bytes([], [], version=2), "unsupported GGUF version 2"),
    ],
)
def test_files_that_are_not_gguf(desk: Desk, data: bytes, message: str) -> None:
    path = desk.dat(data)
    line = desk.refused("--gguf", path)
    assert str(path) in line
    assert message in line


WHOLE = dat({"blk.1.attn_q.weight": (2, [1.0, 2.0])})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes([], []), "a GGUF file; give it with --gguf"),
        (b"", "it ends within the number of entries"),
        (dat({}), "the number of entries is 0"),
        (WHOLE[:-1], "it ends within the values of blk.1.attn_q.weight"),
        (WHOLE[:20], "it ends within name 0"),
        (struct.pack("<ii", 1, 0), "the length of name 0 is 0"),
        (struct.pack("<ii", 1, 1 << 20), "name 0 has 1048576 bytes"),
        (struct.pack("<ii", 1, 2) + b"\xff\xff", "name 0 is not UTF-8"),
        (struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii", -1, 1), "the number of calls of x is -1"),
        (struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii", 1, 0), "the number of values of x is 0"),
        (struct.pack("<i", 2) + WHOLE[4:] * 2, "blk.1.attn_q.weight occurs twice"),
        (dat({"blk.1.attn_q.weight": (1, [-1.0])}), "must be finite and nonnegative"),
        (dat({"output.weight": (1, [1.0])}), "no text-layer importance vectors matched"),
    ],
)
def test_files_of_the_older_form_that_do_not_suit(desk: Desk, data: bytes, message: str) -> None:
    path = desk.dat(data)
    line = desk.refused("--dat", path)
    assert line.startswith(f"error: {path}: ")
    assert message in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({k: v for k, v in CONFIG.items() if k != name}, f"{name} is missing") for name in CONFIG),
        ({**CONFIG, "layer_types": "full_attention"}, "layer_types must be a list"),
        (
            {**CONFIG, "layer_types": None, "num_hidden_layers": 2, "full_attention_interval": 0},
            "text.full_attention_interval: expected a positive integer",
        ),
        ({**CONFIG, "linear_num_key_heads": 0}, "linear_num_key_heads must be a positive integer"),
        ({**CONFIG, "linear_num_key_heads": 3}, "4 value heads are not shared evenly by 3 key heads"),
        ({"text_config": 1}, "no JSON object"),
        ([], "no JSON object"),
    ],
)
def test_configurations_that_do_not_suit(desk: Desk, config: Any, message: str) -> None:
    desk.configure(config)
    line = desk.refused("--gguf", desk.gguf(every()))
    assert line.startswith(f"error: {desk.config}: ")
    assert message in line


def test_without_kinds_of_layers_their_interval_tells(desk: Desk) -> None:
    """As a build takes the same configuration."""
    short = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    desk.configure({**short, "num_hidden_layers": 2, "full_attention_interval": 2})
    vectors, _ = desk.imported("--gguf", desk.gguf(every()))
    assert {name: vector.tolist() for name, vector in vectors.items()} == EXPECTED


@pytest.mark.parametrize("option", ["--gguf", "--config"])
def test_the_output_replaces_no_input(desk: Desk, option: str) -> None:
    matrix = desk.gguf(every())
    path = matrix if option == "--gguf" else desk.config
    before = path.read_bytes()
    desk.out.symlink_to(path)
    ran = desk.run("--gguf", matrix)
    assert ran.code == 2
    assert ran.err == f"error: --out: {desk.out} is the file that {option} gives; name another one\n"
    assert path.read_bytes() == before


def test_the_output_is_no_directory(desk: Desk) -> None:
    desk.out.mkdir()
    ran = desk.run("--gguf", desk.gguf(every()))
    assert ran.code == 2
    assert ran.err == f"error: --out: {desk.out} is a directory; name a file\n"


def test_missing_files(desk: Desk) -> None:
    assert "no such GGUF file" in desk.refused("--gguf", desk.directory / "absent.gguf")
    assert "No such file" in desk.refused("--dat", desk.directory / "absent.dat")
    desk.config.unlink()
    assert "config.json: No such file" in desk.refused("--gguf", desk.gguf(every()))


def test_what_is_there_stays_when_an_import_fails(desk: Desk) -> None:
    desk.out.write_bytes(b"precious")
    assert desk.run("--gguf", desk.gguf(sums("output.weight", [1.0])), "--overwrite").code == 1
    assert desk.out.read_bytes() == b"precious"


def test_one_matrix_has_to_be_given(desk: Desk) -> None:
    for given in ((), ("--gguf", "a", "--dat", "b")):
        ran = desk.run(*given)
        assert ran.code == 2
        assert "--gguf PATH or with --dat PATH" in ran.err


def test_imported_vectors_can_be_loaded(desk: Desk) -> None:
    desk.imported("--gguf", desk.gguf(every()))
    loaded = imatrix.load(desk.out)
    assert {name: vector.tolist() for name, vector in loaded.items()} == EXPECTED
