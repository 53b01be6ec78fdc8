"""Small parts for tests: a function traced to ATen ops, its arguments named by slots."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.codegen import stage_code
from autopar.program.parts import Part, Slot, StageProgram, Value

ALONE = Mesh(())


def slots(text):
    return tuple(map(Slot.parse, text.split()))


def traced_part(function, inputs, outputs, *arguments, name="forward"):
    """`function` as a part; `inputs` and `outputs` are slots in words."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(argument.clone()) for argument in arguments]
        module = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    return part_of(module, inputs, outputs, name)


def part_of(module, inputs, outputs, name="forward"):
    for node in list(module.graph.nodes):
        if node.op == "output" and not isinstance(node.args[0], (tuple, list)):
            node.args = ((node.args[0],),)
    module.recompile()
    return Part(name, slots(inputs), slots(outputs), fx.GraphModule(module, module.graph))


def values_of(part):
    """A whole layout for every slot of the part."""
    nodes = [node for node in part.graph.graph.nodes if node.op == "placeholder"]
    pairs = [
        *zip(part.inputs, nodes, strict=True),
        *zip(part.outputs, part.graph.graph.output_node().args[0], strict=True),
    ]
    found = {}
    for slot, node in pairs:
        value = node.meta["val"]
        whole = Layout.whole(tuple((size,) if size != 1 else () for size in value.shape))
        found.setdefault(slot, Value(value.dtype, whole))
    return found


def code_of(*parts, mesh=ALONE):
    values = {}
    for part in parts:
        values.update(values_of(part))
    return stage_code(StageProgram(0, {part.name: part for part in parts}, values), mesh)


def run_part(part, *arguments, comm=None, mesh=ALONE):
    """What the generated function gives, under inference mode."""
    function = code_of(part, mesh=mesh).bind(comm, torch.device("cpu"))[part.name]
    with torch.inference_mode():
        return function(list(arguments))


def interpret(part, *arguments):
    """What the graph gives, run node by node."""
    with torch.no_grad():
        return fx.Interpreter(part.graph).run(*arguments, enable_io_processing=False)


class Identity:
    """A communicator of one rank that pretends: gathers repeat, reductions multiply by the axis's size."""

    def __init__(self, size=2):
        self.size, self.calls = size, []

    def all_gather(self, x, axis, dim):
        self.calls.append("all_gather")
        return torch.cat([x] * self.size, dim)

    def all_reduce(self, x, axis, op="sum", inplace=False):
        self.calls.append("all_reduce")
        return x.mul_(self.size) if inplace else x * self.size

    def reduce_scatter(self, x, axis, dim, op="sum"):
        self.calls.append("reduce_scatter")
        return x.chunk(self.size, dim)[0] * self.size

    def shard(self, x, axis, dim):
        return x.chunk(self.size, dim)[0]

    def coordinate(self, axis):
        return 0

    def __getattr__(self, name):
        blocking = getattr(self, name.removesuffix("_start"))

        def start(*args, **kwargs):
            result = blocking(*args, **kwargs)
            self.calls[-1] += "_start"
            return [result]

        return start

    def wait(self, pending):
        self.calls.append("wait")
        return pending[0]
