from collections.abc import Callable
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import pytest

from ninferbuild.models.resources import TEXT_RESOURCES, VISION_RESOURCES, load_resources, token_domain


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    fx.write_resources(path)
    return path


def test_payloads_are_the_file_bytes(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\r\n{{ messages }}\xc3\xa9\n\n")
    references, payloads, count, special = load_resources(directory, vocab_size=16)
    assert references == {"text": {role: f"resource/text/{role}" for role in TEXT_RESOURCES}}
    assert list(payloads) == [f"resource/text/{role}" for role in TEXT_RESOURCES]
    assert payloads["resource/text/chat_template.jinja"] == b"\r\n{{ messages }}\xc3\xa9\n\n"
    assert (count, special) == (12, (10,))


def test_vision_adds_its_processors(directory: Path) -> None:
    references, payloads, _, _ = load_resources(directory, vocab_size=16, vision_config=fx.vision_config())
    assert list(references) == ["text", "vision"]
    assert list(references["vision"]) == list(VISION_RESOURCES)
    assert len(payloads) == 6


def test_overrides_replace_files_that_need_not_exist(directory: Path, tmp_path: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    other = tmp_path / "other.txt"
    other.write_text("{{ other }}")
    overrides = {"chat_template.jinja": other}
    _, payloads, _, _ = load_resources(directory, vocab_size=16, overrides=overrides)
    assert payloads["resource/text/chat_template.jinja"] == b"{{ other }}"


def test_relative_overrides_are_tried_below_ninfer_root(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime" / "templates").mkdir(parents=True)
    (tmp_path / "runtime" / "templates" / "x.jinja").write_text("below the root")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    overrides = {"chat_template.jinja": "templates/x.jinja"}
    with pytest.raises(FileNotFoundError, match=r"chat_template\.jinja is missing"):
        load_resources(directory, vocab_size=16, overrides=overrides)
    monkeypatch.setenv("NINFER_ROOT", str(tmp_path / "runtime"))
    _, payloads, _, _ = load_resources(directory, vocab_size=16, overrides=overrides)
    assert payloads["resource/text/chat_template.jinja"] == b"below the root"
    (tmp_path / "here" / "templates").mkdir()
    (tmp_path / "here" / "templates" / "x.jinja").write_text("here")
    _, payloads, _, _ = load_resources(directory, vocab_size=16, overrides=overrides)
    assert payloads["resource/text/chat_template.jinja"] == b"here"


@pytest.mark.parametrize("role", ["preprocessor_config.json", "vocab.txt"])
def test_overrides_need_a_consumer(directory: Path, role: str) -> None:
    with pytest.raises(ValueError, match=f"{role} has no selected consumer"):
        load_resources(directory, vocab_size=16, overrides={role: directory / "tokenizer.json"})


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json is missing") as caught:
        load_resources(directory, vocab_size=16)
    assert str(directory / "generation_config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("role", "data", "fragment"),
    [
        ("chat_template.jinja", b"", "resource is empty"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("generation_config.json", b"[]", "must contain a JSON object"),
        ("generation_config.json", b"{", "must contain a JSON object"),
        ("tokenizer.json", b"[" * 100_000, "must contain a JSON object"),
        ("tokenizer.json", b"{}", "vocabulary mapping"),
        ("tokenizer.json", b'{"model":{"vocab":{"a":0.0}}}', "invalid tokenizer entry"),
    ],
)
def test_malformed_files_are_named(directory: Path, role: str, data: bytes, fragment: str) -> None:
    (directory / role).write_bytes(data)
    with pytest.raises(ValueError, match=fragment):
        load_resources(directory, vocab_size=16)


@pytest.mark.parametrize("field", ["patch_size", "temporal_patch_size", "merge_size"])
@pytest.mark.parametrize("value", [99, True, None])
def test_processors_agree_with_vision(directory: Path, field: str, value: object) -> None:
    processor = {"patch_size": 2, "temporal_patch_size": 2, "merge_size": 2, field: value}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(processor))
    load_resources(directory, vocab_size=16)
    with pytest.raises(ValueError, match=rf"video_preprocessor_config\.json: {field} differs from Vision config"):
        load_resources(directory, vocab_size=16, vision_config=fx.vision_config())


def tokens(
    vocab: object = None, added: object = None, decoder: object = None, vocab_size: int = 8
) -> tuple[int, tuple[int, ...]]:
    tokenizer: dict[str, Any] = {"model": {"vocab": {"a": 0} if vocab is None else vocab}}
    if added is not None:
        tokenizer["added_tokens"] = added
    return token_domain(tokenizer, {} if decoder is None else {"added_tokens_decoder": decoder}, vocab_size)


def test_token_domain_of_three_sources() -> None:
    added = [{"id": 1, "content": "b", "special": True}]
    assert tokens(added=added, decoder={"2": {"content": "c", "special": True}}) == (3, (1, 2))
    assert tokens(added=added, decoder={"1": {"content": "b", "special": True}}) == (2, (1,))
    assert tokens(added=[{"id": 1, "content": "b"}]) == (2, ())
    assert tokens() == (1, ())
    assert tokens(added=[{"id": 0, "content": "a", "special": True}]) == (1, (0,))


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: token_domain({}, {}, 8), "vocabulary mapping"),
        (lambda: token_domain({"model": {"vocab": []}}, {}, 8), "vocabulary mapping"),
        (lambda: tokens({"a": True}), "invalid tokenizer entry"),
        (lambda: tokens({"a": -1}), "invalid tokenizer entry"),
        (lambda: tokens({"a": 8}), "invalid tokenizer entry"),
        (lambda: tokens({"a": 0, "b": 0}), "disagree about token 0"),
        (lambda: tokens(added=[{"id": "1", "content": "b"}]), "invalid tokenizer entry"),
        (lambda: tokens(added=[{"id": 1}]), "invalid tokenizer entry"),
        (lambda: tokens(added=[1]), "invalid tokenizer entry"),
        (lambda: tokens(added={}), "invalid tokenizer entry"),
        (lambda: tokens(added=[{"id": 0, "content": "z"}]), "disagree about token 0"),
        (lambda: tokens(added=[{"id": 1, "content": "b", "special": 1}]), "special must be boolean"),
        (lambda: tokens(decoder={"x": {"content": "b"}}), "invalid tokenizer entry"),
        (lambda: tokens(decoder={"-1": {"content": "b"}}), "invalid tokenizer entry"),
        (lambda: tokens(decoder=[]), "invalid tokenizer entry"),
        (
            lambda: tokens(
                added=[{"id": 1, "content": "b", "special": True}],
                decoder={"1": {"content": "b", "special": False}},
            ),
            "special flag",
        ),
        (lambda: tokens({"a": 0, "b": 2}), "contiguous public token ID domain"),
        (lambda: tokens({}), "contiguous public token ID domain"),
    ],
)
def test_contradictory_tokenizers_are_refused(make: Callable[[], object], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        make()
