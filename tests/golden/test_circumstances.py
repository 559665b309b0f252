"""The bytes of an artifact depend on nothing that only decides how they are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
import hashlib
from pathlib import Path
import shutil
import tempfile
from typing import Any

from fixtures.golden import CASES, WriteCheckpoint, expected, golden_target
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
import pytest
import torch

from ninferbuild import encode, execute, lanes
from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build
from ninferbuild.rules import tiles

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

powers = st.integers(8, 23).map(lambda exponent: 1 << exponent)
sizes = st.one_of(powers, st.integers(200, 1 << 20))


@dataclass(frozen=True)
class Circumstances:
    """How a build is carried out."""

    device: str
    jobs: int  # actions at a time
    threads: int  # of torch, within one action
    rows_per_chunk: int
    chunk_bytes: int  # source bytes of a chunk where ``rows_per_chunk`` is left alone
    tile_elements: int  # what is encoded at a time within a chunk
    large_bytes: int  # from which size a parent is read ahead
    blocks_ahead: int
    blocks_under_way: int  # blocks of a payload that are being stored at a time
    blocks_in_flight: int  # blocks on a GPU at a time

    def settle(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(execute, "CHUNK_BYTES", self.chunk_bytes)
        patch.setattr(execute, "CUDA_CHUNK_BYTES", self.chunk_bytes)
        patch.setattr(tiles, "CPU_TILE_ELEMENTS", self.tile_elements)
        patch.setattr(encode, "LARGE_BYTES", self.large_bytes)
        patch.setattr(lanes, "BLOCKS_AHEAD", self.blocks_ahead)
        patch.setattr(lanes, "CUDA_BLOCKS_AHEAD", self.blocks_ahead)
        patch.setattr(encode, "BLOCKS_UNDER_WAY", self.blocks_under_way)
        patch.setattr(lanes, "BLOCKS_IN_FLIGHT", self.blocks_in_flight)
        run = execute.Executor.run

        def with_threads(executor: execute.Executor, *arguments: Any) -> None:
            executor.threads = self.threads
            run(executor, *arguments)

        patch.setattr(execute.Executor, "run", with_threads)


circumstances = st.builds(
    Circumstances,
    device=st.sampled_from(DEVICES),
    jobs=st.integers(1, 6),
    threads=st.integers(1, 4),
    rows_per_chunk=st.one_of(st.just(512), st.integers(1, 5000)),
    chunk_bytes=sizes,
    tile_elements=sizes,
    large_bytes=st.sampled_from([0, 1 << 12, 1 << 40]),
    blocks_ahead=st.integers(1, 4),
    blocks_under_way=st.integers(0, 5),
    blocks_in_flight=st.integers(0, 4),
)


@pytest.mark.parametrize("name", CASES)
def test_bytes_do_not_depend_on_how_they_are_made(name: str, checkpoint: WriteCheckpoint) -> None:
    wanted = expected(name)["objects"]
    files: set[str] = set()

    @settings(max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(circumstances)
    def check(how: Circumstances) -> None:
        directory = Path(tempfile.mkdtemp(prefix="ninferbuild-test-"))
        note(str(directory))
        with pytest.MonkeyPatch.context() as patch:
            how.settle(patch)
            target = replace(
                golden_target(name, checkpoint, directory), device=how.device, rows_per_chunk=how.rows_per_chunk
            )
            result = build(target, jobs=how.jobs)
        assert result.executed
        with Artifact(target.out) as artifact:
            found = {object_id: hashlib.sha256(artifact.read_object(object_id)).hexdigest() for object_id in wanted}
        assert found == wanted
        # All of the files, directory and gaps included, whatever the device.
        files.add(" ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path, _ in result.files))
        assert len(files) == 1
        shutil.rmtree(directory)

    check()
