"""Bad input ends with one line that names the parameter or file and says what to do, and costs nothing that was done.

Every row of :func:`test_bad_input` breaks one thing and runs a command on it. The command fails with the row's exit
code and message, leaves the output directory as it was, and once the row has mended what it broke, a build executes
only what had not been finished before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
import json
import os
from pathlib import Path
import struct

from fixtures.breakable import DOWN, LAYER, NORM, Bench, load, tmpfs, write
import numpy as np
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.cache import filesystem

Steps = Iterator[list[str]]
"""A row: it breaks something and yields the command that fails; resumed, it mends that, and may yield the command that
succeeds (else :meth:`Bench.convert`); resumed again, it may look at what came out.
"""


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        parts: what the line says.
        missing: how many actions the mended build executes after a complete one; None: the row starts with an empty
            cache and fails while encoding, so the mended build executes some of them.
    """

    body: Callable[[Bench], Steps]
    code: int
    parts: tuple[str, ...]
    missing: int | None


CASES: list[Case] = []


def case(
    *parts: str, code: int = 1, missing: int | None = 0
) -> Callable[[Callable[[Bench], Steps]], Callable[[Bench], Steps]]:
    def register(body: Callable[[Bench], Steps]) -> Callable[[Bench], Steps]:
        CASES.append(Case(body, code, parts, missing))
        return body

    return register


