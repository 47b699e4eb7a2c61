"""How many tokens a step gives by the way drafts are drawn: greedy, coupled with the pick's noise, or probabilistic.

    python -m benchmark.bench_draft_sampling --json out.json

The demo's target and both of its drafts on the held-out excerpts, several seeds each; accepted lengths are counts, so
no clock is involved. The text is the same in the first two columns; it is not in the third.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from specdec import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
from specdec.demo.prompts import held_out_prompts
from specdec.messages import DRAFT_SAMPLINGS, Response

SETTINGS: dict[str, dict[str, Any]] = {
    'no filter': {'top_k': 0},
    'top_k 20, top_p 0.95': {'top_k': 20, 'top_p': 0.95},
}


def accepted_length(responses: list[Response]) -> float:
    total = responses[0].speculation
    for response in responses[1:]:
        total = total + response.speculation
    return total.mean_accepted_length


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = [prompt.text for prompt in held_out_prompts()][: args.prompts] * args.seeds
    rows = []
    for method in args.methods:
        drawn = SpeculativeConfig(method, draft_sampling='probabilistic')  # has memory for all three
        with Pipeline(args.model, PytorchEngineConfig(device_type=args.device), speculative_config=drawn) as pipe:
            for name, filters in SETTINGS.items():
                for temperature in args.temperatures:
                    row: dict[str, Any] = {'method': method, 'filters': name, 'temperature': temperature}
                    for kind in DRAFT_SAMPLINGS:
                        configs = [
                            GenerationConfig(
                                max_new_tokens=args.tokens, do_sample=True, temperature=temperature, random_seed=seed,
                                draft_sampling=kind, **filters,
                            )
                            for seed in range(len(prompts))
                        ]  # fmt: skip
                        row[kind] = round(
                            accepted_length(pipe(prompts, configs, do_preprocess=False, use_tqdm=False)), 3
                        )
                    rows.append(row)
                    print(' | '.join(str(value) for value in row.values()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', nargs='?', default='demo')
    parser.add_argument('--methods', nargs='+', default=['dflash', 'dspark'])
    parser.add_argument('--temperatures', nargs='+', type=float, default=[0.3, 0.7, 1.0])
    parser.add_argument('--prompts', type=int, default=16)
    parser.add_argument('--seeds', type=int, default=2)
    parser.add_argument('--tokens', type=int, default=96)
    parser.add_argument('--device', default='auto')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print('method | filters | temperature | ' + ' | '.join(DRAFT_SAMPLINGS))
    rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
