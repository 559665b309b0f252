"""The proposal head: the rows of the output head for the most frequent tokens, as a matrix of its own.

Draft models propose from these rows; ``proposal/token_ids`` says which token each row stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ninferbuild.recipes.formats import Q4
from ninferbuild.rules import METHODS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe, Selection
    from ninferbuild.sources.logical import LogicalSource

OUTPUT_HEAD = "text/output_head"
HEAD = "proposal/head"
TOKEN_IDS = "proposal/token_ids"
DEFAULT_ROWS = 131072
DEFAULT_RANKING = None
"""Stands for the ranking that :func:`find_ranking` finds."""

_MODEL_RANKING = "ranking.i64"
_TREE_RANKING = Path("tools", "freq_corpus", "fixtures", "ranking", "ranking.train.counts.i64")


def find_ranking(ranking: str | os.PathLike[str] | None, model_root: Path | None = None) -> Path:
    """The file of token counts: ``ranking`` itself, or the first that exists of the usual places.

    These are ``ranking.i64`` in the model directory, and the ranking of a checked-out runtime tree, which is looked
    for below the working directory and below ``$NINFER_ROOT``.

    Raises:
        FileNotFoundError: none was given and there is none in these places.
    """
    if ranking is not None:
        return Path(ranking)
    root = os.environ.get("NINFER_ROOT")
    candidates = [_TREE_RANKING] if model_root is None else [model_root / _MODEL_RANKING, _TREE_RANKING]
    if root:
        candidates.append(Path(root) / _TREE_RANKING)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    hint = "" if root else f", $NINFER_ROOT/{_TREE_RANKING} (NINFER_ROOT is not set)"
    raise FileNotFoundError(f"no token ranking for the proposal head; pass --ranking PATH (tried {tried}{hint})")


def read_counts(path: Path, vocab_size: int) -> NDArray[np.int64]:
    """The first row of a ranking file: little-endian int64 counts ``[vocab_size]``, rows one after the other.

    Raises:
        ValueError: the file is empty or does not hold whole rows.
    """
    import numpy as np

    size = path.stat().st_size
    if size == 0 or size % (8 * vocab_size):
        raise ValueError(
            f"{path}: ranking must hold complete int64 vocabulary rows: {size} bytes is not a multiple of "
            f"{vocab_size} × 8"
        )
    return np.fromfile(path, dtype="<i8", count=vocab_size).astype(np.int64, copy=False)


def select_shortlist(total: Any, n: int, force_include: Iterable[int] = ()) -> NDArray[np.int64]:
    """The ``n`` most frequent tokens, most frequent first; ties go to the lower id.

    Args:
        total: counts by token id, 1-D.
        n: length of the shortlist.
        force_include: ids that must be in it, whatever their counts. Ids outside the domain are ignored; when there
            are ``n`` or more, the ``n`` most frequent of them are the shortlist. Among equal counts they come last.

    Returns:
        ids ``[n]``.

    Raises:
        ValueError: ``total`` is not 1-D, or it has fewer than ``n`` tokens.
    """
    import numpy as np

    counts = np.asarray(total).astype(np.int64, copy=False)
    if counts.ndim != 1 or not 0 < n <= counts.size:
        raise ValueError(
            f"a proposal head of {n} rows is outside the frequency domain of {counts.size} tokens; "
            "choose another --proposal-rows"
        )

    def by_count(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        # ~x falls as x rises and, unlike -x, has no overflow.
        return ids[np.argsort(~counts[ids], kind="stable")]

    forced = np.array(sorted({i for i in map(int, force_include) if 0 <= i < counts.size}), dtype=np.int64)
    if forced.size >= n:
        return by_count(forced)[:n]
    free = np.ones(counts.size, dtype=bool)
    free[forced] = False
    picked = by_count(np.flatnonzero(free))[: n - forced.size]
    return by_count(np.concatenate([picked, forced]))


def add_proposal(
    recipe: Recipe,
    *,
    ranking: str | os.PathLike[str] | None = DEFAULT_RANKING,
    rows: int = DEFAULT_ROWS,
    source: LogicalSource | None = None,
    format: str = Q4,
) -> None:
    """Add ``proposal/head`` and ``proposal/token_ids`` to a recipe and its model.

    Args:
        ranking: file of token counts; None looks in the usual places.
        rows: number of tokens.
        source: the head to take rows from; None for what the recipe has chosen for ``text/output_head`` so far, whose
            encoded rows are kept when they are imported.
        format: format of ``proposal/head`` when its values are quantised.

    Raises:
        ValueError: there is a proposal head already, the output head comes from several sources, or the ranking or
            the number of rows is unsuitable.
        FileNotFoundError: there is no ranking.
    """
    head = _Head(source, format, "grouped_absmax") if source is not None else _chosen_head(recipe, format)
    inputs = _add_rows(recipe, head, ranking, rows).inputs
    if source is None:
        _copy_rotation(recipe, inputs)


def add_official_proposal(
    recipe: Recipe, *, ranking: str | os.PathLike[str] | None = DEFAULT_RANKING, rows: int = DEFAULT_ROWS
) -> AddedProposal:
    """What ``--proposal`` adds: rows of the head that the recipe imports, else Q4 rows of the checkpoint's own head.

    A recipe that takes the whole output head from another source means that head; a proposal from the base
    checkpoint would disagree with it. ``add_proposal(recipe, source=model.parameters["text/output_head"].source)``
    gives the base head's rows whatever the recipe chose.
    """
    head = _official_head(recipe)
    added = _add_rows(recipe, head, ranking, rows)
    if head.source is not _output_head_source(recipe.model):
        _copy_rotation(recipe, added.inputs)
    return added


class _Head(NamedTuple):
    """The output head that rows are taken from, and how the rows are stored."""

    source: LogicalSource
    format: str
    method: str


@dataclass(frozen=True, slots=True)
class AddedProposal:
    """A proposal head as it was added.

    Attributes:
        ids: the tokens of its rows.
        inputs: the hidden states that it multiplies.
        head: where the rows come from.
        selections: what the recipe had for ``proposal/head`` and ``proposal/token_ids`` afterwards.
    """

    ids: NDArray[np.int32]
    inputs: tuple[str, ...]
    head: _Head
    selections: tuple[Selection, Selection]

    def follow_output_head(self, recipe: Recipe) -> None:
        """Take the rows from the output head that the recipe has by now: what ``--proposal`` does after overrides.

        The result is what adding the proposal now would give, but for choices made for ``proposal/head`` since: its
        source stays if it was assigned, and so do its format and method. Nothing changes while ``proposal/token_ids``
        is not what was added, or while the output head is split.
        """
        from ninferbuild.sources.logical import gather_source

        head, ids = self.selections
        if recipe.selections[TOKEN_IDS] != [ids] or len(recipe.selections[OUTPUT_HEAD]) != 1:
            return
        chosen = _official_head(recipe)
        (now, *others) = recipe.selections[HEAD]
        if others or now.source is not head.source or chosen.source is self.head.source:
            return
        recipe.assign(HEAD, source=gather_source(chosen.source, self.ids))
        if (now.format, now.method) == (head.format, head.method):
            recipe.assign(HEAD, format=chosen.format, method=chosen.method)
        _copy_rotation(recipe, self.inputs)


def _add_rows(recipe: Recipe, head: _Head, ranking: str | os.PathLike[str] | None, rows: int) -> AddedProposal:
    import numpy as np

    from ninferbuild.models.model import Parameter
    from ninferbuild.sources.logical import array_source, gather_source

    model = recipe.model
    if HEAD in model.parameters:
        raise ValueError(f"{HEAD} is already configured")
    path = find_ranking(ranking, model.root)
    counts = read_counts(path, model.config["vocab_size"])[: model.token_count]
    ids = select_shortlist(counts, rows, model.special_token_ids).astype(np.int32)
    gathered = gather_source(head.source, ids)
    inputs = tuple(f"{name}/final_hidden" for name in ("mtp", "dflash", "dflash2") if name in model.components)

    model.components["text"]["proposal"] = {"domain": "indexed", "rows": rows}
    model.add(Parameter(HEAD, tuple(gathered.shape), gathered, inputs=inputs, residency="proposal"))
    model.add(
        Parameter(
            TOKEN_IDS,
            (rows,),
            array_source(ids, f"shortlist({path})"),
            direct_format="int32",
            residency="proposal",
        )
    )
    recipe.add_parameter(HEAD)
    recipe.add_parameter(TOKEN_IDS)
    recipe.assign(HEAD, format=head.format, method=head.method)
    (added,), (token_ids,) = recipe.selections[HEAD], recipe.selections[TOKEN_IDS]
    return AddedProposal(ids, inputs, head, (added, token_ids))


def _official_head(recipe: Recipe) -> _Head:
    own = _output_head_source(recipe.model)
    selections = recipe.selections[OUTPUT_HEAD]
    replaced = len(selections) == 1 and selections[0].source is not own
    return _chosen_head(recipe, Q4) if replaced else _Head(own, Q4, "grouped_absmax")


def _chosen_head(recipe: Recipe, format: str) -> _Head:
    """What the recipe has for the output head: encoded rows where it imports them, else values for ``format``."""
    selection = _only_selection(recipe)
    if selection.method is METHODS["import_encoded"]:
        return _Head(selection.source, selection.format, "import_encoded")
    return _Head(selection.source, format, "grouped_absmax")


def _output_head_source(model: Model) -> LogicalSource:
    if OUTPUT_HEAD not in model.parameters:
        raise ValueError(f"the model has no {OUTPUT_HEAD} to take a proposal head from")
    return model.parameters[OUTPUT_HEAD].source


def _only_selection(recipe: Recipe) -> Selection:
    _output_head_source(recipe.model)
    selections = recipe.selections[OUTPUT_HEAD]
    if len(selections) != 1:
        raise ValueError(f"{OUTPUT_HEAD} is split; a proposal head cannot be derived from split sources")
    return selections[0]


def _copy_rotation(recipe: Recipe, inputs: tuple[str, ...]) -> None:
    """Rows of a rotated head are rotated too: their inputs need the same signs."""
    overrides = recipe.auxiliary_overrides
    signs = next(
        (value for (name, _, role), value in overrides.items() if name == OUTPUT_HEAD and role == "hadamard_signs"),
        None,
    )
    if signs is not None:
        for name in inputs:
            recipe.use(HEAD, name, auxiliaries={"hadamard_signs": signs})