encoding = partial(case, missing=None)
"""A row that fails while encoding: some actions are finished by then and kept."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(write(tmp_path), monkeypatch, capsys)


def planning(args: list[str]) -> list[str]:
    """The command that plans what ``args`` convert."""
    at = args.index("--jobs")
    return ["plan", *(arg for arg in (*args[1:at], *args[at + 2 :]) if arg != "--overwrite"), "--hash", "--json"]


# Checkpoints


@case("text/layers/0/mlp/down", "model: missing source tensor", DOWN, "complete the checkpoint")
def missing_tensor(bench: Bench) -> Steps:
    bench.own_process = True
    bench.edit(DOWN, None)
    yield bench.convert()
    bench.restore()


@case("text/layers/0/mlp/down", DOWN, "expected source shape (128, 256), got (256, 128)", "config.json")
def wrong_shape(bench: Bench) -> Steps:
    bench.edit(DOWN, bench.words(DOWN), shape=(256, 128))
    yield bench.convert()
    bench.restore()


@case("text/layers/0/mlp/down", "model/model.safetensors", "unsupported source dtype BOOL")
def dtype_that_no_method_reads(bench: Bench) -> Steps:
    bench.edit(DOWN, np.zeros(128 * 256, "u1"), dtype="BOOL")
    yield bench.convert()
    bench.restore()


@encoding("text/layers/0/mlp/down", "weight must be floating point, got torch.int32")
def dtype_that_the_method_does_not_read(bench: Bench) -> Steps:
    bench.edit(DOWN, np.zeros(128 * 256, "<i4"), dtype="I32")
    yield bench.convert("--assign", "text/layers/0/mlp/down=q4_g64_fp16:grouped_absmax")
    bench.restore()


@case("model/model.safetensors", "truncated")
def truncated_payload(bench: Bench) -> Steps:
    weights = bench.root / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    yield bench.convert()
    bench.restore()


@case("model/model.safetensors", "header exceeds file", "truncated")
def truncated_header(bench: Bench) -> Steps:
    os.truncate(bench.root / "model" / "model.safetensors", 200)
    yield bench.convert()
    bench.restore()


@case("model/model.safetensors", "truncated, download it again")
def empty_weights(bench: Bench) -> Steps:
    os.truncate(bench.root / "model" / "model.safetensors", 0)
    yield bench.convert()
    bench.restore()


@case("model/model.safetensors", "corrupt Safetensors header")
def corrupt_header(bench: Bench) -> Steps:
    weights = bench.root / "model" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[8] ^= 0x21
    weights.write_bytes(damaged)
    yield bench.convert()
    bench.restore()


@case("model/model-2.safetensors", "missing file", DOWN, "complete the download")
def index_that_names_a_missing_shard(bench: Bench) -> Steps:
    model = bench.root / "model"
    shards = dict.fromkeys(load(model), "model-1.safetensors") | {DOWN: "model-2.safetensors"}
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    yield bench.convert()
    bench.restore()


@case("model/model.safetensors.index.json", "not valid JSON")
def corrupt_index(bench: Bench) -> Steps:
    (bench.root / "model" / "model.safetensors.index.json").write_text("{")
    yield bench.convert()
    bench.restore()


@case("model/config.json", "not valid JSON")
def corrupt_configuration(bench: Bench) -> Steps:
    (bench.root / "model" / "config.json").write_text("{")
    yield bench.convert()
    bench.restore()


# Unknown names


@case("--recipe: ", "qwen3_6_27", "did you mean qwen3_6_27b?", code=2)
def unknown_recipe(bench: Bench) -> Steps:
    yield bench.convert("--recipe", "qwen3_6_27")


@case("none.py", code=2)
def missing_recipe_file(bench: Bench) -> Steps:
    yield bench.convert("--recipe", "none.py")


@case("--components: ", "components text, visoin", "supported optional components vision", code=2)
def unknown_component(bench: Bench) -> Steps:
    yield bench.convert("--components", "text,visoin")


def target_file(bench: Bench, assign: str) -> list[str]:
    """The command that builds a target with one assignment."""
    (bench.root / "ninferbuild.toml").write_text(
        '[targets.small]\nmodel = "model"\nrecipe = "recipe.py"\nout = "out/small.ninfer"\n'
        f'device = "cpu"\n[[targets.small.assign]]\n{assign}\n'
    )
    return ["build", "small"]


TOML = ("ninferbuild.toml: targets.small.assign[0]",)


@case(*TOML, "unknown numeric format 'q3'", "known: bf16", code=2)
def unknown_format_in_toml(bench: Bench) -> Steps:
    yield target_file(bench, 'select = "text/layers/0/mlp/up"\nformat = "q3"')


@case(*TOML, "unknown conversion method 'grouped'", "choose one of cast_direct", code=2)
def unknown_method_in_toml(bench: Bench) -> Steps:
    yield target_file(bench, 'select = "text/layers/0/mlp/up"\nmethod = "grouped"')


@case(*TOML, "selector 'text/layers/9/*' matched no logical parameter", code=2)
def selector_that_matches_nothing_in_toml(bench: Bench) -> Steps:
    yield target_file(bench, 'select = "text/layers/9/*"\nformat = "bf16"')


@case("ninferbuild.toml: targets.small.assign[0].slect", "unknown key; did you mean 'select'?", code=2)
def unknown_selector_key_in_toml(bench: Bench) -> Steps:
    yield target_file(bench, 'slect = "text/layers/0/*"\nformat = "bf16"')


@case("--assign text/layers/0/mlp/up=q3: ", "unknown numeric format 'q3'", "known: bf16", code=2)
def unknown_format_in_an_option(bench: Bench) -> Steps:
    yield bench.convert("--assign", "text/layers/0/mlp/up=q3")


@case("--assign text/layers/0/mlp/up=bf16:grouped", "unknown conversion method 'grouped'", "choose one of", code=2)
def unknown_method_in_an_option(bench: Bench) -> Steps:
    yield bench.convert("--assign", "text/layers/0/mlp/up=bf16:grouped")


@case("--assign text/layers/9/*=bf16", "selector 'text/layers/9/*' matched no logical parameter", code=2)
def selector_that_matches_nothing_in_an_option(bench: Bench) -> Steps:
    yield bench.convert("--assign", "text/layers/9/*=bf16")


@case("--assign 'text'", "write SELECTOR=FORMAT", code=2)
def malformed_option(bench: Bench) -> Steps:
    yield bench.convert("--assign", "text")


CONFIGURE = "def configure(model, recipe, sources):\n    "


@case("unknown numeric format 'q3'", "known: bf16", "text/layers/0/mlp/up")
def unknown_format_in_a_recipe(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f'{CONFIGURE}recipe.assign("text/layers/0/mlp/up", format="q3")\n'))


@case("override.py:2: ", "unknown conversion method 'grouped'", "choose one of")
def unknown_method_in_a_recipe(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f'{CONFIGURE}recipe.assign("text/layers/0/mlp/up", method="grouped")\n'))


@case("override.py:2: ", "selector 'text/layers/9/*' matched no logical parameter")
def selector_that_matches_nothing_in_a_recipe(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f'{CONFIGURE}recipe.assign("text/layers/9/*", format="bf16")\n'))


@case("override.py:2: ", "requires source 'other'", "--source other=PATH")
def source_that_is_not_given(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f'{CONFIGURE}sources["other"]\n'))


# Values that a method refuses


def spoil(bench: Bench, word: int) -> None:
    """Put a bfloat16 word into the matrix of the feed-forward's output."""
    words = bench.words(DOWN)
    words[300] = word
    bench.edit(DOWN, words)


