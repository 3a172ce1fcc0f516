"""What a worker cannot go on after."""

from __future__ import annotations

import logging
import os
from typing import NoReturn

_LOG = logging.getLogger(__name__)


def is_fatal(error: BaseException) -> bool:
    """Whether an error leaves the process unable to compute: memory is used up, or the device is in a bad state."""
    import torch  # here, since `end_process` needs none of it

    if isinstance(error, MemoryError | torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    return "CUDA error" in str(error)


def end_process(name: str, error: BaseException) -> NoReturn:
    """End this process at once, so that Ray starts the actor again and the scheduler learns of it."""
    _LOG.critical("%s ends: %s", name, error, exc_info=error)
    os._exit(1)
