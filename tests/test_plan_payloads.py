"""Prepared recipes down to the stored bytes: order of parents, shapes, bindings, payload digests."""

from __future__ import annotations

from typing import Any

from fixtures.rm4 import array_parameter, digests, doubling_rows, model_of, nvfp4_parameter, payload, rm4, summary
import pytest
import torch

from ninferbuild.method import AuxiliaryValue
from ninferbuild.recipe import Recipe

BF16, Q4, Q5, Q8 = "bf16", "q4_g64_fp16", "q5_g64_fp16", "q8_g32_fp16"


def part(index: int, first: int, last: int) -> dict[str, Any]:
    return {"object": f"weight/{index:06d}", "range": [first, last]}


def test_automatic_pairs() -> None:
    recipe = Recipe(rm4())
    recipe.assign(("query", "key"), format=Q4, method="grouped_absmax", activation_policy="AllowA4")
    recipe.assign(("gate", "value"), format=Q5, method="grouped_absmax", activation_policy="AllowA8")
    prepared = recipe.prepare(device="cpu", rows_per_chunk=3)
    assert summary(prepared) == [(Q4, (8, 128), ("query", "key")), (Q5, (8, 128), ("gate", "value"))]
    assert [job.spec.id for job in prepared.weights] == ["weight/000000", "weight/000001"]
    assert digests(prepared) == ["ca08518d5d06cdc7", "d4c8371b04545130"]
    assert prepared.bindings == {
        "query": {"parts": [part(0, 0, 512)]},
        "key": {"parts": [part(0, 512, 1024)]},
        "gate": {"parts": [part(1, 0, 512)]},
        "value": {"parts": [part(1, 512, 1024)]},
    }
    assert prepared.uses == [
        {"parameter": name, "input": "input", "activation_policy": policy}
        for name, policy in zip(("query", "key", "gate", "value"), ["AllowA4"] * 2 + ["AllowA8"] * 2, strict=True)
    ]
    assert prepared.auxiliaries == []


def split_recipe() -> Recipe:
    recipe = Recipe(model_of([array_parameter("weight", doubling_rows(1), ("input",))]))
    recipe.assign("weight", format=Q4, method="grouped_absmax")
    recipe.assign("weight", rows=(1, 3), format=Q5)
    return recipe


def test_row_split() -> None:
    prepared = split_recipe().prepare(device="cpu")
    assert summary(prepared) == [
        (Q4, (1, 128), ("weight",)),
        (Q5, (2, 128), ("weight",)),
        (Q4, (1, 128), ("weight",)),
    ]
    assert digests(prepared) == ["6a605ce2be46b98b", "c556aaed59549d99", "fa5a341681cc9062"]
    assert prepared.bindings == {"weight": {"parts": [part(0, 0, 128), part(1, 0, 256), part(2, 0, 128)]}}
    assert [job.sources for job in prepared.weights] == [
        ("rows(weight, 1 spans, 1 rows)",),
        ("rows(weight, 1 spans, 2 rows)",),
        ("rows(weight, 1 spans, 1 rows)",),
    ]


def test_a_whole_assign_keeps_the_split() -> None:
    recipe = split_recipe()
    recipe.assign("weight", format=Q4)
    assert [(job.spec.format, job.spec.shape) for job in recipe.prepare(device="cpu").weights] == [
        (Q4, (1, 128)),
        (Q4, (2, 128)),
        (Q4, (1, 128)),
    ]


def shared_recipe() -> Recipe:
    recipe = Recipe(rm4(("key", "context_key"), ()))
    recipe.assign("*", format=Q8, method="grouped_absmax")
    recipe.share("context_key", "key")
    recipe.use("context_key", "input", activation_policy="AllowA8")
    return recipe


def test_sharing() -> None:
    prepared = shared_recipe().prepare(device="cpu")
    assert digests(prepared) == ["aa3c39de25df244c"]
    assert prepared.bindings == {name: {"object": "weight/000000"} for name in ("key", "context_key")}
    assert prepared.bindings["key"] is not prepared.bindings["context_key"]
    assert [use["activation_policy"] for use in prepared.uses] == ["A16Only", "AllowA8"]


def test_a_physical_change_ends_sharing() -> None:
    recipe = shared_recipe()
    recipe.assign("context_key", format=Q5)
    prepared = recipe.prepare(device="cpu")
    assert [job.spec.format for job in prepared.weights] == [Q8, Q5]
    assert prepared.weights[1].sources == ("key",)
    assert digests(prepared)[1] == "73daa7efe3023561"


def test_without_any_assign() -> None:
    prepared = Recipe(rm4()).prepare(device="cpu")
    assert summary(prepared) == [(BF16, (16, 128), ("query", "key", "gate", "value"))]
    assert digests(prepared) == ["6b8269bbdfb36bec"]
    assert [binding["parts"][0]["range"][0] for binding in prepared.bindings.values()] == [0, 512, 1024, 1536]
    assert prepared.weights[0].method_name == "cast_direct"


def test_explicit_group_keeps_match_order() -> None:
    recipe = Recipe(rm4())
    recipe.group(["value", "query"])
    prepared = recipe.prepare(device="cpu")
    assert [job.parameters for job in prepared.weights] == [("value", "query"), ("key",), ("gate",)]
    assert digests(prepared) == ["dd063dfac1369a53", "897b6044a5d29364", "affcabacdc75681f"]
    assert prepared.bindings["query"] == {"parts": [part(0, 512, 1024)]}