INFINITY, NAN, HUGE = 0x7F80, 0x7FC1, 0x7F00


@encoding("text/layers/0/mlp/down", "contains NaN or infinity", "cast_direct")
def infinity_in_grouped_absmax(bench: Bench) -> Steps:
    spoil(bench, INFINITY)
    yield bench.convert("--assign", "text/layers/0/mlp/down=q4_g64_fp16:grouped_absmax")
    bench.restore()


@encoding("text/layers/0/mlp/down", "contains NaN or infinity", "cast_direct")
def nan_in_grouped_absmax(bench: Bench) -> Steps:
    spoil(bench, NAN)
    yield bench.convert("--assign", "text/layers/0/mlp/down=q4_g64_fp16:grouped_absmax")
    bench.restore()


@encoding("text/layers/0/mlp/down", "fp8_row_maxabs", "contains NaN or infinity", "cast_direct")
def infinity_in_fp8_row_maxabs(bench: Bench) -> Steps:
    spoil(bench, INFINITY)
    yield bench.convert()
    bench.restore()


@encoding("text/layers/0/mlp/down", "fp8_row_maxabs", "contains NaN or infinity", "cast_direct")
def nan_in_fp8_row_maxabs(bench: Bench) -> Steps:
    bench.own_process = True
    spoil(bench, NAN)
    yield bench.convert()
    bench.restore()


POST_NORM = f"{LAYER}post_attention_layernorm.weight"


@encoding("text/layers/0/post_attention_norm", "cast_direct", "NaN", "from float32 to BF16", "mend the weights")
def nan_that_cast_direct_must_convert(bench: Bench) -> Steps:
    """Infinities pass, and a BF16 NaN is copied bit for bit: of the two norms only the F32 one is refused."""
    words = bench.words(NORM)
    words[:4] = INFINITY, 0xFF80, NAN, 0xFFAA
    bench.edit(NORM, words)
    good = bench.words(POST_NORM)
    wide = good.astype("<u4") << 16
    bench.edit(POST_NORM, np.concatenate([[0x7FC00001], wide[1:]]).astype("<u4").view("<f4"), dtype="F32")
    yield bench.convert()
    bench.edit(POST_NORM, np.concatenate([[0xFF800000], wide[1:]]).astype("<u4").view("<f4"), dtype="F32")
    yield bench.convert()
    with Artifact(bench.out) as artifact:
        bindings = artifact.directory.bindings
        stored = {
            role: np.frombuffer(artifact.read_object(bindings[f"text/layers/0/{role}"]["object"]), "<u2")
            for role in ("input_norm", "post_attention_norm")
        }
    assert np.array_equal(stored["input_norm"], words)
    assert np.array_equal(stored["post_attention_norm"], [0xFF80, *good[1:]])


@encoding("text/layers/0/mlp/down", "scale is not finite and positive", "too large; keep them in bf16")
def scale_that_binary16_cannot_hold(bench: Bench) -> Steps:
    spoil(bench, HUGE)
    yield bench.convert("--assign", "text/layers/0/mlp/down=q4_g64_fp16:grouped_absmax")
    bench.restore()


@encoding("text/layers/0/mlp/down", "too small to scale; keep it in bf16")
def row_that_no_scale_reaches(bench: Bench) -> Steps:
    words = bench.words(DOWN)
    words[:256] = 0
    words[5] = 1
    bench.edit(DOWN, words)
    yield bench.convert()
    bench.restore()


