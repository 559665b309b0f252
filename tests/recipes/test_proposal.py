from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild import models
from ninferbuild.method import AuxiliaryValue
from ninferbuild.recipe import Recipe
from ninferbuild.recipes.formats import FP8, Q4, Q6
from ninferbuild.recipes.proposal import (
    add_official_proposal,
    add_proposal,
    find_ranking,
    read_counts,
    select_shortlist,
)
from ninferbuild.rules import METHODS
from ninferbuild.sources.logical import EncodedRows, LogicalSource, array_source
from ninferbuild.sources.safetensors import SafetensorsSource

IDS = [1, 2, 5, 6, 7, 10]
"""The shortlist of six rows that the FX ranking and its special token 10 give."""


@pytest.fixture
def recipe(checkpoints: Path) -> Recipe:
    return Recipe(models.build(SafetensorsSource(checkpoints / "dense"), ("text", "mtp")))


@pytest.fixture
def ranking(checkpoints: Path) -> Path:
    return checkpoints / "rank.i64"


@pytest.mark.parametrize(
    ("counts", "n", "forced", "expected"),
    [
        ([9, 5, 9, 5, 0, 0], 3, {5}, [0, 2, 5]),
        ([5, 9, 9, 1, 0, 7, 7, 7, 2, 3, 0, 0], 6, {10}, IDS),
        ([1, 5, 5, 2], 2, {0, 1, 2}, [1, 2]),
        ([1, 5, 5, 2], 3, {3, 0, 1}, [1, 3, 0]),
        ([1, 1, 1, 1], 3, {0}, [1, 2, 0]),
        ([3, 2, 1], 3, (), [0, 1, 2]),
        ([3, 2, 1], 2, [7, -1, 2, 2], [0, 2]),
    ],
)
def test_shortlist(counts: list[int], n: int, forced: set[int], expected: list[int]) -> None:
    assert select_shortlist(counts, n, forced).tolist() == expected
    assert select_shortlist(torch.tensor(counts), n, forced).tolist() == expected


@pytest.mark.parametrize("counts", [[3, 2, 1], [[1, 2], [3, 4]]])
@pytest.mark.parametrize("n", [0, -1, 5])
def test_shortlist_outside_the_domain(counts: list[int], n: int) -> None:
    with pytest.raises(ValueError, match="outside the frequency domain"):
        select_shortlist(np.array(counts), n)


@given(st.data())
def test_shortlist_is_sorted_and_holds_the_most_frequent(data: st.DataObject) -> None:
    bounds = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
    counts = data.draw(st.lists(bounds, min_size=1, max_size=20))
    n = data.draw(st.integers(1, len(counts)))
    forced = data.draw(st.sets(st.integers(-2, 21)))
    ids = select_shortlist(np.array(counts, dtype=np.int64), n, forced).tolist()

    inside = {i for i in forced if 0 <= i < len(counts)}
    assert len(set(ids)) == len(ids) == n
    assert [counts[i] for i in ids] == sorted((counts[i] for i in ids), reverse=True)
    chosen = set(ids)
    if len(inside) < n:
        assert inside <= chosen
        candidates = set(range(len(counts))) - inside
        expected = sorted(candidates, key=lambda i: (-counts[i], i))[: n - len(inside)]
        assert chosen - inside == set(expected)
    else:
        assert ids == sorted(inside, key=lambda i: (-counts[i], i))[:n]


def test_only_the_first_row_counts(ranking: Path, tmp_path: Path) -> None:
    assert read_counts(ranking, 16).tolist() == [5, 9, 9, 1, 0, 7, 7, 7, 2, 3, 0, 0, 99, 99, 99, 99]
    for size in (0, 8, 16 * 8 + 1, 24 * 8):
        path = tmp_path / f"{size}.i64"
        path.write_bytes(bytes(size))
        with pytest.raises(ValueError, match="complete int64 vocabulary rows"):
            read_counts(path, 16)
    with pytest.raises(FileNotFoundError):
        read_counts(tmp_path / "none", 16)


