"""`specdec calibrate`: fit the temperatures of a draft's confidence head on prompts of one's own.

Every draft is verified while blocks are collected, so all positions are seen. Half of the prompts fit, the other half
judges. Next: spec_decode/calibration.py, the fitting; models/checkpoint.py, which reads the result.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from specdec.cli import engine_options as options
from specdec.cli.prompts import Conversation, read_prompts
from specdec.engine.build import DEMO, build_engine, demo_folder
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import ConfigError
from specdec.messages import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
from specdec.models.checkpoint import CALIBRATION, read_draft
from specdec.models.hub import resolve_model
from specdec.pipeline import Pipeline
from specdec.plan import Candidate, LengthChoice
from specdec.spec_decode.calibration import Blocks, Reliability, fit_temperatures, overall

LEAST_BLOCKS = 200  # below that a bin of the plot holds a handful of blocks


class Recorder:
    """Has every draft verified, and keeps what the head said of each block and what became of it."""

    def __init__(self) -> None:
        self.rows: list[tuple[Sequence[float], int, int]] = []

    def choose(self, decodes: Sequence[Candidate], joining: Sequence[Candidate], other_rows: int) -> LengthChoice:
        del joining, other_rows
        return LengthChoice(sum(c.available for c in decodes), True)

    def observe(self, survival: Sequence[float], verified: int, accepted: int) -> None:
        self.rows.append((survival, verified, accepted))

    def report(self, survival: Sequence[float]) -> None:
        """Kept once its verdict is known."""

    def blocks(self, num_drafts: int) -> Blocks:
        """Confidence logits are what survivals rise from: logit(a_k / a_(k-1))."""
        survival = torch.tensor([row for row, _, _ in self.rows], dtype=torch.float64).view(-1, num_drafts)
        before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
        confidence = (survival / before.clamp(min=1e-30)).clamp(1e-7, 1 - 1e-7)
        counts = torch.tensor([(v, a) for _, v, a in self.rows], dtype=torch.int64).view(-1, 2)
        return Blocks(confidence.logit().float(), counts[:, 0], counts[:, 1])


def calibrate(
    target: options.Model,
    draft: Annotated[str, typer.Argument(metavar='DRAFT', help="Folder of a draft with a confidence head, or 'demo'.")],
    prompts: Annotated[
        str,
        typer.Argument(
            metavar='PROMPTS', help='A prompt in each line, text or .jsonl ({"prompt"} or {"messages"}), or \'demo\'.'
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar='FILE', help="Where to write; by default specdec.json in the draft's folder."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar='PNG', help='Reliability before and after; needs matplotlib.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help='Tokens of each answer.', min=8)] = 256,
    temperature: Annotated[
        float, typer.Option(help='Of the answers; 0 is greedy. Calibrate for what you serve.', min=0.0, max=2.0)
    ] = 1.0,
    batch_size: Annotated[int, typer.Option(help='Answers at a time.', min=1)] = 16,
    device: options.Device = 'auto',
    dtype: options.Dtype = 'auto',
) -> None:
    """Make a draft's confidence true: fit its temperatures on prompts, for verify lengths that adapt.

    Writes specdec.json into the draft's folder, which loading then reads; config.json is left alone.

    Try it: specdec calibrate demo demo demo --output specdec.json
    """
    if plot is not None:
        _pyplot()  # refuse before the work starts
    conversations = read_prompts(None if prompts == DEMO else Path(prompts))
    if len(conversations) < 2:
        raise ConfigError('prompts', prompts, 'needs at least two: one half fits, the other judges')
    folder = demo_folder('dspark') if draft == DEMO else resolve_model(draft)
    config = read_draft(folder)
    if not config.has_confidence:
        raise ConfigError('draft', draft, 'has no confidence head; there is nothing to calibrate')
    engine = build_engine(
        target,
        PytorchEngineConfig(device_type=device, dtype=dtype, max_batch_size=batch_size),
        SpeculativeConfig(config.kind, str(folder), config.num_proposals, verify_length='adaptive'),
    )
    engine.agent.model.proposer.draft.confidence.temperatures.fill_(1.0)  # what an earlier calibration said is undone
    generation = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        random_seed=0,
        ignore_eos=True,
        **({'temperature': temperature, 'top_k': 0} if temperature > 0 else {}),
    )
    halves = []
    with Pipeline.from_engine(engine, Tokenizer.load(engine.info.folder)) as pipe:
        for half in (conversations[::2], conversations[1::2]):
            engine.scheduler.lengths = recorder = Recorder()
            _answer(pipe, half, generation)
            halves.append(recorder.blocks(config.num_proposals))
    fitting, judging = halves
    if min(len(fitting), len(judging)) < LEAST_BLOCKS:
        found = min(len(fitting), len(judging))
        raise ConfigError('prompts', prompts, f'gave {found} blocks per half, {LEAST_BLOCKS} are needed; give more')
    temperatures = fit_temperatures(fitting)
    before, after = overall(judging, torch.ones_like(temperatures)), overall(judging, temperatures)
    path = output or folder / CALIBRATION
    values = [round(float(t), 4) for t in temperatures]
    path.write_text(json.dumps({'confidence_temperatures': values}, indent=2) + '\n')
    console = Console()
    _show(console, values, before, after, f'{len(fitting)} blocks fitted, {len(judging)} others judged')
    console.print(f'written to {path}')
    if plot is not None:
        draw(before, after, plot)


def _answer(pipe: Pipeline, conversations: list[Conversation], generation: GenerationConfig) -> None:
    for response in pipe.infer(conversations, generation):
        if response.finish_reason == 'error':
            raise ConfigError('prompts', conversations[response.index], response.error_message or 'failed')


def _show(console: Console, values: list[float], before: Reliability, after: Reliability, title: str) -> None:
    table = Table(title=title)
    for name in ('', 'expected calibration error', 'temperatures'):
        table.add_column(name)
    table.add_row('before', f'{before.error:.4f}', '1 everywhere')
    table.add_row('after', f'{after.error:.4f}', ', '.join(f'{value:.2f}' for value in values))
    console.print(table)


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('plot', '', 'needs matplotlib; install it, or leave --plot out') from None
    matplotlib.use('Agg')
    from matplotlib import pyplot

    return pyplot


def draw(before: Reliability, after: Reliability, file: Path) -> None:
    """Predicted against observed survival, bins with 10 blocks or more."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 5))
    axes.plot([0, 1], [0, 1], color='grey', linewidth=1, label='perfect')
    for name, found in (('before', before), ('after', after)):
        shown = found.counts >= 10
        label = f'{name}: error {found.error:.3f}'
        axes.plot(found.predicted[shown].tolist(), found.observed[shown].tolist(), marker='o', label=label)
    axes.set_xlabel('predicted: drafts 1..k all accepted')
    axes.set_ylabel('observed share')
    axes.set_title("Confidence head's reliability")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