# NVFP4

OUTPUT = f"{LAYER}self_attn.o_proj"
QUANTIZED = ("--source", "quantized=quantized")


@case("text/layers/0/attention/key", "N divisible by 128", "[64, 128]", "choose another format")
def nvfp4_rows_that_are_not_whole_tiles(bench: Bench) -> Steps:
    yield bench.convert("--assign", "text/layers/0/attention/key=nvfp4:import_encoded")


OWN_NVFP4 = """
import torch

def own(request):
    def produce(output):
        output.write_codes(0, torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 8, dtype=torch.uint8), {divisor})
    return request.job(produce=produce)

def configure(model, recipe, sources):
    recipe.assign("text/layers/0/attention/output", format="nvfp4", method=own)
"""


@encoding("override.py:6: ", "text/layers/0/attention/output [own/nvfp4]", "whole 128-row tiles")
def nvfp4_rows_of_a_user_that_are_not_whole_tiles(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(OWN_NVFP4.format(divisor=r'b"\0\0\x80\x3f"')))


@encoding("override.py:6: ", "text/layers/0/attention/output [own/nvfp4]", "and weight divisor")
def divisor_that_a_user_does_not_write(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(OWN_NVFP4.format(divisor="None")))


@case("text/layers/0/attention/output", "quantized: missing source tensor", f"{OUTPUT}.weight_global_scale", missing=1)
def missing_weight_divisor(bench: Bench) -> Steps:
    bench.edit(f"{OUTPUT}.weight_global_scale", None, store="quantized")
    yield bench.convert(*QUANTIZED)
    bench.restore()
    yield bench.convert(*QUANTIZED)


@case("text/layers/0/attention/output", "quantized: missing source tensor", f"{OUTPUT}.input_global_scale", missing=1)
def missing_activation_divisor(bench: Bench) -> Steps:
    bench.edit(f"{OUTPUT}.input_global_scale", None, store="quantized")
    yield bench.convert(*QUANTIZED)
    bench.restore()
    yield bench.convert(*QUANTIZED)


@case("text/layers/0/attention/output", "quantized/model.safetensors", "divisor must be finite and positive", missing=1)
def divisor_of_zero(bench: Bench) -> Steps:
    bench.edit(f"{OUTPUT}.weight_global_scale", np.zeros(1, "<f4"), store="quantized")
    yield bench.convert(*QUANTIZED)
    bench.restore()
    yield bench.convert(*QUANTIZED)


@encoding("text/layers/0/attention/output", f"{OUTPUT}.weight_scale", "nonnegative finite")
def scale_word_that_is_nan(bench: Bench) -> Steps:
    bench.edit(f"{OUTPUT}.weight_scale", np.full(128 * 8, 0x7F, "u1"), store="quantized")
    yield bench.convert(*QUANTIZED)
    bench.restore()
    yield bench.convert(*QUANTIZED)


# Outputs


@case("small.ninfer exists and is not an artifact made by ninferbuild (or is damaged)", "--overwrite")
def foreign_entry(bench: Bench) -> Steps:
    bench.out.write_bytes(b"mine")
    yield bench.convert()
    yield bench.convert("--overwrite")


@case("--out: ", "small.ninfer is a directory; name a file", code=2)
def directory_in_place_of_the_entry(bench: Bench) -> Steps:
    bench.out.mkdir()
    yield bench.convert()
    bench.out.rmdir()


@case("small.ninfer.part-0001 exists and belongs to no artifact made here", "--overwrite")
def foreign_part(bench: Bench) -> Steps:
    bench.out.with_name("small.ninfer.part-0001").write_bytes(b"mine")
    yield bench.convert("--max-file-bytes", "100000")
    yield bench.convert("--max-file-bytes", "100000", "--overwrite")


@case("small.ninfer.conversion.json exists and is no report of ninferbuild", "--overwrite")
def foreign_report(bench: Bench) -> Steps:
    bench.out.with_name("small.ninfer.conversion.json").write_text('{"mine": true}')
    yield bench.convert()
    yield bench.convert("--overwrite")


