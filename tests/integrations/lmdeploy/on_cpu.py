"""Programs for tests that need processes of LMDeploy's own, which import this module again and so get the stand-ins.

`python -m tests.integrations.lmdeploy.on_cpu lmdeploy ARGUMENTS` is specdec-lmdeploy on a CPU;
`... pipeline JSON` runs prompts of ids through a pipeline and prints, as JSON, each one's new ids, and of every decode
step how many drafts were accepted.
"""

import json
import sys

import tests.integrations.lmdeploy.cpu_host  # noqa: F401 - before anything of LMDeploy's


def pipeline(target: str, draft: dict[str, object], engine: dict[str, object], prompts: list[list[int]]) -> None:
    import lmdeploy

    from specdec.integrations.lmdeploy import SpeculativeConfig
    from tests.integrations.lmdeploy.host import Served, ask

    speculative = SpeculativeConfig(**draft) if draft else None
    settings = lmdeploy.PytorchEngineConfig(**engine)
    with Served(lmdeploy.pipeline(target, backend_config=settings, speculative_config=speculative)) as served:
        outcomes = served.run([ask(ids, max_new_tokens=20) for ids in prompts])
        print(json.dumps([[outcome.token_ids for outcome in outcomes], served.accepted]))


if __name__ == '__main__':
    if sys.argv[1] == 'lmdeploy':
        from specdec.integrations.lmdeploy.cli import main

        del sys.argv[1]
        main()
    else:
        pipeline(**json.loads(sys.argv[2]))
