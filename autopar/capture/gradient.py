"""The gradient graph: parameters, buffers and a microbatch → loss, gradients and new buffers.

    traced = trace_gradient(Request(model, form, trainable=("wte.weight", …), …))

The model runs on fake tensors under make_fx, then autograd runs on what that recorded; where the trace holds mutations
it is traced again under functional tensors.

Invariants:
- the graph is functional, clean and labelled (see `graphs`); every parameter has a placeholder, used or not;
- loss and gradients are a microbatch's share of the whole batch's: over the microbatches, they add up to those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import private
from autopar.capture.batches import BatchForm
from autopar.capture.clean import clean
from autopar.capture.drawing import drawing
from autopar.capture.graphs import RANDOM_KEY, Role, assign_keys
from autopar.capture.labels import CallMode, Labels, error_source
from autopar.capture.replaced import replacements
from autopar.capture.shares import Shares, share_out, totals_graph
from autopar.capture.terms import mark_loss, term_marks
from autopar.errors import CaptureError, Error
from autopar.private import OpOverload, schema_of


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be traced."""

    model: nn.Module
    form: BatchForm
    inputs: dict[Role, Tensor]
    """params, buffers, microbatch tensors and the random key, in this order; only their shapes are used."""
    trainable: tuple[str, ...]
    """Parameters that want a gradient; none: the forward alone is traced."""
    loss: Callable[[Any, Any], Any] | None
    microbatches: int = 1
    mixed: bool = False
    wants_gradients: bool = True
    """False: the trace ends with the loss."""
    symbolic_dims: dict[Role, tuple[int, ...]] = field(default_factory=dict)
    """Dims to be traced as symbols."""
    whole_batch: dict[Role, Tensor] = field(default_factory=dict)
    """The batch's tensors, of all microbatches."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The gradient graph, the roles of its outputs, and the values of constants made in the forward."""

    graph: fx.GraphModule
    outputs: tuple[Role, ...]
    constants: dict[str, Tensor]
    whole: fx.GraphModule | None = None
    """The whole batch → the graph's inputs of kind "total", in their order."""
    averaged: tuple[str, ...] = ()
    """Lines of the loss's terms that are averaged over microbatches."""


def trace_gradient(request: Request) -> Traced:
    """Raises `CaptureError` where the model can't be captured, naming the user's line."""
    run, graph, constants, mode = _traced(request)
    shares = Shares({}, ())
    whole: fx.GraphModule | None = None
    if request.trainable and request.microbatches > 1:
        shares, whole = _shared_out(request, graph, mode)
    outputs = _drop_unchanged(graph, run.outputs)
    _drop_unused(graph)
    finish(graph)
    names = _buffer_names(graph)
    return Traced(graph, outputs, {n: v for n, v in constants.items() if n in names}, whole, shares.averaged)


def _traced(request: Request) -> tuple[_Step, fx.GraphModule, dict[str, Tensor], Any]:
    """What was run, its clean graph, constants, and the mode of its values."""
    mode = private.new_fake_mode(symbolic=bool(request.symbolic_dims))
    fakes = {role: _fake(mode, role, value, request) for role, value in request.inputs.items()}
    run = _Step(request)
    with mode, _errors_explained(run):
        graph = private.trace(run.flat, list(fakes.values()))
    if _mutates(graph):
        graph = private.functionalize(graph, mode)
    for role, node in zip(fakes, _placeholder_nodes(graph), strict=True):
        node.meta["role"] = role
    constants = _constants_as_buffers(graph, mode)
    return run, clean(graph, mode), constants, mode


def _shared_out(request: Request, graph: fx.GraphModule, mode: Any) -> tuple[Shares, fx.GraphModule | None]:
    """The graph's loss and gradients as shares of the whole batch's; see `shares`."""
    loss = next(iter(reversed(graph.graph.nodes))).args[0][0]
    inputs = {**request.inputs, **request.whole_batch}
    whole = dataclasses.replace(request, inputs=inputs, symbolic_dims={}, wants_gradients=False)
    traced = _traced(whole)[1]
    shares = share_out(graph, traced, loss, request.microbatches, mode)
    totals = totals_graph(traced, shares.totals)
    if totals is not None:
        finish(totals, phase="prologue")
    if shares.averaged:
        warnings.warn(
            f"loss ({', '.join(shares.averaged)}): not a sum or mean over samples; it is computed for each of the "
            f"{request.microbatches} microbatches and averaged, as accumulating their gradients does",
            RuntimeWarning,
            stacklevel=2,
        )
    return shares, totals