def unusable_output(bench: Bench, name: str) -> list[str]:
    return [*bench.convert()[:-1], name]


@case("--out: ", "is a directory; name a file", code=2)
def working_directory_for_the_entry(bench: Bench) -> Steps:
    yield unusable_output(bench, ".")


@case("--out: ", "new is a directory; name a file", code=2)
def new_directory_for_the_entry(bench: Bench) -> Steps:
    yield unusable_output(bench, "new/")


@case("--out: must not be empty", code=2)
def no_name_for_the_entry(bench: Bench) -> Steps:
    yield unusable_output(bench, "")


@case("--out: ", "is too long", "204 bytes", code=2)
def long_name_for_the_entry(bench: Bench) -> Steps:
    """The longest name that can be used is one byte shorter."""
    yield unusable_output(bench, "n" * 205)
    yield unusable_output(bench, "n" * 204)


@case("--out: ", r"'\udcff.ninfer' is not UTF-8", code=2)
def name_of_the_entry_that_is_not_utf8(bench: Bench) -> Steps:
    bench.own_process = True
    yield unusable_output(bench, "\udcff.ninfer")


@case("--device: gpu: no such device", code=2)
def unknown_device(bench: Bench) -> Steps:
    yield bench.convert("--device", "gpu")


@case("--set device: cuda:x: GPUs are given by number", code=2)
def unknown_gpu_by_set(bench: Bench) -> Steps:
    yield bench.convert("--set", "device=cuda:x")


@case("--device cuda:0,0: each GPU may be named once", code=2)
def gpu_named_twice_for_a_target(bench: Bench) -> Steps:
    yield [*target_file(bench, 'select = "text/layers/0/mlp/up"\nformat = "bf16"'), "--device", "cuda:0,0"]


@case("ninferbuild.toml: targets.small.device: tpu: no such device", code=2)
def unknown_device_in_toml(bench: Bench) -> Steps:
    command = target_file(bench, 'select = "text/layers/0/mlp/up"\nformat = "bf16"')
    file = bench.root / "ninferbuild.toml"
    file.write_text(file.read_text().replace('"cpu"', '"tpu"'))
    yield command


@case("recipe.py/small.ninfer", "is not a directory; choose another output")
def output_below_a_file(bench: Bench) -> Steps:
    yield [*bench.convert()[:-1], "recipe.py/small.ninfer"]


@case("--max-file-bytes", "maximum file bytes 100", "allow larger files", code=2)
def files_too_small_for_the_directory(bench: Bench) -> Steps:
    yield bench.convert("--max-file-bytes", "100")


@case("small/small.ninfer", "cannot be written; choose another output")
def output_on_a_read_only_disk(bench: Bench) -> Steps:
    with tmpfs(bench.root / "small", "ro"):
        yield [*bench.convert()[:-1], "small/small.ninfer"]


@case("small", "bytes have to be written and", "kept in reserve", "are free; make room", missing=1)
def full_disk_for_the_output(bench: Bench) -> Steps:
    """What has to be written is compared with the free space before the first action."""
    assign = ("--assign", "text/final_norm=fp32")
    with tmpfs(bench.outputs / "small", "size=100k") as small:
        yield [*bench.convert(*assign)[:-3], str(small / "small.ninfer"), *assign]
    yield bench.convert(*assign)


@case("small.ninfer: cannot be written: No space left on device")
def disk_that_fills_up_while_linking(bench: Bench) -> Steps:
    bench.monkeypatch.setattr(filesystem, "free_bytes", lambda path: 1 << 40)
    with tmpfs(bench.outputs / "small", "size=100k") as small:
        yield [*bench.convert()[:-1], str(small / "small.ninfer")]
    bench.monkeypatch.undo()
    bench.monkeypatch.chdir(bench.root)
    bench.use_cache(bench.root / "cache")


# The cache


