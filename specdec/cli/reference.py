"""The tables of docs/en that are made from the code: the server's flags and its metrics.

`python -m specdec.cli.reference` writes them into the pages; a test compares. Next: serve.py, where the flags are.
"""

import re
from pathlib import Path

import typer

from specdec.cli import engine_options
from specdec.cli.serve import UNSERVED, application

DOCS = Path(__file__).parents[2] / 'docs' / 'en'


def flag_table() -> str:
    """Every flag of `specdec serve api_server` that acts, by group."""
    lines = []
    group = None
    for panel, names, default, text in _flags():
        if panel == engine_options.COMPATIBILITY:
            continue
        if panel != group:
            group = panel
            lines += ['', f'### {panel}', '', '| flag | default | what it does |', '|---|---|---|']
        lines.append(f'| {names} | {default} | {_cell(text)} |')
    return '\n'.join(lines).strip('\n')


def compatibility_table() -> str:
    """Flags of LMDeploy's that are accepted at their default only."""
    lines = ['| flag | only value | about |', '|---|---|---|']
    lines += [
        f'| {names} | {default} | {_cell(text)} |'
        for panel, names, default, text in _flags()
        if panel == engine_options.COMPATIBILITY
    ]
    return '\n'.join(lines)


def metric_table() -> str:
    """Every metric: name, kind, meaning."""
    from specdec.serve import metrics

    rows = [(name, 'gauge', text) for name, text in metrics.GAUGES.items()]
    rows += [(f'{name}_total', 'counter', text) for name, text in metrics.COUNTERS.items()]
    first, second = metrics.POSITIONS.items()
    rows += [(f'{first[0]}_total{{position}}', 'counter', first[1]), (f'{second[0]}{{position}}', 'gauge', second[1])]
    rows.append((f'{metrics.LENGTHS[0]}_total{{length}}', 'counter', metrics.LENGTHS[1]))
    rows.append((f'{metrics.FINISHED}_total{{finished_reason}}', 'counter', 'Requests that ended, by the reason.'))
    rows += [(name, 'histogram', text) for name, text in metrics.HISTOGRAMS.items()]
    rows.append((metrics.INFO, 'info', 'Settings of the engine, as labels.'))
    lines = ['| metric | kind | what it says |', '|---|---|---|']
    return '\n'.join(lines + [f'| `{metrics.PREFIX}{name}` | {kind} | {_cell(text)} |' for name, kind, text in rows])


TABLES = {
    'flags.md': {'flags': flag_table},
    'lmdeploy.md': {'refused': compatibility_table},
    'metrics.md': {'metrics': metric_table},
}


def filled(page: str, text: str) -> str:
    """The page with its tables, which stand between <!-- NAME --> and <!-- end -->."""
    for name, make in TABLES[page].items():
        place = re.search(rf'<!-- {name} -->\n.*?\n<!-- end -->', text, re.S)
        assert place is not None, f'{page} has no place for {name}'
        begin, end = place.span()
        text = text[:begin] + f'<!-- {name} -->\n{make()}\n<!-- end -->' + text[end:]
    return text


def _flags() -> list[tuple[str, str, str, str]]:
    """(group, names, default, help) of each option, in the order of --help."""
    command = typer.main.get_command(application).commands['api_server']
    rows = []
    for parameter in command.params:
        if parameter.param_type_name != 'option' or parameter.name == 'help':
            continue
        names = ', '.join(f'`{name}`' for name in (*parameter.opts, *parameter.secondary_opts))
        panel = parameter.rich_help_panel or 'Other'
        default = UNSERVED[parameter.name][0] if parameter.name in UNSERVED else parameter.default
        rows.append((panel, names, _default(default), parameter.help or ''))
    order = list(dict.fromkeys(panel for panel, *_ in rows))
    return sorted(rows, key=lambda row: order.index(row[0]))


def _default(value: object) -> str:
    if value is None or value == []:
        return 'unset'
    return f'`{"on" if value is True else "off" if value is False else value}`'


def _cell(text: str) -> str:
    return text.replace('|', '\\|')


def main() -> None:
    for page in TABLES:
        path = DOCS / page
        path.write_text(filled(page, path.read_text(encoding='utf-8')), encoding='utf-8')


if __name__ == '__main__':
    main()
