"""A checkpoint taken from the GGUF files that an exporter made of it gives the same artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time
from typing import Any

from fixtures import gguf_export, synthetic
from fixtures.workbench import REPOSITORY
import numpy as np
import pytest

from ninferbuild import models, recipe_file
from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build, plan
from ninferbuild.memo import SETTLED_NS
from ninferbuild.pipeline import convert
from ninferbuild.recipe import Recipe
from ninferbuild.sources.opened import Sources
from ninferbuild.target import CacheSettings, Proposal, Target

RECIPE = "qwen3_6_27b"
COMPONENTS = ("text", "vision", "mtp")

OVERRIDE = """
from tools.convert.sources.gguf_source import (
    HFAliasSource,
    qwen35_linear_attention_name_map,
    qwen35_mtp_name_map,
    qwen35_vision_name_map,
    standard_dense_name_map,
)


def text(model, source):
    config = model.config
    names, transforms, shapes = standard_dense_name_map(config["num_hidden_layers"])
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "linear_attention":
            maps = qwen35_linear_attention_name_map(
                layer,
                num_k_heads=config["linear_num_key_heads"],
                num_v_heads=config["linear_num_value_heads"],
                head_k_dim=config["linear_key_head_dim"],
                head_v_dim=config["linear_value_head_dim"],
            )
            for whole, part in zip((names, transforms, shapes), maps):
                whole.update(part)
    return names, transforms, shapes


def mtp(model, source):
    return qwen35_mtp_name_map(model.config["num_hidden_layers"], norm_offset=True)


def vision(model, source):
    config = model.components["vision"]["config"]
    return qwen35_vision_name_map(
        config["depth"],
        hidden_size=config["hidden_size"],
        patch_size=config["patch_size"],
        temporal_patch_size=config["temporal_patch_size"],
    )


def take(model, recipe, component, source, names, transforms, shapes, composites=None):
    store = HFAliasSource(source, names, transforms=transforms, shapes=shapes, composites=composites)
    for name, parameter in model.parameters.items():
        if name.startswith(component + "/") and parameter.source_factory is not None:
            recipe.assign(name, source=model.source(name, store))


def configure(model, recipe, sources):
    quantized = sources["quantized"]
    take(model, recipe, "text", quantized, *text(model, quantized))
    if "mtp" in model.components:
        take(model, recipe, "mtp", quantized, *mtp(model, quantized))
    if "vision" in model.components:
        take(model, recipe, "vision", sources["pictures"], *vision(model, sources["pictures"]))
