from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest

from ninferbuild.artifact.json_text import decode_json, encode_json, encode_records
from ninferbuild.artifact.schema import (
    ArtifactError,
    ResourceSpec,
    TensorSpec,
    binding_parts,
    decode_directory,
    encode_directory,
    parse_directory,
    plan_objects,
    validate_encoding,
)
from ninferbuild.artifact.writer import layout_directory

DROP = object()


def changed(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    """Set (or drop) the member at a path such as ``objects|1|offset``."""
    *parents, last = path.split("|")
    target: Any = value
    for step in parents:
        target = target[int(step) if isinstance(target, list) else step]
    key: Any = int(last) if isinstance(target, list) else last
    if new is DROP:
        del target[key]
    else:
        target[key] = new
    return value


PART = {"path": "a", "payload_bytes": 1}

INVALID = [
    ("components", DROP),
    ("objects", DROP),
    ("bindings", DROP),
    ("uses", DROP),
    ("files", DROP),
    ("version", 3),
    ("metadata", []),
    ("metadata", None),
    ("metadata|name", ""),
    ("metadata|name", None),
    ("provenance", []),
    ("files", []),
    ("files", {}),
    ("files|0|path", "demo.ninfer"),
    ("files|0|extra", 1),
    ("files|0|payload_bytes", 0),
    ("files|0|payload_bytes", 516.0),
    ("files|0|payload_bytes", True),
    ("files|0|payload_bytes", 515),
    *(
        ("files", [{"path": None, "payload_bytes": 516}, {"path": name, "payload_bytes": 1}])
        for name in ("demo.ninfer", ".", "..", "a/b", "a\\b", "", "a\0", 5, None, "\ud800")
    ),
    ("files", [{"path": None, "payload_bytes": 516}, PART, PART]),
    ("files", [{"path": None, "payload_bytes": 2**64 - 1}, PART]),
    ("objects", []),
    ("objects", {}),
    ("objects|0", "note"),
    ("objects|0|kind", "blob"),
    ("objects|0|kind", DROP),
    ("objects|0|shape", [1]),
    ("objects|1|dtype", "bf16"),
    ("objects|1|divisors", 0),
    ("objects|1|divisors", True),
    ("objects|1|divisors", None),
    ("objects|1|id", "note"),
    ("objects|1|id", ""),
    ("objects|1|offset", -1),
    ("objects|1|offset", 2),
    ("objects|1|bytes", 0),
    ("objects|2|bytes", 5),
    ("objects|2|offset", 2**64 - 1),
    ("objects|1|shape", [0, 3]),
    ("objects|1|shape", "23"),
    ("objects|1|shape", [1] * 17),
    ("objects|1|shape", [2**32, 2**32]),
    ("components", {}),
    ("components", []),
    ("components|text|extra", 1),
    ("components|text|config", DROP),
    ("components|text|config", []),
    ("components|text|target", "vision"),
    ("components|text|resources", []),
    ("components|text|resources", None),
    ("components|text|resources", {"note.txt": "m"}),
    ("components|text|resources", {"note.txt": "nothing"}),
    ("components|text|resources", {"": "note"}),
    ("components|vision", {"config": {}, "proposal": {"domain": "full"}}),
    ("components|text|proposal", {"domain": "full", "rows": 5}),
    ("components|text|proposal", {"domain": "full", "rows": None}),
    ("components|text|proposal", {"domain": "indexed", "rows": 0}),
    ("components|text|proposal", {"domain": "indexed"}),
    ("components|text|proposal", {"domain": "other"}),
    ("components|text|proposal", {"domain": ["full"]}),
    ("components|text|proposal", {"domain": "full", "extra": 1}),
    ("bindings", []),
    ("bindings|text/w", {"object": "m", "parts": []}),
    ("bindings|text/w", {}),
    ("bindings|text/w", "m"),
    ("bindings|text/w", {"object": "note"}),
    ("bindings|text/w", {"object": "nothing"}),
    ("bindings|text/w", {"object": ["m"]}),
    ("bindings|", {"object": "m"}),
    ("bindings|text/w", {"parts": []}),
    ("bindings|text/w", {"parts": ({"object": "m", "range": [0, 1]},)}),
    ("bindings|text/w", {"parts": [{"object": "m", "range": (0, 1)}]}),
    ("bindings|text/w", {"parts": [{"object": "m", "range": [0, 1], "extra": 1}]}),
    *(
        ("bindings|text/w", {"parts": [{"object": "m", "range": bounds}]})
        for bounds in ([0, 1, 2], [2, 2], [3, 2], [0, 7], [0, 6.0], [-1, 2], [False, True])
    ),
    ("uses", {}),
    ("uses|0|parameter", "text/other"),
    ("uses|0|extra", 1),
    ("uses|0|input", ""),
    ("uses|0|activation_policy", "AllowA2"),
    ("uses|0|activation_policy", None),
    ("uses|0|auxiliaries", []),
    ("uses|0|auxiliaries", None),
    ("uses|0|auxiliaries", {"signs": {"object": "note"}}),
    ("uses|0|auxiliaries", {"": {"object": "d"}}),
    ("uses", [{"parameter": "text/w", "input": "x"}] * 2),
]

VALID = [
    ("metadata", DROP),
    ("provenance", DROP),
    ("metadata|other", None),
    ("files|0|payload_bytes", 600),
    *(
        ("files", [{"path": None, "payload_bytes": 500}, {"path": name, "payload_bytes": 16}])
        for name in ("a", "...", "a b", ".hidden", "é")
    ),
    ("objects|1|divisors", 1),
    ("objects|1|shape", (2, 3)),
    ("objects|1|shape", [1] * 15 + [6]),
    ("components|text|target", "text"),
    ("components|text|proposal", {"domain": "full"}),
    ("components|text|proposal", {"domain": "indexed", "rows": 5}),
    ("components", {"ngram": {"config": {}}}),
    ("bindings|text/w", {"parts": [{"object": "m", "range": [0, 6]}, {"object": "m", "range": [0, 6]}]}),
    ("uses", []),
    ("uses|0|activation_policy", "AllowA4"),
]


class TestRules:
    @pytest.mark.parametrize(("path", "new"), INVALID)
    def test_refused(self, demo_value, path, new):
        with pytest.raises(ArtifactError):
            parse_directory(changed(demo_value, path, new), entry_name="demo.ninfer")

    @pytest.mark.parametrize(("path", "new"), VALID)
    def test_accepted(self, demo_value, path, new):
        parse_directory(changed(demo_value, path, new), entry_name="demo.ninfer")

    def test_objects_are_listed_in_ascending_order(self, demo_value):
        demo_value["objects"].reverse()
        with pytest.raises(ArtifactError, match="before the end"):
            parse_directory(demo_value)

    @pytest.mark.parametrize("value", [None, [], "x", 1])
    def test_root_is_an_object(self, value):
        with pytest.raises(ArtifactError):
            parse_directory(value)

    def test_a_part_may_have_the_entry_name_when_that_is_unknown(self, demo_value):
        demo_value["files"].append({"path": "demo.ninfer", "payload_bytes": 1})
        assert parse_directory(demo_value).payload_bytes == 517

    def test_messages_name_the_object(self, demo_value):
        with pytest.raises(ArtifactError, match="'m'"):
            parse_directory(changed(demo_value, "objects|1|bytes", 0))

    @pytest.mark.parametrize(
        ("path", "new", "message"),
        [
            ("objects|1|offset", 257, "multiple of 256"),
            ("objects|1|bytes", 13, "13 bytes"),
            ("objects|1|format", "fp5", "fp5"),
            ("objects|1|layout", "mystery_v1", "mystery_v1"),
            ("objects|1|divisors", 2, "stores one divisor"),
            ("objects|0|encoding", "gzip", "gzip"),
        ],
    )
    def test_encodings_are_checked_when_wanted(self, demo_value, path, new, message):
        directory = parse_directory(changed(demo_value, path, new))
        broken = "note" if "encoding" in path else "m"
        for item in directory.objects:
            if item.id != broken:
                validate_encoding(item)
        with pytest.raises(ArtifactError, match=message) as caught:
            validate_encoding(next(item for item in directory.objects if item.id == broken))
        assert repr(broken) in str(caught.value)

    def test_json_form_and_parts(self, demo_value):
        directory = parse_directory(demo_value)
        order = ["components", "objects", "bindings", "uses", "files", "metadata", "provenance"]
        assert list(directory.to_json()) == order
        assert directory.to_json() == demo_value
        by_id = {item.id: item for item in directory.objects}
        assert binding_parts(directory.bindings["text/w"], by_id) == (("m", 0, 6),)
        assert binding_parts(directory.bindings["text/swap"], by_id) == (("m", 3, 6), ("m", 0, 3))
        assert binding_parts({"object": "d"}, by_id) == (("d", 0, 1),)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**65)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["m", "d"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_accepted_or_refused(demo_value, data):
    """Replaces some node of a valid directory by an arbitrary value."""
    value = copy.deepcopy(demo_value)
    parent, key = {"root": value}, "root"
    while isinstance(parent[key], dict | list) and parent[key] and data.draw(st.integers(0, 4)):
        parent = parent[key]
        key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
    parent[key] = data.draw(JSON_VALUES)
    message = ""
    try:
        for item in parse_directory(value).objects:
            validate_encoding(item)
    except ArtifactError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


class TestText:
    def test_white_space_around_the_value(self, demo_value):
        text = encode_directory(demo_value)
        assert decode_directory(b" \t\r\n" + text + b"\n \t\r") == parse_directory(demo_value)

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: b"\xef\xbb\xbf" + text,
            lambda text: text + b"\0",
            lambda text: text + b" {}",
            lambda text: b"\x0c" + text,
            lambda text: text.replace(b'"Demo"', b'"\xff"'),
            lambda text: text.replace(b'"Demo"', b'"\xed\xa0\x80"'),
            lambda text: b"",
            lambda text: text.replace(b'"flag":true', b'"flag":true,"flag":true'),
            lambda text: text.replace(b'"flag":true', b'"flag":true,"fl\\u0061g":true'),
            lambda text: text.replace(b"1e-06", b"Infinity"),
            lambda text: text.replace(b"1e-06", b"-Infinity"),
            lambda text: text.replace(b"1e-06", b"NaN"),
            lambda text: text.replace(b"1e-06", b"1e400"),
            lambda text: text.replace(b"1e-06", b"1" * 5000),
            lambda text: text.replace(b"1e-06", b"[" * 100000 + b"]" * 100000),
            lambda text: text.replace(b'"Demo"', b'"\\ud800"'),
            lambda text: text.replace(b'"Demo"', b'"Demo",'),
            lambda text: text.replace(b'"Demo"', b'"Demo" // comment\n'),
        ],
    )
    def test_refused(self, demo_value, change):
        text = encode_directory(demo_value)
        broken = change(text)
        assert broken != text
        with pytest.raises(ArtifactError):
            decode_directory(broken)

    def test_a_pair_of_surrogate_escapes_is_one_character(self):
        assert decode_json(b'["\\ud83d\\ude00"]') == ["\U0001f600"]

    def test_written_form(self):
        value = {"b": [0.1, 1.0, -0.0, 1e7, 1e-6, 1e16, 5e-324], "a": 'é/\x7f\u2028"\\\b\f\n\r\t\x01', "e": [[], {}]}
        expected = (
            '{"b":[0.1,1.0,-0.0,10000000.0,1e-06,1e+16,5e-324],'
            '"a":"é/\x7f\u2028\\"\\\\\\b\\f\\n\\r\\t\\u0001","e":[[],{}]}'
        )
        assert encode_directory(value) == expected.encode()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1, 2}, b"x", {(1, 2): 3}])
    def test_what_json_cannot_hold(self, value):
        with pytest.raises(ArtifactError):
            encode_directory({"components": value})

    @settings(deadline=None)
    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"])),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
        )
    )
    def test_round_trip(self, value):
        assert decode_json(encode_json(value)) == value


