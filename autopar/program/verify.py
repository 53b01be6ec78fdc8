"""verify: the program proven equal to the single-device step, on a virtual mesh.

Two halves (DESIGN, section 1): (a) the captured step against the eager model and optimizer, in native precision;
(b) the program against the captured step, all ranks in lock-step, every floating dtype promoted to float64.
Losses, gradients, buffers, parameters and optimizer state are compared after each of several steps, which draw the
random numbers of their step and microbatch in all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autopar.capture.batches import microbatch
from autopar.capture.drawing import reference_rng
from autopar.capture.gradient import check_loss, find_loss
from autopar.capture.graphs import RANDOM_KEY, Captured, Role, placeholders
from autopar.capture.step import ForwardStep, TrainStep
from autopar.program.interleaved import own_name
from autopar.program.parts import Pipeline, Slot
from autopar.program.promote import default_float64, promote_graph, promote_pipeline, promoted, promoted_dtype
from autopar.program.virtual import VirtualMesh, whole_value
from autopar.program.weights import with_weights
from autopar.randomness import random_keys

EXACT = 1e-10
"""Greatest relative difference in float64: the order of sums may differ, nothing else."""

ZERO = 1e-2
"""Gradients this far below the largest are compared on its scale: those that are zero but for rounding (of a bias
before a normalisation, of the attention keys' bias) have none of their own."""

NATIVE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-9}
"""Greatest relative difference between the captured and the eager step, in native precision, by dtype."""

MIXED = 6e-2
"""The same for what a mixed step computes in bf16 and eager, from the same rounded parameters, in fp32."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One compared value: `relative` is max |a − b| over max |b|."""

    half: str
    step: int
    name: str
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        verdict = f"{'ok' if self.ok else 'DIFFERS'} ({self.relative:.2e}, at most {self.tolerance:.0e})"
        return f"{self.half}, step {self.step}: {self.name} {verdict}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Every comparison; `ok` when all are within their tolerance."""

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    @property
    def first(self) -> Difference | None:
        """The first value that differs, in the order in which the step makes them."""
        return next((d for d in self.differences if not d.ok), None)

    def worst(self, half: str) -> Difference | None:
        return max((d for d in self.differences if d.half == half), key=lambda d: d.relative, default=None)

    def to_dict(self) -> dict[str, object]:
        worst = {half: found.relative for half in HALVES if (found := self.worst(half)) is not None}
        return {"ok": self.ok, "compared": len(self.differences), "worst": worst, "first": str(self.first or "")}

    def __str__(self) -> str:
        lines = []
        for half in HALVES:
            found = self.worst(half)
            if found is not None:
                count = sum(1 for d in self.differences if d.half == half)
                greatest = f"greatest relative difference {found.relative:.2e} ({found.name})"
                lines.append(f"{half}: {count} values, {greatest}")
        lines.append("equal" if self.ok else f"NOT equal; first: {self.first}")
        return "\n".join(lines)


HALVES = ("captured = eager", "program = captured")


