"""An exported model behind HTTP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cramlm.errors import EnvironmentFault
from cramlm.inference.combined import ModelPart
from cramlm.serving.limits import Address, Limits


def serve(
    path: Path,
    address: Address,
    *,
    model_part: ModelPart = "combined",
    abstain_below: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    window_seconds: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    announce: Callable[[str], None] = print,
) -> int:
    """Serve the model of `path` (a run, an exported folder, or an ONNX one) until a signal; return 0 after SIGTERM, 130 after SIGINT.

    model_part: the model of the folder that predicts (inference/combined.py). abstain_below: the lowest confidence of a prediction with a
    label; None: every prediction has a label, and none a confidence. device: of an encoder (cpu, cuda, cuda:N, auto). threads: of the
    model; None = the default of PyTorch or onnxruntime. window_seconds: how long an idle server waits for more requests to compute
    together. `announce` is called with one line when the server listens and one when the model is loaded.

    Raises:
        EnvironmentFault: if a package is missing or the port is taken. ArtifactError: if there is no model, or it cannot be loaded safely.
    """
    try:
        from cramlm.serving.batching import load_model
        from cramlm.serving.server import run_server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cramlm"):
            raise
        raise EnvironmentFault(f"serving needs the package {error.name}; run: pip install 'cramlm[serve]'") from error
    load = partial(load_model, model_part=model_part, abstain_below=abstain_below, device=device, threads=threads)
    return run_server(path, address, load=load, window_seconds=window_seconds, limits=limits, announce=announce)
