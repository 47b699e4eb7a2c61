"""Timing on a GPU: CUDA events, graphs, medians; and the bandwidth that floors are counted with."""

import statistics
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object]) -> float:
    """Device time of one call, by events."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def graph_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median device time of `work` replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(seconds(graph.replay) for _ in range(repeats))


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large read (int64 sum over 4 GiB), the best of seven."""
    buffer = torch.ones(2**29, dtype=torch.int64, device=device)
    times = [seconds(buffer.sum) for _ in range(8)]
    return buffer.numel() * 8 / min(times[1:])
