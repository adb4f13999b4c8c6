import subprocess
import sys

import pytest

from spd_lightning.errors import one_line_errors, shortened


@pytest.mark.parametrize(
    "error", [ValueError("a wrong\n  value"), FileNotFoundError(2, "No such file", "x.json"), OSError("disk")]
)
def test_mistakes_of_the_user_are_one_line_and_exit_code_two(error, capsys, monkeypatch):
    monkeypatch.delenv("SPD_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended, one_line_errors("spd-x"):
        raise error
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"spd-x: error: {' '.join(str(error).split())}\n"


def test_an_error_without_text_has_its_name(capsys):
    with pytest.raises(SystemExit), one_line_errors("spd-x"):
        raise ValueError
    assert capsys.readouterr().err == "spd-x: error: ValueError\n"


def test_what_is_not_the_users_mistake_keeps_its_traceback():
    with pytest.raises(KeyError), one_line_errors("spd-x"):
        raise KeyError("bug")
    with one_line_errors("spd-x"):
        pass


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("SPD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="where"), one_line_errors("spd-x"):
        raise ValueError("where")


def test_interrupted_from_the_keyboard_says_so(capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors("spd-x"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nspd-x: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    code = (
        "from spd_lightning.errors import one_line_errors\n"
        "with one_line_errors('spd-x'):\n"
        "    for _ in range(100000):\n        print('line')\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=60) == 141


def test_a_long_text_keeps_its_ends():
    text = "x" * 30 + "middle" + "y" * 30
    assert shortened(text, len(text)) == text
    assert shortened(text, 21) == "x" * 7 + " [...] " + "y" * 7
