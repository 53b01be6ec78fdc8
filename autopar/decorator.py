"""`parallelize`: a model that trains on all ranks, with the training loop of a single device.

    @autopar.parallelize(optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-4), cluster="auto")
    class GPT(nn.Module): ...

    model = GPT(config)                     # parameters on meta: no rank ever holds the whole model
    metrics = model.train_step(*batch)      # captured, planned, compiled and started at the first batch

Invariants:
- every rank runs one plan: under torchrun rank 0 makes it and broadcasts its text, or the message of its mistake;
- the model keeps its class's name and attributes; `state_dict()` is the ordinary one, gathered once training began.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture import TrainStep
from autopar.cluster import Cluster, parse_cluster
from autopar.errors import CaptureError, Error, LayersDifferError, PlanError
from autopar.pins import Pins
from autopar.plans import Plan
from autopar.program.ranks import join, own_device

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `parallelize`."""

    optimizer: OptimizerFactory | None
    loss: Loss | None
    cluster: str | Cluster
    pin: str | Sequence[str] | Pins | None
    memory: str | float | None
    microbatches: int | Literal["auto"]
    precision: str | None
    clip_norm: float | None
    seed: int


@dataclass(slots=True)
class Session:
    """What a parallelized model carries: how its step is made, and from the first batch on what runs it."""

    options: Options
    model: nn.Module | Callable[[], nn.Module]
    """What the step captures: the instance itself, or a factory of one."""
    plan: Plan | None = None
    trainer: Any = None

    def step(self, batch: Any) -> TrainStep:
        """The training step on `batch`, for planning and compiling by hand."""
        options = self.options
        return TrainStep(
            self.model,
            batch,
            loss=options.loss,
            optimizer=options.optimizer,
            microbatches=options.microbatches,
            precision=options.precision or _default_precision(options.cluster),
            clip_norm=options.clip_norm,
        )

    def cluster(self) -> Cluster:
        """The cluster to plan for; `auto` is the running job, which alone is one device."""
        given = self.options.cluster
        cluster = parse_cluster(given) if isinstance(given, str) else given
        return _one_device(cluster) if given == "auto" and "WORLD_SIZE" not in os.environ else cluster

    def start(self, batch: Any) -> None:
        """Plans, compiles and starts this rank."""
        from autopar.compiling import compile
        from autopar.planning import plan

        step = self.step(batch)
        options = self.options

        def planned() -> Plan:
            return plan(step, self.cluster(), pin=options.pin, memory=options.memory)

        self.plan = agree(planned)
        try:
            program = compile(step, self.plan)
        except LayersDifferError:  # on every rank: now that all layers are captured, the plan looks at each
            self.plan = agree(planned)
            program = compile(step, self.plan)
        self.trainer = program.start(seed=options.seed)


