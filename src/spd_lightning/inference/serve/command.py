"""`spd-infer serve`: an endpoint for OpenAI's clients. Knows arguments; imports no web packages until it is called."""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.inference.arguments import add_runtime_arguments, opened_decoder, run_on_ranks

KEY_VARIABLE = "SPD_API_KEY"
PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def add_serve_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer serve`."""
    add = parser.add_argument
    add("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    add("--host", type=str, default="127.0.0.1", help="address to serve on; 0.0.0.0 is all of this machine's")
    add("--port", type=int, default=8000, help="0 takes a free one and prints it")
    add(
        "--api_key",
        type=str | None,
        default=None,
        help=f"that requests must bring; better set {KEY_VARIABLE}, since others can see a command line",
    )
    add("--served_model_name", type=str | None, default=None, help="what requests call the model; the target's name")
    add("--max_queue", type=int, default=64, help="requests that may wait; further ones are refused with status 429")
    add("--request_timeout", type=float, default=600.0, help="seconds that a request may take, waiting included")
    add("--shutdown_grace", type=float, default=10.0, help="seconds that the running request has after SIGTERM")
    add(
        "--method",
        type=Literal["drafter", "ar"],
        default="drafter",
        help="ar decodes plainly, by the same stages: a baseline",
    )
    add_runtime_arguments(parser)


def run_serve(given: Namespace, args: Sequence[str]) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    check_packages()
    from spd_lightning.inference.serve.server import bind
    from spd_lightning.inference.serve.service import ServeSettings, serve

    api_key = given.api_key or os.environ.get(KEY_VARIABLE) or None
    settings = ServeSettings(
        given.served_model_name,
        api_key,
        given.max_queue,
        given.request_timeout,
        given.shutdown_grace,
        given.max_new_tokens,
        given.verify,
        given.method == "ar",
    )
    if given.runtime == "virtual":
        raise ValueError("runtime='virtual' measures by a clock of its own: serve with local or distributed")

    def work() -> None:
        from spd_lightning.inference.runtime.environment import rank_environment

        environment = rank_environment() if given.runtime == "distributed" else None
        if environment is not None and environment.rank != 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the lead ends all
            with opened_decoder(given, given.drafter) as decoder:
                decoder.follow()
            return
        with bind(given.host, given.port) as listener:
            if not is_local(given.host) and api_key is None:
                print(
                    f"spd-infer: warning: everybody who can reach {given.host}:{given.port} can use this server: set "
                    f"{KEY_VARIABLE}, or keep to --host 127.0.0.1",
                    file=sys.stderr,
                    flush=True,
                )
            with opened_decoder(given, given.drafter) as decoder:
                serve(decoder, listener, settings)

    run_on_ranks(given, args, work, (signal.SIGINT, signal.SIGTERM))


def check_packages() -> None:
    """Raises `ValueError` if a package of the extra is not installed."""
    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(
            f"serve needs {', '.join(missing)}, not installed: pip install -c constraints.txt -e '.[serve]'"
        )


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
