"""`specdec demo`: the packaged model completes held-out code plainly, with DFlash and with DSpark, side by side.

First one completion of each is streamed with accepted drafts in colour, then all are measured, interleaved, and
compared in a table. Next: pipeline.py, which does the work; demo/prompts.py, the code that is completed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec import (
    ConfigError,
    EngineError,
    GenerationConfig,
    Pipeline,
    PytorchEngineConfig,
    Response,
    SpeculativeConfig,
    pipeline,
)
from specdec.demo import demo_folder
from specdec.demo.prompts import Prompt, held_out_prompts
from specdec.messages import METHODS, SpeculationStats

PLAIN = 'plain'
TITLES = {PLAIN: 'plain decoding', 'dflash': 'DFlash', 'dspark': 'DSpark'}
ACCEPTED, OWN = 'bold green', 'default'  # styles of a token that was drafted and accepted, and of the target's own
NUM_SHOWN_LINES = 6  # of the prompt, above each streamed completion


@dataclass(slots=True)
class Score:
    """One method's rounds: tokens per second of each, in order."""

    method: str
    rates: list[float] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    identical: bool = True

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates)

    def ratio_to(self, plain: 'Score') -> float:
        """The median of the rounds' ratios: a round's methods ran one after the other, on the same prompts."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rates, plain.rates))


def demo(
    tokens: Annotated[int, typer.Option(min=1, help='Tokens generated for each prompt.')] = 128,
    prompts: Annotated[int, typer.Option(min=1, help='Number of held-out prompts that are measured.')] = 8,
    batch: Annotated[int, typer.Option(min=1, help='Prompts that are completed at a time.')] = 1,
    device: Annotated[str, typer.Option(help="'auto' (CUDA if there, else CPU), 'cuda' or 'cpu'.")] = 'auto',
    json_file: Annotated[
        str | None,
        typer.Option(
            '--json', metavar='FILE', help="Write the figures as JSON; '-' is stdout, with nothing else on it."
        ),
    ] = None,
) -> None:
    """Watch the packaged demo model decode plainly, with DFlash and with DSpark, and compare them.

    A small model, trained on the Python standard library, completes code that it has never seen. Tokens that a draft
    proposed and the model accepted are green. The table at the end tells speed, and whether the output is the same.
    """
    console = Console(stderr=json_file == '-', highlight=False)
    chosen = choose_prompts(prompts)
    if json_file not in (None, '-') and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError('json', json_file, 'its folder does not exist; make it first')
    engine_config = PytorchEngineConfig(device_type=device, max_batch_size=batch, enable_prefix_caching=False)
    gen_config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
    with ExitStack() as stack:
        pipes = {method: stack.enter_context(open_method(method, engine_config)) for method in (PLAIN, *METHODS)}
        stream_all(pipes, chosen[0], gen_config, console)
        scores = measure(pipes, [prompt.text for prompt in chosen], batch, gen_config)
    console.print(as_table(scores, batch, len(chosen), tokens))
    if json_file is not None:
        write_json(scores, json_file)


def choose_prompts(number: int) -> list[Prompt]:
    available = held_out_prompts()
    if number > len(available):
        raise ConfigError('prompts', number, f'there are {len(available)} held-out prompts; ask for at most so many')
    return available[:number]


def open_method(method: str, engine_config: PytorchEngineConfig) -> Pipeline:
    draft = None if method == PLAIN else SpeculativeConfig(method, str(demo_folder(method)))
    return pipeline(str(demo_folder('target')), engine_config, speculative_config=draft)


# ------------------------------------------------------------------------------------------------------ streaming
def stream_all(pipes: dict[str, Pipeline], prompt: Prompt, gen_config: GenerationConfig, console: Console) -> None:
    """One completion of each method; it also warms the models up."""
    lines = prompt.text.splitlines()[-NUM_SHOWN_LINES:]
    for method, pipe in pipes.items():
        console.print(f'\n{TITLES[method]}: {prompt.name}', style='bold')
        console.print('\n'.join(lines), style='dim', end='', markup=False, emoji=False, soft_wrap=True)
        start = time.perf_counter()
        response = stream_one(pipe, prompt.text, gen_config, console)
        rate = response.generate_token_len / (time.perf_counter() - start)
        accepted = response.speculation.mean_accepted_length or 1.0
        console.print(f'\n{rate:.0f} tokens/s, {accepted:.2f} tokens per step', style='cyan')


def stream_one(pipe: Pipeline, text: str, gen_config: GenerationConfig, console: Console) -> Response:
    """Prints a completion as it comes: every piece is one step, whose last token is the target's own."""
    whole = Response()
    detokenizer = pipe.tokenizer.detokenizer()

    def show(text: str, style: str) -> None:
        console.print(text, style=style, end='', markup=False, emoji=False, soft_wrap=True)

    for piece in pipe.stream_infer(text, gen_config=gen_config, do_preprocess=False):
        num_accepted = piece.speculation.accepted - whole.speculation.accepted
        show(detokenizer.push(piece.token_ids[:num_accepted]), ACCEPTED)
        show(detokenizer.push(piece.token_ids[num_accepted:]), OWN)
        whole.extend(piece)
    show(detokenizer.flush(), OWN)
    return checked(whole)


