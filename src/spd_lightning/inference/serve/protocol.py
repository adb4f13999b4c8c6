"""What requests may say: OpenAI's fields, and `top_k`. Knows no decoder; what it cannot honour, it refuses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from spd_lightning.inference.sampling import SamplingParams, VerifyMode
from spd_lightning.inference.serve.refusal import Refusal


def checked_text(text: str) -> str:
    """The text, if it can be spelled in UTF-8: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text that is not valid Unicode (half of a surrogate pair)") from error
    return text


Text = Annotated[str, AfterValidator(checked_text)]
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "store": (False,),
}
"""Fields that change what an answer is and are not supported, each with the values that change nothing."""


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnswerRequest(BaseModel):
    """What both kinds of request may say. `null` is what an absent field is."""

    model_config = STRICT
    default_new_tokens: ClassVar[int | None] = None

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These change nothing in an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # These are checked against `NEUTRAL`.
    n: Any = None
    best_of: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None

    @property
    def wanted_tokens(self) -> int | None:
        """The limit of new tokens that the request names."""
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to report for each token; none where no log-probabilities are wanted."""
        raise NotImplementedError

    def refuse_unsupported(self) -> None:
        """Raises `Refusal` for what would have to change the answer and does not."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and not any(value == other and type(value) in kinds_of(other) for other in neutral):
                allowed = " or ".join(repr(other) for other in neutral)
                raise Refusal(
                    400, f"{name}={value!r} is not supported: leave it out or give {allowed}", param=name,
                    code="unsupported_value",
                )  # fmt: skip
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options is for stream=true: leave it out", param="stream_options")

    def params(self, max_new_tokens: int, verify: VerifyMode) -> SamplingParams:
        """How tokens are drawn; with a seed if they are.

        Raises:
            Refusal: naming the value that is out of range.
        """
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        try:
            params = SamplingParams(
                max_new_tokens,
                1.0 if self.temperature is None else float(self.temperature),
                self.top_k or 0,
                1.0 if self.top_p is None else float(self.top_p),
                self.seed,
                verify,
                stop,
            )
        except ValueError as error:
            raise Refusal(400, str(error), param=str(error).split("=")[0].split(":")[0]) from error
        return params if params.is_greedy else params.seeded()


def kinds_of(value: Any) -> tuple[type, ...]:
    """Types that count as a value's: `true` is no 1."""
    return (int, float) if type(value) is int else (type(value),)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = STRICT
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """A turn. Further fields may be there as clients echo them, if they are empty."""

    model_config = STRICT | ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    chat_template_kwargs: Any = None
    store: Any = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Refusal(
                400, "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        for number, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value:
                    raise Refusal(
                        400,
                        f"messages[{number}].{name} is not supported: leave it out",
                        param=f"messages.{number}.{name}",
                    )


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`."""

    default_new_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Any = None
    suffix: Any = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs
