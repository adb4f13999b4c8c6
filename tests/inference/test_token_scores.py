"""Log-probabilities of committed tokens: against the whole model, whatever decodes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.token_scores import TokenScores
from tests.inference.folders import save_folders

PROMPT = [72, 105]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_folders(tmp_path_factory.mktemp("scores"), "qwen3", 2)


@pytest.mark.parametrize(("method", "temperature"), [("start", 0.0), ("start", 0.7), ("start_autoregressive", 0.7)])
def test_scores_are_the_targets_own_of_what_was_committed(
    method: str, temperature: float, folders: tuple[str, str]
) -> None:
    drafter, target = folders
    decoder = PipelineDecoder.from_pretrained(drafter, max_length=64)
    params = SamplingParams(12, temperature, 20, seed=1, ignore_eos=True)
    scores = TokenScores(len(decoder.tokenizer), 3)
    ids = getattr(decoder, method)(PROMPT, params, scores).result().token_ids
    assert ids == getattr(decoder, method)(PROMPT, params).result().token_ids

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(target)(torch.tensor([PROMPT + ids])).logits[0]
    law = logits[len(PROMPT) - 1 : -1, : len(decoder.tokenizer)].double().log_softmax(dim=1)
    noted = [scores.by_position[len(PROMPT) + index] for index in range(12)]
    assert [score.token_id for score in noted] == ids
    assert [score.logprob for score in noted] == pytest.approx(
        [float(law[i, token]) for i, token in enumerate(ids)], abs=1e-4
    )
    for index, score in enumerate(noted):
        values, tokens = law[index].topk(3)
        assert [token for token, _ in score.top] == tokens.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)