# ------------------------------------------------------------------------------------------------------ measuring
def measure(pipes: dict[str, Pipeline], texts: list[str], batch: int, gen_config: GenerationConfig) -> dict[str, Score]:
    """Rounds of `batch` prompts each; in every round all methods run, one after the other, on the same prompts."""
    rounds = [texts[i : i + batch] for i in range(0, len(texts), batch)]
    for pipe in pipes.values():
        run_round(pipe, rounds[0], gen_config)
    scores = {method: Score(method) for method in pipes}
    with _progress(len(rounds) * len(pipes)) as advance:
        for round_texts in rounds:
            expected: list[list[int]] | None = None
            for method, pipe in pipes.items():
                responses, seconds = run_round(pipe, round_texts, gen_config)
                score, token_ids = scores[method], [response.token_ids for response in responses]
                expected = expected or token_ids
                score.identical = score.identical and token_ids == expected
                score.rates.append(sum(map(len, token_ids)) / seconds)
                score.speculation = sum((r.speculation for r in responses), start=score.speculation)
                advance()
    return scores


def run_round(pipe: Pipeline, texts: list[str], gen_config: GenerationConfig) -> tuple[list[Response], float]:
    start = time.perf_counter()
    responses = pipe(texts, gen_config, do_preprocess=False, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [checked(response) for response in responses], seconds


def checked(response: Response) -> Response:
    """The response, if it is none of an error."""
    if response.finish_reason == 'error':
        raise EngineError(f'the demo cannot go on: {response.error_message}')
    return response


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task('measuring', total=total)
        yield lambda: progress.advance(task)


# ---------------------------------------------------------------------------------------------------------- results
def as_table(scores: dict[str, Score], batch: int, num_prompts: int, num_tokens: int) -> Table:
    table = Table(title=f'{num_prompts} held-out prompts, {num_tokens} tokens each, {batch} at a time')
    table.add_column('method')
    for heading in ('tokens/s', 'mean accepted length', 'ratio to plain', 'identical output'):
        table.add_column(heading, justify='right')
    for method, score in scores.items():
        table.add_row(
            TITLES[method],
            f'{score.tokens_per_s:.1f}',
            f'{_mean_accepted_length(score):.2f}',
            f'{score.ratio_to(scores[PLAIN]):.2f}x',
            'yes' if score.identical else 'no',
        )
    return table


def write_json(scores: dict[str, Score], file: str) -> None:
    figures = [
        {
            'method': method,
            'tokens_per_s': round(score.tokens_per_s, 3),
            'mean_accepted_length': round(_mean_accepted_length(score), 4),
            'identical': score.identical,
        }
        for method, score in scores.items()
    ]
    text = json.dumps({'methods': figures}, indent=2) + '\n'
    if file == '-':
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding='utf-8')
    except OSError as error:
        raise ConfigError('json', file, f'cannot be written ({error.strerror})') from error


def _mean_accepted_length(score: Score) -> float:
    """A step of plain decoding has one token; so has, by convention, a method that took no decode step at all."""
    return score.speculation.mean_accepted_length or 1.0
