"""Points on a step's time line, and the time between two of them. Next: step_cost.py, which collects such times."""

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """A point on the step's own time line: the host's clock on CPU; an event on the stream on CUDA, without waiting."""
    if device.type == 'cpu':
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Mark, end: Mark) -> float:
    """Between two marks; waits for the second one where the device has not passed it yet."""
    if isinstance(start, float) or isinstance(end, float):
        return (end - start) * 1e3
    end.synchronize()
    return start.elapsed_time(end)