class TestPlanning:
    def test_offsets(self):
        specs = [
            ResourceSpec("a", 1),
            ResourceSpec("b", 5),
            TensorSpec("t", (3,), "bf16", "contiguous_le_v1"),
            ResourceSpec("c", 2),
            TensorSpec("u", (2, 130), "q5_g64_fp16", "row_split_k128_v1"),
            TensorSpec("v", (), "int32", "contiguous_le_v1"),
        ]
        places = [(item.offset, item.bytes) for item in plan_objects(specs)]
        assert places == [(0, 1), (1, 5), (256, 6), (262, 2), (512, 528), (1280, 4)]

    @pytest.mark.parametrize(
        "specs",
        [
            [],
            [ResourceSpec("a", 1), ResourceSpec("a", 1)],
            [ResourceSpec("a", 0)],
            [ResourceSpec("a", True)],
            [ResourceSpec("", 1)],
            [ResourceSpec("a", 1, "gzip")],
            [ResourceSpec("a", 2**64 - 1), ResourceSpec("b", 1)],
            [TensorSpec("t", (3,), "q4_g64_fp16", "row_split_k128_v1")],
            [TensorSpec("t", (3,), "bf16", "row_split_k128_v1")],
            [TensorSpec("t", (3,), "fp5", "contiguous_le_v1")],
            [TensorSpec("t", (3,), "bf16", "mystery_v1")],
            [TensorSpec("t", (0,), "bf16", "contiguous_le_v1")],
            [TensorSpec("t", (2**63,), "bf16", "contiguous_le_v1")],
            [TensorSpec("t", (256, 64), "q4_g64_fp16", "row_split_k128_v1", 2)],
        ],
    )
    def test_refused(self, specs):
        with pytest.raises(ArtifactError):
            plan_objects(specs)

    def test_foreign_specs(self):
        with pytest.raises(TypeError):
            plan_objects([("a", 1)])

    def test_stacked_divisors(self):
        (item,) = plan_objects([TensorSpec("w", (256, 64), "nvfp4", "block_scale_k16_m128x4_v1", 2)])
        assert encode_json(item.to_json()) == (
            b'{"id":"w","shape":[256,64],"format":"nvfp4","layout":"block_scale_k16_m128x4_v1","offset":0,'
            b'"bytes":9224,"divisors":2,"kind":"tensor"}'
        )
        (item,) = plan_objects([TensorSpec("w", (256, 64), "nvfp4", "block_scale_k16_m128x4_v1")])
        assert item.bytes == 9220
        assert "divisors" not in item.to_json()


