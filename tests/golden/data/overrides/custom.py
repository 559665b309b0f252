"""A user's own method and a user's own source, written against the documented import paths."""

import math
from pathlib import Path

import numpy as np
from tools.artifact.formats import QuantFormat, get_format
from tools.convert.quantization.groupwise import quantize_matrix
from tools.convert.sources.logical import LogicalSource
import torch


def clipped(request):
    if len(request.target.shape) != 2 or not isinstance(get_format(request.target.format), QuantFormat):
        raise ValueError("clipped needs a grouped-integer matrix")
    limit = float(request.parameters["clip"])
    if not math.isfinite(limit) or limit <= 0:
        raise ValueError("clip must be positive")
    rows, width = request.target.shape

    def produce(output):
        for first in range(0, rows, request.rows_per_chunk):
            last = min(rows, first + request.rows_per_chunk)
            block = request.values(first * width, last * width).reshape(last - first, width)
            words = quantize_matrix(block.clamp(-limit, limit), request.target.format, device=request.device)
            output.write_codes(first, words.codes, words.scales)

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign("text/layers/0/mlp/down", format="q6_g64_fp16", method=clipped, parameters={"clip": 0.0625})
    name = "text/layers/1/mlp/down"
    data = np.load(Path(__file__).with_name("down.npy"), mmap_mode="r")
    if tuple(data.shape) != model.parameters[name].shape:
        raise ValueError("down.npy must have the logical shape")

    def read_values(begin, end):
        return torch.from_numpy(data.reshape(-1)[begin:end].astype(np.float32, copy=True))

    recipe.assign(
        name,
        source=LogicalSource(tuple(data.shape), "down.npy", read_values),
        format="q8_g32_fp16",
        method="grouped_absmax",
    )
