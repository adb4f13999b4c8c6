"""Stages and drafter in processes of their own: the tokens of one process, in step, and no rank left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.cluster import DistributedRuntime
from spd_lightning.inference.runtime.distributed import join
from spd_lightning.inference.runtime.draft_rank import DraftRank
from spd_lightning.inference.runtime.environment import RankEnvironment
from spd_lightning.inference.runtime.local import LocalRuntime
from spd_lightning.inference.runtime.stage_rank import StageRank
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import load_embedding
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.token_scores import TokenScores
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.inference.verify import make_verifier
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import ScriptedProposer, cut, make_pipeline, run
from tests.inference.ranks import CPU, Ledger, decoded, make_runtime, run_ranks, stop_for
from tests.modules.conftest import make_target

DEMO = Path(__file__).resolve().parents[2] / "runs" / "demo"
PROMPTS = [[65], [72, 105], list(range(60, 71))]
SAMPLED = [
    SamplingParams(24, temperature=0.9, top_k=20, top_p=0.95, seed=3),
    SamplingParams(24, temperature=1.0, seed=4),
    SamplingParams(24, temperature=1.0, seed=5, verify="coupled"),
]
REQUESTS = [*((SamplingParams(24), prompt) for prompt in PROMPTS), *((params, PROMPTS[2]) for params in SAMPLED)]


def plainly(target, layout, prompt, params) -> list[int]:
    verifier = make_verifier(params, NUM_TOKENS)
    return list(decode_autoregressively(cut(target, layout), verifier, prompt, stop_for(params)))


def lead_or_follow(runtime: DistributedRuntime, lead):
    """The lead's answer; the other ranks follow until it closes."""
    if not runtime.is_lead:
        return runtime.follow(stop_for)
    answer = lead(runtime)
    runtime.close()
    return answer


@pytest.mark.parametrize(
    ("family", "num_stages", "schedule", "anchors"),
    [
        ("qwen3_5", 2, "pre_step", "auto"),
        ("qwen3_5", 4, "pre_step", "auto"),
        ("llama", 1, "pre_step", "auto"),
        ("qwen3", 2, "post_step", "auto"),
        ("llama", 1, "post_step", "auto"),
        ("qwen3", 3, "post_step", "first_stage"),
    ],
)
def test_ranks_decode_what_one_process_decodes(
    family: str, num_stages: int, schedule: str, anchors: str, tmp_path: Path
) -> None:
    """Greedy, rejection (with and without top-k) and coupled; requests follow each other; plain decoding as well."""
    target = make_target(family, 8, torch.float32)
    layout = FeatureLayout.build(8, num_stages, anchors=anchors, schedule=schedule)

    def lead(runtime):
        answers = []
        for params, prompt in REQUESTS:
            tokens, stats = decoded(runtime, prompt, params)
            plain = decoded(runtime, prompt, params, "plain")[0]
            answers.append((tokens, stats, plain))
        return answers

    outcomes = run_ranks(
        num_stages + 1, lambda rank, url: lead_or_follow(make_runtime(rank, url, target, layout), lead), tmp_path
    )
    assert [outcome.error for outcome in outcomes] == [None] * (num_stages + 1)
    for (params, prompt), (tokens, stats, plain) in zip(REQUESTS, outcomes[0].value, strict=True):
        expected, local, _ = run(make_pipeline(target, layout, params), layout, prompt, params.max_new_tokens)
        assert tokens == expected
        assert stats == local
        assert plain == plainly(target, layout, prompt, params)
        if params.is_greedy or params.verify == "coupled":
            assert tokens == plain