def test_proposal_parameters(recipe: Recipe, ranking: Path) -> None:
    add_official_proposal(recipe, ranking=ranking, rows=6)
    model = recipe.model
    assert list(model.parameters)[-2:] == ["proposal/head", "proposal/token_ids"]
    assert list(model.components["text"]) == ["config", "resources", "proposal"]
    assert model.components["text"]["proposal"] == {"domain": "indexed", "rows": 6}

    head, tokens = model.parameters["proposal/head"], model.parameters["proposal/token_ids"]
    assert (head.shape, head.inputs, head.residency) == ((6, 128), ("mtp/final_hidden",), "proposal")
    own = model.parameters["text/output_head"].source
    assert torch.equal(head.source.rows(0, 6), own.rows(0, 16)[IDS])
    assert head.source.label == f"rows({own.label}, 6 spans, 6 rows)"
    assert (tokens.shape, tokens.inputs, tokens.residency) == ((6,), (), "proposal")
    assert tokens.direct_format == "int32"
    assert tokens.source.values().dtype == torch.int32
    assert tokens.source.values().tolist() == IDS
    assert tokens.source.label == f"shortlist({ranking})"

    chosen = recipe.selections["proposal/head"][0]
    assert (chosen.format, chosen.method) == (Q4, METHODS["grouped_absmax"])
    assert recipe.policies["proposal/head", "mtp/final_hidden"] == "A16Only"
    assert recipe.selections["proposal/token_ids"][0].format == "int32"


def test_a_second_proposal_is_refused(recipe: Recipe, ranking: Path) -> None:
    add_proposal(recipe, ranking=ranking, rows=6)
    with pytest.raises(ValueError, match="already configured"):
        add_official_proposal(recipe, ranking=ranking, rows=6)


@pytest.mark.parametrize("rows", [0, 13, 131072])
def test_rows_beyond_the_token_domain_change_nothing(recipe: Recipe, ranking: Path, rows: int) -> None:
    with pytest.raises(ValueError, match="outside the frequency domain of 12 tokens"):
        add_official_proposal(recipe, ranking=ranking, rows=rows)
    assert "proposal/head" not in recipe.model.parameters
    assert "proposal" not in recipe.model.components["text"]


def test_a_split_head_lends_no_rows(recipe: Recipe, ranking: Path) -> None:
    recipe.assign("text/output_head", rows=(0, 4), format=Q6, method="grouped_absmax")
    with pytest.raises(ValueError, match="split sources"):
        add_proposal(recipe, ranking=ranking, rows=6)
    add_official_proposal(recipe, ranking=ranking, rows=6)
    assert "lm_head" in recipe.model.parameters["proposal/head"].source.label


def imported_head(recipe: Recipe, checkpoints: Path) -> None:
    source = recipe.model.source("text/output_head", SafetensorsSource(checkpoints / "q8"), FP8)
    recipe.assign("text/output_head", format=FP8, method="import_encoded", source=source)


def test_an_imported_head_lends_encoded_rows(recipe: Recipe, ranking: Path, checkpoints: Path) -> None:
    imported_head(recipe, checkpoints)
    add_official_proposal(recipe, ranking=ranking, rows=6)
    chosen = recipe.selections["proposal/head"][0]
    assert (chosen.format, chosen.method) == (FP8, METHODS["import_encoded"])
    assert chosen.source.read_encoded is not None
    rows = chosen.source.read_encoded(0, 6)
    head = recipe.selections["text/output_head"][0].source.read_encoded
    assert head is not None
    assert torch.equal(rows.codes, head(0, 16).codes[IDS])
    assert torch.equal(rows.scales, head(0, 16).scales[IDS])


def test_the_base_head_can_be_asked_for(recipe: Recipe, ranking: Path, checkpoints: Path) -> None:
    imported_head(recipe, checkpoints)
    own = recipe.model.parameters["text/output_head"].source
    add_proposal(recipe, ranking=ranking, rows=6, source=own)
    chosen = recipe.selections["proposal/head"][0]
    assert (chosen.format, chosen.method) == (Q4, METHODS["grouped_absmax"])
    assert torch.equal(chosen.source.rows(0, 6), own.rows(0, 16)[IDS])


