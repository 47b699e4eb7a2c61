"""One core: behind the same prompts, LMDeploy with the plug-in drafts what the embedded engine drafts (fp32)."""

import pytest

from specdec.engine.build import demo_folder
from tests.helpers.engines import DRAFTS, Settings, drive, generate, load, make_engine, prompt_ids, request
from tests.integrations.lmdeploy.host import Host, ask

NEW = 40
CASES = [
    ('demo', 'dflash'),
    ('demo', 'dspark'),
    ('moe', 'dflash_fill_in'),
    ('moe', 'dspark_vanilla'),
    *(('dense', draft) for draft in DRAFTS),
]


def embedded(models: object, prompt: list[int]) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    engine = drive(make_engine(models, Settings(session_len=256, page_size=16)))
    asked = request(prompt, NEW)  # which never stops by itself
    (outcome,) = generate(engine, [asked])
    return outcome.token_ids, engine.proposals[asked.request_id]


@pytest.mark.parametrize(('target', 'draft'), CASES)
def test_same_drafts(host: Host, target: str, draft: str) -> None:
    if target == 'demo':
        models, prompts = load(demo_folder('target'), demo_folder(draft), draft), host.demo_prompts(3)
    else:
        models, prompts = host.world.models(draft, target=target), [list(prompt_ids(n, seed=5)) for n in (3, 77)]
    with host.serve(target, draft) as served:
        served.watch()
        for prompt in prompts:
            served.drafted.clear()
            (outcome,) = served.run([ask(prompt, max_new_tokens=NEW)])
            ids, proposals = embedded(models, prompt)
            assert outcome.token_ids == ids[: len(outcome.token_ids)]
            end = len(prompt) + len(outcome.token_ids)
            mine = {length: drafts for length, _, drafts in served.drafted}
            common = mine.keys() & proposals.keys()  # the engines end in different ways
            assert len(common) >= len([n for n in proposals if n < end]) - 1
            assert {n: mine[n] for n in common} == {n: proposals[n] for n in common}
