"""The baseline: converting a target in the plainest way that gives the same payload.

One parent after the other, 512 rows at a time: read them, encode them on the device, pack them on the host, write
them where they belong. Nothing overlaps and nothing is kept. Only the plan, that is which rows go into which object,
comes from the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from benchmark.arithmetic import DIRECT, METHODS

if TYPE_CHECKING:
    from ninferbuild.plan import Parent
    from ninferbuild.target import Target

ROWS = 512
"""Rows that are converted at a time."""

STORED = {"BF16": torch.bfloat16, "F32": torch.float32}


def convert(target: Target, out: Path, device: str) -> None:
    """Write the payload of ``target``, without directory, to ``out``; fsync included.

    Raises:
        ValueError: the target uses a method that the baseline does not have.
    """
    import os

    from ninferbuild.artifact.layouts import planes
    from ninferbuild.artifact.schema import ResourceSpec, plan_objects
    from ninferbuild.configure import configured
    from ninferbuild.plan import plan_parents

    where = torch.device(device)
    with configured(target) as ready, out.open("wb") as file:
        parents = plan_parents(ready.recipe).parents
        resources = ready.model.resources
        specs = [ResourceSpec(name, len(data)) for name, data in resources.items()]
        objects = plan_objects([*specs, *(parent.target for parent in parents)])
        for item, data in zip(objects, resources.values(), strict=False):
            file.seek(item.offset)
            file.write(data)
        for item, parent in zip(objects[len(specs) :], parents, strict=True):
            spec = parent.target
            positions = [item.offset + plane.offset for plane in planes(spec.layout, spec.format, spec.shape)]
            for block in _blocks(parent):
                if parent.method_name not in METHODS:
                    raise ValueError(f"the baseline has no method {parent.method_name}")
                for index, packed in enumerate(METHODS[parent.method_name](block.to(where), spec.format)):
                    file.seek(positions[index])
                    positions[index] += file.write(packed.numpy().data)
        file.truncate(objects[-1].offset + objects[-1].bytes)
        file.flush()
        os.fsync(file.fileno())


def _blocks(parent: Parent) -> Iterator[torch.Tensor]:
    """The values of a parent's inputs: rows ``[r, K]``, or flat for direct formats."""
    target = parent.request.target
    direct = target.format in DIRECT
    width = prod(target.shape[1:]) if len(target.shape) > 1 else 1
    step = ROWS * width
    with _Files() as files:
        for block in _values(parent, step, files):
            yield block if direct else block.view(-1, width)


def _values(parent: Parent, step: int, files: _Files) -> Iterator[torch.Tensor]:
    described = [item.source.description for item in parent.request.inputs]
    dtypes = {item.dtype if item is not None and not item.steps else "" for item in described}
    if len(dtypes) != 1 or not dtypes <= STORED.keys():
        # A few small transposed tensors.
        total = prod(parent.request.target.shape)
        for begin in range(0, total, step):
            yield parent.request.values(begin, min(total, begin + step))
        return
    dtype = STORED[dtypes.pop()]
    spans = [span for item in described if item is not None for part in item.parts for span in part.region.spans]
    wanted = step * dtype.itemsize
    pending = bytearray()
    for span in spans:
        assert span.file.path is not None
        file = files.open(span.file.path)
        position = span.begin
        while position < span.end:
            file.seek(position)
            data = file.read(min(wanted - len(pending), span.end - position))
            position += len(data)
            pending += data
            if len(pending) == wanted:
                yield torch.frombuffer(pending, dtype=dtype)
                pending = bytearray()
    if pending:
        yield torch.frombuffer(pending, dtype=dtype)


class _Files:
    """Checkpoint files that are being read, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()

    def open(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = path.open("rb")
        return self._open[path]