def finish(graph: fx.GraphModule, *, phase: str = "") -> None:
    """Turns the tracer's labels into the documented metadata, drops all other metadata, and compiles the graph."""
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            private.rename(node, re.sub(r"\W", "_", node.meta["role"].name or node.meta["role"].kind))
        if node.op == "output":
            node.args = (tuple(node.args[0]),)
        label = node.meta.get("custom", {})
        meta = {name: node.meta[name] for name in ("val", "role") if name in node.meta}
        meta["phase"] = phase or label.get("phase", "forward")
        node.meta = {**meta, "path": label.get("path", ""), "source": label.get("source", "")}
    assign_keys(graph.graph)
    graph.graph.lint()
    graph.recompile()


# -- the traced function ---------------------------------------------------------------------------------------------


class _Running(nn.Module):
    """The model with all that is run on it, so that `functional_call` swaps its parameters for the backward, too.

    What a checkpoint runs again would else read the parameters' values at capture.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Any:
        """The results of `run`."""
        return self.run()


class _Step:
    """The function that make_fx sees, and what it found out."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.roles = tuple(request.inputs)
        self.labels = Labels(_Step.flat.__code__)
        self.outputs: list[Role] = []

    def flat(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Placeholders in the order of `roles` → the flat outputs; `outputs` says what they are."""
        by_kind: dict[str, dict[str, Tensor]] = {"param": {}, "buffer": {}, "batch": {}, "random": {}}
        for role, value in zip(self.roles, values, strict=True):
            by_kind[role.kind][role.name] = value
        state = {f"model.{name}": value for name, value in by_kind["param"].items()}
        state |= {f"model.{name}": value.clone() for name, value in by_kind["buffer"].items()}
        running = _Running(self.request.model, functools.partial(self._run, by_kind))
        results: dict[Role, Tensor] = torch.func.functional_call(running, state, ())
        if self.request.trainable and not self.request.wants_gradients:
            self.outputs = list(results)
            return tuple(value.detach() for value in results.values())
        results.update({Role("buffer", name): state[f"model.{name}"].detach() for name in by_kind["buffer"]})
        self.outputs = list(results)
        return tuple(results.values())

    def _run(self, by_kind: Mapping[str, Mapping[str, Tensor]]) -> dict[Role, Tensor]:
        """Forward and backward, while the model has the traced parameters."""
        with self._following(by_kind["random"][RANDOM_KEY.name]) as calls:
            results = self._forward(calls, by_kind["batch"])
            if self.request.trainable and self.request.wants_gradients:
                results.update(self._backward(calls, results[Role("loss", "loss")], by_kind["param"]))
        return results

    @contextlib.contextmanager
    def _following(self, key: Tensor) -> Iterator[CallMode]:
        """Labels follow the model, random ops draw from `key`; under the mode, calls are replaced."""
        request = self.request
        with (
            self.labels.following(request.model),
            drawing(key, _Step.flat.__code__, request.model) as draws,
            torch.set_grad_enabled(bool(request.trainable)),
        ):
            marks = term_marks() if self._is_shared else {}
            yield CallMode(self.labels, replacements(draws, mixed=request.mixed) | marks)

    @property
    def _is_shared(self) -> bool:
        """Whether the loss is to be shared out to several microbatches."""
        return bool(self.request.trainable) and self.request.microbatches > 1

    def _forward(self, calls: CallMode, batch: Mapping[str, Tensor]) -> dict[Role, Tensor]:
        request = self.request
        given = request.form.rebuild(_cast(batch) if request.mixed else batch)
        args, kwargs = request.form.call(given)
        with calls:
            output = request.model(*args, **kwargs)
            if not request.trainable:
                return {Role("output", name): value for name, value in named_tensors(output)}
            loss = find_loss(output) if request.loss is None else request.loss(output, given)
        loss = check_loss(loss)
        return {Role("loss", "loss"): mark_loss(loss) if self._is_shared else loss}

    def _backward(self, calls: CallMode, loss: Tensor, params: Mapping[str, Tensor]) -> dict[Role, Tensor]:
        self.labels.begin_backward(loss)
        wanted = [params[name] for name in self.request.trainable]
        cotangent = torch.full((), 1.0, dtype=loss.dtype)
        with calls:  # for what the backward runs again
            gradients = private.gradients(loss, wanted, cotangent)
        named = zip(self.request.trainable, gradients, strict=True)
        return {Role("grad", name): gradient for name, gradient in named if gradient is not None}


def _cast(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in batch.items()}


# -- the loss --------------------------------------------------------------------------------------------------------


def find_loss(output: Any) -> Any:
    """The loss in a model's output: the output itself, its `.loss`, or its "loss" entry."""
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    raise CaptureError(
        f"the model returned {type(output).__name__} without a loss; return a scalar loss, an object with `.loss` "
        "(a Hugging Face model returns one when the batch holds `labels`), or pass loss=callable(output, batch)"
    )


def check_loss(loss: Any) -> Tensor:
    """The loss as a 0-d tensor that depends on a parameter."""
    if not isinstance(loss, Tensor):
        raise CaptureError(f"loss: got {type(loss).__name__}; expected a scalar tensor")
    if loss.numel() != 1:
        shape = list(loss.shape)
        raise CaptureError(
            f"loss: got a tensor of shape {shape}; expected a scalar: reduce it, or pass loss=callable(output, batch)"
        )
    if not loss.requires_grad:
        raise CaptureError("loss: depends on no trainable parameter (detached, under no_grad, or all of them frozen)")
    return loss.reshape(()) if loss.dim() else loss


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a model's output, by their place in it ("logits", "hidden.0"; "output" when there is one)."""
    if isinstance(output, Tensor):
        yield name or "output", output
        return
    items = output.items() if isinstance(output, Mapping) else enumerate(output) if _is_sequence(output) else ()
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}" if name else str(key))


def _is_sequence(value: object) -> bool:
    return isinstance(value, (tuple, list))


# -- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors_explained(run: _Step) -> Iterator[None]:
    packed = any(role.name == "position_ids" for role in run.roles)
    try:
        with private.traceable_hugging_face(run.request.model, packed=packed), private.traceable_modules():
            yield
    except Error:
        raise
    except Exception as error:
        raise CaptureError(_explanation(error)) from error


def _explanation(error: Exception) -> str:
    line, text = error_source(error, _Step.flat.__code__)
    where = f"{line}: `{text}`" if line else "the model"
    if private.is_data_dependent(error):
        return (
            f"{where} needs the value of a tensor, but one captured step must serve all batches; "
            "select with torch.where or a mask, use ops whose output shape is fixed, or decide by a Python constant"
        )
    return f"{where} failed while the step was captured: {type(error).__name__}: {error}"


# -- after the trace -------------------------------------------------------------------------------------------------


def _fake(mode: Any, role: Role, value: Tensor, request: Request) -> Tensor:
    dtype = torch.bfloat16 if request.mixed and role.kind == "param" and value.is_floating_point() else value.dtype
    like = torch.empty(value.shape, dtype=dtype, device="meta")
    with torch.no_grad():
        on_cpu = private.cpu_fake(mode, like, request.symbolic_dims.get(role))
    wants = role.kind == "param" and role.name in request.trainable
    return on_cpu.requires_grad_() if wants else on_cpu


def _mutates(graph: fx.GraphModule) -> bool:
    """Whether the trace must be made functional; batch norm mutates its statistics without saying so."""
    hidden = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
    ops = [n.target for n in graph.graph.nodes if isinstance(n.target, OpOverload)]
    return any(schema_of(op).is_mutable or op.overloadpacket.__name__ in hidden for op in ops)


def _placeholder_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _buffer_names(graph: fx.GraphModule) -> set[str]:
    return {node.meta["role"].name for node in _placeholder_nodes(graph) if node.meta["role"].kind == "buffer"}


def _constants_as_buffers(graph: fx.GraphModule, mode: Any) -> dict[str, Tensor]:
    """Constants of the trace become placeholders, and their values are returned by name; scalars become `full`.

    Equal constants (of equal layers, say) are one.
    """
    constants: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], fx.Node] = {}
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in [n for n in graph.graph.nodes if n.op == "get_attr"]:
        value: Tensor = getattr(graph, str(node.target))
        if value.dim() == 0 and not value.is_complex():
            with graph.graph.inserting_before(first):
                new = graph.graph.call_function(torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype})
        else:
            content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = (value.dtype, value.shape, value.stride(), content)
            if kind in known:
                node.replace_all_uses_with(known[kind])
                graph.graph.erase_node(node)
                continue
            role = Role("buffer", f"_constant{len(constants)}")
            constants[role.name] = value.detach().clone()
            with graph.graph.inserting_before(first):
                new = known[kind] = graph.graph.placeholder(role.name)
            new.meta["role"] = role
        with mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        new.meta.update({"val": fake, "custom": node.meta.get("custom", {})})
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    return constants


def _drop_unchanged(graph: fx.GraphModule, roles: list[Role]) -> tuple[Role, ...]:
    """Removes the outputs of buffers that come back as they went in; the roles of the others."""
    output = next(iter(reversed(graph.graph.nodes)))
    items = list(zip(roles, output.args[0], strict=True))
    kept = [(role, node) for role, node in items if role.kind != "buffer" or node.meta.get("role") != role]
    output.args = (tuple(node for _, node in kept),)
    return tuple(role for role, _ in kept)


def _drop_unused(graph: fx.GraphModule) -> None:
    for node in _placeholder_nodes(graph):
        if not node.users and node.meta["role"].kind != "param":
            graph.graph.erase_node(node)
