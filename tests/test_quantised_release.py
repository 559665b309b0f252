"""Quantised releases through the command line: every word arrives, and nothing is made twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
from pathlib import Path
import shutil
import struct
from typing import Any

from fixtures import releases
from fixtures.workbench import Finished
import pytest
import torch

from ninferbuild.artifact.codecs.fp8_row import decode_fp8_row_scaled_words, dequantize_fp8_row_scaled
from ninferbuild.artifact.codecs.nvfp4 import decode_nvfp4_words, dequantize_nvfp4
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorObject
from ninferbuild.configure import configured
from ninferbuild.plan import plan_parents
from ninferbuild.sources.compressed_tensors import matrix_source
from ninferbuild.sources.safetensors import SafetensorsSource
from ninferbuild.target import convert_target

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty layers of four experts."""
    return releases.write_experts(tmp_path_factory.mktemp("experts") / "release")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def built(run: Run, *arguments: object) -> dict[str, Any]:
    """The report of ``convert --json``."""
    done = run("convert", *arguments, "--device", "cpu", "--json")
    assert done.code == 0, done
    report: dict[str, Any] = json.loads(done.out)
    return report


def expert_options(release: Path) -> tuple[object, ...]:
    return (
        *("--model", release, "--source", f"quantized={release}", "--recipe", "qwen3_6_35b_a3b_nvfp4"),
        *("--components", "text,mtp", "--out", "experts.ninfer"),
    )


