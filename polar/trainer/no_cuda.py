"""Scoped stand-in for CUDA, so that Megatron-Core's DDP and optimizer run on a CPU.

Invariant: inert where CUDA is present. Elsewhere, inside `with no_cuda():`
  * a torch call that asks for device="cuda" gets the CPU,
  * `Tensor.cuda()` returns the tensor itself,
  * `Tensor.type()` answers "torch.cuda.FloatTensor" (Megatron's gradient clipper asserts it),
  * `torch.cuda.current_device` and `torch.cuda.synchronize` do nothing harmful.
DDP and the optimizer are built inside the context, and every step runs inside it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _current_device() -> torch.device:
    return _CPU


def _synchronize(device: object = None) -> None:
    """Nothing runs asynchronously on a CPU."""


class _RedirectCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values = dict(kwargs or {})
        device = values.get("device")
        if device is not None and (device == "cuda" or getattr(device, "type", None) == "cuda"):
            values["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not values:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **values)


@contextlib.contextmanager
def no_cuda() -> Iterator[None]:
    """Run Megatron code that assumes CUDA; nothing is changed on a machine that has it."""
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda, "current_device", _current_device),
        mock.patch.object(torch.cuda, "synchronize", _synchronize),
        _RedirectCuda(),
    ):
        yield
