"""Running a command: the group of commands, and errors as one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
import os
import signal
import sys
import threading
import traceback

import click

from ninferbuild.cli.output import Output
from ninferbuild.errors import ActionsFailedError, NinferbuildError
from ninferbuild.platform_io import ENDING_SIGNALS
from ninferbuild.printable import printable, printable_lines

COMMANDS = {
    "build": "build",
    "convert": "convert",
    "plan": "plan",
    "diff": "diff",
    "graph": "graph",
    "params": "params",
    "list": "list_",
    "inspect": "inspect",
    "verify": "verify",
    "graft": "graft",
    "imatrix": "imatrix",
    "lock": "lock",
    "reproduce": "reproduce",
    "init": "init",
    "gguf": "gguf",
    "cache": "cache",
}
"""Command → module of this package that defines ``command``."""

_PRINTING = (__name__, "ninferbuild.cli.output", "ninferbuild.progress", "click.utils", "rich.console")


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called for."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would write a blank line
            raise click.Abort from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = import_module(f"ninferbuild.cli.{COMMANDS[cmd_name]}")
        except KeyboardInterrupt:
            raise click.Abort from None
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from ninferbuild.target_schema import suggest

        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"no such command {args[0]!r}{suggest(args[0], list(COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from ninferbuild.version import VERSION

        click.echo(f"ninferbuild {VERSION}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 differs, 130 interrupted, 143 terminated.",
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Build .ninfer artifacts from checkpoints and recipes, incrementally.

    \b
    ninferbuild convert --model DIR --recipe qwen3_6_27b --out MODEL.ninfer
    ninferbuild init NAME --model DIR --recipe qwen3_6_27b   # the same, kept in ninferbuild.toml
    ninferbuild build NAME
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def run(args: Sequence[str] | None) -> int:
    with _ended_in_order() as ended_by:
        return _run(args, ended_by)


@contextmanager
def _ended_in_order() -> Iterator[list[int]]:
    """Let signals that would kill the process end it like Ctrl-C; yields a list that gets the number of one that came.

    A signal that is handled or ignored already, as by nohup, stays so.
    """
    ended_by: list[int] = []

    def end(number: int, frame: object) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield ended_by
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _run(args: Sequence[str] | None, ended_by: Sequence[int]) -> int:
    output, stdout = Output(), sys.stdout
    try:
        code = commands.main(
            args=None if args is None else list(args), prog_name="ninferbuild", standalone_mode=False, obj=output
        )
        sys.stdout.flush()
    except click.UsageError as error:
        if error.ctx is not None:
            click.echo(f"usage: {error.ctx.get_usage().removeprefix('Usage: ')}", err=True)
        return _fail(error.format_message(), error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _interrupted(ended_by)
    except BrokenPipeError:
        return _unread()
    except SystemExit as error:
        if sys.stdout is not stdout:  # click meets a broken pipe by wrapping the streams and leaving
            return _unread()
        return _fail(one_line(error), 1)  # of a user's code: commands return their exit codes
    except BaseException as error:  # also what a user's code derives from that; nothing else is left
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps what is raised while it makes a class
            return _interrupted(ended_by)
        if output.verbose:
            click.echo(printable_lines(traceback.format_exc()), err=True, nl=False)
        if isinstance(error, OSError) and _came_of_printing(error):
            _discard_stdout()
            return _fail(f"cannot write to standard output: {one_line(error)}", 1)
        show_error(error)
        return exit_code(error)
    return code if isinstance(code, int) else 0


def _interrupted(ended_by: Sequence[int]) -> int:
    if ended_by:
        return _fail("terminated; finished actions are kept", 128 + ended_by[0])
    if sys.stderr.isatty():  # after the terminal's own ^C
        click.echo(err=True)
    return _fail("interrupted; finished actions are kept", 130)


def _unread() -> int:
    """The reader of our output has gone."""
    _discard_stdout()
    return 1


def _came_of_printing(error: OSError) -> bool:
    """Whether the error of a system call without a file came from a module that does nothing but print."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = traceback.tb_frame.f_globals.get("__name__") if traceback is not None else None
    return error.filename is None and where in _PRINTING


def _discard_stdout() -> None:
    """Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_error(error: BaseException) -> None:
    """Say on standard error what went wrong: one line; of several failures one each, and one that sums them up."""
    if isinstance(error, ActionsFailedError):
        for failure in error.failures:
            click.echo(f"error: {one_line(failure)}", err=True)
        click.echo(f"error: {error.summary}", err=True)
    else:
        click.echo(f"error: {one_line(error)}", err=True)


def exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, NinferbuildError) else 1


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line; with the name of its class where the message alone says too little, and
    behind ``file:line`` of the user's code that it came from.
    """
    from ninferbuild.user_errors import place_of

    if isinstance(error, FileNotFoundError) and error.filename is None and _is_astray():
        message = "the working directory does not exist any more; change to one that does"
    elif isinstance(error, OSError) and error.strerror:
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        message = ": ".join([*files, error.strerror])
    elif isinstance(error, SyntaxError):
        message = error.msg
    else:
        message = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if not message:
        message = type(error).__name__
    elif not isinstance(error, NinferbuildError | ValueError | OSError):
        message = f"{type(error).__name__}: {message}"
    place = place_of(error)
    return printable(message if place is None else f"{place}: {message}")


def _is_astray() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {printable_lines(message)}", err=True)
    return code
