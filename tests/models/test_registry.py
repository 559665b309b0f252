from collections.abc import Callable, Iterator
import gc
from importlib import metadata
import json
from pathlib import Path
import subprocess
import sys

from fixtures import fx
import pytest

from ninferbuild import models
from ninferbuild.models import Model, Parameter, qwen3_5
from ninferbuild.models.bulk import collection_paused
from ninferbuild.sources.logical import array_source
from ninferbuild.sources.safetensors import SafetensorsSource

OpenFx = Callable[[str], SafetensorsSource]


@pytest.fixture
def _fresh_registry() -> Iterator[None]:
    models._registered.cache_clear()
    yield
    models._registered.cache_clear()


def store_with(directory: Path, config: object) -> SafetensorsSource:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return SafetensorsSource(directory)


@pytest.mark.parametrize("architecture", qwen3_5.ARCHITECTURES)
def test_architecture_chooses_the_adapter(tmp_path: Path, architecture: str) -> None:
    store = store_with(tmp_path / "m", {"architectures": [architecture]})
    assert models.adapter_for(store) is qwen3_5


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    store = store_with(tmp_path / "m", {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ValueError, match=r"unsupported architecture LlamaForCausalLM; known: .*Qwen3_5ForCausalLM"):
        models.build(store)


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": [3]}])
def test_a_config_without_architecture_is_named(tmp_path: Path, config: object) -> None:
    with pytest.raises(ValueError, match=r"config\.json: names no model architecture"):
        models.build(store_with(tmp_path / "m", config))


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty: not a checkpoint directory, and no config\.json beside it"):
        models.build(SafetensorsSource(tmp_path / "empty"))


@pytest.mark.usefixtures("_fresh_registry")
def test_other_distributions_register_adapters(
    open_fx: OpenFx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_family.py").write_text("ARCHITECTURES = ('OtherForCausalLM', 'Qwen3_5ForCausalLM')\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered = [
        metadata.EntryPoint("broken", "a_module_that_is_not_there", models.ENTRY_POINTS),
        metadata.EntryPoint("other", "other_family", models.ENTRY_POINTS),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: registered)
    other = store_with(tmp_path / "other", {"architectures": ["OtherForCausalLM"]})
    assert getattr(models.adapter_for(other), "__name__", None) == "other_family"
    assert models.adapter_for(open_fx("alt")) is qwen3_5
    unknown = store_with(tmp_path / "unknown", {"architectures": ["NewForCausalLM"]})
    with pytest.raises(
        ValueError, match=r"known: OtherForCausalLM, Qwen.*; adapter broken cannot be loaded: No module"
    ):
        models.build(unknown)


def test_companions_come_from_the_named_sources(open_fx: OpenFx, checkpoints: Path) -> None:
    drafts = {"dflash": open_fx("dflash"), "dflash2": open_fx("dflash2")}
    model = models.build(open_fx("dense"), ("text", "dflash2"), sources=drafts)
    assert list(model.components) == ["text", "dflash2"]
    assert model.root == checkpoints / "dense"
    assert models.build(open_fx("dense")).components.keys() == {"text"}
    with pytest.raises(ValueError, match="requires its source"):
        models.build(open_fx("dense"), ("text", "dflash"))


def test_an_mtp_source_is_optional(open_fx: OpenFx, tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    fx.save(path, {name: fx.float_tensor(name, shape) for name, shape in fx.mtp_tensors()})
    own = models.build(open_fx("dense"), ("text", "mtp"), sources={})
    other = models.build(open_fx("dense"), ("text", "mtp"), sources={"mtp": SafetensorsSource(path)})
    name = "mtp/input_projection"
    assert "dense:mtp.fc" in own.parameters[name].source.label
    assert "mtp.safetensors:mtp.fc" in other.parameters[name].source.label


def test_building_a_model_reads_no_tensor_and_imports_no_torch(checkpoints: Path) -> None:
    program = f"""
import sys
from ninferbuild import models
from ninferbuild.sources.safetensors import SafetensorsSource
stores = {{name: SafetensorsSource({str(checkpoints)!r} + "/" + name) for name in ("dense", "dflash", "dflash2")}}
models.build(stores["dense"], ("text", "vision", "mtp", "dflash", "dflash2"), sources=stores)
assert "torch" not in sys.modules
assert not any(store.bytes_read for store in stores.values())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_collector_rests_only_inside() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        _ = 1 / 0
    assert gc.isenabled()


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    import numpy as np

    return Parameter(name, shape, array_source(np.zeros((2, 3), np.float32), name))


def test_model_refuses_what_it_cannot_hold() -> None:
    model = Model({"text": {"config": {"a": 1}}})
    assert model.config == {"a": 1}
    model.add(_parameter("text/x", (2, 3)))
    with pytest.raises(ValueError, match="duplicate logical parameter text/x"):
        model.add(_parameter("text/x", (2, 3)))
    with pytest.raises(ValueError, match="source shape differs"):
        model.add(_parameter("text/y", (3, 2)))
    with pytest.raises(KeyError):
        model.source("text/none", None)
    with pytest.raises(ValueError, match="explicit logical source"):
        model.source("text/x", None)
    assert list(model.parameters) == ["text/x"]