"""

ENCODERS = {
    "F32": gguf_export.as_f32,
    "F16": gguf_export.half_matrices,
    "BF16": gguf_export.bf16_matrices,
}


class World:
    """A checkpoint ``hf``; ``config``, the same without weights; and GGUF files of its weights."""

    def __init__(self, root: Path):
        self.root = root
        geometry = synthetic.text_geometry(4, h=64, inter=128, d=32, gk=2, gkd=16, gv=6, gvd=16, vocab=256)
        synthetic.write_base(root / "hf", geometry, salt=7)
        synthetic.write_ranking(root / "ranking.i64", geometry["vocab_size"], salt=7)
        shutil.copytree(root / "hf", root / "config", ignore=shutil.ignore_patterns("*.safetensors"))
        for kind, encoder in ENCODERS.items():
            gguf_export.export(root / "hf", root / f"{kind}.gguf", encoder)
            gguf_export.export_vision(root / "hf", root / f"mmproj-{kind}.gguf", encoder)
        (root / "override.py").write_text(OVERRIDE)

    def target(self, directory: Path, **changes: Any) -> Target:
        """The checkpoint's own artifact."""
        target = Target(
            name="out",
            identity=str(directory / "out.ninfer"),
            file=None,
            model=self.root / "hf",
            recipe=RECIPE,
            components=COMPONENTS,
            artifact_name="toy",
            out=directory / "out.ninfer",
            device="cpu",
            cache=CacheSettings(dir=directory / "cache"),
        )
        return replace(target, **changes)

    def from_gguf(self, directory: Path, kind: str = "F32", **changes: Any) -> Target:
        """The same from a GGUF and a checkpoint without weights."""
        sources = {"quantized": self.root / f"{kind}.gguf", "pictures": self.root / f"mmproj-{kind}.gguf"}
        given: dict[str, Any] = {
            "model": self.root / "config",
            "overrides": (str(self.root / "override.py"),),
            "sources": sources,
        }
        return self.target(directory, **(given | changes))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def own(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the checkpoint itself, with a proposal head."""
    directory = tmp_path_factory.mktemp("own")
    build(world.target(directory, proposal=Proposal(48, world.root / "ranking.i64")))
    return directory / "out.ninfer"


def payloads(path: Path) -> dict[str, bytes]:
    """What is bound to each parameter: its object's bytes, and which elements of it."""
    with Artifact(path) as artifact:
        directory = artifact.directory.to_json()
        found = {}
        for name, binding in directory["bindings"].items():
            for part in binding.get("parts", [binding]):
                found[f"{name} {sorted(part.items())}"] = artifact.read_object(part["object"])
        return found


def assert_same(one: Path, other: Path) -> None:
    """Equal payloads; logarithms of decays, which the file holds the exponentials of, to a unit in the last place."""
    left, right = payloads(one), payloads(other)
    assert left.keys() == right.keys()
    assert any("/a_log " in name for name in left)
    for name, payload in left.items():
        if "/a_log " in name:
            exact, found = (np.frombuffer(data, "<f4") for data in (payload, right[name]))
            unit = np.spacing(np.maximum(np.abs(exact), np.float32(1)))
            assert (np.abs(exact - found) <= unit).all(), name
        else:
            assert payload == right[name], name


class TestEquivalence:
    @pytest.mark.parametrize("kind", ENCODERS)
    def test_the_artifact_is_the_checkpoints(self, world: World, own: Path, tmp_path: Path, kind: str) -> None:
        proposal = Proposal(48, world.root / "ranking.i64")
        build(world.from_gguf(tmp_path, kind, proposal=proposal))
        assert_same(own, tmp_path / "out.ninfer")

    def test_as_a_library(self, world: World, tmp_path: Path) -> None:
        def make(out: Path, checkpoint: Path, *overrides: Path, **named: Path) -> Path:
            with Sources(checkpoint, named) as sources:
                model = models.build(sources["base"], COMPONENTS, sources=sources)
                recipe = Recipe(model)
                for function in (RECIPE, *map(str, overrides)):
                    recipe_file.load(function)(model, recipe, sources)
                convert(model, recipe, out, device="cpu", rows_per_chunk=7)
            recipe_file.purge()
            return out

        root = world.root
        assert_same(
            make(tmp_path / "one.ninfer", root / "hf"),
            make(
                tmp_path / "other.ninfer",
                root / "config",
                root / "override.py",
                quantized=root / "F32.gguf",
                pictures=root / "mmproj-F32.gguf",
            ),
        )


def edited(world: World, directory: Path, tensor: str, element: int) -> Path:
    """A copy of the F32 file in which one element of a tensor has another value."""
    from ninferbuild.sources.gguf import GGUFFile

    path = directory / "edited.gguf"
    shutil.copy(world.root / "F32.gguf", path)
    with GGUFFile(path) as file:
        (span,) = file.region(tensor, 4 * element, 4 * element + 4).spans
    with path.open("r+b") as out:
        out.seek(span.begin)
        word = np.frombuffer(out.read(4), "<f4")
        out.seek(span.begin)
        out.write((word * np.float32(0.5)).tobytes())
    return path


class TestIncremental:
    """What is described costs nothing again, and one change costs one action."""

    def test_nothing_is_read_again(self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = world.from_gguf(tmp_path)
        newest = max(path.stat().st_ctime_ns for path in world.root.glob("*.gguf"))
        time.sleep(max(0.0, (newest + SETTLED_NS + 10**8 - time.time_ns()) / 1e9))
        assert build(target).executed > 0

        def refuse(*arguments: object) -> None:
            raise AssertionError("a payload was read")

        monkeypatch.setattr("ninferbuild.sources.files.CheckpointFile.read_into", refuse)
        assert {action.state for action in plan(target).actions} == {"cached"}
        again = build(target)
        assert (again.executed, again.up_to_date) == (0, True)
        (tmp_path / "out.ninfer").unlink()
        assert build(target).executed == 0

    @pytest.mark.parametrize(
        ("tensor", "element", "parameters"),
        [
            ("blk.3.ffn_down.weight", 5, {"text/layers/3/mlp/down"}),
            ("blk.0.attn_norm.weight", 0, {"text/layers/0/input_norm"}),
            ("blk.1.ssm_a", 2, {"text/layers/1/gdn/a_log"}),
            ("blk.2.ssm_conv1d.weight", 300, {"text/layers/2/gdn/convolution"}),
            ("blk.1.ssm_out.weight", 100, {"text/layers/1/gdn/output"}),
            ("blk.4.nextn.enorm.weight", 9, {"mtp/embedding_norm"}),
        ],
    )
    def test_one_tensor_is_one_action(
        self, world: World, tmp_path: Path, tensor: str, element: int, parameters: set[str]
    ) -> None:
        build(world.from_gguf(tmp_path))
        sources = {"quantized": edited(world, tmp_path, tensor, element), "pictures": world.root / "mmproj-F32.gguf"}
        target = world.from_gguf(tmp_path, sources=sources)
        planned = plan(target, hash_sources=True)
        assert {name for item in planned.actions if item.state != "cached" for name in item.parameters} == parameters
        assert build(target).executed == 1

    def test_equal_bytes_in_another_file_are_no_work(self, world: World, tmp_path: Path) -> None:
        build(world.from_gguf(tmp_path))
        shutil.copy(world.root / "F32.gguf", tmp_path / "copy.gguf")
        sources = {"quantized": tmp_path / "copy.gguf", "pictures": world.root / "mmproj-F32.gguf"}
        assert build(world.from_gguf(tmp_path, sources=sources)).executed == 0


UP_TO_DATE = """
import sys
from ninferbuild.cli import main

code = main(sys.argv[1:])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "gguf"})
sys.exit(f"exit code {code}, {loaded}" if code or loaded else 0)
"""


def test_a_build_without_work_loads_neither_torch_nor_the_package_gguf(world: World, tmp_path: Path) -> None:
    root = world.root
    arguments = ["convert", "--model", root / "config", "--recipe", RECIPE, "--components", ",".join(COMPONENTS)]
    arguments += ["--override", root / "override.py", "--source", f"quantized={root / 'F16.gguf'}"]
    arguments += ["--source", f"pictures={root / 'mmproj-F16.gguf'}", "--out", tmp_path / "out.ninfer"]
    environment = {**os.environ, "NINFERBUILD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)}
    for program in (["-m", "ninferbuild"], ["-c", UP_TO_DATE]):
        command = [sys.executable, *program, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "is up to date" in done.stdout


USERS = """
import numpy as np
from tools.convert.sources.gguf_source import HFAliasSource

SCALE = {scale}


def scaled(values, shape):
    return values * SCALE, shape


def summed(store):
    parts = [store.read_flat(f"blk.{{layer}}.attn_norm.weight") for layer in (0, 1)]
    return parts[0] + SCALE * parts[1], store.describe("blk.0.attn_norm.weight").shape


def configure(model, recipe, sources):
    prefix = "model.language_model.layers.3."
    store = HFAliasSource(
        sources["quantized"],
        {{prefix + "mlp.down_proj.weight": "blk.3.ffn_down.weight"}},
        transforms={{prefix + "mlp.down_proj.weight": scaled}},
        composites={{prefix + "input_layernorm.weight": summed}},
    )
    for name in ("text/layers/3/mlp/down", "text/layers/3/input_norm"):
        recipe.assign(name, source=model.source(name, store))
"""


class TestUsersFunctions:
    """Their values are looked at in each build: never stale, and no work where they are what they were."""

    @pytest.fixture
    def target(self, world: World, tmp_path: Path) -> Callable[[float, Path], Target]:
        def make(scale: float, gguf: Path) -> Target:
            (tmp_path / "users.py").write_text(USERS.format(scale=scale))
            overrides = (str(tmp_path / "users.py"),)
            return world.target(tmp_path, components=("text",), overrides=overrides, sources={"quantized": gguf})

        return make

    def test_values_decide(self, world: World, tmp_path: Path, target: Callable[[float, Path], Target]) -> None:
        gguf = world.root / "F32.gguf"
        assert build(target(0.5, gguf)).executed > 2
        first = payloads(tmp_path / "out.ninfer")
        assert build(target(0.5, gguf)).executed == 0
        assert build(target(0.25, gguf)).executed == 2
        second = payloads(tmp_path / "out.ninfer")
        changed = {name.split(" ")[0] for name in first if first[name] != second.get(name)}
        assert changed == {"text/layers/3/mlp/down", "text/layers/3/input_norm"}
        assert build(target(0.25, edited(world, tmp_path, "blk.3.ffn_down.weight", 0))).executed == 1
        assert build(target(0.5, gguf)).executed == 0
        assert payloads(tmp_path / "out.ninfer") == first

    def test_the_numbers_are_the_functions(
        self, world: World, tmp_path: Path, target: Callable[[float, Path], Target]
    ) -> None:
        build(target(2.0, world.root / "F32.gguf"))
        tensors = gguf_export.read_checkpoint(world.root / "hf")
        norms = [tensors[f"model.language_model.layers.{layer}.input_layernorm.weight"] + 1 for layer in (0, 1)]
        expected = (norms[0] + np.float32(2) * norms[1]).astype(np.float32)
        found = next(data for name, data in payloads(tmp_path / "out.ninfer").items() if "3/input_norm " in name)
        words = (np.frombuffer(found, "<u2").astype(np.uint32) << 16).view(np.float32)
        assert np.allclose(words, expected, rtol=2**-8)


class TestWhatIsMissing:
    def test_a_hybrid_needs_the_map_of_its_linear_attention(self, world: World, tmp_path: Path) -> None:
        (tmp_path / "dense.py").write_text(OVERRIDE.replace('if kind == "linear_attention"', "if False"))
        target = world.from_gguf(tmp_path, overrides=(str(tmp_path / "dense.py"),))
        message = r"text/layers/0/gdn/.*no GGUF tensor mapped for 'model\.language_model\.layers\.0\.linear_attn\."
        with pytest.raises(ValueError, match=message):
            build(target)

    def test_a_proposal_without_weights_needs_an_output_head(self, world: World, tmp_path: Path) -> None:
        """The rows follow the override's head, or come from a base checkpoint that has none."""
        target = world.from_gguf(tmp_path, proposal=Proposal(48, world.root / "ranking.i64"))
        kept = OVERRIDE.replace(
            'if name.startswith(component + "/")', 'if name != "text/output_head" and name.startswith(component + "/")'
        )
        (tmp_path / "headless.py").write_text(kept)
        with pytest.raises(ValueError, match=r"missing source tensor 'lm_head\.weight'"):
            build(replace(target, overrides=(str(tmp_path / "headless.py"),)))
        build(target)

    def test_an_assigned_proposal_head_stays(self, world: World, own: Path, tmp_path: Path) -> None:
        text = OVERRIDE + (
            "    import numpy as np\n"
            "    from tools.convert.sources.logical import array_source\n"
            "    zeros = array_source(np.zeros(model.parameters['proposal/head'].shape, np.float32), 'zeros')\n"
            "    recipe.assign('proposal/head', source=zeros)\n"
        )
        (tmp_path / "zeros.py").write_text(text)
        proposal = Proposal(48, world.root / "ranking.i64")
        build(world.from_gguf(tmp_path, proposal=proposal, overrides=(str(tmp_path / "zeros.py"),)))
        heads = {
            name: data for name, data in payloads(tmp_path / "out.ninfer").items() if name.startswith("proposal/head")
        }
        assert heads
        assert not any(any(data) for data in heads.values())