@case("no space left for the cache", "make room", "NINFERBUILD_CACHE", missing=1)
def full_disk_for_the_cache(bench: Bench) -> Steps:
    assign = ("--assign", "text/final_norm=fp32")
    with tmpfs(bench.root / "small", "size=24m") as small:
        bench.use_cache(small / "cache")
        assert bench.run(bench.convert("--no-link")).code == 0
        filler = small / "filler"
        filler.write_bytes(bytes(max(filesystem.free_bytes(small) - (64 << 10), 0)))
        yield bench.convert(*assign)
        filler.unlink()
        yield bench.convert(*assign)


@case("not enough free space to create", "cache", "make room", "NINFERBUILD_CACHE")
def disk_too_small_for_a_cache(bench: Bench) -> Steps:
    kept = bench.cache
    with tmpfs(bench.root / "small", "size=256k") as small:
        bench.use_cache(small / "cache")
        yield bench.convert()
    bench.use_cache(kept)


@case("cache", "cannot be written", "NINFERBUILD_CACHE")
def unwritable_cache(bench: Bench) -> Steps:
    """Mode bits do not stop root, a read-only disk does."""
    kept = bench.cache
    with tmpfs(bench.root / "small", "ro") as small:
        bench.use_cache(small)
        yield bench.convert()
    bench.use_cache(kept)


@case("other is not a directory", "NINFERBUILD_CACHE")
def file_in_place_of_the_cache(bench: Bench) -> Steps:
    kept = bench.cache
    bench.use_cache(bench.root / "other")
    bench.cache.write_bytes(b"mine")
    yield bench.convert()
    bench.use_cache(kept)


def on_nfs(bench: Bench) -> None:
    """Let the mount table say that everything is on NFS."""
    table = bench.root / "mounts"
    table.write_text("server:/export / nfs4 rw 0 0\n")
    bench.monkeypatch.setattr(filesystem, "kind_of", partial(filesystem.kind_of, mounts=table))


NETWORK = ("cache", "network file system (nfs4)", "choose a local directory", "NINFERBUILD_CACHE")


@case(*NETWORK)
def cache_on_a_network_file_system(bench: Bench) -> Steps:
    original = filesystem.kind_of
    on_nfs(bench)
    yield bench.convert()
    bench.monkeypatch.setattr(filesystem, "kind_of", original)


@case(*NETWORK)
def cache_on_a_network_file_system_that_is_not_allowed_enough(bench: Bench) -> Steps:
    """``allow_foreign_fs`` is what lets a build use it all the same."""
    on_nfs(bench)
    yield bench.convert("--set", "cache.allow_foreign_fs=false")
    yield bench.convert("--set", "cache.allow_foreign_fs=true")


# A user's own code


@case("override.py:3: KeyError: 'a'")
def recipe_that_raises(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f"{CONFIGURE}table = {{}}\n    table['a']\n"))


@case("override.py:2: AssertionError")
def recipe_that_raises_without_a_message(bench: Bench) -> Steps:
    bench.own_process = True
    yield bench.convert(*bench.override(f"{CONFIGURE}assert not model.parameters\n"))


@case("beside.py:2: ZeroDivisionError: division by zero")
def module_beside_a_recipe_that_raises(bench: Bench) -> Steps:
    (bench.root / "beside.py").write_text("def divide():\n    return 1 / 0\n")
    yield bench.convert(*bench.override(f"import beside\n{CONFIGURE}beside.divide()\n"))


@case("override.py:1: ", "SyntaxError", "expected ':'")
def recipe_that_is_not_python(bench: Bench) -> Steps:
    yield bench.convert(*bench.override("def configure(model, recipe, sources)\n"))


@case("override.py defines no function 'configure'; use FILE:function")
def recipe_without_configure(bench: Bench) -> Steps:
    yield bench.convert(*bench.override("def other(model, recipe, sources):\n    pass\n"))


@case("override.py:1: ModuleNotFoundError", "nowhere")
def recipe_whose_import_fails(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(f"import nowhere\n{CONFIGURE}pass\n"))


@case("override.py:3: SystemExit: 0")
def recipe_that_exits(bench: Bench) -> Steps:
    """Exit code 0 of a recipe must not pass for a finished build."""
    yield bench.convert(*bench.override(f"import sys\n{CONFIGURE}sys.exit(0)\n"))


