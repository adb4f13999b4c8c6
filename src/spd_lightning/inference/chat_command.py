"""`spd-infer chat`: a conversation with a decoder. Knows arguments."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.inference.arguments import add_decoding_arguments, opened_decoder, run_on_ranks, sampling_params


def add_chat_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer chat`."""
    parser.add_argument("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    parser.add_argument("--system", type=str | None, default=None, help="system message")
    add_decoding_arguments(parser)


def run_chat(given: Namespace, args: Sequence[str]) -> None:
    """Holds a conversation."""
    params = sampling_params(given)

    def work() -> None:
        from spd_lightning.inference.chat import converse

        with opened_decoder(given, given.drafter) as decoder:
            if decoder.is_lead:
                converse(decoder, params, given.system)
            else:
                decoder.follow()

    run_on_ranks(given, args, work)
