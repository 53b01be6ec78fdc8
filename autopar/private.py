"""Every use of a private or unstable function of torch and transformers, each behind a name of our own.

A newer or older torch that lacks one of them gives a `CaptureError` that names the function, at the moment when it is
needed and not before.

Invariants:
- nothing else in `autopar` or `passes` touches an underscore name of torch or transformers;
- whatever is changed in another library is changed inside a context manager and put back.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from autopar.errors import CaptureError
from autopar.experts import experts_forward


def _private(module: str, name: str) -> Any:
    """The attribute `name` of `module`, or a clear error."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        message = f"torch {torch.__version__} has no {module}.{name}, which capture needs; use torch 2.11 to 2.13"
        raise CaptureError(message) from None


# -- ops -------------------------------------------------------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """The schema of an `OpOverload`: argument names, and which of them alias or are written."""
    return op._schema


# -- fake tensors ----------------------------------------------------------------------------------------------------


def new_fake_mode(*, symbolic: bool = False) -> Any:
    """A mode under which tensors have shapes and no data; real tensors met on the way become constants."""
    options: dict[str, Any] = {"allow_non_fake_inputs": True}
    if symbolic:
        options["shape_env"] = _private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
    return _private("torch._subclasses", "FakeTensorMode")(**options)


def is_fake(value: object) -> bool:
    """Whether `value` is a tensor without data."""
    return isinstance(value, _private("torch._subclasses", "FakeTensor"))


def cpu_fake(mode: Any, like: Tensor, symbolic_dims: Sequence[int] | None = None) -> Tensor:
    """A contiguous fake CPU tensor of the sizes of `like`; `symbolic_dims` become symbols, equal sizes sharing one."""
    if symbolic_dims is None:
        with mode:
            return torch.empty(like.shape, dtype=like.dtype)
    dynamic = _private("torch.fx.experimental.symbolic_shapes", "DimDynamic")
    context = _private("torch.fx.experimental.symbolic_shapes", "StatelessSymbolicContext")
    sizes = [dynamic.DUCK if dim in symbolic_dims else dynamic.STATIC for dim in range(like.dim())]
    real = torch.empty(like.shape, dtype=like.dtype)
    fake: Tensor = mode.from_tensor(real, symbolic_context=context(dynamic_sizes=sizes))
    return fake


def as_fake(mode: Any, meta: Tensor) -> Tensor:
    """A fake CPU tensor of the sizes and strides of a meta tensor: what calls in the mode give, in a tenth of the time
    or less."""
    fake: Tensor = _private("torch._subclasses", "FakeTensor")(mode, meta, torch.device("cpu"))
    return fake


def meta_twin(value: Tensor) -> Tensor:
    """A meta tensor that lies in its storage as a (fake) tensor lies in its own."""
    whole = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device="meta")
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def size_expression(size: Any) -> Any:
    """The sympy expression of a symbolic size, or the int itself."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, as long as one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Ops inside run for real, whatever dispatch modes are active."""
    disabled: contextlib.AbstractContextManager[Any] = _private(
        "torch.utils._python_dispatch", "_disable_current_modes"
    )()
    return disabled


def is_data_dependent(error: BaseException) -> bool:
    """Whether `error` says that a tensor's value was asked for while tracing."""
    names = {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}
    return type(error).__name__ in names or "trying to get a value out of symbolic" in str(error)


# -- tracing ---------------------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> fx.GraphModule:
    """`function` as a graph of ATen ops, at the fake `arguments`; node labels are kept."""
    make_fx = _private("torch.fx.experimental.proxy_tensor", "make_fx")
    without_checks = _swapped(torch.__dict__, _check_tensor_all_with=lambda *check: None)  # of values, which fakes lack
    with torch.fx.traceback.preserve_node_meta(), without_checks:
        graph: fx.GraphModule = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*arguments)
    return graph


def trace_functional(function: Callable[..., Any], arguments: Sequence[Any]) -> fx.GraphModule:
    """`trace` under functional tensors: the graph has no mutating ops."""
    wrap = _private("torch._subclasses.functional_tensor", "dispatch_functionalize")
    functional_mode = _private("torch._subclasses.functional_tensor", "FunctionalTensorMode")
    return trace(wrap(function, functional_mode()), arguments)