class Parallelized(nn.Module):
    """What `parallelize` adds to a model's class."""

    _autopar: Session

    def train_step(self, *batch: Any, **keywords: Any) -> dict[str, Any]:
        """One optimizer step on a batch given as the model's forward takes it; the same metrics on every rank.

        The first call captures, plans and compiles. Raises `autopar.Error` for a batch that doesn't fit the step.
        """
        session, whole = self._autopar, _batch(batch, keywords)
        if session.trainer is None:
            session.start(whole)
        metrics: dict[str, Any] = session.trainer.step(whole)
        return metrics

    def as_step(self, *batch: Any, **keywords: Any) -> TrainStep:
        """This model's training step as a value, for `autopar.plan` and the command line."""
        return self._autopar.step(_batch(batch, keywords))

    @property
    def plan(self) -> Plan:
        """The plan in force; raises `PlanError` before the first `train_step`."""
        if self._autopar.plan is None:
            raise PlanError(f"{type(self).__name__} has no plan yet; it is made at the first train_step")
        return self._autopar.plan

    @property
    def trainer(self) -> Any:
        """What runs the steps: its `optimizer.param_groups` are live; None before the first `train_step`."""
        return self._autopar.trainer

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The ordinary state dict. Once training began all ranks must call: rank 0 gets it gathered."""
        if self._autopar.trainer is None:
            return super().state_dict(*args, **kwargs)
        return self._autopar.trainer.full_state_dict()


def parallelize(
    model: Any = None,
    /,
    *,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    cluster: str | Cluster = "auto",
    pin: str | Sequence[str] | Pins | None = None,
    memory: str | float | None = None,
    microbatches: int | Literal["auto"] = 1,
    precision: str | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Any:
    """A class decorator, with or without arguments; given a module, it adds the same methods to that instance.

    `optimizer(params)`: any `torch.optim` optimizer, AdamW by default; `loss(output, batch)`: by default the output
    itself or its `.loss`. `clip_norm`: as for `TrainStep`. `cluster`, `pin`, `memory`: as for `autopar.plan`. `seed`:
    of the step's random ops, and of the initial weights of a class; an instance keeps the weights that it has.

    Raises `CaptureError` for anything but a module or a class of modules.
    """
    options = Options(optimizer, loss, cluster, pin, memory, microbatches, precision, clip_norm, seed)
    if model is None:
        return functools.partial(_parallelized, options=options)
    return _parallelized(model, options)


def _parallelized(model: Any, options: Options) -> Any:
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _decorated(model, options)
    if isinstance(model, nn.Module):
        return _adopted(model, options)
    raise CaptureError(f"parallelize: got {type(model).__name__}; expected a torch.nn.Module or a class of them")


def _decorated(cls: type[nn.Module], options: Options) -> type[nn.Module]:
    """A class whose instances are built on meta and remember how to build real ones."""

    @functools.wraps(cls.__init__)
    def initialise(self: Parallelized, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            cls.__init__(self, *args, **kwargs)
        self._autopar = Session(options, functools.partial(cls, *args, **kwargs))

    return _extended(cls, {"__init__": initialise})


def _adopted(model: nn.Module, options: Options) -> nn.Module:
    """The same instance, its class extended in place (as `fully_shard` of torch does)."""
    model.__class__ = _extended(type(model), {})
    model._autopar = Session(options, model)  # type: ignore[assignment]
    return model


def _extended(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Parallelized, cls), {**names, **members})


def _batch(positionals: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if positionals and keywords:
        raise CaptureError("train_step: got positionals and keywords; give the batch as one or the other")
    return keywords or positionals


def _default_precision(cluster: str | Cluster) -> str:
    """fp32 on CPUs, mixed on GPUs."""
    if cluster == "auto":
        return "mixed" if torch.cuda.is_available() else "fp32"
    kind = (parse_cluster(cluster) if isinstance(cluster, str) else cluster).device.kind
    return "fp32" if kind == "cpu" else "mixed"


def _one_device(cluster: Cluster) -> Cluster:
    innermost = replace(cluster.levels[-1], size=1)
    return replace(cluster, name=f"auto:1x{cluster.device.kind}", levels=(innermost,))


# -- one plan for all ranks --------------------------------------------------------------------------------------
def agree(make: Callable[[], Plan]) -> Plan:
    """`make()`'s plan on every rank: rank 0 makes it, the others get its text; alone, just `make()`.

    A mistake that rank 0 finds is raised on every rank, so none waits for the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return make()
    join(own_device())
    if dist.get_rank() != 0:
        return _received()
    try:
        plan = make()
    except Exception as error:
        _broadcast([type(error).__name__, str(error)])
        raise
    _broadcast(["Plan", plan.to_json()])
    return plan


def _received() -> Plan:
    kind, text = _broadcast(["", ""])
    if kind != "Plan":
        raise _ERRORS.get(kind, Error)(f"rank 0: {text}")
    return Plan.from_json(text, "the plan of rank 0")


def _broadcast(words: list[str]) -> list[str]:
    """Rank 0's words on every rank, once all have them: a rank that exits takes the bytes under way with it."""
    dist.broadcast_object_list(words, src=0)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    return words


_ERRORS: dict[str, type[Error]] = {cls.__name__: cls for cls in Error.__subclasses__()}