@pytest.mark.parametrize("num_stages", [1, 2])
def test_scores_of_committed_tokens_come_to_the_lead(num_stages: int, tmp_path: Path) -> None:
    """Chains, trees and plain decoding; a request without scores comes between, and one of another number of tokens."""
    target, layout = make_target("llama", 8, torch.float32), FeatureLayout.build(8, num_stages)
    shape = TreeShape(2, 2) if num_stages > 1 else None
    sampled = SamplingParams(6, temperature=0.9, seed=3)
    asked = [
        ("pipelined", SamplingParams(6), 3),
        ("plain", sampled, 0),
        ("pipelined", sampled, None),
        ("plain", sampled, 5),
    ]
    if shape is not None:
        asked += [("tree", sampled, 2), ("pipelined", sampled, 1)]

    def lead(runtime):
        answers = []
        for method, params, num_top in asked:
            scores = None if num_top is None else TokenScores(NUM_TOKENS, num_top)
            stats = DecodeStats(num_stages)
            tokens = list(runtime.decode(method, PROMPTS[1], params, stop_for(params), stats, scores))
            answers.append((tokens, None if scores is None else scores.by_position))
        return answers

    outcomes = run_ranks(
        num_stages + 1,
        lambda rank, url: lead_or_follow(make_runtime(rank, url, target, layout, shape=shape), lead),
        tmp_path,
    )
    assert [outcome.error for outcome in outcomes] == [None] * (num_stages + 1)
    for (_, _, num_top), (tokens, found) in zip(asked, outcomes[0].value, strict=True):
        if num_top is None:
            assert found is None
            continue
        with torch.no_grad():
            logits = target.model(torch.tensor([[*PROMPTS[1], *tokens]])).logits[0]
        scores = TokenScores(NUM_TOKENS, num_top)
        for index, token in enumerate(tokens):
            position = len(PROMPTS[1]) + index
            scores.note(logits[position - 1], position, token)
            assert found[position].token_id == token
            assert len(found[position].top) == num_top
        numbers = [
            [[s.logprob, *(value for _, value in s.top)] for s in by.values()] for by in (found, scores.by_position)
        ]
        torch.testing.assert_close(torch.tensor(numbers[0]), torch.tensor(numbers[1]), rtol=0, atol=1e-5)
        assert sorted(found) == sorted(scores.by_position)


@pytest.mark.skipif(not (DEMO / "drafter").is_dir(), reason=f"{DEMO} is not there: make demo makes it")
def test_a_real_target_is_decoded_over_ranks_as_in_one_process(tmp_path: Path) -> None:
    """SmolLM2-135M and the demo's drafter, each rank with the weights of its own part only."""
    drafter, target = load_drafter(DEMO / "drafter").module, str(DEMO / "target")
    params = SamplingParams(16)

    def body(rank, url):
        num_stages = drafter.layout.num_stages
        store, transport = join(RankEnvironment(rank, num_stages + 1, rank, url), num_stages, CPU, 60.0)
        if rank == num_stages:
            role = DraftRank(transport, DraftSession(drafter, load_embedding(target, "float32"), 64))
        else:
            stage = Stage.load(target, drafter.layout, rank + 1, 64, "float32")
            verifier = make_verifier(params, 49152, drafter.draft_token_ids)
            role = StageRank(transport, stage, num_stages, lambda _: verifier, drafter.config.draft_vocab_size, 49152)
        runtime = DistributedRuntime(role, transport, store)
        runtime.meet("loaded")
        return lead_or_follow(runtime, lambda runtime: decoded(runtime, PROMPTS[2], params))

    outcomes = run_ranks(drafter.layout.num_stages + 1, body, tmp_path)
    assert {outcome.error for outcome in outcomes} == {None}
    local = LocalRuntime.load(drafter, target, 49152, 64, "float32")
    stats = DecodeStats(drafter.layout.num_stages)
    expected = list(local.decode("pipelined", PROMPTS[2], params, stop_for(params), stats))
    assert outcomes[0].value == (expected, stats)
    assert expected == list(local.decode("plain", PROMPTS[2], params, stop_for(params), stats))


