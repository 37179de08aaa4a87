"""Does the host wait for the GPU?"""

from collections.abc import Callable

import torch


def never_waits(run: Callable[[], object]) -> None:
    """Run once, to compile, and once more, where an operation that waits raises."""
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
