"""Numbers on their way from a device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrival:
    """A copy of a small tensor, started at once; on CUDA the host goes on meanwhile."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = numbers, None
        if numbers.device.type == "cuda":
            with torch.cuda.device(numbers.device):
                self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
                self._host.copy_(numbers, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def is_there(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Any:
        """The numbers, as ``tolist`` gives them; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