# -- the captured step, run as it is -----------------------------------------------------------------------------
@dataclass(slots=True)
class Reference:
    """Runs the captured graphs on one device; `values` are parameters, buffers and state by slot."""

    captured: Captured
    microbatches: int
    values: dict[Slot, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    shares: list[Tensor] = field(default_factory=list)
    """Each microbatch's share of the loss."""
    grad_norm: Tensor | None = None
    """Of the last update, where gradients are clipped."""

    @torch.no_grad()
    def backward(
        self, microbatch: Callable[[int], Mapping[str, Tensor]], keys: Sequence[Tensor], whole: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All microbatches: fills `gradients`, returns the outputs (loss: their sum).

        `keys`: what each microbatch's random ops draw from. `whole` is the whole batch.
        """
        self.gradients = {}
        totals = self._totals(whole)
        collected: dict[str, list[Tensor]] = {}
        for index in range(self.microbatches):
            for name, value in self._microbatch(microbatch(index), keys[index], totals).items():
                collected.setdefault(name, []).append(value)
        self.shares = collected.get("loss", [])
        return {
            name: torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum(0) for name, parts in collected.items()
        }

    def _totals(self, batch: Mapping[str, Tensor]) -> dict[Role, Tensor]:
        graph = self.captured.whole
        if graph is None:
            return {}
        roles = placeholders(graph)
        inputs = [batch[r.name] if r.kind == "batch" else self.values[Slot(r.kind, r.name)] for r in roles]
        return {Role("total", f"total{i}"): value for i, value in enumerate(torch.fx.Interpreter(graph).run(*inputs))}

    def _microbatch(self, batch: Mapping[str, Tensor], key: Tensor, totals: Mapping[Role, Tensor]) -> dict[str, Tensor]:
        graph = self.captured.gradient
        given = {RANDOM_KEY: key, **totals, **{Role("batch", name): value for name, value in batch.items()}}
        inputs = [given[r] if r in given else self.values[Slot(r.kind, r.name)] for r in placeholders(graph)]
        results: dict[str, Tensor] = {}
        for role, value in zip(self.captured.gradient_outputs, torch.fx.Interpreter(graph).run(*inputs), strict=True):
            if role.kind == "grad":
                value = value.to(torch.promote_types(value.dtype, self._gradient_dtype(role.name)))
                before = self.gradients.get(role.name)
                self.gradients[role.name] = value if before is None else before + value
            elif role.kind == "buffer":
                self.values[Slot("buffer", role.name)] = value
            else:
                results[role.name or role.kind] = value
        return results

    def _gradient_dtype(self, name: str) -> torch.dtype:
        """What gradients are summed in: fp32 for bf16 parameters with fp32 masters."""
        template = self.captured.updates[self.captured.update_of[name]].graph
        dtype: torch.dtype = placeholders(template)[Role("grad", "")].meta["val"].dtype
        return dtype

    @torch.no_grad()
    def update(self, scalars: Mapping[str, float]) -> None:
        """The optimizer's step from `gradients`, which are clipped before."""
        if self.captured.clip_norm is not None:
            holders = [torch.nn.Parameter(torch.empty_like(g)) for g in self.gradients.values()]
            for holder, gradient in zip(holders, self.gradients.values(), strict=True):
                holder.grad = gradient.clone()
            self.grad_norm = torch.nn.utils.clip_grad_norm_(holders, self.captured.clip_norm)
            clipped = (holder.grad for holder in holders)
            self.gradients = {name: g for name, g in zip(self.gradients, clipped, strict=True) if g is not None}
        for name, index in self.captured.update_of.items():
            template = self.captured.updates[index]
            inputs = [self._update_input(role, name, scalars) for role in placeholders(template.graph)]
            results = torch.fx.Interpreter(template.graph).run(*inputs)
            for role, value in zip(template.output_roles, results, strict=True):
                self.values[_slot(role, name)] = value

    def _update_input(self, role: Role, name: str, scalars: Mapping[str, float]) -> Tensor:
        if role.kind == "grad":
            return self.gradients[name]
        if role.kind == "scalar":
            return torch.tensor(scalars[role.name], dtype=torch.float64)
        return self.values[_slot(role, name)]


def _slot(role: Role, parameter: str) -> Slot:
    return Slot("param", parameter) if role.kind == "param" else Slot("state", f"{parameter}.{role.name}")


def initial_values(step: ForwardStep, captured: Captured, weights: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """Parameters and buffers from `weights` (by name), constants, and the optimizer's initial state."""
    values = {Slot("param", name): weights[name] for name in step.parameter_names}
    known = {**weights, **captured.constants}
    for role in placeholders(captured.gradient):
        if role.kind == "buffer":
            values[Slot("buffer", role.name)] = known[role.name]
    for name, state in captured.initial_state.items():
        for key, init in state.items():
            values[Slot("state", f"{name}.{key}")] = init.build(weights[name])
    return values


# -- the two halves ----------------------------------------------------------------------------------------------
def verify(
    step: ForwardStep, pipeline: Pipeline, weights: Mapping[str, Tensor], num_steps: int = 3, seed: int = 0
) -> VerifyReport:
    """Runs both halves on the step's own batch, from `weights`; random numbers are those of `seed`."""
    captured = step.capture()
    found = list(_captured_against_eager(step, captured, weights, num_steps, seed))
    found += _program_against_captured(step, captured, pipeline, weights, num_steps, seed)
    return VerifyReport(tuple(found))


def relative_difference(a: Tensor, b: Tensor, at_least: float = 0.0) -> float:
    """max |a − b| / max(|b|, at_least), where that is zero the plain difference; NaN on one side only is infinite."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    difference = (a - b).nan_to_num().abs().max().item()
    scale = max(b.nan_to_num().abs().max().item(), at_least)
    return difference / scale if scale > 0 else difference


def _largest(values: Mapping[str, Tensor]) -> float:
    return max((value.abs().max().item() for value in values.values() if value.numel()), default=0.0)


def _native_values(step: ForwardStep, captured: Captured, weights: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """Initial values in the dtypes of the captured step: bf16 parameters beside fp32 masters, where it is mixed."""
    values = initial_values(step, captured, weights)
    params = [(Slot("param", r.name), n) for r, n in placeholders(captured.gradient).items() if r.kind == "param"]
    return values | {slot: values[slot].to(node.meta["val"].dtype) for slot, node in params}


def _captured_against_eager(
    step: ForwardStep, captured: Captured, weights: Mapping[str, Tensor], num_steps: int, seed: int
) -> Iterator[Difference]:
    if not isinstance(step, TrainStep):
        return
    eager, mixed = EagerStep(step, weights, seed), step.is_mixed
    reference = Reference(captured, step.microbatches, _native_values(step, captured, _copies(weights)))
    for index in range(num_steps):
        keys = random_keys(seed, index, step.microbatches)
        got = reference.backward(lambda i: step.microbatch(step.batch, i), keys, step.batch_tensors())
        loss = eager.backward(index)
        tolerance = MIXED if mixed else NATIVE[loss.dtype]
        yield Difference(HALVES[0], index, "loss", relative_difference(got["loss"], loss), tolerance)
        wanted = {n: g for n, g in eager.gradients().items() if n in reference.gradients}
        floor = _largest(wanted) * ZERO
        for name, gradient in wanted.items():
            relative = relative_difference(reference.gradients[name], gradient, floor)
            tolerance = MIXED if mixed else NATIVE[gradient.dtype]
            yield Difference(HALVES[0], index, f"grad:{name}", relative, tolerance)
        # the update starts from the eager gradients: adaptive optimizers blow rounding errors up to the learning rate
        reference.gradients.update({n: g.clone() for n, g in wanted.items()})
        reference.update(captured.scalars)
        eager.update()
        for name, b in eager.parameters().items():
            a = reference.values[Slot("param", name)]
            yield Difference(HALVES[0], index, f"param:{name}", relative_difference(a, b), NATIVE[a.dtype])


@dataclass(slots=True)
class EagerStep:
    """The user's own model and optimizer, run as they would be on one device, with the random numbers of `seed`.

    The whole batch is run in one piece. In microbatches, whose gradients accumulate, it is run where these are another
    step by themselves: where numbers are drawn, where buffers change (batch norm), and where a term of the loss is
    averaged over them. Where such a loss counts tokens, too, each microbatch has the weight that the captured one has.
    """

    source: TrainStep
    weights: Mapping[str, Tensor]
    seed: int = 0
    pieces: int = field(init=False)
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = with_weights(self.source.model, self.weights)
        self.optimizer = self.source.optimizer_factory(list(self.model.parameters()))
        captured = self.source.capture()
        changes = any(role.kind == "buffer" for role in captured.gradient_outputs)
        draws = RANDOM_KEY in placeholders(captured.gradient)
        self.pieces = self.source.microbatches if draws or changes or captured.averaged else 1

    def backward(self, step: int) -> Tensor:
        """The gradients of the whole batch in the `step`-th step; returns its loss.

        In mixed precision, at the rounded parameters.
        """
        masters = {p: p.data for p in self.model.parameters()} if self.source.is_mixed else {}
        for parameter, master in masters.items():
            parameter.data = master.to(torch.bfloat16).to(master.dtype) if master.is_floating_point() else master
        try:
            return self._backward(step)
        finally:
            for parameter, master in masters.items():
                parameter.data = master

    def _backward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        losses, shares = [], self._shares(step)
        for index in range(self.pieces):
            with reference_rng(self.seed, step, index, model=self.model):
                loss = self._loss(microbatch(self.source.batch_tensors(), index, self.pieces))
                weight = (shares[index] / loss.detach()).nan_to_num().item() if shares else 1 / self.pieces
                if weight:
                    torch.autograd.backward(loss * weight)
                    losses.append(loss.detach() * weight)
        return torch.stack(losses).sum()

    def _shares(self, step: int) -> list[Tensor]:
        """What each piece has of the captured loss, where that counts in the whole batch; one may have no tokens."""
        captured, source = self.source.capture(), self.source
        if self.pieces == 1 or captured.whole is None:
            return []
        named = {**self.parameters(), **dict(self.model.named_buffers())}
        reference = Reference(captured, self.pieces, _native_values(source, captured, _copies(named)))
        keys = random_keys(self.seed, step, self.pieces)
        reference.backward(lambda i: source.microbatch(source.batch, i), keys, source.batch_tensors())
        return reference.shares

    def update(self) -> None:
        """The optimizer's step, its gradients clipped before."""
        if self.source.clip_norm is not None:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, self.source.clip_norm)
        self.optimizer.step()

    def _loss(self, tensors: Mapping[str, Tensor]) -> Tensor:
        given = self.source.form.rebuild(tensors)
        args, kwargs = self.source.form.call(given)
        output = self.model(*args, **kwargs)
        return check_loss(find_loss(output) if self.source.loss is None else self.source.loss(output, given))

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters()}


def _program_against_captured(
    step: ForwardStep,
    captured: Captured,
    pipeline: Pipeline,
    weights: Mapping[str, Tensor],
    num_steps: int,
    seed: int = 0,
) -> list[Difference]:
    with default_float64():
        double = {name: promoted(value) for name, value in weights.items()}
        exact = promote_captured(captured)
        reference = Reference(exact, step.microbatches, initial_values(step, exact, double))
        virtual = VirtualMesh(promote_pipeline(pipeline))
        present = {slot for stage in pipeline.stages for slot in stage.values}
        virtual.load({slot: value for slot, value in reference.values.items() if slot in present})
        found: list[Difference] = []
        for index in range(num_steps):
            keys = random_keys(seed, index, step.microbatches)
            batch = {name: promoted(value) for name, value in step.batch_tensors().items()}
            got = virtual.step(batch, captured.scalars, keys)
            expected = reference.backward(
                lambda i: {name: promoted(value) for name, value in step.microbatch(step.batch, i).items()}, keys, batch
            )
            held = {name: _gradient(virtual, name) for name in reference.gradients}
            gradients = {name: value for name, value in held.items() if value is not None}
            found += _compare_gradients(index, got, expected, gradients, reference)
            # as above: a rounding error over Adam's eps is an update that says nothing about the program's
            reference.gradients |= gradients
            reference.update(captured.scalars)
            if reference.grad_norm is not None:
                relative = relative_difference(got["grad_norm"], reference.grad_norm)
                found.append(Difference(HALVES[1], index, "grad_norm", relative, EXACT))
            found += _compare_values(index, virtual, reference, present)
    return found


def _gradient(virtual: VirtualMesh, name: str) -> Tensor | None:
    """The step's whole gradient, what tied parameters add to it on several stages summed; None where no slot holds it.

    (Two parameters may share one gradient, which has the name of the other.)
    """
    parts = []
    for stage in virtual.pipeline.stages:
        for slot in (slot for slot in stage.values if slot.kind == "accumulator" and own_name(slot) == name):
            wide, layout = virtual.local(slot, stage.index), stage.values[slot].layout
            parts.append(whole_value(wide, layout, virtual.mesh, str(slot)))
    return torch.stack(parts).sum(0) if parts else None


def _compare_gradients(
    index: int,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    reference: Reference,
) -> Iterator[Difference]:
    for name, value in expected.items():
        yield Difference(HALVES[1], index, name, relative_difference(got[name], value), EXACT)
    floor = _largest(reference.gradients) * ZERO
    for name, value in gradients.items():
        relative = relative_difference(value, reference.gradients[name], floor)
        yield Difference(HALVES[1], index, f"grad:{name}", relative, EXACT)


def _compare_values(index: int, virtual: VirtualMesh, reference: Reference, present: set[Slot]) -> Iterator[Difference]:
    for slot, value in reference.values.items():
        if slot in present:
            gathered = virtual.gather(slot, rtol=EXACT, atol=1e-12)
            yield Difference(HALVES[1], index, str(slot), relative_difference(gathered, value), EXACT)


def promote_captured(captured: Captured) -> Captured:
    """The captured step with every floating dtype promoted to float64."""
    states = {
        name: {key: replace(init, dtype=promoted_dtype(init.dtype)) for key, init in state.items()}
        for name, state in captured.initial_state.items()
    }
    return replace(
        captured,
        gradient=promote_graph(captured.gradient),
        whole=None if captured.whole is None else promote_graph(captured.whole),
        updates=tuple(replace(u, graph=promote_graph(u.graph)) for u in captured.updates),
        initial_state=states,
        constants={name: promoted(value) for name, value in captured.constants.items()},
    )


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in weights.items()}
