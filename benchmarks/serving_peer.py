"""A simple server for comparison: FastAPI with a transformers pipeline. Run by bench_serving.py in its own process.

    python benchmarks/serving_peer.py EXPORT PORT THREADS

The pipeline handles one request at a time: without the lock, parallel requests compete for the same cores.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline
from transformers.utils import logging


class Body(BaseModel):
    """The request of /v1/predict."""

    texts: list[str]


def build(folder: str, *, serial: bool) -> FastAPI:
    """Return the application; serial: one request at a time."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    classify: Any = pipeline("text-classification", model=folder, device="cpu", top_k=None)
    app = FastAPI()
    lock = threading.Lock() if serial else threading.Semaphore(1000)

    @app.post("/v1/predict")
    def predict(body: Body) -> dict[str, Any]:
        with lock:
            predictions = classify(body.texts, truncation=True, batch_size=len(body.texts))
        return {
            "predictions": [
                {"label": prediction[0]["label"], "probabilities": {entry["label"]: entry["score"] for entry in prediction}}
                for prediction in predictions
            ]
        }

    @app.get("/readyz")
    def ready() -> str:
        return "ready"

    return app


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    uvicorn.run(build(sys.argv[1], serial=sys.argv[4:] != ["parallel"]), port=int(sys.argv[2]), access_log=False, log_level="warning")
