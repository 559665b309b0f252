"""``ninferbuild convert``."""

from __future__ import annotations

from typing import Any

from ninferbuild.cli.abbreviations import AbbreviatedCommand
from ninferbuild.cli.building import build_targets
from ninferbuild.cli.options import build_options, change_options, convert_options, settings_of, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.target import convert_target


@subcommand(
    "convert",
    cls=AbbreviatedCommand,
    examples=(
        "convert --model Qwen3.6-27B --recipe qwen3_6_27b --components text,vision,mtp --proposal \\",
        "    --ranking ranking.i64 --name qwen3.6-27b --out qwen3.6-27b.ninfer",
        "convert --model Qwen3.8-27B --recipe qwen3_8_27b_nvfp4 --source quantized=Qwen3.8-27B-NVFP4 --out q.ninfer",
        "convert --model Qwen3.6-27B --recipe my_recipe.py:small --out small.ninfer --device cpu",
    ),
)
@convert_options(required=True)
@build_options
@change_options
def command(output: Output, sets: tuple[str, ...], assigns: tuple[str, ...], **options: Any) -> int:
    """Build one artifact from options alone, with the reference converter's flags and the same cache.

    Long options may be cut to a unique prefix. An output that is up to date is left alone.
    """
    target = convert_target(settings_of(options), sets=sets, assigns=assigns)
    return build_targets(output, [target], **options)