def test_a_quantised_head_of_other_values_lends_values(recipe: Recipe, ranking: Path) -> None:
    head = array_source(np.arange(16 * 128, dtype=np.float32).reshape(16, 128), "head")
    recipe.assign("text/output_head", format=Q6, method="grouped_absmax", source=head)
    add_official_proposal(recipe, ranking=ranking, rows=6)
    chosen = recipe.selections["proposal/head"][0]
    assert (chosen.format, chosen.method) == (Q4, METHODS["grouped_absmax"])
    assert chosen.source.label == "rows(head, 6 spans, 6 rows)"


def test_a_rotated_head_passes_its_signs_on(checkpoints: Path, ranking: Path) -> None:
    model = models.build(
        SafetensorsSource(checkpoints / "dense"),
        ("text", "mtp", "dflash"),
        sources={"dflash": SafetensorsSource(checkpoints / "dflash")},
    )
    recipe = Recipe(model)
    codes = (torch.arange(16 * 128) % 3 - 1).to(torch.int8).reshape(16, 1, 128)
    scales = torch.arange(1, 17, dtype=torch.float16).reshape(16, 1)

    def read_encoded(begin: int, end: int) -> EncodedRows:
        return EncodedRows("t2_g128_fp16", codes[begin:end], scales[begin:end])

    def no_values(begin: int, end: int) -> torch.Tensor:
        raise AssertionError("values were read")

    head = LogicalSource((16, 128), "ternary", no_values, read_encoded)
    recipe.assign("text/output_head", format="t2_g128_fp16", method="import_encoded", source=head)
    signs = AuxiliaryValue("bf16", (128,), b"\x80\x3f\x80\xbf" * 64)
    recipe.use("text/output_head", "text/final_hidden", auxiliaries={"hadamard_signs": signs})
    later = replace(signs, data=b"\x80\xbf" * 128)
    recipe.use("text/output_head", "mtp/final_hidden", auxiliaries={"hadamard_signs": later})

    add_official_proposal(recipe, ranking=ranking, rows=6)
    chosen = recipe.selections["proposal/head"][0]
    assert chosen.format == "t2_g128_fp16"
    assert chosen.source.read_encoded is not None
    rows = chosen.source.read_encoded(0, 6)
    assert torch.equal(rows.codes, codes[IDS])
    assert torch.equal(rows.scales, scales[IDS])
    for name in ("mtp", "dflash"):
        assert recipe.auxiliary_overrides["proposal/head", f"{name}/final_hidden", "hadamard_signs"] == signs


def test_values_from_a_given_source_get_no_signs(recipe: Recipe, ranking: Path) -> None:
    signs = AuxiliaryValue("bf16", (128,), bytes(256))
    recipe.use("text/output_head", "text/final_hidden", auxiliaries={"hadamard_signs": signs})
    add_official_proposal(recipe, ranking=ranking, rows=6)
    assert not any(name == "proposal/head" for name, _, _ in recipe.auxiliary_overrides)


def other_head(label: str = "other") -> LogicalSource:
    return array_source(np.arange(16 * 128, dtype=np.float32).reshape(16, 128), label)


