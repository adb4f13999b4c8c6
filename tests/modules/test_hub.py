from urllib.error import HTTPError, URLError

import pytest
from huggingface_hub import constants

from spd_lightning.modules import hub
from spd_lightning.modules.hub import offline_when_unreachable


@pytest.fixture
def online(monkeypatch):
    """The libraries are not told to stay offline, and nobody has asked yet whether the hub answers."""
    answers = hub._answers
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    answers.cache_clear()
    yield
    answers.cache_clear()


def test_an_unreachable_hub_is_asked_once_and_then_left_alone(monkeypatch, online):
    asked = []

    def fail(request, timeout):
        asked.append((request.full_url, request.get_method(), timeout))
        raise URLError("Name or service not known")

    monkeypatch.setattr(hub, "urlopen", fail)
    for _ in range(2):
        with offline_when_unreachable():
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE
    assert asked == [(constants.ENDPOINT, "HEAD", hub.PROBE_SECONDS)]


def test_the_switch_is_undone_after_an_error(monkeypatch, online):
    monkeypatch.setattr(hub, "_answers", lambda endpoint: False)
    with pytest.raises(OSError), offline_when_unreachable():
        raise OSError
    assert not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_used(monkeypatch, online):
    def complain(request, timeout):
        raise HTTPError(request.full_url, 503, "busy", {}, None)

    monkeypatch.setattr(hub, "urlopen", complain)
    with offline_when_unreachable():
        assert not constants.HF_HUB_OFFLINE


def test_who_chose_to_be_offline_is_not_asked_about(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("asked"))
    with offline_when_unreachable():
        assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE


def test_transport_errors_include_those_of_the_library_that_the_hub_uses():
    from huggingface_hub import get_session

    module = type(get_session()).__module__.partition(".")[0]
    assert module in {error.__module__.partition(".")[0] for error in hub.transport_errors()}
