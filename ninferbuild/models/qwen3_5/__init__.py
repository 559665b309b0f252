"""Qwen3.5, 3.6 and 3.8: dense and mixture-of-experts text, Vision, MTP, DFlash and DFlash2."""

from __future__ import annotations

from ninferbuild.models.qwen3_5.build import COMPONENTS, build_model
from ninferbuild.models.qwen3_5.config import (
    DENSE_ARCHITECTURES,
    MOE_ARCHITECTURES,
    draft_config,
    text_config,
    vision_config,
)

ARCHITECTURES = DENSE_ARCHITECTURES + MOE_ARCHITECTURES
DEFAULT_COMPONENTS = ("text",)
COMPANIONS = {"dflash": True, "dflash2": True, "mtp": False}

__all__ = [
    "ARCHITECTURES",
    "COMPANIONS",
    "COMPONENTS",
    "DEFAULT_COMPONENTS",
    "build_model",
    "draft_config",
    "text_config",
    "vision_config",
]
