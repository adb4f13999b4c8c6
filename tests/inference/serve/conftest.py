"""One decoder for all tests of the server, and one server for those that leave it as it was."""

from collections.abc import Iterator

import pytest

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from tests.inference.serve.live import MESSAGES, Live, save_endless_folders, served


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Drafter and target."""
    return save_endless_folders(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def decoder(folders: tuple[str, str]) -> PipelineDecoder:
    return PipelineDecoder.from_pretrained(folders[0], max_length=192)


@pytest.fixture(scope="session")
def greedy_text(decoder: PipelineDecoder) -> str:
    """What `generate` answers to `CHAT`."""
    return decoder.generate(MESSAGES, SamplingParams(12)).text


@pytest.fixture
def live(decoder: PipelineDecoder) -> Iterator[Live]:
    with served(decoder) as live:
        yield live
