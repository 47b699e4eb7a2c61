"""`specdec-lmdeploy`: LMDeploy's own command line, with method dspark and the plug-in's drafts behind dflash."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from specdec.errors import SpecdecError
from specdec.integrations.lmdeploy import install, installed_here
from specdec.integrations.lmdeploy.patches import CLI_PATCHES, PATCHES, refusal


def main() -> None:
    if not (installed_here and install((*PATCHES, *CLI_PATCHES))):
        sys.exit(f'specdec-lmdeploy: {refusal() or "this LMDeploy is not the one the plug-in is for"}')
    from lmdeploy.cli import run

    try:
        run()
    except SpecdecError as error:
        sys.exit(f'specdec-lmdeploy: {error}')


def add_spec_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ArgumentHelper.add_spec_group: one more algorithm, one more flag, and drafts as trained by default."""

    def add(parser: ArgumentParser) -> Any:
        from specdec.integrations.lmdeploy.configs import BEHAVIOURS, METHODS

        group = original(parser)
        actions = {action.dest: action for action in group._group_actions}
        algorithm, tokens = actions['speculative_algorithm'], actions['speculative_num_draft_tokens']
        algorithm.choices = sorted({*algorithm.choices, *METHODS})
        tokens.default = None
        tokens.help = 'Drafted tokens per step. Default: as many as the draft was trained to propose'
        group.add_argument(
            '--speculative-stock',
            action='append',
            default=[],
            choices=BEHAVIOURS,
            help='A behaviour to leave as LMDeploy has it; may be given several times',
        )
        return group

    return add


def get_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """For LMDeploy's get_speculative_config: the plug-in's class, which spawned engines unpickle."""

    def get(args: Namespace) -> Any:
        from specdec.integrations.lmdeploy.configs import SpeculativeConfig

        if args.speculative_algorithm is None:
            return original(args)
        return SpeculativeConfig(
            method=args.speculative_algorithm,
            model=args.speculative_draft_model or '',
            num_speculative_tokens=args.speculative_num_draft_tokens,
            dflash_block_size=args.speculative_dflash_block_size,
            stock=tuple(args.speculative_stock),
        )

    return get