def functionalize(graph: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """The same graph without mutating ops: a second trace, at the same fake values."""

    def run(*arguments: Any) -> Any:
        return fx.Interpreter(graph).run(*arguments, enable_io_processing=False)

    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with mode:
        return trace_functional(run, values)


def gradients(output: Tensor, inputs: Sequence[Tensor], cotangent: Tensor) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, None for what `output` doesn't depend on; function modes stay on in the backward.

    (torch's own leaves them off: what `torch.utils.checkpoint` runs again would be traced as other ops.)
    """
    run = _private("torch.autograd.graph", "_engine_run_backward")
    found: tuple[Tensor | None, ...] = run(
        (output,), (cotangent,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def set_label(label: dict[str, str]) -> None:
    """Nodes traced from now on carry `label` as `meta["custom"]`."""
    torch.fx.traceback.get_current_meta()["custom"] = label


def rename(node: fx.Node, name: str) -> None:
    """Gives a placeholder a readable name, made unique."""
    node._rename(name)
    node.target = node.name


def sequence_number() -> int:
    """The number that autograd will give to the next recorded op."""
    number: int = _private("torch.autograd", "_get_sequence_nr")()
    return number


def sequence_number_of(grad_fn: Any) -> int:
    """The number of a recorded op: backward nodes are matched to forward code by it."""
    number: int = grad_fn._sequence_nr()
    return number


# -- initialisation --------------------------------------------------------------------------------------------------

_INITIALIZERS: Any = torch.library.Library("autopar_init", "DEF")  # type: ignore[no-untyped-call]
_INITIALIZERS.define(
    "trunc_normal_(Tensor(a!) x, float mean, float std, float a, float b) -> Tensor(a!)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_INITIALIZERS.impl(
    "trunc_normal_", lambda x, *bounds: _private("torch.nn.init", "_no_grad_trunc_normal_")(x, *bounds), "CPU"
)
torch.library.register_fake("autopar_init::trunc_normal_", lambda x, mean, std, a, b: x, lib=_INITIALIZERS)


@contextlib.contextmanager
def rejection_sampling_as_ops() -> Iterator[None]:
    """Inside, `torch.nn.init.trunc_normal_`, which loops on the values it drew, is one op."""

    def trunc_normal_(x: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if generator is not None:
            raise CaptureError("the factory initialises weights with a generator of its own; use the global one")
        with torch.no_grad():
            drawn: Tensor = torch.ops.autopar_init.trunc_normal_(x, mean, std, a, b)
        return drawn

    namespace = _private("torch.nn.init", "__dict__")
    if "_no_grad_trunc_normal_" not in namespace:
        yield
        return
    with _swapped(namespace, _no_grad_trunc_normal_=trunc_normal_):
        yield


@contextlib.contextmanager
def traceable_modules() -> Iterator[None]:
    """Inside, what some modules of torch do that no trace can follow is done otherwise, with the same result.

    - `SyncBatchNorm` is a batch norm: in a process group it would refuse tensors that are on no GPU;
    - a batch norm that averages cumulatively (`momentum=None`) divides by its count of batches as a tensor;
    - a reentrant checkpoint is one that isn't: its backward can't run for chosen inputs.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_swapped_attribute(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward))
        stack.enter_context(_swapped(nn.modules.batchnorm.__dict__, float=_float))
        stack.enter_context(_swapped_attribute(CheckpointFunction, "apply", _checkpoint))
        yield


def _float(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else float(value)


def _checkpoint(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        with torch.no_grad():  # as a reentrant one, which sees no other inputs
            return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def _swapped_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


# -- optimizers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def traceable_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Patches what some optimizers do on Python scalars, so that their step traces with 0-d tensors."""
    with contextlib.ExitStack() as stack:
        init = getattr(type(optimizer), "_init_group", None)
        if type(optimizer).__name__ == "Adafactor" and init is not None:
            stack.enter_context(_swapped(init.__globals__, max=_max, min=_min))
        if type(optimizer).__name__ == "RAdam":
            stack.enter_context(_swapped(torch.compiler.__dict__, is_compiling=lambda: True))
        yield


def _max(a: Any, b: Any) -> Any:
    return (
        torch.clamp(a, min=b)
        if isinstance(a, Tensor)
        else torch.clamp(b, min=a)
        if isinstance(b, Tensor)
        else max(a, b)
    )


def _min(a: Any, b: Any) -> Any:
    return (
        torch.clamp(a, max=b)
        if isinstance(a, Tensor)
        else torch.clamp(b, max=a)
        if isinstance(b, Tensor)
        else min(a, b)
    )


@contextlib.contextmanager
def _swapped(namespace: dict[str, Any], **values: Any) -> Iterator[None]:
    missing = object()
    saved = {name: namespace.get(name, missing) for name in values}
    namespace.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is missing:
                del namespace[name]
            else:
                namespace[name] = value


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a part of `model` comes from transformers."""
    return any(cls.__module__.startswith("transformers.") for module in model.modules() for cls in type(module).__mro__)


@contextlib.contextmanager
def traceable_hugging_face(model: nn.Module, *, packed: bool) -> Iterator[None]:
    """No key-value cache, experts whose tokens can be split, and masks that stay symbolic: unless samples are packed,
    attention gets `is_causal=True`."""
    if not is_hugging_face(model):
        yield
        return
    with contextlib.ExitStack() as stack:
        for config in _configs(model):
            stack.enter_context(_swapped(config.__dict__, use_cache=False))
        if not packed:
            masks = _private("transformers.masking_utils", "__dict__")
            if "find_packed_sequence_indices" not in masks:
                raise CaptureError(
                    "transformers.masking_utils has no find_packed_sequence_indices; use transformers 4.56 to 5"
                )
            stack.enter_context(_swapped(masks, find_packed_sequence_indices=lambda position_ids: None))
        if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
            interface = _private("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS")
            stack.enter_context(_swapped_attribute(interface, "get_interface", lambda name, own: experts_forward))
        yield


def _configs(model: nn.Module) -> list[Any]:
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [config for config in configs.values() if hasattr(config, "use_cache")]