@case("override.py:5: Stop: enough")
def recipe_that_raises_what_is_no_exception(bench: Bench) -> Steps:
    bench.own_process = True
    yield bench.convert(*bench.override(f"class Stop(BaseException):\n    pass\n\n{CONFIGURE}raise Stop('enough')\n"))


@case("override.py: configure(model, recipe) must take (model, recipe, sources): too many positional arguments")
def recipe_that_takes_too_few_arguments(bench: Bench) -> Steps:
    yield bench.convert(*bench.override("def configure(model, recipe):\n    pass\n"))


@case("override.py:2: ", "null bytes")
def recipe_with_a_nul_byte(bench: Bench) -> Steps:
    yield bench.convert(*bench.override("# fine\n# not \0\n"))


@case("text/layers/0/mlp/up: 'a\\x00b': not the path of an importance matrix: it holds a NUL")
def importance_matrix_with_a_nul_in_its_path(bench: Bench) -> Steps:
    choice = 'format="q5_g64_fp16", method="grouped_search", parameters={"imatrix": "a\\0b"}'
    yield bench.convert(*bench.override(f'{CONFIGURE}recipe.assign("text/layers/0/mlp/up", {choice})\n'))


@case("override.py:3: source 'x': 'a\\x00b.ninfer' is not a path: it holds a NUL")
def source_with_a_nul_in_its_path(bench: Bench) -> Steps:
    yield bench.convert(
        *bench.override(
            f"from ninferbuild.sources.opened import open_source\n{CONFIGURE}open_source('x', 'a\\0b.ninfer')\n"
        )
    )


OWN_METHOD = """
class Unusual(Exception):
    pass

def own(request):
    {prepare}
    def produce(output):
        {produce}
    return request.job(produce=produce)

def configure(model, recipe, sources):
    recipe.assign("text/final_norm", method=own)
"""


def own_method(bench: Bench, *, prepare: str = "pass", produce: str = "pass") -> list[str]:
    return bench.convert(*bench.override(OWN_METHOD.format(prepare=prepare, produce=produce)))


@case("override.py:6: text/final_norm: no; way")
def method_that_refuses(bench: Bench) -> Steps:
    yield own_method(bench, prepare=r'raise Unusual("no\nway")')


@case("override.py:6: text/final_norm: ZeroDivisionError: division by zero")
def method_that_fails(bench: Bench) -> Steps:
    yield own_method(bench, prepare="1 / 0")


@case("text/final_norm: method own must return request.job(...), not int")
def method_that_returns_something_else(bench: Bench) -> Steps:
    yield own_method(bench, prepare="return 3")


@encoding("override.py:8: text/final_norm [own/bf16]: KeyError: 'clip'")
def producer_that_fails(bench: Bench) -> Steps:
    yield own_method(bench, produce='request.parameters["clip"]')


@encoding("override.py:8: text/final_norm [own/bf16]: no; way")
def producer_that_raises_an_exception_of_its_own(bench: Bench) -> Steps:
    yield own_method(bench, produce=r'raise Unusual("no\nway")')


@encoding("override.py:8: nowhere.npy: No such file or directory")
def producer_that_misses_a_file(bench: Bench) -> Steps:
    yield own_method(bench, produce='open("nowhere.npy")')


@encoding("override.py:8: SystemExit: 0")
def producer_that_exits(bench: Bench) -> Steps:
    yield own_method(bench, produce="raise SystemExit(0)")


@encoding("text/final_norm [own/bf16]", "coverage is incomplete, [0, 256) is missing")
def producer_that_writes_nothing(bench: Bench) -> Steps:
    yield own_method(bench)


OWN_SOURCE = """
from tools.convert.sources.logical import LogicalSource

def read(begin, end):
    return [0.0] * {count}

def configure(model, recipe, sources):
    shape = model.parameters["text/final_norm"].shape
    recipe.assign("text/final_norm", source=LogicalSource(shape, "own values", read))
"""


@case("text/final_norm: own values: read_values must return a torch.Tensor, not list")
def reader_that_returns_something_else(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(OWN_SOURCE.format(count="(end - begin)")))


