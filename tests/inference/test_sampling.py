"""The warped law against its definition, and the keyed draws: reproducible, independent, of the right law."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spd_lightning.inference.sampling import (
    Purpose,
    SamplingParams,
    _key,
    best_token,
    draw,
    gumbel_noise,
    shortlist,
    uniform,
    warp,
)

INF = math.inf
BIG_VOCAB = 248_320


def naive_warp(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """By the definition, one token at a time."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        ranked = ranked[:top_k]
    weights = {token: math.exp((logits[token] - max(logits)) / temperature) for token in ranked}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in ranked:
        if top_p == 1 or mass < top_p:
            kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 12, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.35, 0.8, 0.999, 1.0])
def test_warp_is_temperature_then_top_k_then_top_p(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logits[[2, 5, 9]] = logits[0].item()  # ties
    logits[7] = -INF
    wanted = naive_warp(logits.tolist(), temperature, top_k, top_p)
    probs = warp(logits, temperature, top_k, top_p)
    torch.testing.assert_close(probs, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-15)
    assert [p > 0 for p in probs.tolist()] == [p > 0 for p in wanted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_law_is_float64_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(warp(logits, 0.7, 20, 0.9), warp(logits.double(), 0.7, 20, 0.9))


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    logits = torch.tensor([0.0, 5.0, 7.0, 5.0, 5.0, 7.0])
    assert shortlist(logits, 1.0, 4, 1.0)[0].tolist() == [2, 5, 1, 3]
    assert shortlist(logits, 1.0, 0, 0.6)[0].tolist() == [2, 5]
    assert best_token(logits) == shortlist(logits, 1.0, 1, 1.0)[0].item() == 2


def test_close_float64_logits_that_the_temperature_makes_equal_keep_their_rank() -> None:
    low = next(x for x in (1.9 + i * 2.0**-52 for i in range(9)) if x / 1.8 == (x + 2.0**-52) / 1.8)
    logits = torch.tensor([low, low + 2.0**-52, 0.5], dtype=torch.float64)
    assert shortlist(logits, 1.8, 1, 1.0)[0].item() == best_token(logits) == 1
    assert shortlist(logits, 1.8, 0, 0.1)[0].item() == 1


@pytest.mark.parametrize("top_p", [1e-17, 1e-3, 0.5, 0.999, 1 - 2.0**-53])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 50.0])
def test_the_nucleus_is_that_of_a_sorted_vocabulary(spread: float, top_p: float) -> None:
    logits = spread * torch.randn(3001, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = logits.sort(descending=True, stable=True).indices
    probs = logits.softmax(dim=0)[order]
    kept = shortlist(logits, 1.0, 0, top_p)[0]
    assert torch.equal(kept, order[: len(kept)])
    assert len(kept) == 1 or probs[: len(kept) - 1].sum() < top_p + 1e-12
    assert probs[: len(kept)].sum() >= top_p - 1e-12


def test_the_warp_leaves_the_logits_alone() -> None:
    logits = torch.randn(20, dtype=torch.float64)
    before = logits.clone()
    warp(logits, 1.0, 0, 1.0).zero_()
    warp(logits, 1.0, 5, 0.5).zero_()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [1.0, INF, 0.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize("choose", [best_token, lambda logits: warp(logits, 1.0, 2, 1.0)])
def test_logits_that_are_not_finite_are_refused(bad: list[float], choose: Callable) -> None:
    with pytest.raises(ValueError, match="the largest logit is"):
        choose(torch.tensor(bad))


def test_a_draw_inverts_the_cumulative_sum_and_never_takes_weight_zero() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    largest = 1 - 2.0**-53
    numbers = (0.0, 0.2499, 0.25, 0.7499, 0.75, largest)
    assert [draw(weights, number) for number in numbers] == [1, 1, 3, 3, 4, 4]
    for seed in range(200):  # whatever the sum is rounded to, the largest number stays inside
        some = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        some[6] = 0
        assert draw(some, largest) == 5


def test_draws_are_functions_of_seed_position_and_purpose() -> None:
    keys = [(seed, position, purpose) for seed in (0, 1, 2**62) for position in (0, 1, 12) for purpose in Purpose]
    assert [uniform(*key) for key in keys] == [uniform(*key) for key in keys]
    assert len({uniform(*key) for key in keys}) == len(keys)
    ids = torch.arange(50)
    noises = [gumbel_noise(seed, position, ids) for seed in (0, 1, 2**62) for position in (0, 1, 12)]
    assert len({tuple(noise.tolist()) for noise in noises}) == len(noises)


def test_draws_are_the_same_in_every_release() -> None:
    assert uniform(7, 11, Purpose.DRAFT) == pytest.approx(0.503795080815006, abs=1e-15)
    noise = gumbel_noise(7, 11, torch.tensor([0, 1, 248_319]))
    assert noise.tolist() == pytest.approx([-0.9014472286301174, 1.141327914332909, 0.11578921670189148], abs=1e-14)


def test_noise_is_split_mix_64() -> None:
    """The naive twin, in Python integers."""
    mask = 2**64 - 1

    def split_mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    for seed in range(20):
        ids = torch.tensor([0, 1, 2, 1000, 248_319])
        key = _key(seed, 5, Purpose.NOISE)
        bits = [split_mix((key + token_id * 0x9E3779B97F4A7C15) & mask) >> 11 for token_id in ids.tolist()]
        wanted = [-math.log(-math.log(number * 2.0**-53)) for number in bits]
        assert gumbel_noise(seed, 5, ids).tolist() == pytest.approx(wanted, abs=1e-12)


def test_noise_is_finite_where_the_bits_are_all_zero() -> None:
    """SplitMix64 maps 0 to 0, so one id of each key has the uniform number 0."""
    for seed in range(10):
        token_id = -_key(seed, 5, Purpose.NOISE) * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
        noise = gumbel_noise(seed, 5, torch.tensor([token_id - 2**64 if token_id >= 2**63 else token_id]))
        assert noise.item() == pytest.approx(-math.log(54 * math.log(2)))


def test_noise_belongs_to_the_target_id_whatever_else_is_asked_for() -> None:
    every = gumbel_noise(3, 4, torch.arange(BIG_VOCAB))
    some = torch.tensor([5, 17, 100_000, BIG_VOCAB - 1, 17])
    torch.testing.assert_close(gumbel_noise(3, 4, some), every[some], rtol=0, atol=1e-14)
    assert every.isfinite().all()


def test_noise_is_gumbel() -> None:
    """Mean, variance and the largest distance from the distribution function (Kolmogorov-Smirnov)."""
    noise = gumbel_noise(0, 9, torch.arange(BIG_VOCAB)).sort().values
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    steps = (torch.arange(BIG_VOCAB) + 0.5) / BIG_VOCAB
    assert (torch.exp(-torch.exp(-noise)) - steps).abs().max() < 2 / math.sqrt(BIG_VOCAB)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def test_purposes_positions_and_seeds_are_uncorrelated() -> None:
    num = 5_000
    limit = 4.5 / math.sqrt(num)

    def series(seed: int, start: int, purpose: Purpose) -> torch.Tensor:
        return torch.tensor([uniform(seed, start + i, purpose) for i in range(num)], dtype=torch.float64)

    all_series = [series(0, 0, purpose) for purpose in Purpose]
    all_series += [series(0, 1, Purpose.DRAFT), series(1, 0, Purpose.DRAFT)]
    for i, one in enumerate(all_series):
        assert one.mean().item() == pytest.approx(0.5, abs=0.02)
        for other in all_series[:i]:
            assert abs(correlation(one, other)) < limit
            assert abs(correlation((one - 0.5).abs(), (other - 0.5).abs())) < limit


def test_noise_of_neighbouring_ids_and_positions_is_uncorrelated() -> None:
    ids = torch.arange(BIG_VOCAB)
    limit = 4.5 / math.sqrt(BIG_VOCAB)
    here = gumbel_noise(0, 100, ids)
    for other in (gumbel_noise(0, 101, ids), gumbel_noise(1, 100, ids), here.roll(1), here.roll(2)):
        assert abs(correlation(here, other)) < limit
    by_position = torch.stack([gumbel_noise(0, position, torch.tensor([17, 18])) for position in range(4_000)])
    assert abs(correlation(by_position[:, 0], by_position[:, 1])) < 4.5 / math.sqrt(4_000)
    assert abs(correlation(by_position[1:, 0], by_position[:-1, 0])) < 4.5 / math.sqrt(4_000)


@pytest.mark.parametrize(
    "setting, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens=0: an integer of at least 1"),
        (dict(temperature=-0.5), "temperature=-0.5: a number of at least 0"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=INF), "temperature=inf"),
        (dict(top_k=-1), "top_k=-1: an integer of at least 0"),
        (dict(top_p=0.0), "top_p=0.0: a number above 0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_p=math.nan), "top_p=nan"),
        (dict(seed=-1), "seed=-1: an integer from 0"),
        (dict(seed=2**63), "seed=9223372036854775808"),
        (dict(stop=("a", "")), "an empty string would end every text"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**setting)


@pytest.mark.parametrize(
    "name, value, message",
    [("verify", "exact", "verify='exact': rejection or coupled"), ("stop", "END", "stop='END': a tuple of strings")],
)
def test_a_setting_of_a_wrong_type_is_named_with_its_rule(name: str, value: str, message: str) -> None:
    params = SamplingParams()
    object.__setattr__(params, name, value)  # the type checks of the tests would not let it pass `__init__`
    with pytest.raises(ValueError, match=message):
        params.__post_init__()


def test_a_low_temperature_is_greedy() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=9.9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_unseeded_requests_differ_and_a_seed_stays() -> None:
    params = SamplingParams(temperature=1.0, top_k=50)
    one, other = params.seeded(), params.seeded()
    assert one.seed is not None and one.seed != other.seed
    assert replace(one, seed=None) == params
    assert one.seeded() == one
    assert SamplingParams(seed=0).seeded().seed == 0
