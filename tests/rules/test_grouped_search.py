"""``grouped_search``: the search to the bit, against a plain model of it, and what holds whatever the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import hashlib
from importlib.util import find_spec
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
from numpy.typing import NDArray
import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.rules import compiled, grouped_search, scale_search
from ninferbuild.rules.groupwise import QuantizedMatrix, quantize_matrix
from ninferbuild.rules.scale_bounds import can_win
from ninferbuild.rules.scale_search import search_quantize_matrix

Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"
FORMATS = (Q4, Q5, Q6, Q8)

Array = NDArray[Any]


@pytest.fixture(
    scope="module",
    autouse=True,
    params=["torch", pytest.param("compiled", marks=pytest.mark.skipif(not find_spec("numba"), reason="needs numba"))],
)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the CPU searches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_ready", set())
        if request.param == "compiled":
            assert compiled.load_now(compiled.Work.SEARCH)
        yield request.param


# The search again, one group after the other, in numpy and without tricks


class Search:
    """One group ``x [G]`` with importance ``h [G]``."""

    def __init__(self, x: Array, h: Array, format: str, *, negative: bool):
        record = QUANT_FORMATS[format]
        self.w, self.x, self.h = x.astype(np.float32), x.astype(np.float32).astype(np.float64), h.astype(np.float64)
        self.qmin, self.qmax, self.negative = record.qmin, record.qmax, negative

    def encode(self, s: np.float16) -> Array:
        reciprocal = np.float32(1.0 / np.float64(s))
        return np.clip(np.rint(self.w * reciprocal), self.qmin, self.qmax)

    def error(self, s: np.float16) -> float:
        residuals = self.x - np.float64(s) * self.encode(s).astype(np.float64)
        return _tree(self.h * residuals * residuals)

    def least_squares(self, s: np.float16) -> np.float64:
        codes = self.encode(s).astype(np.float64)
        numerator, denominator = _tree(self.h * self.x * codes), _tree(self.h * codes * codes)
        return np.float64(numerator) / np.float64(max(denominator, 1e-300)) if denominator > 0 else np.float64(0)

    @staticmethod
    def rounded(v: np.float64) -> np.float16:
        s = np.float16(np.float32(v))
        if s == 0 and v != 0:
            return np.float16(math.copysign(2.0**-24, v))
        return s

    @staticmethod
    def step(s: np.float16, k: int) -> np.float16:
        word = int(s.view(np.uint16))
        magnitude = word & 0x7FFF
        if magnitude == 0 or not 1 <= magnitude + k <= 0x7BFF:
            return np.float16(0)
        return np.uint16((word & 0x8000) | (magnitude + k)).view(np.float16)

    def scale(self) -> np.float16:
        magnitudes = np.abs(self.w)
        largest = magnitudes.max()
        if largest == 0:
            return np.float16(0)
        canonical = self.rounded(np.float64(largest) / self.qmax)
        best, error = canonical, self.error(canonical)

        def consider(*candidates: np.float16) -> None:
            nonlocal best, error
            for s in candidates:
                if s == 0 or not np.isfinite(s) or (s < 0 and not self.negative):
                    continue
                if (e := self.error(s)) < error:
                    best, error = s, e

        extreme = np.float64(self.w[int(np.argmax(magnitudes))])
        ratios = [round(0.70 + 0.02 * j, 2) for j in range(25)]
        consider(*(self.rounded(np.float64(largest) / self.qmax * ratio) for ratio in ratios))
        consider(*(self.rounded(extreme / self.qmin * ratio) for ratio in ratios))
        consider(*(self.rounded(np.float64(canonical) * 2.0**e) for e in (-2, -1, 1, 2)))
        consider(*(self.step(canonical, k) for k in (-2, -1, 1, 2)))
        fit = self.rounded(self.least_squares(canonical))
        consider(fit, *(self.rounded(np.float64(fit) * 2.0**e) for e in (-1, 1)))
        consider(*(self.step(fit, k) for k in (-2, -1, 1, 2)))
        refit = self.rounded(self.least_squares(best))
        consider(refit, self.step(refit, -1), self.step(refit, 1))
        return best


def _tree(terms: Array) -> float:
    while len(terms) > 1:
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
    return float(terms[0])


def searched(weight: Array, format: str, importance: Array | None, *, negative: bool) -> tuple[Array, Array]:
    """Codes int8 ``[N, R, G]`` and scale words uint16 ``[N, R]``."""
    rows, columns = weight.shape
    padded, group = -(-columns // 128) * 128, QUANT_FORMATS[format].group_size
    x, h = np.zeros((rows, padded), np.float32), np.ones(padded)
    x[:, :columns] = weight
    if importance is not None:
        h[:] = 0
        h[:columns] = importance
    x, h = x.reshape(rows, -1, group), h.reshape(-1, group)
    scales, codes = np.zeros(x.shape[:2], np.float16), np.zeros(x.shape, np.int8)
    with np.errstate(all="ignore"):
        for row in range(rows):
            for column in range(x.shape[1]):
                search = Search(x[row, column], h[column], format, negative=negative)
                scales[row, column] = s = search.scale()
                codes[row, column] = search.encode(s) if s != 0 else 0
    return codes, scales.view(np.uint16)


def errors_of(weight: Array, result: QuantizedMatrix, importance: Array | None) -> Array:
    """The weighted squared error of each group, ``[N, R]``."""
    codes, scales = result.codes.cpu().double().numpy(), result.scales.cpu().double().numpy()
    rows, groups, group = codes.shape
    x, h = np.zeros((rows, groups * group)), np.ones(groups * group)
    x[:, : weight.shape[1]] = weight.astype(np.float32)
    if importance is not None:
        h[: len(importance)] = importance
    residuals = x.reshape(codes.shape) - codes * scales[..., None]
    return (h.reshape(groups, group) * residuals**2).sum(-1)


def digest(result: QuantizedMatrix) -> str:
    return hashlib.sha256(result.codes.cpu().numpy().tobytes() + result.scales.cpu().numpy().tobytes()).hexdigest()


# Groups worked by hand


def first_group(
    values: Sequence[float], format: str, device: str, *, negative: bool, importance: torch.Tensor | None = None
) -> tuple[int, list[int]]:
    weight = torch.zeros(1, 64)
    weight[0, : len(values)] = torch.tensor(values)
    result = search_quantize_matrix(weight, format, importance=importance, negative_scales=negative, device=device)
    assert not result.codes[0, 0, len(values) :].any()
    assert not result.scales[0, 64 // QUANT_FORMATS[format].group_size :].any()
    word = int(result.scales[0, 0].cpu().view(torch.int16)) & 0xFFFF
    return word, result.codes[0, 0, : len(values)].tolist()


HALF = [0.5] * 32
WORKED = [
    pytest.param(Q4, [8, -3, 5, 1], False, 0x3D43, [6, -2, 4, 1], id="refitted"),
    pytest.param(Q4, [8, -3, 5, 1], True, 0xBC00, [-8, 3, -5, -1], id="full range, negative"),
    pytest.param(Q4, [-8, 3, -5, 1], False, 0x3C00, [-8, 3, -5, 1], id="full range"),
    pytest.param(Q4, [-8, 3, -5, 1], True, 0x3C00, [-8, 3, -5, 1], id="full range needs no sign"),
    pytest.param(Q6, [2.0**-126], True, 0x0001, [0], id="tiny"),
    pytest.param(Q6, [1.0], False, 0x2821, [31], id="one value"),
    pytest.param(Q6, [1.0], True, 0xA800, [-32], id="one value, negative"),
    pytest.param(Q4, HALF * 2, False, 0x2C92, [7] * 64, id="q4 constant"),
    pytest.param(Q4, HALF * 2, True, 0xAC00, [-8] * 64, id="q4 constant, negative"),
    pytest.param(Q5, HALF * 2, False, 0x2844, [15] * 64, id="q5 constant"),
    pytest.param(Q5, HALF * 2, True, 0xA800, [-16] * 64, id="q5 constant, negative"),
    pytest.param(Q6, HALF * 2, False, 0x2421, [31] * 64, id="q6 constant"),
    pytest.param(Q6, HALF * 2, True, 0xA400, [-32] * 64, id="q6 constant, negative"),
    pytest.param(Q8, HALF, False, 0x1C08, [127] * 32, id="q8 constant"),
    pytest.param(Q8, HALF, True, 0x1C08, [127] * 32, id="q8 constant, symmetric"),
]


@pytest.mark.parametrize(("format", "values", "negative", "scale", "codes"), WORKED)
def test_worked_groups(device, format, values, negative, scale, codes) -> None:
    assert first_group(values, format, device, negative=negative) == (scale, codes)


def test_without_importance_in_a_group_it_is_encoded_as_by_absmax(device: str) -> None:
    values = [1.0] + [0.013] * 63
    found = first_group(values, Q4, device, negative=False, importance=torch.zeros(64))
    assert found == (0x3092, [7] + [0] * 63)


# A matrix whose results are known


@pytest.fixture(scope="module")
def known() -> torch.Tensor:
    state, values = 1, []
    for _ in range(800):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state / 2**31 - 0.5) * 0.25)
    weight = np.array(values, np.float32).reshape(4, 200)
    weight[1] *= np.float32(2.0**-22)
    weight[2, 5], weight[3, 70] = 0.875, -0.8125
    expected = "80269e9df750e789498b73fd8b30d3f1e967d3c56de00b2d4216feb94476087d"
    assert hashlib.sha256(weight.tobytes()).hexdigest() == expected
    return torch.from_numpy(weight)


def importance() -> torch.Tensor:
    return torch.tensor([((7 * i) % 11) / 4 for i in range(200)])


KNOWN = {
    (Q4, False, False): "1621ef3707d59d55748fea27284066bc7e55f4e4556132401e90b829dda72a4e",
    (Q4, False, True): "f6d7f502c3ed466d739e9a154e2697cfbdc959c08a1eb4782e3ab9ef1eae1b5b",
    (Q4, True, False): "92ddcb7fe0b391963815b2033379756c4db63cb9759905f6797d554110440f8f",
    (Q4, True, True): "c33c76eec323539ed175a86fbc3585b739b3cc1a4bec8a200d984d6832a9a05e",
    (Q5, False, False): "1c3ad664601566bf52b45444471c9ba4226f10bdcbb46c3df8141c9eb1150f25",
    (Q5, False, True): "9b05cad0fd2a32fc435d120f2e1d416105c5c9f25b161d1395409c241368d6a8",
    (Q5, True, False): "364ac81b7b85c70b9e084639dc28e11081d00209460097d116a72a8f545f4c87",
    (Q5, True, True): "24551246b34abac4ca51505642229307832873c32c97eae9dbd19aebca86c4b6",
    (Q6, False, False): "c5d4fb1f084e976320a63c27b9d393237a1f8e4416ad091d68f9bd9fd561a6f7",
    (Q6, False, True): "3416cbd74b9fa3fcaca51a39d607142c82f07876a60dfc031f63838bb407ecce",
    (Q6, True, False): "0304e574621ebd17d5c0e103805f62149b26d756dd7ab4bf64d733d5bdb18387",
    (Q6, True, True): "63850963cc3a610a488d41463d6796d8af9723576c61edba30aeca8a5ad94b1f",
    (Q8, False, False): "721ebc777ff4275490ace9ffaec6ef1ae73451172563d5c4ecac669d5e854db3",
    (Q8, False, True): "028fd0613633fb5f467f10414eb261c816e7d847a0d5c1e552609089e573abc8",
    (Q8, True, False): "721ebc777ff4275490ace9ffaec6ef1ae73451172563d5c4ecac669d5e854db3",
    (Q8, True, True): "028fd0613633fb5f467f10414eb261c816e7d847a0d5c1e552609089e573abc8",
}
"""(format, negative scales, weighted) → SHA-256 of codes and scales of the known matrix."""


@pytest.mark.parametrize(("format", "negative", "weighted"), KNOWN)
def test_known_matrix(known, model, device, format, negative, weighted) -> None:
    weights = importance() if weighted else None
    result = search_quantize_matrix(known, format, importance=weights, negative_scales=negative, device=device)
    assert digest(result) == KNOWN[format, negative, weighted]
    codes, scales = searched(known.numpy(), format, None if weights is None else weights.numpy(), negative=negative)
    assert np.array_equal(result.codes.cpu().numpy(), codes)
    assert np.array_equal(model.words(result.scales), scales)


@pytest.mark.parametrize(
    ("format", "negative", "weighted", "total"),
    [
        (Q4, None, False, 0.175136),
        (Q4, False, False, 0.126731),
        (Q4, True, False, 0.107583),
        (Q4, None, True, 0.219508),
        (Q4, False, True, 0.144700),
        (Q4, True, True, 0.130355),
        (Q5, None, False, 0.0353993),
        (Q5, False, False, 0.0341292),
        (Q5, True, False, 0.0312826),
    ],
)
def test_total_error_of_the_known_matrix(known, format, negative, weighted, total) -> None:
    weights = importance().numpy() if weighted else None
    if negative is None:
        result = quantize_matrix(known, format, device="cpu")
    else:
        result = search_quantize_matrix(known, format, importance=weights, negative_scales=negative, device="cpu")
    assert errors_of(known.numpy(), result, weights).sum() == pytest.approx(total, rel=4e-6)


# Whatever the weights are


@st.composite
def problems(draw: st.DrawFn) -> tuple[Array, Array | None]:
    """A matrix of up to six rows and two groups or more, and importance for its columns."""
    seed, rows = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 6))
    columns = draw(st.sampled_from([64, 128, 200]))
    generator = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["normal", "spread", "few values", "sparse", "tiny", "huge"]))
    weight = generator.standard_normal((rows, columns))
    if kind == "spread":
        weight *= 10.0 ** generator.uniform(-8, 0, weight.shape)
    elif kind == "few values":
        weight = generator.choice([-1.0, -0.5, 0.0, 0.25, 1.0], weight.shape)
    elif kind == "sparse":
        weight *= generator.random(weight.shape) < 0.03
    weight *= {"tiny": 1e-8, "huge": 5e4}.get(kind, 10.0 ** draw(st.integers(-6, 1)))
    weights = None
    match draw(st.sampled_from(["equal", "uniform", "skewed", "mostly zero", "outside"])):
        case "uniform":
            weights = generator.random(columns)
        case "skewed":
            weights = 10.0 ** generator.uniform(-12, 3, columns)
        case "mostly zero":
            weights = generator.random(columns) * (generator.random(columns) < 0.05)
        case "outside":
            weights = generator.random(columns) * 1e-200
    return weight.astype(np.float32), weights


@settings(max_examples=120, deadline=None)
@given(problem=problems(), format=st.sampled_from(FORMATS), negative=st.booleans())
def test_agrees_with_the_model(model, problem, format, negative) -> None:
    weight, weights = problem
    result = search_quantize_matrix(
        torch.from_numpy(weight), format, importance=weights, negative_scales=negative, device="cpu"
    )
    codes, scales = searched(weight, format, weights, negative=negative)
    assert np.array_equal(model.words(result.scales), scales)
    assert np.array_equal(result.codes.numpy(), codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("negative", [False, True])
def test_all_devices_and_the_exhaustive_search_agree(monkeypatch, device, format, negative) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(40, 640, generator=generator) * torch.logspace(-9, 3, 40)[:, None]
    weights = torch.rand(640, generator=generator).double() ** 6
    found = search_quantize_matrix(weight, format, importance=weights, negative_scales=negative, device=device)
    monkeypatch.setattr(compiled, "_ready", set())
    monkeypatch.setattr(scale_search, "can_win", lambda *arguments: arguments[4].clone())
    exhaustive = search_quantize_matrix(weight, format, importance=weights, negative_scales=negative, device="cpu")
    assert digest(found) == digest(exhaustive)


def test_most_candidates_need_no_exact_error() -> None:
    values = torch.randn(64, 400, generator=torch.Generator().manual_seed(3))
    maxima = values.abs().amax(dim=0)
    candidates = ((maxima / 7) * torch.linspace(0.7, 1.2, 26)[:, None]).half()
    usable = torch.ones_like(candidates, dtype=torch.bool)
    contenders = can_win(values, None, maxima, candidates, usable, QUANT_FORMATS[Q4])
    assert bool(contenders.any(dim=0).all())
    assert contenders.sum() < 1.1 * 400


@settings(max_examples=40, deadline=None)
@given(problem=problems(), format=st.sampled_from(FORMATS), negative=st.booleans())
def test_never_worse_than_absmax(problem, format, negative) -> None:
    weight, weights = problem
    result = search_quantize_matrix(
        torch.from_numpy(weight), format, importance=weights, negative_scales=negative, device="cpu"
    )
    canonical = quantize_matrix(torch.from_numpy(weight), format, device="cpu")
    ours, theirs = errors_of(weight, result, weights), errors_of(weight, canonical, weights)
    assert (ours <= theirs * (1 + 1e-12)).all()
    record = QUANT_FORMATS[format]
    assert record.qmin <= int(result.codes.min()) <= int(result.codes.max()) <= record.qmax
    assert bool(result.scales.isfinite().all())
    assert negative or bool((result.scales.view(torch.int16) >= 0).all())


@settings(max_examples=30, deadline=None)
@given(problem=problems(), format=st.sampled_from(FORMATS), power=st.integers(-60, 60))
def test_a_power_of_two_in_the_importance_changes_nothing(problem, format, power) -> None:
    weight, weights = problem
    weights = np.ones(weight.shape[1]) if weights is None else weights
    first, second = (
        search_quantize_matrix(torch.from_numpy(weight), format, importance=scaled, device="cpu")
        for scaled in (weights, np.ldexp(weights, power))
    )
    assert digest(first) == digest(second)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), format=st.sampled_from(FORMATS), order=st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_others(problem, format, order) -> None:
    weight, weights = problem
    rows = list(range(len(weight)))
    order.shuffle(rows)
    whole = search_quantize_matrix(torch.from_numpy(weight), format, importance=weights, device="cpu")
    for place, row in enumerate(rows):
        shuffled = torch.from_numpy(weight[rows])[place : place + 1]
        alone = search_quantize_matrix(shuffled, format, importance=weights, device="cpu")
        assert torch.equal(alone.codes[0], whole.codes[row])
        assert torch.equal(alone.scales[0], whole.scales[row])


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_threads_and_tiles_change_nothing(harness, monkeypatch, device, format) -> None:
    weight = torch.randn(37, 333, generator=torch.Generator().manual_seed(2)).bfloat16()
    parameters = {"negative_scales": True}
    expected = harness.payload(grouped_search, harness.request(weight, format, parameters=parameters))
    threads = torch.get_num_threads()
    try:
        for rows, tile, count in ((1, 64, 1), (7, 1 << 20, 3), (512, 1, 2)):
            torch.set_num_threads(count)
            monkeypatch.setattr(scale_search, "CPU_TILE_GROUPS", tile)
            monkeypatch.setattr(scale_search, "CUDA_TILE_ELEMENTS", tile)
            monkeypatch.setattr(scale_search, "FUSED_TILE_ELEMENTS", tile)
            request = harness.request(weight, format, rows_per_chunk=rows, device=device, parameters=parameters)
            assert harness.payload(grouped_search, request) == expected
            assert harness.assembled(grouped_search, request) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_other_floating_types_are_taken_as_binary32(device, dtype) -> None:
    weight = torch.randn(5, 200, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = search_quantize_matrix(weight, Q5, device=device)
    assert digest(found) == digest(search_quantize_matrix(weight.float(), Q5, device="cpu"))


# What is refused


def test_importance_has_to_suit_the_matrix() -> None:
    weight = torch.ones(2, 64)
    for shape in ((32,), (2, 64), ()):
        with pytest.raises(ValueError, match=r"importance must have one value per input channel \(64\)"):
            search_quantize_matrix(weight, Q4, importance=torch.ones(shape), device="cpu")
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="importance must be finite and nonnegative"):
            search_quantize_matrix(weight, Q4, importance=torch.full((64,), bad), device="cpu")


def test_weights_are_refused_first(device: str) -> None:
    bad = torch.full((64,), -1.0)
    with pytest.raises(ValueError, match="quantized numeric format"):
        search_quantize_matrix(torch.ones(2, 64), "bf16", importance=bad, device=device)
    with pytest.raises(ValueError, match="rank 2"):
        search_quantize_matrix(torch.ones(64), Q4, importance=bad, device=device)
    with pytest.raises(TypeError, match="weight must be floating point"):
        search_quantize_matrix(torch.ones(2, 64, dtype=torch.int32), Q4, importance=bad, device=device)
    with pytest.raises(ValueError, match="NaN or infinity"):
        search_quantize_matrix(torch.full((2, 64), math.nan), Q4, importance=bad, device=device)
    with pytest.raises(ValueError, match="scale is not finite and positive"):
        search_quantize_matrix(torch.full((2, 64), 1e9), Q4, importance=bad, device=device)
