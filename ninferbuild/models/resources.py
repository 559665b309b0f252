"""Frontend resources: the tokenizer and processor files that an artifact carries byte for byte.

The tokenizer also fixes the public token domain: ids ``0 … count − 1`` without a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import os
from pathlib import Path
from typing import Any

import msgspec

TEXT_RESOURCES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VISION_RESOURCES = ("preprocessor_config.json", "video_preprocessor_config.json")

_PROCESSOR_FIELDS = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
"""Field of a processor file → field of the Vision configuration that it must equal."""

References = dict[str, dict[str, str]]
"""component → role → object id"""


def load_resources(
    model_dir: str | os.PathLike[str],
    *,
    vocab_size: int,
    vision_config: Mapping[str, Any] | None = None,
    overrides: Mapping[str, str | os.PathLike[str]] | None = None,
) -> tuple[References, dict[str, bytes], int, tuple[int, ...]]:
    """Read and check the resources of the selected components.

    Args:
        model_dir: where a resource is looked for under its role's name.
        vocab_size: rows of the embedding; every token id is below it.
        vision_config: the Vision configuration when Vision is selected.
        overrides: role → file to take instead. A relative path that does not exist is also tried below
            ``$NINFER_ROOT``.

    Returns:
        ``(references, payloads, token count, ascending special token ids)``; payloads by object id.

    Raises:
        ValueError: an override nobody uses, an empty or malformed file, or a contradiction with the configuration.
        FileNotFoundError: a resource is missing.
    """
    overrides = dict(overrides or {})
    roles = [("text", role) for role in TEXT_RESOURCES]
    if vision_config is not None:
        roles += [("vision", role) for role in VISION_RESOURCES]
    unused = [role for role in overrides if role not in {role for _, role in roles}]
    if unused:
        raise ValueError(f"resource {', '.join(unused)} has no selected consumer")

    paths = {
        role: _override_path(overrides[role]) if role in overrides else Path(model_dir) / role for _, role in roles
    }
    references: References = {}
    payloads: dict[str, bytes] = {}
    parsed: dict[str, dict[str, Any]] = {}
    for component, role in roles:
        path = paths[role]
        data = _read(path, role, paths)
        text = _text(data, path)
        if role == "tokenizer.json":
            parsed[role] = _vocabulary_of(data) or _object(text, path)
        elif role.endswith(".json"):
            parsed[role] = _object(text, path)
        if component == "vision" and vision_config is not None:
            _check_processor(parsed[role], vision_config, path)
        identifier = f"resource/{component}/{role}"
        references.setdefault(component, {})[role] = identifier
        payloads[identifier] = data
    count, special = token_domain(parsed["tokenizer.json"], parsed["tokenizer_config.json"], vocab_size)
    return references, payloads, count, special


def _override_path(value: str | os.PathLike[str]) -> Path:
    path, root = Path(value), os.environ.get("NINFER_ROOT")
    if root and not path.is_absolute() and not path.exists():
        below_root = Path(root) / path
        if below_root.exists():
            return below_root
    return path


def _read(path: Path, role: str, paths: Mapping[str, Path]) -> bytes:
    """The bytes of one resource; when it is missing, the message has an option for each of ``paths`` that is."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        options = " ".join(f"--resource {other}=PATH" for other, place in paths.items() if not place.exists())
        raise FileNotFoundError(
            error.errno, f"resource {role} is missing; add it or pass {options}", str(path)
        ) from None
    if not data:
        raise ValueError(f"{path}: resource is empty")
    return data


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: resource is not UTF-8 text: {error}") from error


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: resource must contain a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: resource must contain a JSON object")
    return value


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[dict[str, Any]] = []


_TOKENIZER = msgspec.json.Decoder(_Tokenizer)


def _vocabulary_of(data: bytes) -> dict[str, Any] | None:
    """What :func:`token_domain` reads of a regular ``tokenizer.json``, or None for an irregular one.

    Most of the file is merge rules that nobody here reads; making objects of them takes longer than the rest of
    building a model.
    """
    try:
        tokenizer = _TOKENIZER.decode(data)
    except msgspec.MsgspecError:
        return None
    return {"model": {"vocab": tokenizer.model.vocab}, "added_tokens": tokenizer.added_tokens}


def _tokens(vocabulary: Mapping[str, Any], vocab_size: int) -> dict[int, str]:
    """Id → token of a vocabulary, which has a quarter of a million entries: no step for each, unless one is wrong."""
    identifiers = vocabulary.values()
    if set(map(type, identifiers)) == {int} and min(identifiers) >= 0 and max(identifiers) < vocab_size:
        tokens = dict(zip(identifiers, vocabulary, strict=True))
        if len(tokens) == len(vocabulary):
            return tokens
    tokens = {}
    for content, identifier in vocabulary.items():
        if type(identifier) is not int or not 0 <= identifier < vocab_size:
            raise ValueError(f"tokenizer.json: invalid tokenizer entry {content!r}: {identifier!r}")
        if tokens.setdefault(identifier, content) != content:
            raise _disagreement(identifier, tokens[identifier], content)
    return tokens


