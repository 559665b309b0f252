"""Unique prefixes of options, for scripts written for the reference converter."""

from __future__ import annotations

import click

REFERENCE_FLAGS = (
    "model",
    "recipe",
    "override",
    "source",
    "components",
    "resource",
    "proposal",
    "proposal-rows",
    "ranking",
    "name",
    "out",
    "device",
    "rows-per-chunk",
    "max-file-bytes",
    "workers",
    "help",
)
"""Long flags of the reference converter."""


class AbbreviatedCommand(click.Command):
    """A command whose long options may be cut to a unique prefix.

    A prefix that was unique among the reference converter's flags keeps its meaning, whatever options came later:
    ``--over`` is ``--override`` in spite of ``--overwrite``.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        extra.setdefault("token_normalize_func", self._full_name)
        return super().make_context(info_name, args, parent, **extra)

    def _full_name(self, token: str) -> str:
        options = [option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)]
        names = [option.removeprefix("--") for option in options if option.startswith("--")]
        short = [option[1:] for option in options if not option.startswith("--")]
        if token in (*names, *short, "help", "h"):
            return token
        matches = [name for name in REFERENCE_FLAGS if name.startswith(token)]
        if not matches:
            matches = [name for name in names if name.startswith(token)]
        if len(matches) > 1:
            raise click.UsageError(f"ambiguous option --{token}: could be {', '.join(f'--{name}' for name in matches)}")
        return matches[0] if matches else token
