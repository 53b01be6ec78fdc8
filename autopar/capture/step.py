"""The training step (or the forward alone) of a single-device model: what the user hands over.

    step = TrainStep(model, {"tokens": tokens, "targets": targets}, optimizer=torch.optim.AdamW, microbatches=4)
    captured = step.capture()        # gradient graph of one microbatch, update templates; see `graphs.Captured`

Invariants:
- constructing a step is cheap: a factory builds on meta, nothing is traced before `capture()`;
- the model is left as it was found: parameters keep their values, hooks are removed;
- `batch` holds all samples of one optimizer step; only its shapes and constants matter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from autopar.capture.batches import BatchForm, batch_size, check_divides, microbatch
from autopar.capture.folding import Folded, UnequalError
from autopar.capture.gradient import Request, Traced, trace_gradient
from autopar.capture.graphs import RANDOM_KEY, Captured, Role, graph_hash
from autopar.capture.runs import equal_runs, shortened
from autopar.capture.update import capture_updates
from autopar.errors import CaptureError

Optimizer = torch.optim.Optimizer

PRECISIONS = ("fp32", "mixed", "mixed-bf16-sums")


class ForwardStep:
    """The forward of a model on a batch."""

    microbatches = 1
    microbatches_are_free = False
    """Whether the planner chooses their number."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], batch: Any) -> None:
        """`model`: a module on CPU or meta, or a factory of one, which is called under `torch.device("meta")`.

        `batch`: a dict of keywords, a tuple of positionals or one tensor; what isn't a tensor is a constant.
        Raises `CaptureError` when they are none of these.
        """
        self.factory = None if isinstance(model, nn.Module) else model
        self.model = model if isinstance(model, nn.Module) else _build(model)
        self.form = BatchForm.of(self.model, batch, has_loss=self._has_loss)
        self.batch = batch

    # -- what it is about ----------------------------------------------------------------------------------------
    @property
    def parameter_names(self) -> tuple[str, ...]:
        """One name for each distinct parameter: its first."""
        return tuple(name for name, _ in self.model.named_parameters())

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters and buffers → the name they go by."""
        first: dict[int, str] = {}
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        return {name: first[id(value)] for name, value in named if first.setdefault(id(value), name) != name}

    @property
    def fresh_batch_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a whole batch, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.batch_tensors().items()}

    def batch_tensors(self, batch: Any = None) -> dict[str, Tensor]:
        """The tensors of a batch (this step's own by default) by name; raises `CaptureError` when its form differs."""
        return self.form.tensors(self.batch if batch is None else batch)

    def microbatch(self, batch: Any, index: int) -> dict[str, Tensor]:
        """The tensors of one microbatch: contiguous rows of each tensor that has the batch's samples."""
        return microbatch(self.batch_tensors(batch), index, self.microbatches)

    def with_microbatches(self, microbatches: int) -> Self:
        """This step with another number of microbatches; itself where it has as many."""
        if microbatches == self.microbatches and not self.microbatches_are_free:
            return self
        check_divides(batch_size(self.batch_tensors()), microbatches)
        other = copy.copy(self)
        for name in ("_captured", "_folded"):
            other.__dict__.pop(name, None)
        other.microbatches, other.microbatches_are_free = microbatches, False
        return other

    # -- capture -------------------------------------------------------------------------------------------------
    def capture(self) -> Captured:
        """The step as graphs; the same object at every call. Raises `CaptureError`, naming the user's line."""
        return self._captured

    def fold(self) -> Folded:
        """The step with few of its equal layers traced; where that can't be done, with all of them."""
        return self._folded

    def unfold(self) -> bool:
        """Gives up folded layers that all layers, once captured, turn out not to be; returns whether they weren't."""
        folded = self.__dict__.get("_folded")
        if folded is None or not folded.runs or graph_hash(folded.whole) == graph_hash(self.capture()):
            return False
        self._folded = Folded(self.capture())
        return True

    def symbolic_shapes(self) -> dict[str, tuple[Any, ...]]:
        """Per node of the gradient graph its shape as sympy expressions in `b` (microbatch) and `s` (sequence)."""
        from autopar.capture.symbolic import symbolic_shapes  # sympy takes a while to import

        return symbolic_shapes(self._request(), self.capture().gradient)

    def formulas(self) -> dict[str, Any]:
        """`matmul_flops`, `saved_bytes`, `parameter_bytes` of a microbatch, as sympy expressions in `b` and `s`."""
        from autopar.capture.formulas import formulas

        return formulas(self.capture(), self.symbolic_shapes())

    @functools.cached_property
    def _captured(self) -> Captured:
        return self._capture()

    @functools.cached_property
    def _folded(self) -> Folded:
        runs = equal_runs(self.model, self.group_of) if "_captured" not in self.__dict__ else ()
        if runs:
            with contextlib.suppress(CaptureError, UnequalError), shortened(self.model, runs):
                folded = Folded(self._capture(), runs)
                folded.check()
                return folded
        return Folded(self.capture())

    def _capture(self) -> Captured:
        traced = self._traced()
        return Captured(traced.graph, traced.outputs, constants=traced.constants)

    def _traced(self) -> Traced:
        return trace_gradient(self._request())

    def _request(self) -> Request:
        return Request(self.model, self.form, self._inputs(), trainable=(), loss=None)

    def _inputs(self) -> dict[Role, Tensor]:
        inputs: dict[Role, Tensor] = {Role("param", n): p for n, p in self.model.named_parameters()}
        inputs |= {Role("buffer", n): b for n, b in self.model.named_buffers()}
        inputs |= {Role("batch", n): t for n, t in self.microbatch(self.batch, 0).items()}
        return {**inputs, RANDOM_KEY: torch.empty((), dtype=torch.int64)}

    @property
    def group_of(self) -> dict[str, int]:
        """Trainable parameter → index of its group in the optimizer; parameters that no group holds are absent."""
        return {}

    @property
    def _has_loss(self) -> bool:
        return False


class TrainStep(ForwardStep):
    """One optimizer step: forward, loss, backward over microbatches, update."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        microbatches: int | Literal["auto"] = 1,
        precision: str = "fp32",
        clip_norm: float | None = None,
    ) -> None:
        """`model`, `batch`: as for `ForwardStep`; the batch holds all samples of the optimizer step.

        `loss(output, batch)`: by default the output itself, its `.loss` or its "loss". With it, the batch may hold more
        than the model's forward takes.
        `optimizer(params)`: any `torch.optim` optimizer; AdamW by default.
        `microbatches`: into how many parts the batch goes; "auto" leaves it to the planner.
        `precision`: "fp32"; "mixed": bf16 parameters and gradients, fp32 master parameters and optimizer state, and
        gradients are summed over microbatches in fp32; "mixed-bf16-sums": in bf16.
        `clip_norm`: the 2-norm of all gradients that the optimizer takes is clipped to this, as by
        `torch.nn.utils.clip_grad_norm_`; a step's metrics then have `grad_norm`, the norm before that.
        Raises `CaptureError` when `microbatches` doesn't divide the batch, or for an unknown precision.
        """
        self.loss = loss
        self.optimizer_factory: Callable[[list[nn.Parameter]], Optimizer] = optimizer or torch.optim.AdamW
        self.microbatches_are_free = microbatches == "auto"
        self.microbatches = 1 if microbatches == "auto" else microbatches
        self.precision = precision
        self.clip_norm = clip_norm
        super().__init__(model, batch)
        if precision not in PRECISIONS:
            raise CaptureError(f"precision={precision!r}: expected one of {', '.join(map(repr, PRECISIONS))}")
        if clip_norm is not None and not clip_norm > 0:
            raise CaptureError(f"clip_norm={clip_norm!r}: expected a number above 0, or None for no clipping")
        check_divides(batch_size(self.batch_tensors()), self.microbatches)

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are computed with in bf16."""
        return self.precision != "fp32"

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Parameters that require a gradient."""
        return tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The user's optimizer over the model's parameters; its groups are matched to names by identity."""
        made = self.optimizer_factory(list(self.model.parameters()))
        if not isinstance(made, Optimizer):
            raise CaptureError(f"optimizer: got {type(made).__name__}; expected a callable(params) -> Optimizer")
        return made

    @property
    def group_of(self) -> dict[str, int]:
        """Trainable parameter → index of its group in the optimizer; parameters that no group holds are absent."""
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        named = dict(self.model.named_parameters())
        return {name: groups[id(named[name])] for name in self.trainable_names if id(named[name]) in groups}

    def _capture(self) -> Captured:
        traced = self._traced()
        updated = [role.name for role in traced.outputs if role.kind == "grad"]
        named = dict(self.model.named_parameters())
        group_of = self.group_of
        wanted = {name: (named[name], group_of[name]) for name in updated}
        updates = capture_updates(self.optimizer, wanted, mixed=self.is_mixed)
        return Captured(
            gradient=traced.graph,
            gradient_outputs=traced.outputs,
            whole=traced.whole,
            averaged=traced.averaged,
            updates=updates.templates,
            update_of=updates.update_of,
            scalars=updates.scalars,
            options=updates.options,
            initial_state=updates.initial_state,
            clip_norm=self.clip_norm,
            narrow_sums=self.precision == "mixed-bf16-sums",
            constants=traced.constants,
        )

    def _request(self) -> Request:
        trainable = tuple(self.group_of)
        if not trainable:
            raise CaptureError("no parameter to train: none requires a gradient, or the optimizer holds none that does")
        whole = {Role("batch", name): tensor for name, tensor in self.batch_tensors().items()}
        return Request(
            self.model,
            self.form,
            self._inputs(),
            trainable,
            self.loss,
            self.microbatches,
            self.is_mixed,
            whole_batch=whole,
        )

    @property
    def _has_loss(self) -> bool:
        return self.loss is not None


def _build(factory: Callable[[], nn.Module]) -> nn.Module:
    if not callable(factory):
        raise CaptureError(f"model: got {type(factory).__name__}; expected a module, or a callable that makes one")
    with torch.device("meta"):
        model = factory()
    if isinstance(model, nn.Module):
        return model
    raise CaptureError(f"model: the factory returned {type(model).__name__}; expected a torch.nn.Module")