class Stored:
    """Objects of an artifact, decoded once each."""

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self._decoded: dict[str, tuple[Any, torch.Tensor]] = {}

    def rows(self, parameter: str, columns: int) -> tuple[TensorObject, Any, torch.Tensor, slice]:
        """The object of a parameter that lies in one piece, its words and values, and the parameter's rows."""
        binding = self.artifact.directory.bindings[parameter]
        (part,) = binding.get("parts", [{"object": binding.get("object")}])
        item = self.artifact.by_id[part["object"]]
        assert isinstance(item, TensorObject)
        begin, end = part.get("range", [0, item.shape[0] * columns])
        if item.id not in self._decoded:
            payload = self.artifact.read_object(item.id)
            if item.format == "nvfp4":
                words: Any = decode_nvfp4_words(payload, item.shape, item.divisors)
                values = dequantize_nvfp4(payload, item.shape, item.divisors, dtype=torch.float32)
            else:
                words = decode_fp8_row_scaled_words(payload, item.shape)
                values = dequantize_fp8_row_scaled(payload, item.shape, dtype=torch.float32)
            self._decoded[item.id] = words, values
        return item, *self._decoded[item.id], slice(begin // columns, end // columns)


def check_nvfp4(stored: Stored, parameter: str, store: SafetensorsSource, prefix: str, shape: tuple[int, int]) -> None:
    """A whole matrix: codes and scales byte for byte, its divisor, its values."""
    source = matrix_source(store, f"{prefix}.weight", shape, "nvfp4")
    given = source.read_encoded(0, shape[0])  # type: ignore[misc]
    item, words, values, rows = stored.rows(parameter, shape[1])
    assert torch.equal(words.codes[rows], given.codes)
    assert torch.equal(words.scales[rows], given.scales)
    assert words.divisors[rows.start * item.divisors // item.shape[0]] == given.weight_divisor
    assert torch.equal(values[rows].reshape(-1).view(torch.int32), source.values().view(torch.int32))


def check_fp8(stored: Stored, parameter: str, store: SafetensorsSource, prefix: str, shape: tuple[int, int]) -> None:
    source = matrix_source(store, f"{prefix}.weight", shape)
    given = source.read_encoded(0, shape[0])  # type: ignore[misc]
    _, (codes, scales), values, rows = stored.rows(parameter, shape[1])
    assert torch.equal(codes[rows], given.codes)
    assert torch.equal(scales[rows].view(torch.int16), given.scales.view(torch.int16))
    assert torch.equal(values[rows].reshape(-1).view(torch.int32), source.values().view(torch.int32))


def change(release: Path, tensor: str, to: Callable[[bytes], bytes]) -> None:
    """Other bytes for one stored tensor."""
    with (release / "model.safetensors").open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[tensor]["data_offsets"]
        file.seek(8 + length + begin)
        data = file.read(end - begin)
        file.seek(8 + length + begin)
        file.write(to(data))


def other_codes(data: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in data)


def test_a_release_of_experts(experts: Path, here: Path, run: Run) -> None:
    release = shutil.copytree(experts, here / "release")
    options = expert_options(release)
    report = built(run, *options)
    assert report["actions"]["executed"] == report["actions"]["total"]
    assert run("verify", "experts.ninfer").code == 0
    with Artifact("experts.ninfer") as artifact, SafetensorsSource(release) as store:
        stored = Stored(artifact)
        for layer in range(40):
            for prefix in releases.expert_prefixes(layer, 4):
                owner, role = prefix.split(".mlp.")[1].replace("shared_expert", "shared").rsplit(".", 1)
                name = f"text/layers/{layer}/moe/{owner.replace('.', '/')}/{role.removesuffix('_proj')}"
                check_nvfp4(stored, name, store, prefix, (128, 128))
        assert sum(isinstance(item, TensorObject) and item.divisors > 1 for item in artifact.objects) == 3 * 40

    assert built(run, *options)["actions"]["executed"] == 0

    before = Path("experts.ninfer").read_bytes()
    change(release, f"{releases.TEXT}layers.17.mlp.experts.2.up_proj.weight_packed", other_codes)
    changed = built(run, *options)
    assert changed["actions"]["executed"] == 1
    assert run("verify", "experts.ninfer").code == 0
    after = Path("experts.ninfer").read_bytes()
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(before, after, strict=True)) >= 128 * 64


def test_what_a_scalar_changes(here: Path, run: Run) -> None:
    """A weight divisor is part of a payload; an activation divisor is an object of its own."""
    release = releases.write_experts(here / "release", layers=2)
    options = expert_options(release)
    built(run, *options)
    expert = f"{releases.TEXT}layers.1.mlp.experts.2.down_proj"
    change(release, f"{expert}.weight_global_scale", lambda _: struct.pack("<f", 77.0))
    assert built(run, *options)["actions"]["executed"] == 1
    with Artifact("experts.ninfer") as artifact:
        item, words, _, rows = Stored(artifact).rows("text/layers/1/moe/experts/2/down", 128)
        assert words.divisors[rows.start * item.divisors // item.shape[0]] == struct.pack("<f", 77.0)

    def activation_divisors() -> set[bytes]:
        with Artifact("experts.ninfer") as artifact:
            return {artifact.read_object(item.id) for item in artifact.objects if item.id.startswith("auxiliary/")}

    assert activation_divisors() == {struct.pack("<f", releases.ACTIVATION_DIVISOR)}
    for owner in ("experts.0", "shared_expert"):
        scalar = f"{releases.TEXT}layers.1.mlp.{owner}.down_proj.input_global_scale"
        change(release, scalar, lambda _: struct.pack("<f", 9.0))
    assert built(run, *options)["actions"]["executed"] == 0
    assert activation_divisors() == {struct.pack("<f", value) for value in (releases.ACTIVATION_DIVISOR, 9.0)}
    assert run("verify", "experts.ninfer").code == 0


DENSE: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    "nvidia": ("qwen3_8_27b_nvfp4_nvidia", releases.write_model_opt),
    "orcarouter": ("qwen3_8_27b_nvfp4_orcarouter", releases.write_gptq),
}


@pytest.mark.parametrize("release", DENSE)
def test_a_dense_release(release: str, here: Path, run: Run) -> None:
    recipe, write = DENSE[release]
    base, quantized = releases.write_dense_base(here / "base"), write(here / release)
    options = ("--model", base, "--source", f"quantized={quantized}", "--recipe", recipe, "--components", "text,mtp")
    built(run, *options, "--out", "dense.ninfer")
    assert run("verify", "dense.ninfer").code == 0
    with Artifact("dense.ninfer") as artifact, SafetensorsSource(quantized) as store:
        stored = Stored(artifact)
        for layer in range(4):
            source, name = f"{releases.TEXT}layers.{layer}.", f"text/layers/{layer}/"
            for role in ("gate", "up", "down"):
                check_nvfp4(stored, f"{name}mlp/{role}", store, f"{source}mlp.{role}_proj", (128, 128))
            if layer == 3:
                for role, letter in (("key", "k"), ("value", "v"), ("output", "o")):
                    prefix = f"{source}self_attn.{letter}_proj"
                    check_fp8(stored, f"{name}attention/{role}", store, prefix, (128, 128))
            else:
                check_fp8(stored, f"{name}gdn/z", store, f"{source}linear_attn.in_proj_z", (256, 128))
                check_fp8(stored, f"{name}gdn/output", store, f"{source}linear_attn.out_proj", (128, 256))
        formats = {item.format for item in artifact.objects if isinstance(item, TensorObject)}
        assert {"nvfp4", "fp8_e4m3fn_row_bf16", "q8_g32_fp16", "bf16", "fp32"} == formats
    assert built(run, *options, "--out", "dense.ninfer")["actions"]["executed"] == 0


def test_block_fp8_is_a_model_like_any_other(here: Path, run: Run) -> None:
    """Its decoded values are quantised anew; a word of row-scaled FP8 could not say them."""
    model = releases.write_block_fp8(here / "model")
    options = ("--model", model, "--recipe", "qwen3_8_27b", "--assign", "text/layers/0/gdn/z=bf16:cast_direct")
    built(run, *options, "--out", "block.ninfer")
    assert run("verify", "block.ninfer").code == 0
    with Artifact("block.ninfer") as artifact, SafetensorsSource(model) as store:
        directory = artifact.directory
        source = matrix_source(store, f"{releases.TEXT}layers.0.linear_attn.in_proj_z.weight", (256, 128))
        stored = artifact.read_object(directory.bindings["text/layers/0/gdn/z"]["object"])
        values = torch.frombuffer(bytearray(stored), dtype=torch.bfloat16)
        assert torch.equal(values, source.values().to(torch.bfloat16))


def test_planning_reads_scalars_alone(experts: Path, here: Path) -> None:
    release = str(experts)
    settings = {"model": release, "sources": {"quantized": release}, "recipe": "qwen3_6_35b_a3b_nvfp4", "out": "x"}
    with configured(convert_target(settings)) as ready:
        plan_parents(ready.recipe)
        scalars = 40 * 5 * 3 * 2
        assert ready.sources["quantized"].bytes_read == 4 * scalars
        assert ready.sources["base"].bytes_read == 0


def test_the_command_of_the_page(here: Path, run: Run) -> None:
    """The model that a release was made from gives everything but the experts."""
    page = (Path(__file__).parent.parent / "docs" / "from-a-quantised-release.md").read_text()
    command = page.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ").split()
    base = releases.write_experts_base(here / "Qwen3.6-35B-A3B", layers=2)
    release = releases.write_experts(here / "Qwen3.6-35B-A3B-NVFP4", layers=2)
    assert command[0] == "ninferbuild"
    done = run(*command[1:], "--device", "cpu")
    assert done.code == 0, done
    with Artifact(command[-1]) as artifact, SafetensorsSource(release) as store, SafetensorsSource(base) as model:
        assert {"text", "vision", "mtp"} == artifact.directory.components.keys()
        prefix = f"{releases.TEXT}layers.1.mlp.experts.3.down_proj"
        check_nvfp4(Stored(artifact), "text/layers/1/moe/experts/3/down", store, prefix, (128, 128))
        norm = artifact.directory.bindings["text/final_norm"]["object"]
        stored = torch.frombuffer(bytearray(artifact.read_object(norm)), dtype=torch.bfloat16)
        assert torch.equal(stored, model.read_flat(f"{releases.TEXT}norm.weight"))


class TestBeforeAnythingIsEncoded:
    @pytest.fixture
    def release(self, here: Path) -> Path:
        return releases.write_experts(here / "release", layers=2)

    def test_processor_files(self, release: Path, here: Path, run: Run) -> None:
        """The release lacks both; one message has both options, and with them it is planned."""
        options = ("plan", *expert_options(release), "--components", "text,vision")
        done = run(*options)
        assert done.code == 1
        files = ("preprocessor_config.json", "video_preprocessor_config.json")
        assert done.err.endswith(f"pass --resource {files[0]}=PATH --resource {files[1]}=PATH\n")
        geometry = releases.synthetic.VISION
        processor = {
            "patch_size": geometry["patch_size"],
            "temporal_patch_size": geometry["temporal_patch_size"],
            "merge_size": geometry["spatial_merge_size"],
        }
        for name in files:
            (here / name).write_text(json.dumps(processor))
        assert run(*options, *(part for name in files for part in ("--resource", f"{name}={here / name}"))).code == 0

    def test_added_tokens(self, release: Path, here: Path, run: Run) -> None:
        own = here / "tokenizer_config.json"
        shutil.move(release / own.name, own)
        (release / own.name).write_text("{}")
        for command in ("plan", "convert"):
            done = run(command, *expert_options(release))
            assert done.code == 1
            assert "pass --resource tokenizer_config.json=PATH" in done.err
        assert run("plan", *expert_options(release), "--resource", f"tokenizer_config.json={own}").code == 0

    def test_activation_divisors(self, here: Path, run: Run) -> None:
        release = releases.write_experts(here / "torn", layers=2)
        scalar = f"{releases.TEXT}layers.1.mlp.experts.2.up_proj.input_global_scale"
        change(release, scalar, lambda _: struct.pack("<f", 64.0))
        done = run("plan", *expert_options(release))
        assert done.code == 1
        named = "activation divisors disagree: text/layers/1 gate and up: 131, but text/layers/1/moe/experts/2/up 64."
        assert named in done.err
        assert len(done.err.splitlines()) == 1
