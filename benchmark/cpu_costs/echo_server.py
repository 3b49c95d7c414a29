"""A bare FastAPI application that parses a JSON body and returns it. Usage: PORT."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()


@app.post("/generate")
async def echo(request: Request) -> dict[str, Any]:
    """The body."""
    body: dict[str, Any] = await request.json()
    return body


@app.get("/health")
async def health() -> dict[str, str]:
    """Ready."""
    return {"status": "ok"}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
