"""What a run took: wall-clock and CPU seconds, and energy where codecarbon is installed; added up over every start of the run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramlm.artifacts import publish_file

FILE = "spent.json"


@dataclass(slots=True)
class Spent:
    """borrowed_seconds: of stages that another run made and this one uses. kwh: None where energy is not measured. whole: False if a start
    was killed, so that its part is missing.
    """

    seconds: float = 0.0
    borrowed_seconds: float = 0.0
    cpu_seconds: float = 0.0
    kwh: float | None = None
    whole: bool = True
    starts: int = 0
    running: bool = False


def read_spent(run: Path) -> Spent | None:
    """What a run's folder tells; None if it was not run by an experiment."""
    path = run / FILE
    return Spent(**json.loads(path.read_bytes())) if path.is_file() else None


@contextlib.contextmanager
def spending(run: Path) -> Iterator[Spent]:
    """Count this start, however it ends; whoever uses it adds `borrowed_seconds`."""
    spent = read_spent(run) or Spent()
    spent.whole, spent.running, spent.starts = spent.whole and not spent.running, True, spent.starts + 1
    _write(run, spent)
    began, cpu = time.monotonic(), time.process_time()
    meter = _start_meter()
    try:
        yield spent
    finally:
        spent.seconds += time.monotonic() - began
        spent.cpu_seconds += time.process_time() - cpu
        spent.running = False
        if meter is not None:
            meter.stop()
            if (told := getattr(meter, "final_emissions_data", None)) is not None:  # it logs what goes wrong in it, and goes on
                spent.kwh = (spent.kwh or 0.0) + float(told.energy_consumed)
        _write(run, spent)


def _write(run: Path, spent: Spent) -> None:
    publish_file(run / FILE, (json.dumps(asdict(spent)) + "\n").encode())


def _start_meter() -> Any:
    """codecarbon's tracker of this machine, which asks no network; the country only matters for emissions, which are not told."""
    if importlib.util.find_spec("codecarbon") is None:
        return None
    from codecarbon import OfflineEmissionsTracker

    meter = OfflineEmissionsTracker(country_iso_code="USA", save_to_file=False, log_level="critical", allow_multiple_runs=True)
    meter.start()
    return meter