class TestFollowingTheOutputHead:
    """What happens to the rows when the output head is replaced after they were added."""

    def test_rows_come_from_the_new_head(self, recipe: Recipe, ranking: Path) -> None:
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        recipe.assign("text/output_head", source=other_head())
        added.follow_output_head(recipe)
        (chosen,) = recipe.selections["proposal/head"]
        assert chosen.source.label == "rows(other, 6 spans, 6 rows)"
        assert torch.equal(chosen.source.rows(0, 6), other_head().rows(0, 16)[IDS])
        assert (chosen.format, chosen.method) == (Q4, METHODS["grouped_absmax"])

    def test_an_imported_head_lends_encoded_rows(self, recipe: Recipe, ranking: Path, checkpoints: Path) -> None:
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        imported_head(recipe, checkpoints)
        added.follow_output_head(recipe)
        (chosen,) = recipe.selections["proposal/head"]
        assert (chosen.format, chosen.method) == (FP8, METHODS["import_encoded"])

    def test_an_imported_head_that_is_replaced_by_values(
        self, recipe: Recipe, ranking: Path, checkpoints: Path
    ) -> None:
        imported_head(recipe, checkpoints)
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        recipe.assign("text/output_head", source=other_head(), format=Q6, method="grouped_absmax")
        added.follow_output_head(recipe)
        (chosen,) = recipe.selections["proposal/head"]
        assert (chosen.format, chosen.method) == (Q4, METHODS["grouped_absmax"])
        assert chosen.source.label.startswith("rows(other")

    def test_what_was_assigned_stays(self, recipe: Recipe, ranking: Path) -> None:
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        recipe.assign("text/output_head", source=other_head())
        own = array_source(np.zeros((6, 128), np.float32), "own")
        recipe.assign("proposal/head", source=own)
        added.follow_output_head(recipe)
        assert recipe.selections["proposal/head"][0].source is own

    def test_an_assigned_format_goes_with_the_new_rows(self, recipe: Recipe, ranking: Path, checkpoints: Path) -> None:
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        recipe.assign("proposal/head", format=Q6)
        imported_head(recipe, checkpoints)
        added.follow_output_head(recipe)
        (chosen,) = recipe.selections["proposal/head"]
        assert (chosen.format, chosen.method) == (Q6, METHODS["grouped_absmax"])
        assert str(checkpoints / "q8") in chosen.source.label

    @pytest.mark.parametrize(
        "change",
        [
            lambda recipe: None,
            lambda recipe: recipe.assign("text/output_head", format=Q6),
            lambda recipe: recipe.assign("text/output_head", source=other_head(), rows=(0, 4)),
            lambda recipe: (
                recipe.assign("text/output_head", source=other_head()),
                recipe.assign("proposal/token_ids", source=array_source(np.arange(6, dtype=np.int32), "ids")),
            ),
            lambda recipe: (
                recipe.assign("text/output_head", source=other_head()),
                recipe.assign("proposal/head", format=Q6, rows=(0, 2)),
            ),
        ],
        ids=["nothing", "a format", "a split head", "other tokens", "split rows"],
    )
    def test_otherwise_nothing_changes(self, recipe: Recipe, ranking: Path, change: Callable[[Recipe], object]) -> None:
        added = add_official_proposal(recipe, ranking=ranking, rows=6)
        change(recipe)
        before = recipe.selections["proposal/head"]
        added.follow_output_head(recipe)
        assert recipe.selections["proposal/head"] is before


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """An empty working directory; makes ranking files at the place a name says."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("NINFER_ROOT", raising=False)
    inner = Path("tools/freq_corpus/fixtures/ranking/ranking.train.counts.i64")
    places = {
        "model": tmp_path / "model" / "ranking.i64",
        "cwd": tmp_path / "cwd" / inner,
        "root": tmp_path / "root" / inner,
    }

    def make(place: str) -> Path:
        places[place].parent.mkdir(parents=True, exist_ok=True)
        places[place].write_bytes(bytes(128))
        return places[place]

    return make


def test_the_ranking_is_looked_for_in_three_places(
    tree: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match="--ranking") as caught:
        find_ranking(None, model)
    message = str(caught.value)
    assert "\n" not in message
    assert str(model / "ranking.i64") in message
    assert "tools/freq_corpus" in message
    assert "$NINFER_ROOT" in message

    root = tree("root")
    monkeypatch.setenv("NINFER_ROOT", str(tmp_path / "root"))
    assert find_ranking(None, model) == root
    cwd = tree("cwd")
    assert find_ranking(None, model).resolve() == cwd
    own = tree("model")
    assert find_ranking(None, model) == own
    assert find_ranking(None).resolve() == cwd
    assert find_ranking("given.i64", model) == Path("given.i64")


def test_a_recipe_finds_the_ranking_of_its_model(tree: Callable[[str], Path], recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no token ranking"):
        add_official_proposal(recipe, rows=6)
    recipe.model.root = tree("model").parent
    add_official_proposal(recipe, rows=6)
    label = f"shortlist({tmp_path / 'model' / 'ranking.i64'})"
    assert recipe.model.parameters["proposal/token_ids"].source.label == label
