"""What a dialogue asks: its turns without the answers, and an id made of them. Knows no tokenizer and no target."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Literal

from spd_lightning.data.conversations import Conversation, DropRow, Message
from spd_lightning.data.rows import SourceItem

AnsweredTurns = Literal["all", "last"]


@dataclass(frozen=True)
class Questions:
    """The turns of a dialogue that lead to each of its answers.

    Attributes:
        id: a hash of `asks`, followed by `-2`, `-3` where the same is asked again.
        asks: for each answer the turns since the one before; the first may begin with a system turn.
    """

    id: str
    asks: tuple[tuple[Message, ...], ...]

    def with_repeat(self, number: int) -> "Questions":
        """The same questions, asked for the `number`-th time."""
        return self if number == 1 else replace(self, id=f"{self.id}-{number}")


def questions_of(item: SourceItem, turns: AnsweredTurns) -> Questions:
    """What `item` asks.

    Args:
        item: a dialogue; it needs no answers, and a last user turn without one is asked as well.
        turns: `all` drops the answers that are there and asks for each of them; `last` keeps the dialogue up to its
            last answer, or to its last turn if that is the user's, and asks once.

    Raises:
        DropRow: `not_a_dialogue` for plain text and token rows.
    """
    if not isinstance(item, Conversation):
        raise DropRow("not_a_dialogue", f"a {type(item).__name__} asks nothing")
    messages = item.messages
    if turns == "last":
        asks = [messages[:-1] if messages[-1].role == "assistant" else messages]
    else:
        asks = []
        turns_since: list[Message] = []
        for message in messages:
            if message.role == "assistant":
                asks.append(tuple(turns_since))
                turns_since = []
            else:
                turns_since.append(message)
        if turns_since:
            asks.append(tuple(turns_since))
    content = [[(message.role, message.content) for message in ask] for ask in asks]
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=True).encode("ascii"))
    return Questions(digest.hexdigest()[:16], tuple(asks))