@case("override.py:5: text/final_norm: name 'count' is not defined")
def reader_that_fails(bench: Bench) -> Steps:
    yield bench.convert(*bench.override(OWN_SOURCE.format(count="count")))


# Artifacts


def artifact(bench: Bench, *options: str) -> bytearray:
    """The bytes of a good artifact, written beside the output directory."""
    assert bench.run([*bench.convert(*options), "--out", "good.ninfer"]).code == 0
    return bytearray((bench.root / "good.ninfer").read_bytes())


def inspect(bench: Bench, data: bytes) -> list[str]:
    (bench.root / "broken.ninfer").write_bytes(data)
    return ["inspect", "broken.ninfer"]


@case("broken.ninfer: the file ends inside the 32-byte header")
def artifact_truncated_in_its_header(bench: Bench) -> Steps:
    yield inspect(bench, artifact(bench)[:20])


@case("broken.ninfer: the header declares", "bytes of directory; the file has 100")
def artifact_truncated_in_its_directory(bench: Bench) -> Steps:
    yield inspect(bench, artifact(bench)[:100])


@case("broken.ninfer: the file has", "its directory declares")
def artifact_truncated_in_its_payload(bench: Bench) -> Steps:
    bench.own_process = True
    yield inspect(bench, artifact(bench)[:-1])


@case("broken.ninfer: no v3 .ninfer entry: the v3 magic is missing (found 47 47 55 46")
def artifact_of_another_kind(bench: Bench) -> Steps:
    yield inspect(bench, b"GGUF" + artifact(bench)[4:])


@case("broken.ninfer: no v3 .ninfer entry: container version 2 is obsolete; upgrade the file")
def artifact_of_an_old_version(bench: Bench) -> Steps:
    data = artifact(bench)
    data[7] = 2
    yield inspect(bench, data)


@case("broken.ninfer: ", "JSON", "1 column 2")
def artifact_with_a_damaged_directory(bench: Bench) -> Steps:
    data = artifact(bench)
    data[33] = 0x21
    yield inspect(bench, data)


@case("broken.ninfer: ", "offset")
def artifact_with_an_object_elsewhere(bench: Bench) -> Steps:
    data = artifact(bench)
    (length,) = struct.unpack_from("<Q", data, 8)
    at = data.index(b'"offset":', data.index(b'"weight/000001"'), 32 + length) + len(b'"offset":')
    data[at] = ord("9") if data[at] != ord("9") else ord("8")
    yield inspect(bench, data)


@case("good.ninfer.part-0001: no v3 .ninfer entry: this is a continuation; open the entry")
def part_in_place_of_an_artifact(bench: Bench) -> Steps:
    artifact(bench, "--max-file-bytes", "100000")
    yield ["inspect", "good.ninfer.part-0001"]


@case("none.ninfer: No such file or directory")
def artifact_that_does_not_exist(bench: Bench) -> Steps:
    yield ["inspect", "none.ninfer"]


@pytest.mark.parametrize("row", CASES, ids=[row.body.__name__ for row in CASES])
def test_bad_input(row: Case, bench: Bench) -> None:
    if row.missing is not None:
        assert bench.run(bench.convert("--no-link")).code == 0
    steps = row.body(bench)
    command = next(steps)
    before = bench.listing()

    failed = bench.run([*command, "-q"])
    assert (failed.code, failed.out) == (row.code, ""), failed
    lines = failed.err.splitlines()
    if row.code == 2:
        lines = [line for line in lines if not line.startswith("usage: ")]
    assert len(lines) == 1, failed
    assert lines[0].startswith("error: ")
    for part in row.parts:
        assert part in lines[0]
    assert bench.listing() == before

    bench.own_process = False
    mended = next(steps, None) or bench.convert()
    plan = json.loads(bench.run(planning(mended)).out)
    states = [action["state"] for action in plan["actions"]]
    done = bench.run([*mended, "--json"])
    assert done.code == 0, done
    executed = json.loads(done.out)["actions"]["executed"]
    assert executed == states.count("run")
    if row.missing is None:
        assert 0 < executed < len(states)
    else:
        assert executed == row.missing
    assert next(steps, None) is None
