"""Recording device work in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """Records functions that read and write tensors at fixed places. All graphs of one recorder share memory, so they must be
    replayed one at a time, and what one leaves behind is good until the next."""

    def __init__(self, device: torch.device, warmup: int = 2) -> None:
        self.device, self.warmup = device, warmup
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where recordings are made; work that belongs to them but runs eagerly in between goes there too."""
        if self._stream is None:
            with torch.cuda.device(self.device):
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return self._stream

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of `function` and its result, whose tensors every replay rewrites. Runs it a few times first, so that kernels
        are compiled, algorithms chosen and handles made; then once more for the recording, so it must not mind."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(self.warmup):
                    function()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: a data loader's threads may go on pinning memory meanwhile
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = function()
            finally:
                torch.cuda.set_stream(current)  # a recording that fails may leave its own stream behind
            return graph, result
