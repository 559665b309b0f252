"""The mapping of source names to opened checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from ninferbuild.sources import opened
from ninferbuild.sources.logical import array_source
from ninferbuild.sources.opened import Sources
from ninferbuild.sources.safetensors import SafetensorsSource


@pytest.fixture
def paths(tmp_path, checkpoints):
    return {
        name: checkpoints.write_directory(tmp_path / name, {name: checkpoints.bf16([1.0])})
        for name in ("base", "one", "two", "three")
    }


def test_opens_on_first_use_and_keeps(paths):
    with Sources(paths["base"], {"one": paths["one"], "gone": "no/such/path", "two": paths["two"]}) as sources:
        assert sources.opened == ("base",)
        assert list(sources) == ["base", "one", "gone", "two"]
        two = sources["two"]
        assert isinstance(two, SafetensorsSource)
        assert two.has("two")
        assert sources["two"] is two
        assert sources.opened == ("base", "two")
        assert list(sources) == ["base", "two", "one", "gone"]
        assert len(sources) == 4
        assert "gone" in sources
        with pytest.raises(FileNotFoundError, match="no/such/path"):
            _ = sources["gone"]
        assert sources.opened == ("base", "two")


def test_missing_names(paths):
    sources = Sources(paths["base"])
    with pytest.raises(ValueError, match=r"requires source 'mtp'; provide --source mtp=PATH"):
        _ = sources["mtp"]
    assert "mtp" not in sources
    assert "base" in sources
    with pytest.raises(ValueError, match="--model"):
        Sources(paths["base"], {"base": paths["one"]})
    with pytest.raises(TypeError):
        sources["x"] = 1


def test_name_of_a_file(paths):
    sources = Sources(SafetensorsSource(paths["base"]), {"one": paths["one"], "two": paths["two"]})
    files = {name: sources[name].tensor(name).parts[0].region.spans[0].file for name in ("two", "base")}
    assert {name: sources.name_of(file) for name, file in files.items()} == {"two": "two", "base": "base"}
    foreign = SafetensorsSource(paths["one"]).tensor("one").parts[0].region.spans[0].file
    assert sources.name_of(foreign) is None
    memory = array_source(np.zeros(2), "m").description
    assert memory is not None
    assert sources.name_of(memory.parts[0].region.spans[0].file) is None


def test_an_opener_is_chosen_by_the_suffix(paths, monkeypatch):
    class Store:
        closed = False

        def __init__(self, name, path):
            self.name, self.path = name, path

        def close(self):
            self.closed = True

    monkeypatch.setitem(opened.OPENERS, ".blocks", Store)
    with Sources(paths["base"], {"blocks": "some/file.blocks"}) as sources:
        store = sources["blocks"]
        assert (store.name, str(store.path)) == ("blocks", "some/file.blocks")
    assert store.closed
