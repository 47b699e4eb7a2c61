"""The `specdec` command: one table of sub-commands, of which only the one that is asked for is imported.

Errors that specdec raises on purpose become one line on stderr and exit status 1; wrong usage has status 2.
Next: chat.py, the shortest way from a command to a model.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from specdec.errors import SpecdecError
from specdec.version import __version__

# name: module in specdec.cli (with a function of the command's name), and the line that `specdec --help` shows
COMMANDS = {
    'serve': ('serve', 'Serve a model over HTTP, OpenAI-compatible: `specdec serve api_server MODEL`.'),
    'chat': ('chat', 'Talk to a model in the terminal.'),
    'demo': ('demo', 'Watch the packaged demo model decode plainly, with DFlash and with DSpark, and compare them.'),
    'inspect': ('inspect', 'Show what specdec understands of a checkpoint, without loading its weights.'),
    'calibrate': ('calibrate', "Fit a draft's confidence on prompts, for verify lengths that adapt."),
    'check_env': ('check_env', 'Print what a bug report should say about this machine.'),
}


GROUPS = ('serve',)  # modules with sub-commands of their own, in an `application`
LIST_FLAGS = (  # take several values after one flag, as in LMDeploy
    '--api-keys', '--allow-origins', '--allow-methods', '--allow-headers', '--adapters',
    '--cudagraph-capture-batch-sizes',
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line (`arguments`: those of the process) and exits with its status."""
    arguments = normalised(sys.argv[1:] if arguments is None else arguments)
    wanted = next((argument for argument in arguments if argument in COMMANDS), None)
    try:
        _application(wanted)(arguments, prog_name='specdec')
    except SpecdecError as error:
        print(f'error: {error}', file=sys.stderr)
        raise SystemExit(1) from None


def normalised(arguments: list[str]) -> list[str]:
    """Long options with dashes for underscores (as LMDeploy takes them), and `check-env` for `check_env`.

    `--api-keys a b` becomes `--api-keys a --api-keys b`.
    """
    result: list[str] = []
    flag = ''
    for argument in arguments:
        name, equals, value = argument.partition('=')
        if name.startswith('-'):
            argument = name.replace('_', '-') + equals + value if name.startswith('--') else argument
            flag = argument
        elif flag in LIST_FLAGS and result[-1] != flag:
            result.append(flag)
        result.append(argument)
    for index, argument in enumerate(result[:2]):
        if argument.replace('-', '_') in (COMMANDS if index == 0 else ('api_server',)):
            result[index] = argument.replace('-', '_')
    return result


def _application(wanted: str | None) -> typer.Typer:
    application = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    application.callback()(_options)
    for name, (module, summary) in COMMANDS.items():
        if name in GROUPS and name == wanted:
            application.add_typer(_load(module, 'application'), name=name)
            continue
        function = _load(module, name) if name == wanted else _never_called
        application.command(name, help=None if name == wanted else summary)(function)
    return application


def _load(module: str, name: str) -> Any:
    return vars(import_module(f'specdec.cli.{module}'))[name]


def _never_called() -> None:
    raise AssertionError('a command that is called has been imported')


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option('--version', '-v', callback=_show_version, is_eager=True, help='Print the version and exit.')
    ] = False,
) -> None:
    """Serve large language models faster with block speculative decoding (DFlash, DSpark).

    Start with `specdec demo`: it needs no GPU and no download.
    """


if __name__ == '__main__':
    main()