def test_explicit_group_with_a_shape() -> None:
    recipe = Recipe(rm4())
    recipe.group(["v*", "query"], shape=(2, 512))
    prepared = recipe.prepare(device="cpu")
    assert prepared.weights[0].spec.shape == (2, 512)
    assert prepared.bindings["value"] == {"parts": [part(0, 0, 512)]}
    assert prepared.bindings["query"] == {"parts": [part(0, 512, 1024)]}
    assert digests(prepared)[0] == "dd063dfac1369a53"  # direct words do not depend on the shape


def test_encoded_formats_of_other_ranks_are_matrices() -> None:
    vector = torch.arange(128.0).to(torch.bfloat16)
    model = model_of(
        [
            array_parameter("b", vector),
            array_parameter("c", vector.reshape(2, 2, 32)),
            array_parameter("s", torch.tensor(3.0, dtype=torch.bfloat16)),
        ]
    )
    recipe = Recipe(model)
    recipe.assign("*", format=Q8, method="grouped_absmax")
    prepared = recipe.prepare(device="cpu")
    assert [job.spec.shape for job in prepared.weights] == [(1, 128), (4, 32), (1, 1)]
    assert digests(prepared) == ["36abb1246ac1c1c0", "b1dc659668c32495", "c353bc98d622173e"]
    assert prepared.bindings == {
        "b": {"parts": [part(0, 0, 128)]},
        "c": {"parts": [part(1, 0, 128)]},
        "s": {"parts": [part(2, 0, 1)]},
    }


@pytest.mark.parametrize(
    ("format", "method", "shape", "digest"),
    [(BF16, "cast_direct", (8,), "92ab1d34e6000d92"), (Q8, "grouped_absmax", (1, 8), "37e5570d4fa6eb04")],
)
def test_grouped_vectors(format: str, method: str, shape: tuple[int, ...], digest: str) -> None:
    values = torch.arange(4.0).to(torch.bfloat16)
    recipe = Recipe(model_of([array_parameter("x", values), array_parameter("y", values)]))
    recipe.assign("*", format=format, method=method)
    recipe.group(("x", "y"))
    prepared = recipe.prepare(device="cpu")
    assert prepared.weights[0].spec.shape == shape
    assert digests(prepared) == [digest]


def test_row_pieces_of_other_ranks_keep_the_label() -> None:
    values = torch.arange(24.0).to(torch.bfloat16).reshape(4, 2, 3)
    recipe = Recipe(model_of([array_parameter("cube", values), array_parameter("line", values.reshape(-1))]))
    recipe.assign("cube", rows=(1, 3), layout="contiguous_le_v1")
    recipe.assign("line", rows=(20, 24), layout="contiguous_le_v1")
    prepared = recipe.prepare(device="cpu")
    assert [(job.spec.shape, job.sources) for job in prepared.weights] == [
        ((1, 2, 3), ("cube",)),
        ((2, 2, 3), ("cube",)),
        ((1, 2, 3), ("cube",)),
        ((20,), ("line",)),
        ((4,), ("line",)),
    ]
    stored = b"".join(payload(job) for job in prepared.weights[:3])
    assert stored == values.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert prepared.bindings["line"] == {"parts": [part(3, 0, 20), part(4, 0, 4)]}


def test_shared_and_own_auxiliaries() -> None:
    recipe = Recipe(rm4(("query", "key"), ()))
    recipe.assign("*", format=Q8, method="grouped_absmax")
    signs = AuxiliaryValue("bf16", (128,), bytes.fromhex("803f80bf") * 64)
    for name in ("query", "key"):
        recipe.use(name, "input", auxiliaries={"hadamard_signs": signs, "activation_input_divisor": 2.0})
    prepared = recipe.prepare(device="cpu")
    assert [(item.id, item.format, item.shape) for item in prepared.auxiliaries] == [
        ("auxiliary/000000", "bf16", (128,)),
        ("auxiliary/000001", "fp32", ()),
        ("auxiliary/000002", "fp32", ()),
    ]
    assert [item.data.hex() for item in prepared.auxiliaries[1:]] == ["00000040"] * 2
    assert prepared.auxiliaries[0].spec.layout == "contiguous_le_v1"
    assert [list(use["auxiliaries"].items()) for use in prepared.uses] == [
        [
            ("hadamard_signs", {"object": "auxiliary/000000"}),
            ("activation_input_divisor", {"object": f"auxiliary/00000{index}"}),
        ]
        for index in (1, 2)
    ]


def test_encoded_words_are_imported_without_reading_values() -> None:
    recipe = Recipe(model_of([nvfp4_parameter("matrix", input_divisor=3.0)]))
    recipe.assign("matrix", method="import_encoded", activation_policy="AllowA4")
    prepared = recipe.prepare(device="cpu")
    stored = payload(prepared.weights[0])
    assert len(stored) == 4612
    assert stored[-4:].hex() == "00000040"
    assert [item.data.hex() for item in prepared.auxiliaries] == ["00004040"]


def test_stacked_divisors_are_stored_in_row_order() -> None:
    recipe = Recipe(model_of([nvfp4_parameter("up", divisor=4.0), nvfp4_parameter("gate", divisor=2.0)]))
    recipe.assign("*", method="import_encoded")
    recipe.group(["gate", "up"])
    (job,) = recipe.prepare(device="cpu").weights
    assert (job.spec.shape, job.spec.divisors) == ((256, 64), 2)
    assert payload(job)[-8:].hex() == "0000004000008040"


def test_preparing_again_gives_the_same_and_changes_nothing() -> None:
    recipe = split_recipe()
    before = {name: list(pieces) for name, pieces in recipe.selections.items()}
    one, two = recipe.prepare(device="cpu"), recipe.prepare(device="cpu")
    assert [job.spec for job in one.weights] == [job.spec for job in two.weights]
    assert one.bindings == two.bindings
    assert digests(one) == digests(two)
    assert recipe.selections == before
