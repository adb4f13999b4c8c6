"""The routes. Knows what a request asks for; leaves the answer to the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from spd_lightning.inference.sampling import VerifyMode
from spd_lightning.inference.serve.answers import Answer, ChatAnswer, CompletionAnswer
from spd_lightning.inference.serve.engine import Engine
from spd_lightning.inference.serve.gate import Gate
from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.prompts import PromptReader
from spd_lightning.inference.serve.protocol import AnswerRequest, ChatRequest, CompletionRequest
from spd_lightning.inference.serve.refusal import Refusal
from spd_lightning.inference.serve.ticket import EventStream, Ticket, whole_answer
from spd_lightning.inference.serve.token_texts import TokenTexts


@dataclass(frozen=True)
class Service:
    """What the routes work with.

    Attributes:
        engine: answers.
        reader: makes prompts.
        token_texts: what tokens spell.
        metrics: are shown.
        model: the name that requests give.
        created: seconds since 1970 at which the server was started.
        timeout: seconds that a request may take.
        verify: how sampled drafts are judged.
        api_key: that requests must bring, if any.
    """

    engine: Engine
    reader: PromptReader
    token_texts: TokenTexts
    metrics: ServeMetrics
    model: str
    created: int
    timeout: float
    verify: VerifyMode = "rejection"
    api_key: str | None = None

    async def answer(self, request: AnswerRequest, made: Callable[..., Answer], http: Request) -> Response:
        """Answers a request, whole or as a stream.

        Raises:
            Refusal: if it is not answered.
        """
        self._check(request)
        request.refuse_unsupported()
        prompt, num_new = await self.reader.read_aside(request)
        params = request.params(num_new, self.verify)
        ticket = Ticket(self.engine, prompt, params, request.num_top, self.timeout)
        answer = made(self.model, len(prompt), params, self.token_texts, request.num_top is not None)
        if not request.stream:
            return JSONResponse(await whole_answer(ticket, answer, http.receive))
        # The status depends on whether there is an answer: it waits for the first of it.
        async with ticket.watched(http.receive):
            head = await ticket.next()
        options = request.stream_options
        return EventStream(ticket, head, answer, bool(options is not None and options.include_usage))

    def _check(self, request: AnswerRequest) -> None:
        if request.model != self.model:
            message = f"there is no model {request.model!r} here: this server has {self.model!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def card(self) -> dict[str, Any]:
        """The entry of `/v1/models`."""
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "spd-lightning"}


def make_app(service: Service) -> Gate:
    """The ASGI application."""
    app = FastAPI(title="spd-infer serve", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        return await service.answer(request, ChatAnswer, http)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        return await service.answer(request, CompletionAnswer, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.model:
            raise Refusal(404, f"there is no model {model!r} here", param="model", code="model_not_found")
        return service.card()

    @app.get("/health")
    async def health() -> Response:
        is_open = service.engine.is_open
        return JSONResponse({"status": "ok" if is_open else "shutting down"}, 200 if is_open else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(), refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        refusal = refusal_of(error)
        return JSONResponse(refusal.body(), refusal.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(Refusal(error.status_code, message).body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return JSONResponse(Refusal(500, f"{type(error).__name__} in the server", "server_error").body(), 500)

    paths = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"})
    return Gate(app, paths, service.api_key, service.timeout, service.metrics)


def refusal_of(error: RequestValidationError) -> Refusal:
    """The first fault of a body as OpenAI words it."""
    faults = error.errors()
    fault = faults[0]
    where = place_of(fault)
    top = where.split(".")[0]
    param = top or None
    match fault["type"]:
        case "json_invalid":
            return Refusal(400, f"the body is not JSON: {fault.get('ctx', {}).get('error', fault['msg'])}")
        case "extra_forbidden":
            return Refusal(400, f"Unrecognized request argument supplied: {fault['loc'][-1]}", param=param)
        case "missing" if param is not None:
            return Refusal(400, f"{where} is missing: it is required", param=param)
        case "missing" | "model_attributes_type":
            return Refusal(400, "the body must be a JSON object, sent with Content-Type: application/json")
    # Where there are several forms of a field, each has its fault, and the one that was read furthest was meant.
    faults = [other for other in faults if place_of(other).split(".")[0] == top]
    depth = max(len(other["loc"]) for other in faults)
    furthest = [other for other in faults if len(other["loc"]) == depth]
    if len(furthest) < len(faults) and len({other["loc"][:-1] for other in furthest}) == 1:
        faults, where = furthest[:1], place_of(furthest[0])
    messages = dict.fromkeys(other["msg"].removeprefix("Value error, ") for other in faults)
    return Refusal(400, f"{where or 'the body'}: {'; or: '.join(messages)}", param=param)


def place_of(fault: Any) -> str:
    """The field of the body that is to blame, without pydantic's names of the forms that it may have."""
    parts = [str(part) for part in fault["loc"][1:]]
    return ".".join(part for part in parts if part.replace("_", "").isalnum() and part != "str")