def test_the_lead_may_end_a_request_early(tmp_path: Path) -> None:
    """The next request is clean: pipelined or plain, before, in and after the first tokens, or never begun."""
    target, layout = make_target("qwen3_5", 8, torch.float32), FeatureLayout.build(8, 2)
    params = SAMPLED[0]

    def lead(runtime):
        answers = []
        for count in (0, 1, 2, 7):
            for method in ("pipelined", "plain"):
                stats = DecodeStats(2)
                decode = runtime.decode(method, PROMPTS[2], params, stop_for(params), stats)
                for _ in range(count):
                    next(decode)
                decode.close()
                answers.append(decoded(runtime, PROMPTS[1], params)[0])
        return answers

    outcomes = run_ranks(3, lambda rank, url: lead_or_follow(make_runtime(rank, url, target, layout), lead), tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    expected, _, _ = run(make_pipeline(target, layout, params), layout, PROMPTS[1], params.max_new_tokens)
    assert outcomes[0].value == [expected] * 8


def test_ranks_may_make_one_decoder_after_the_other(tmp_path: Path) -> None:
    """In one store, which remembers the first one's keys and addresses."""
    target, layout = make_target("llama", 8, torch.float32), FeatureLayout.build(8, 2)

    def body(rank, url):
        answers = []
        for _ in range(2):
            runtime = make_runtime(rank, url, target, layout)
            answers.append(lead_or_follow(runtime, lambda runtime: decoded(runtime, PROMPTS[2], SamplingParams(8))))
        with pytest.raises(RuntimeError, match="only the lead" if rank else "has been closed"):
            next(runtime.decode("pipelined", PROMPTS[2], SamplingParams(8), stop_for(), DecodeStats(2)))
        return answers

    outcomes = run_ranks(3, body, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    first, second = outcomes[0].value
    assert first == second


def test_thousands_of_cycles_with_rejections_and_slow_ranks(tmp_path: Path) -> None:
    """3,000 cycles, 40% rejections, a random rank late now and then: the oracle's tokens, in under three minutes."""
    target, layout = make_target("llama", 4, torch.float32), FeatureLayout.build(4, 4)
    params = SamplingParams(120, ignore_eos=True)
    answer = PROMPTS[2] + plainly(target, layout, PROMPTS[2], params)

    def body(rank, url):
        runtime = make_runtime(rank, url, target, layout, ScriptedProposer(answer, 0.6), timeout=60.0)
        exchange, delays = runtime.transport.exchange, torch.Generator().manual_seed(rank)

        def late(record):
            if float(torch.rand((), generator=delays)) < 0.01:
                time.sleep(0.02)
            return exchange(record)

        runtime.transport.exchange = late

        def lead(runtime):
            cycles, rejected, judged = 0, 0, 0
            while cycles < 3000:
                tokens, stats = decoded(runtime, PROMPTS[2], params)
                assert tokens == answer[len(PROMPTS[2]) :]
                cycles += stats.num_cycles
                judged, rejected = judged + stats.num_judged, rejected + stats.num_judged - stats.num_accepted
            return cycles, rejected / judged

        return lead_or_follow(runtime, lead)

    outcomes = run_ranks(5, body, tmp_path, limit=180)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    cycles, rejected = outcomes[0].value
    assert cycles >= 3000 and 0.35 < rejected < 0.45


def test_both_ends_of_every_transfer_agree_and_all_ranks_exchange_in_one_order(tmp_path: Path) -> None:
    """What gloo forgives and NCCL does not: operations match pairwise in order, shape and dtype."""
    target, layout = make_target("qwen3_5", 8, torch.float32), FeatureLayout.build(8, 3, [1, 5, 2])
    requests = [SamplingParams(60, temperature=1.0, top_k=30, seed=1), SamplingParams(40), *SAMPLED[1:]]

    def lead(runtime):
        for params in requests:
            decoded(runtime, PROMPTS[2], params)
            decoded(runtime, PROMPTS[0], params, "plain")
        decode = runtime.decode("pipelined", PROMPTS[2], requests[0], stop_for(requests[0]), DecodeStats(3))
        for _ in range(9):
            next(decode)
        decode.close()
        decoded(runtime, PROMPTS[1], requests[0])

    def body(rank, url):
        runtime = make_runtime(rank, url, target, layout, wrap=Ledger)
        session = getattr(runtime.rank, "session", None)
        if session is not None:
            draft_logits = session.draft_logits

            def noting(*args):
                runtime.transport.entries.append(("draft",))
                return draft_logits(*args)

            session.draft_logits = noting
        lead_or_follow(runtime, lead)
        return runtime.transport.entries

    outcomes = run_ranks(4, body, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    ledgers = [outcome.value for outcome in outcomes]
    exchanges = [[entry for entry in ledger if entry[0] == "exchange"] for ledger in ledgers]
    assert exchanges[0] == exchanges[1] == exchanges[2] == exchanges[3]
    assert len(exchanges[0]) > 300
    for sender in range(4):
        for receiver in range(4):
            sent = [entry[2:] for entry in ledgers[sender] if entry[:2] == ("send", receiver)]
            received = [entry[2:] for entry in ledgers[receiver] if entry[:2] == ("receive", sender)]
            assert sent == received
            for ours, theirs in zip(cycles_of(ledgers[sender]), cycles_of(ledgers[receiver]), strict=True):
                # Nothing is left over for a later cycle.
                num_sent = sum(entry[:2] == ("send", receiver) for entry in ours)
                assert num_sent == sum(entry[:2] == ("receive", sender) for entry in theirs)
    assert check_overlap(ledgers[3]) > 100


def cycles_of(ledger) -> list[list[tuple]]:
    """A ledger cut at its exchanges."""
    cycles = [[]]
    for entry in ledger:
        if entry[0] == "exchange":
            cycles.append([])
        else:
            cycles[-1].append(entry)
    return cycles


def check_overlap(ledger) -> int:
    """The drafter runs after its receives are posted and before they are waited for; how often it had any."""
    count = 0
    for cycle in cycles_of(ledger):
        if ("draft",) in cycle:
            drafted = cycle.index(("draft",))
            posted = [index for index, entry in enumerate(cycle) if entry[0] == "receive"]
            waited = [index for index, entry in enumerate(cycle) if entry[0] == "wait" and "receive" in entry[1]]
            assert all(index < drafted for index in posted) and all(index > drafted for index in waited)
            assert bool(posted) == bool(waited)
            count += bool(posted)
    return count


def test_drafting_and_stages_take_the_longer_of_their_times(tmp_path: Path) -> None:
    target, layout = make_target("llama", 8, torch.float32), FeatureLayout.build(8, 2)
    pause, params = 0.15, SamplingParams(8, ignore_eos=True)
    answer = PROMPTS[2] + plainly(target, layout, PROMPTS[2], params)

    def body(rank, url):
        runtime = make_runtime(rank, url, target, layout, ScriptedProposer(answer, 1.0))
        role = runtime.rank
        owner, name = (role.session, "draft_logits") if rank == 2 else (role.stage, "run")
        work = getattr(owner, name)

        def slowly(*args):
            time.sleep(pause)
            return work(*args)

        setattr(owner, name, slowly)

        def lead(runtime):
            tokens, seconds, stats = [], [], DecodeStats(2)
            for token in runtime.decode("pipelined", PROMPTS[2], params, stop_for(params), stats):
                tokens.append(token)
                seconds.append(time.perf_counter())
            return tokens, (seconds[-1] - seconds[1]) / (len(tokens) - 2)

        return lead_or_follow(runtime, lead)

    outcomes = run_ranks(3, body, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    tokens, seconds_per_cycle = outcomes[0].value
    assert tokens == answer[len(PROMPTS[2]) :]
    assert pause <= seconds_per_cycle < 1.75 * pause


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("fate", ["killed", "stuck", "failed", "killed while idle"])
def test_a_lost_rank_ends_all_others_and_is_named(fate: str, victim: int, tmp_path: Path) -> None:
    target, layout = make_target("llama", 8, torch.float32), FeatureLayout.build(8, 2)
    timeout, params = 3.0, SamplingParams(100, ignore_eos=True)

    def body(rank, url):
        runtime = make_runtime(rank, url, target, layout, timeout=timeout)
        if fate == "killed while idle":
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                time.sleep(2 * timeout)
                return decoded(runtime, PROMPTS[2], params)
            return runtime.follow(stop_for)
        if rank == victim:
            cycle = runtime.rank.cycle

            def breaking(schedule):
                if schedule.num_cycles == 7:
                    if fate == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if fate == "stuck":
                        time.sleep(3600)
                    raise ValueError("the largest logit is nan")
                return cycle(schedule)

            runtime.rank.cycle = breaking
        return lead_or_follow(runtime, lambda runtime: decoded(runtime, PROMPTS[2], params))

    outcomes = run_ranks(3, body, tmp_path, limit=5 * timeout, doomed=victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.blamed == victim, outcome.error
        assert f"rank {victim} ({['stage 1', 'stage 2', 'drafter'][victim]})" in outcome.error
        if fate == "failed":
            assert "the largest logit is nan" in outcome.error
        assert outcome.seconds < 3.5 * timeout
