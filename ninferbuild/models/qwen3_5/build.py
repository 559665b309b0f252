"""A Qwen3.5 checkpoint, with its companions, as a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import os
from typing import Any

from ninferbuild.models.fields import Config
from ninferbuild.models.model import ComponentsError, Model, Store
from ninferbuild.models.qwen3_5.compatibility import Compatibility
from ninferbuild.models.qwen3_5.config import draft_config, is_moe, text_config, vision_config
from ninferbuild.models.qwen3_5.draft import add_draft
from ninferbuild.models.qwen3_5.parameters import ComponentBuilder, add_mtp, add_text
from ninferbuild.models.qwen3_5.vision import add_vision
from ninferbuild.models.resources import load_resources

COMPONENTS = ("text", "vision", "mtp", "dflash", "dflash2")
DRAFTS = ("dflash", "dflash2")


def build_model(
    base: Any,
    *,
    components: Iterable[str] = ("text",),
    companions: Mapping[str, Any] | None = None,
    resource_overrides: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Model:
    """The model of a base checkpoint. No tensor is read, and nothing of a component that is not selected.

    Args:
        base: the opened base checkpoint; resources are looked for in its directory.
        components: any of :data:`COMPONENTS`, ``text`` among them; their order is irrelevant.
        companions: component → opened checkpoint. ``dflash`` and ``dflash2`` need theirs; ``mtp`` may have one.
        resource_overrides: role → file, see :func:`ninferbuild.models.resources.load_resources`.

    Raises:
        ValueError: the components, a configuration or a resource is unsuitable; the message names it.
        FileNotFoundError: a resource is missing.
    """
    selected = set(components)
    if "text" not in selected or not selected.issubset(COMPONENTS):
        raise ComponentsError(
            f"components {', '.join(sorted(selected)) or 'none'}: expected text and any of the supported optional "
            f"components {', '.join(COMPONENTS[1:])}"
        )
    companions = companions or {}
    records = _records(base, selected, companions)
    text = records["text"]["config"]
    references, payloads, token_count, special = load_resources(
        base.root,
        vocab_size=text["vocab_size"],
        vision_config=records["vision"]["config"] if "vision" in records else None,
        overrides=resource_overrides,
    )
    for component, roles in references.items():
        records[component]["resources"] = roles
    model = Model(
        records,
        resources=payloads,
        token_count=token_count,
        special_token_ids=special,
        root=base.root,
    )
    _add_parameters(model, base, companions)
    return model


def _records(base: Store, selected: set[str], companions: Mapping[str, Store]) -> dict[str, dict[str, Any]]:
    """The component records, still without resources."""
    text = text_config(base.config, mtp="mtp" in selected)
    records: dict[str, dict[str, Any]] = {"text": {"config": text}}
    if "vision" in selected:
        records["vision"] = {"config": vision_config(base.config, text), "target": "text"}
    if "mtp" in selected:
        architecture = "Qwen3_5MoeMTP" if is_moe(text) else "Qwen3_5MTP"
        records["mtp"] = {"config": {"architectures": [architecture]}, "target": "text"}
    for draft in DRAFTS:
        if draft in selected:
            if draft not in companions:
                raise ValueError(f"component {draft} requires its source; pass --source {draft}=PATH")
            records[draft] = {"config": draft_config(companions[draft].config, text, draft), "target": "text"}
    return records


def _add_parameters(model: Model, base: Store, companions: Mapping[str, Store]) -> None:
    configs: dict[str, Config] = {component: record["config"] for component, record in model.components.items()}
    compatibility = Compatibility(configs)

    def component(name: str, tensors: str, store: Store) -> ComponentBuilder:
        return ComponentBuilder(model, store, compatibility, f"{name}/", tensors)

    text = configs["text"]
    prefix = "model.language_model." if "text_config" in base.config else "model."
    head_inputs = tuple(f"{name}/final_hidden" for name in ("text", "mtp", *DRAFTS) if name in configs)
    add_text(component("text", prefix, base), component("text", "", base), text, head_inputs)
    if "mtp" in configs:
        add_mtp(component("mtp", "mtp.", companions.get("mtp", base)), text)
    if "vision" in configs:
        add_vision(component("vision", "model.visual.", base), configs["vision"], text["hidden_size"])
    for draft in DRAFTS:
        if draft not in configs:
            continue
        top_k = configs[draft]["dflash_config"].get("selector_top_k", 0)
        if top_k > model.token_count:
            raise ValueError(f"{draft}: selector_top_k exceeds the token domain: {top_k} of {model.token_count} tokens")
        add_draft(component(draft, "", companions[draft]), configs[draft], text)
