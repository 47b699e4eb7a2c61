"""How training runs on a device: plainly on a CPU; on CUDA in bf16, with compiled layers and captured steps.

A model this small is bound by kernel launches, so a whole step (forward, backward, optimizer) is replayed as one graph.
Next: train.py, whose stages run on this.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EAGER_CALLS = 3  # before a step is captured: they compile, tune and allocate


class CapturedStep:
    """Call `step(*inputs)`, tensors in and a tuple of tensors out; on CUDA replay it as a graph after a few calls.

    Inputs keep their shapes. Outputs are overwritten by the next call. `step` must not wait for the device.
    """

    def __init__(self, step: Callable[..., tuple[Tensor, ...]], device: torch.device) -> None:
        self.step, self.device = step, device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.device.type != 'cuda':
            return self.step(*inputs)
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            return self._run_aside(inputs)
        if self.graph is None:
            self.inputs = tuple(tensor.clone() for tensor in inputs)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.step(*self.inputs)
        for kept, fresh in zip(self.inputs, inputs, strict=True):
            kept.copy_(fresh)
        self.graph.replay()
        return self.outputs

    def _run_aside(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """An eager call on a stream of its own, as capture requires of what it will capture."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            outputs = self.step(*inputs)
        main.wait_stream(stream)
        return outputs


@dataclass(frozen=True, slots=True)
class Machine:
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == 'cuda'

    def autocast(self) -> AbstractContextManager:
        return torch.autocast('cuda', torch.bfloat16) if self.cuda else nullcontext()

    def compile_layers(self, model: nn.Module) -> None:
        """Compile the model's layers in place; one compilation serves all that are alike."""
        if self.cuda:
            for layer in model.layers:
                layer.compile(dynamic=False)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


class Learner:
    """AdamW without decay on norms and biases; the rate rises over the warm-up, then falls linearly to zero."""

    def __init__(
        self, model: nn.Module, rate: float, steps: int, warmup_steps: int, weight_decay: float, machine: Machine
    ) -> None:
        self.model, self.rate, self.steps = model, rate, steps
        self.warmup = max(1, min(warmup_steps, steps // 10))
        parameters = list(model.parameters())
        groups = [
            {'params': [p for p in parameters if p.dim() > 1], 'weight_decay': weight_decay},
            {'params': [p for p in parameters if p.dim() == 1], 'weight_decay': 0.0},
        ]
        # A captured step reads the rate from device memory.
        first = torch.tensor(rate, device=machine.device) if machine.cuda else rate
        self.optimizer = torch.optim.AdamW(
            groups, lr=first, betas=(0.9, 0.95), fused=machine.cuda, capturable=machine.cuda
        )

    def set_rate(self, step: int) -> None:
        """Before step `step` (from 1)."""
        scale = min(step / self.warmup, (self.steps + 1 - step) / max(1, self.steps - self.warmup))
        for group in self.optimizer.param_groups:
            if isinstance(group['lr'], Tensor):
                group['lr'].fill_(self.rate * scale)
            else:
                group['lr'] = self.rate * scale

    def learn(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
