"""A sign of life on stderr while a compilation takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TextIO

from inductor_grpo.capture import Capture


def progress(every: float = 10.0, to: TextIO | None = None) -> Callable[[Capture], AbstractContextManager[None]]:
    """A watcher that says, ``every`` so many seconds, what has been compiling for how long."""

    @contextlib.contextmanager
    def watch(captured: Capture) -> Iterator[None]:
        stop, started = threading.Event(), time.perf_counter()

        def report() -> None:
            while not stop.wait(every):
                elapsed = time.perf_counter() - started
                print(f"[inductor-grpo] {elapsed:.0f} s: {state(captured)}", file=to or sys.stderr, flush=True)

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    return watch


def state(captured: Capture) -> str:
    """What is going on, in a few words."""
    running = [graph for graph in list(captured.graphs) if not graph.done]
    if not running:
        done = len(captured.graphs)
        return f"{done} graph{'s' * (done != 1)} compiled, the target is running"
    graph = running[-1]
    stage = graph.stages[-1].name if graph.stages else "traced"
    doing = {"traced": "building the joint graph", "joint": "rewriting", "normalised": "rewriting"}
    return f"compiling graph {graph.number}: {doing.get(stage, f'generating code ({stage})')}"
