"""Trees over ranks: the tokens and counts of one process, chains and plain decoding between them, and an early end."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.modules.features import FeatureLayout
from tests.inference.conftest import make_pipeline, run
from tests.inference.ranks import decoded, make_runtime, run_ranks, stop_for
from tests.inference.test_distributed import lead_or_follow, plainly
from tests.inference.tree.setting import make_tree_pipeline, run_tree
from tests.modules.conftest import make_target

PROMPT = list(range(60, 67))
REQUESTS = [
    SamplingParams(6),
    SamplingParams(6, temperature=0.9, top_k=20, seed=3),
    SamplingParams(6, temperature=1.0, seed=5, verify="coupled"),
    SamplingParams(6, temperature=1.0, seed=4),
]
SHAPE = TreeShape(2, 3)


@pytest.mark.parametrize(
    ("family", "num_stages", "schedule", "requests"),
    [("qwen3_5", 3, "pre_step", REQUESTS[:3]), ("llama", 2, "post_step", REQUESTS[3:])],
    ids=["qwen3_5", "llama"],
)
def test_ranks_decode_the_trees_that_one_process_decodes(
    family: str, num_stages: int, schedule: str, requests: list[SamplingParams], tmp_path: Path
) -> None:
    target = make_target(family, 8, torch.float32)
    layout = FeatureLayout.build(8, num_stages, schedule=schedule)

    def lead(runtime):
        answers = []
        for params in requests:
            for _ in islice(runtime.decode("tree", PROMPT, params, stop_for(params), DecodeStats(num_stages)), 3):
                pass  # nobody listens to the rest
            trees, stats = decoded(runtime, PROMPT, params, "tree")
            chain, _ = decoded(runtime, PROMPT, params)
            answers.append((trees, stats, chain, decoded(runtime, PROMPT, params, "plain")[0]))
        return answers

    outcomes = run_ranks(
        num_stages + 1,
        lambda rank, url: lead_or_follow(make_runtime(rank, url, target, layout, shape=SHAPE), lead),
        tmp_path,
    )
    assert [outcome.error for outcome in outcomes] == [None] * (num_stages + 1)
    for params, (trees, stats, chain, plain) in zip(requests, outcomes[0].value, strict=True):
        local = run_tree(make_tree_pipeline(target, layout, SHAPE, params), layout, SHAPE, PROMPT, 6)
        assert (trees, stats) == local
        assert chain == run(make_pipeline(target, layout, params), layout, PROMPT, 6)[0]
        assert plain == plainly(target, layout, PROMPT, params)
        if params.is_greedy or params.verify == "coupled":
            assert trees == plain