def description(size: int, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "components": {"text": {"config": {}}},
        "objects": [{"id": "r", "encoding": "raw_bytes_v1", "offset": 0, "bytes": size, "kind": "resource"}],
        "bindings": {},
        "metadata": metadata or {},
    }


def segments(size: int, limit: Any, metadata: dict[str, Any] | None = None) -> list[int]:
    directory, _, _ = layout_directory("a.ninfer", description(size, metadata), size, max_file_bytes=limit)
    return [record.payload_bytes for record in directory.files]


class TestSizing:
    @pytest.mark.parametrize(
        ("n", "start", "sizes", "digest"),
        [
            (3773, 4096, [61440, 38560], "0057b64bd878af2bd6c16c899c0e1c4d33aa23c9f0d8e2a1bcd933a18026fe5a"),
            (3774, 8192, [57344, 42656], "1c36484f020ec545b96ff7f32b12d4dc57b76ba60dac156d71af33a41914adca"),
        ],
    )
    def test_the_reserve_grows(self, n, start, sizes, digest):
        directory, text, payload_offset = layout_directory(
            "a.ninfer", description(100000, {"note": "x" * n}), 100000, max_file_bytes=65536
        )
        assert len(text.rstrip(b" ")) == 4064 + n - 3773
        assert payload_offset == start == 32 + len(text)
        assert [record.payload_bytes for record in directory.files] == sizes
        assert hashlib.sha256(text).hexdigest() == digest
        assert decode_directory(text, entry_name="a.ninfer") == directory

    @pytest.mark.parametrize("limit", [1, 4095, 4096])
    def test_no_room_for_the_directory(self, limit):
        with pytest.raises(ArtifactError, match="cannot hold the directory and payload"):
            segments(5000, limit)

    @pytest.mark.parametrize("limit", [4097, 8191])
    def test_no_room_for_a_segment(self, limit):
        with pytest.raises(ArtifactError, match="cannot hold one aligned segment"):
            segments(5000, limit)

    @pytest.mark.parametrize(
        ("limit", "sizes"), [(8192, [4096, 904]), (9095, [4096, 904]), (9096, [5000]), (None, [5000])]
    )
    def test_limits(self, limit, sizes):
        assert segments(5000, limit) == sizes

    @pytest.mark.parametrize("limit", [0, True, 2**64, -1, 1e6])
    def test_limits_that_are_none(self, limit):
        with pytest.raises(ArtifactError):
            segments(5000, limit)

    def test_large_payloads(self):
        limit, capacity = 32_000_000_000, 31_999_995_904
        assert segments(capacity, limit) == [capacity]
        assert segments(capacity + 1, limit) == [capacity, 1]
        assert segments(100_000_000_000, limit) == [capacity] * 3 + [4_000_012_288]
        assert segments(100_000_000_000, None) == [100_000_000_000]

    @settings(deadline=None)
    @given(
        size=st.integers(1, 400_000),
        limit=st.integers(12_288, 100_000),
        note=st.integers(0, 5000),
    )
    def test_files_are_full_and_hold_everything(self, size, limit, note):
        directory, text, start = layout_directory(
            "a.ninfer", description(size, {"note": "x" * note}), size, max_file_bytes=limit
        )
        sizes = [record.payload_bytes for record in directory.files]
        assert sum(sizes) == size
        assert start == 32 + len(text)
        assert start % 4096 == 0
        for index, length in enumerate(sizes):
            used = (4096 if index else start) + length
            assert used <= limit
            assert index == len(sizes) - 1 or (used > limit - 4096 and length % 4096 == 0)

    def test_values_are_copied(self):
        value = description(5)
        directory, _, _ = layout_directory("a.ninfer", value, 5)
        value["components"]["text"]["config"]["late"] = 1
        assert directory.components == {"text": {"config": {}}}

    def test_names_that_json_makes_equal(self):
        value = description(5, {"1": 1, 1: 2})
        with pytest.raises(ArtifactError, match="same name"):
            layout_directory("a.ninfer", value, 5)
        _, text, _ = layout_directory("a.ninfer", description(5, {1: 2, None: 3, False: 4, 0.5: 5}), 5)
        assert json.loads(text)["metadata"] == {"1": 2, "null": 3, "false": 4, "0.5": 5}

    def test_values_that_contain_themselves(self):
        value = description(5)
        value["metadata"]["self"] = value
        with pytest.raises(ArtifactError, match="nested too deeply"):
            layout_directory("a.ninfer", value, 5)

    def test_unknown_members(self):
        with pytest.raises(ArtifactError, match="version"):
            layout_directory("a.ninfer", {**description(5), "version": 3}, 5)


PLAIN = st.recursive(
    st.text() | st.integers(0, 2**64 - 1) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_records_have_the_text_of_every_other_value(value: Any) -> None:
    assert encode_records(value) == encode_json(value)


def test_every_character_has_one_text() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    assert encode_records(characters) == encode_json(characters)


@pytest.mark.parametrize("value", ["\ud800", {"a": object()}, [2**70]])
def test_records_are_refused_or_written_alike(value: Any) -> None:
    try:
        wanted: object = encode_json(value)
    except ArtifactError as error:
        wanted = str(error)
    try:
        found: object = encode_records(value)
    except ArtifactError as error:
        found = str(error)
    assert found == wanted
