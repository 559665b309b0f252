"""Which parameters a selector selects."""

from __future__ import annotations

import fnmatch

from fixtures.rm4 import array_parameter, doubling_rows, rm4
from hypothesis import given
from hypothesis import strategies as st
import pytest

from ninferbuild.matching import NameIndex
from ninferbuild.recipe import Recipe


def test_one_string_and_a_sequence() -> None:
    recipe = Recipe(rm4())
    assert recipe.match("key") == ("key",)
    assert recipe.match(["value", "query"]) == ("value", "query")


def test_results_come_in_first_seen_order_without_repeats() -> None:
    recipe = Recipe(rm4())
    assert recipe.match(["v*", "*"]) == ("value", "query", "key", "gate")
    assert recipe.match(["key", "?ey", "key"]) == ("key",)


def test_patterns_match_in_model_order_across_slashes() -> None:
    names = ("text/layers/1/mlp/up", "text/layers/0/mlp/up", "mtp/mlp/up", "text/up")
    index = NameIndex(names)
    assert index.find("text/*/up") == names[:2]
    assert index.find("*/mlp/up") == names[:3]
    assert index.find("text/layers/[0]/*") == (names[1],)
    assert index.find("TEXT/*") == ()


def test_a_name_with_wildcard_characters_selects_only_itself() -> None:
    index = NameIndex(("a*", "ab", "a[b]", "a?"))
    assert index.find("a*") == ("a*",)
    assert index.find("a?") == ("a?",)
    assert index.find("a[b]") == ("a[b]",)
    assert index.find("?b") == ("ab",)


@given(
    st.lists(st.text("ab/[]!*?-", max_size=6), unique=True, max_size=12),
    st.text("ab/[]!*?-", max_size=7),
)
def test_find_equals_a_linear_fnmatch(names: list[str], selector: str) -> None:
    expected = [selector] if selector in names else [name for name in names if fnmatch.fnmatchcase(name, selector)]
    assert NameIndex(names).find(selector) == tuple(expected)


def test_no_selectors() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Recipe(rm4()).match([])


def test_a_selector_without_matches_is_named() -> None:
    with pytest.raises(ValueError, match=r"'nope\*' matched no logical parameter"):
        Recipe(rm4()).match(["key", "nope*"])


def test_added_parameters_are_found() -> None:
    model = rm4()
    recipe = Recipe(model)
    assert recipe.match("*") == tuple(model.parameters)
    model.add(array_parameter("extra", doubling_rows(5), ("input",)))
    with pytest.raises(ValueError, match=r"matched no logical parameter; call recipe\.add_parameter"):
        recipe.match("extra")
    recipe.add_parameter("extra")
    assert recipe.match("*") == tuple(model.parameters)
    assert recipe.policies["extra", "input"] == "A16Only"


def test_add_parameter_errors() -> None:
    recipe = Recipe(rm4())
    with pytest.raises(ValueError, match="already contains"):
        recipe.add_parameter("query")
    with pytest.raises(ValueError, match="has no parameter other"):
        recipe.add_parameter("other")
