"""What the commands do with a mistake of the user: one line on stderr and exit code 2, no traceback.

Knows no command; a failure that is not the user's keeps its traceback.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GAP = " [...] "


def shortened(text: str, limit: int) -> str:
    """The text, its middle left out if it is longer than `limit`: the beginning names a value, the end what is wrong."""
    half = (limit - len(GAP)) // 2
    return text if len(text) <= limit else f"{text[:half]}{GAP}{text[-half:]}"


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Turns `ValueError` and `OSError` into one line on stderr and exit code 2.

    Set `SPD_TRACEBACK=1` to see where the error was raised.

    Args:
        program: name that begins the line, such as `spd-data`.

    Raises:
        SystemExit: with code 2 in place of the error, 130 after Ctrl-C, 141 when stdout was closed by its reader.
    """
    try:
        yield
    except BrokenPipeError:
        # `spd-data inspect | head`: the reader has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError) as error:
        if os.environ.get("SPD_TRACEBACK") == "1":
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"{program}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None
