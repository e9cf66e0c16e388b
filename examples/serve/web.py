"""The engine over HTTP: POST /v1/completions (server-sent events, the shape of OpenAI's), GET /metrics, GET /health."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from engine import Engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

_LOOK = 0.25  # seconds between two looks at whether the client is still there
_LARGEST = 1 << 20  # bytes of a request


def app(engine: Engine, tokenizer: Any) -> Starlette:
    """ids of the answer are sent beside its text; the last event tells how the passes were cut."""

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    async def events(request: Request, prompt: list[int], most: int) -> AsyncIterator[tuple[str, Any]]:
        """What the engine tells. Ends early, and takes the request back, when the client is gone."""
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(*event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(queue.put_nowait, event)

        ours = engine.submit(prompt, most, tell)
        try:
            while not await request.is_disconnected():
                try:
                    kind, value = await asyncio.wait_for(queue.get(), _LOOK)
                except asyncio.TimeoutError:
                    continue
                yield kind, value
                if kind != "token":
                    return
        finally:
            engine.cancel(ours)

    async def stream(source: AsyncIterator[tuple[str, Any]]) -> AsyncIterator[str]:
        ids: list[int] = []
        shown = ""
        async for kind, value in source:
            if kind == "token":
                ids.append(value)
                whole = text_of(ids)
                new = "" if whole.endswith("\ufffd") else whole[len(shown) :]  # half a character waits for the rest
                shown += new
                choice = {"index": 0, "text": new, "ids": [value], "finish_reason": None}
                yield f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n"
            elif kind == "end":
                rest = text_of(ids)[len(shown) :]
                choice = {"index": 0, "text": rest, "ids": [], "finish_reason": value["reason"]}
                yield f"data: {json.dumps({'object': 'text_completion', 'choices': [choice], 'kvcompress': value})}\n\n"
            else:
                yield f"data: {json.dumps({'error': {'message': value}})}\n\n"
        yield "data: [DONE]\n\n"

    async def completions(request: Request) -> Response:
        try:
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > _LARGEST:
                    raise ValueError(f"expected a request of at most {_LARGEST} bytes, got more")
            asked = json.loads(body)
            prompt, most = asked["prompt"], asked.get("max_tokens", 16)
            prompt = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
            if not isinstance(prompt, list) or not isinstance(most, int):
                raise ValueError("expected prompt: text or list of token ids, max_tokens: int, got others")
            source = events(request, prompt, most)
            first = await anext(source)  # what is refused is refused with a status of its own
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
        except StopAsyncIteration:
            return Response(status_code=499)  # the client went while it waited

        async def whole() -> AsyncIterator[tuple[str, Any]]:
            yield first
            async for event in source:
                yield event

        if asked.get("stream"):
            return StreamingResponse(stream(whole()), media_type="text/event-stream")
        kind, value = [event async for event in whole()][-1]
        if kind == "error":
            return JSONResponse({"error": {"message": value}}, 500)
        choice = {"index": 0, "text": text_of(value["ids"]), "ids": value["ids"], "finish_reason": value["reason"]}
        return JSONResponse({"object": "text_completion", "choices": [choice], "kvcompress": value})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(engine.meter.text(), media_type="text/plain; version=0.0.4")

    async def health(request: Request) -> Response:
        return JSONResponse({"running": len(engine.running), "waiting": len(engine.waiting)})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/health", health),
        ]
    )