def _check_processor(processor: Mapping[str, Any], vision: Mapping[str, Any], path: Path) -> None:
    for key, name in _PROCESSOR_FIELDS.items():
        if type(processor.get(key)) is not int or processor[key] != vision[name]:
            raise ValueError(
                f"{path}: {key} differs from Vision config: {processor.get(key)!r}, not {name} {vision[name]}"
            )


def token_domain(
    tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any], vocab_size: int
) -> tuple[int, tuple[int, ...]]:
    """The public token domain of a Hugging Face tokenizer.

    Args:
        tokenizer: parsed ``tokenizer.json``.
        tokenizer_config: parsed ``tokenizer_config.json``.
        vocab_size: rows of the embedding; padding rows above the last token are fine.

    Returns:
        ``(number of ids, ascending ids of special tokens)``.

    Raises:
        ValueError: an entry is malformed, two entries contradict each other, or the ids have a gap.
    """
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocabulary, Mapping):
        raise ValueError("tokenizer.json has no vocabulary mapping model.vocab")
    tokens = _tokens(vocabulary, vocab_size)
    flags: dict[int, bool] = {}
    for identifier, entry in [*_added_tokens(tokenizer), *_decoder_entries(tokenizer_config)]:
        content, special = entry.get("content"), entry.get("special", False)
        if type(identifier) is not int or not 0 <= identifier < vocab_size or not isinstance(content, str):
            raise ValueError(f"invalid tokenizer entry {identifier!r}: {content!r}")
        if tokens.setdefault(identifier, content) != content:
            raise _disagreement(identifier, tokens[identifier], content)
        if type(special) is not bool:
            raise ValueError(f"token {identifier}: special must be boolean, got {special!r}")
        if flags.setdefault(identifier, special) != special:
            raise ValueError(f"tokenizer files disagree about the special flag of token {identifier}")

    # Ids are distinct and not negative: they are 0 … max exactly when the largest is their number less one.
    if not tokens or max(tokens) != len(tokens) - 1:
        raise ValueError("tokenizer does not describe a contiguous public token ID domain")
    return len(tokens), tuple(sorted(identifier for identifier, special in flags.items() if special))


def _disagreement(identifier: int, first: str, second: str) -> ValueError:
    return ValueError(f"tokenizer files disagree about token {identifier}: {first!r} and {second!r}")


def _added_tokens(tokenizer: Mapping[str, Any]) -> list[tuple[object, Mapping[str, Any]]]:
    entries = tokenizer.get("added_tokens", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError("tokenizer.json: invalid tokenizer entry: added_tokens must be a list of objects")
    return [(entry.get("id"), entry) for entry in entries]


def _decoder_entries(tokenizer_config: Mapping[str, Any]) -> list[tuple[object, Mapping[str, Any]]]:
    entries = tokenizer_config.get("added_tokens_decoder", {})
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise ValueError(
            "tokenizer_config.json: invalid tokenizer entry: added_tokens_decoder must be an object of objects"
        )
    return [(int(key) if key.isascii() and key.isdigit() else key, entry) for key, entry in entries.items()]


class _AddedTokens(msgspec.Struct):
    """What :func:`require_added_tokens` reads of ``tokenizer.json``; the rest of that large file is skipped."""

    added_tokens: list[dict[str, Any]] = []


def require_added_tokens(payloads: Mapping[str, bytes]) -> None:
    """Refuse a tokenizer configuration without the added tokens of its ``tokenizer.json``.

    Releases saved by newer tools leave ``added_tokens_decoder`` out, and the engine compares the two files when it
    loads an artifact. A partial table must have the special tokens. Nothing is required of a model without resources.

    Args:
        payloads: what :func:`load_resources` gave, by object id.

    Raises:
        ValueError: a token is missing; the message says which option supplies the file.
    """
    tokenizer, config = (payloads.get(f"resource/text/{role}") for role in ("tokenizer.json", "tokenizer_config.json"))
    if tokenizer is None or config is None:
        return
    added = msgspec.json.decode(tokenizer, type=_AddedTokens).added_tokens
    known = json.loads(config).get("added_tokens_decoder", {})
    missing = [entry for entry in added if str(entry["id"]) not in known and (entry.get("special") or not known)]
    if missing:
        listed = ", ".join(f"{entry['content']} ({entry['id']})" for entry in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"tokenizer_config.json lacks added_tokens of its own tokenizer.json: {listed}{more} not in "
            "added_tokens_decoder; pass --resource tokenizer_config.json=PATH with that of the release it was made from"
        )
