"""One contender of `scripts/steps`: a model in training, in a process of its own."""

from __future__ import annotations

import gc
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from one_at_a_time import OneAtATime
from small_gpt import Config, optimizer_of, train_step
from step_models import MODELS, Batch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from train_models import PRECISIONS

from iree_lnbwd import torch as ours
from iree_lnbwd.benchmark.gpu_times import kernel_events

_WARMING = 5  # steps that compile, allocate and record before any is timed
_TRIES, _SECONDS_BETWEEN = 20, 3.0
_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED")
_MIB = 1 << 20
_TRAINING = Config(learning_rate=3e-4)


class Contender(NamedTuple):
    """What sets a contender apart.

    Attributes:
        compiled: Whether it runs under ``torch.compile``.
        enabled: Whether PyTorch's kernels are replaced in its process.
        replaced: Whether its norms are replaced.
    """

    compiled: bool = False
    enabled: bool = False
    replaced: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether kernels of ours are to run."""
        return self.enabled or self.replaced


BASELINE = "eager"
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        BASELINE: Contender(),
        "enable": Contender(enabled=True),
        "replaced": Contender(replaced=True),
        "compiled": Contender(compiled=True),
        "compiled+enable": Contender(compiled=True, enabled=True),
        "compiled+replaced": Contender(compiled=True, replaced=True),
    }
)


@dataclass(frozen=True)
class Task:
    """What a process is to train.

    Attributes:
        model: Of `MODELS`.
        precision: Of `PRECISIONS`.
        contender: Of `CONTENDERS`.
        size: Of the model: one of `SIZES`.
        share: A batch has this part of the shape's, and at least one.
        device: PyTorch's name of it.
        seed: Of weights and batches.
        mode: Of ``torch.compile``; None is its default.
        passes: Whether our pass over inductor's graphs may change them.
        updates: Whether AdamW updates the weights in each step.
        lock: The file of the processes' `OneAtATime`.
    """

    model: str
    precision: str
    contender: str
    size: str
    share: float
    device: str
    seed: int
    mode: str | None
    passes: bool
    updates: bool
    lock: Path


class Turn(NamedTuple):
    """Some steps in a row.

    Attributes:
        milliseconds: Of each step; on a GPU, between two of its events.
        host_milliseconds: Until each step's calls have returned; none on a CPU.
        peak_mib: The most memory that the process's PyTorch has allocated; None on a CPU.
        loss: Of the last step.
    """

    milliseconds: tuple[float, ...]
    host_milliseconds: tuple[float, ...]
    peak_mib: float | None
    loss: float


class KernelUse(NamedTuple):
    """A kernel's part of a step.

    Attributes:
        name: As CUPTI reports it.
        milliseconds: Of all its calls.
        calls: How many.
    """

    name: str
    milliseconds: float
    calls: float


class Distances(NamedTuple):
    """Of gradients to those in f64, relative to these.

    Attributes:
        all_of_them: Of all parameters, as one vector.
        norms: Of the norms' parameters.
    """

    all_of_them: float
    norms: float


class Trainee:
    """A contender in training. Its process has no other."""

    def __init__(self, task: Task) -> None:
        """Makes it, and takes its first steps.

        Raises:
            ImportError: The model's library is not there.
        """
        torch.set_float32_matmul_precision("high")
        self._task, self._contender = task, CONTENDERS[task.contender]
        self._described = MODELS[task.model]
        self._shape = self._described.shape(task.size).reduced(task.share)
        self._device = torch.device(task.device)
        self._precision = PRECISIONS[task.precision]
        ours.use_inductor_pass(task.passes)
        self._model = self._made()
        self._model.to(torch.bfloat16 if self._precision.stream == "bf16" else torch.float32)
        if self._contender.replaced:
            ours.replace_norms(self._model)
        if self._contender.enabled:
            ours.enable()
        loss = self._described.loss
        self._loss: Callable[[nn.Module, Batch], Tensor] = (
            torch.compile(loss, mode=task.mode) if self._contender.compiled else loss
        )
        self._optimizer = optimizer_of(self._model, _TRAINING) if task.updates else None
        self._batch = self._drawn(0)
        self._alone = OneAtATime(task.lock)
        if self._on_gpu:
            _tune_under(self._alone)
        self._warm_up()

    def steps(self, count: int) -> Turn:
        """Takes one step that does not count, since another's came before it, and then so many."""
        self._synchronize()
        self._step()
        self._synchronize()
        times = []
        for _ in range(count):
            loss, *of_step = self._timed()
            times.append(of_step)
        milliseconds, host = zip(*times, strict=True)
        on_gpu = self._on_gpu
        peak = torch.cuda.max_memory_allocated(self._device) / _MIB if on_gpu else None
        return Turn(milliseconds, host if on_gpu else (), peak, loss.item())

    def begin_profiling(self) -> None:
        """Has `kernels` ready, which takes a second, and makes later calls slower."""
        with profile(activities=[ProfilerActivity.CUDA]):
            self._step()
            self._synchronize()

    def kernels(self, count: int) -> list[KernelUse]:
        """The kernels of a step on a GPU, over so many steps; copies and fills count."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(count):
                self._step()
            self._synchronize()
        times, calls = Counter[str](), Counter[str]()
        for event in kernel_events(profiled):
            times[event.name] += event.device_time
            calls[event.name] += 1
        return [
            KernelUse(name, time_ / count / 1e3, calls[name] / count)
            for name, time_ in times.most_common()
        ]

    def inductor(self) -> str:
        """What became of norms in inductor's graphs."""
        return str(ours.status().inductor)

    def distances(self, batches: int) -> Distances:
        """Of the gradients to those of the unreplaced model with these weights in f64.

        Where a model's own code computes in f32, it does so there, too.
        """
        reference = self._made().double()
        reference.load_state_dict(self._model.state_dict())
        of_norms = {
            f"{name}.{parameter}"
            for name, module in reference.named_modules()
            if "Norm" in type(module).__name__  # AdaLN has its linear layer in it, too
            for parameter, _ in module.named_parameters()
        }
        drawn = [self._drawn(number) for number in range(batches)]
        ours.disable()
        loss = self._described.loss
        expected = [self._gradients(reference, loss(reference, batch)) for batch in drawn]
        if self._contender.enabled:
            ours.enable()
        squares: dict[bool, list[Tensor]] = {False: [], True: []}  # of an error and of a gradient
        for batch, exact in zip(drawn, expected, strict=True):
            self._begin()
            with self._autocast():
                found = self._loss(self._model, batch)
            gradients = self._gradients(self._model, found)
            for name, right in exact.items():
                error = gradients[name] - right
                parts = torch.stack((error.square().sum(), right.square().sum()))
                squares[name in of_norms].append(parts)
        norms = torch.stack(squares[True]).sum(0)
        both = norms + torch.stack(squares[False]).sum(0)
        return Distances(*((error / of_all).sqrt().item() for error, of_all in (both, norms)))

    def losses(self, steps: int, batches: int) -> list[float]:
        """Trains by so many steps, with AdamW, on so many batches in turns."""
        optimizer = optimizer_of(self._model, _TRAINING)
        drawn = [self._drawn(number) for number in range(batches)]
        autocast = torch.bfloat16 if self._precision.is_autocast else None
        found = []
        for number, batch in enumerate(itertools.islice(itertools.cycle(drawn), steps), start=1):
            self._begin()
            found.append(
                train_step(
                    *(self._model, optimizer, batch, number, _TRAINING, autocast, self._loss)
                ).clone()
            )
        self._model.zero_grad(set_to_none=True)
        return [loss.item() for loss in found]

    @property
    def _on_gpu(self) -> bool:
        is_one: bool = self._device.type == "cuda"
        return is_one

    def _made(self) -> nn.Module:
        """The model in f32; always with the same weights."""
        torch.manual_seed(self._task.seed)
        with self._device:
            return self._described.make(self._shape).to(self._device).train()

    def _drawn(self, number: int) -> Batch:
        batch = self._described.draw(self._shape, self._task.seed + number)
        return tuple(tensor.to(self._device) for tensor in batch)

    def _autocast(self) -> AbstractContextManager[object]:
        autocast: AbstractContextManager[object] = torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._precision.is_autocast
        )
        return autocast

    def _begin(self) -> None:
        """Says that results of the step before are no longer read."""
        if self._task.mode is not None and self._contender.compiled:
            torch.compiler.cudagraph_mark_step_begin()

    def _step(self) -> Tensor:
        self._begin()
        with self._autocast():
            loss = self._loss(self._model, self._batch)
        torch.autograd.backward(loss)
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad(set_to_none=True)
        return loss.detach()

    def _timed(self) -> tuple[Tensor, float, float]:
        """Takes a step: its loss, its milliseconds and those of the host."""
        if not self._on_gpu:
            start = time.perf_counter()
            loss = self._step()
            milliseconds = (time.perf_counter() - start) * 1e3
            return loss, milliseconds, milliseconds
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        start = time.perf_counter()
        loss = self._step()
        host = (time.perf_counter() - start) * 1e3
        after.record()
        after.synchronize()
        return loss, before.elapsed_time(after), host

    def _warm_up(self) -> None:
        """Takes the first steps; if others have the memory at the time, again."""
        for number in itertools.count(1):
            try:
                # What compiles takes long, and has the GPU in between.
                with nullcontext() if self._contender.compiled else self._alone:
                    self._step()
                with self._alone:
                    for _ in range(_WARMING):
                        self._step()
                    self._synchronize()
                    self._release()
                return
            except RuntimeError as error:
                if number == _TRIES or not _OUT_OF_MEMORY.search(str(error)):
                    raise
            self._model.zero_grad(set_to_none=True)
            self._release()
            time.sleep(_SECONDS_BETWEEN)

    def _release(self) -> None:
        """Gives back what others need to take their first steps."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _gradients(self, model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        """In f64, by the parameters' names."""
        torch.autograd.backward(loss)
        found = {
            name: parameter.grad.double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        model.zero_grad(set_to_none=True)
        return found

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _tune_under(alone: OneAtATime) -> None:
    """Has inductor time the variants of a kernel while no other process has the GPU."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    time_all = CachingAutotuner.benchmark_all_configs

    def time_them_alone(self: object, *arguments: object, **options: object) -> object:
        with alone:
            return time_all(self, *arguments, **options)

    CachingAutotuner.benchmark_all_configs = time_them_alone
