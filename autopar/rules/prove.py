"""Proof of a rule by execution: run the op whole, run it on the shards of each choice, combine, compare.

    executed, wrong = prove(node, Mesh.parse("x=2"))      # one Counterexample per wrong choice

The op is localised by the same pass as in a real program and run on all ranks of a virtual mesh in lock-step. Floating
values are random float64 (with operands that a partial choice makes partial given as random addends), integer operands
that index a factor are drawn from its range, duplicates included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.program.promote import default_float64, promote_nodes, promoted, promoted_dtype
from autopar.program.virtual import Lockstep, poisoned_shard
from autopar.rules.annotate import annotate_factors
from autopar.rules.choices import Choice, choice_text, enumerate_choices, operand_layouts, result_layouts
from autopar.rules.experiment import TOLERANCE, at_shapes, difference, draw_like, run
from autopar.rules.factors import LeafRule
from autopar.rules.nodes import op_name, result_values, shapes_of, tensor_operands
from passes.localise_shapes import localise_graph

Sample = Callable[[Node, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A choice under which the shards don't combine to the whole, or (`error`) can't be run at all."""

    op: str
    choice: str
    result: int
    difference: float
    error: str = ""

    def __str__(self) -> str:
        fault = self.error or f"result {self.result} differs by {self.difference:.2e}"
        return f"{self.op} under '{self.choice}': {fault}"


def single_op(node: Node) -> tuple[Graph, Node]:
    """A graph with `node` alone between placeholders and output, annotated with its leaf rule."""
    graph = Graph()
    env: dict[Node, Node] = {}
    place = {"stage": 0, "phase": "forward", "level": "step"}
    for i, operand in enumerate(dict.fromkeys(node.all_input_nodes)):
        env[operand] = graph.placeholder(f"x{i}")
        env[operand].meta = {"val": operand.meta["val"], "key": f"x{i}", **place}
    copy = graph.node_copy(node, env.__getitem__)
    copy.meta = {**node.meta, "key": "op", "path": "", **place}
    graph.output(copy)
    annotate_factors(graph)
    return graph, copy


def prove(
    node: Node,
    mesh: Mesh,
    sample: Sample | Sequence[Sample] | None = None,
    choices: Sequence[Choice] | None = None,
    seed: int = 0,
) -> tuple[int, list[Counterexample]]:
    """Executes every choice of the node's rule on `mesh`, on the inputs of each `sample`.

    Returns how many executions there were, and the counterexamples. Choices that no graph of this op alone can have
    are left out: one value in two layouts, a partial bool.
    """
    samples = (sample,) if sample is None or callable(sample) else tuple(sample)
    with default_float64():
        _, probe = single_op(node)
        rule: LeafRule = probe.meta["rule"]
        trials = [_trial(probe, rule, draw or random_value, torch.Generator().manual_seed(seed)) for draw in samples]
        picked = list(enumerate_choices(rule, mesh) if choices is None else choices)
        tried = [found for choice in picked if (found := _try(node, mesh, choice, trials)) is not None]
    return len(tried) * len(trials), [c for found in tried for c in found]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Inputs by placeholder, and the op's results on them."""

    inputs: dict[str, Tensor]
    whole: list[Tensor | None]


def _trial(node: Node, rule: LeafRule, sample: Sample, generator: torch.Generator) -> _Trial:
    inputs = _inputs(node, rule, sample, generator)
    result = torch.fx.Interpreter(torch.nn.Module(), graph=promote_nodes(node.graph)).run(*inputs.values())
    return _Trial(inputs, list(result) if isinstance(result, (tuple, list)) else [result])


def draw(node: Node, sample: Sample, generator: torch.Generator) -> list[Tensor]:
    """Values of the node's distinct operands, in order; those that index a factor are drawn from its range."""
    _, probe = single_op(node)
    return list(_inputs(probe, probe.meta["rule"], sample, generator).values())


def refute(node: Node, text: str, meshes: Sequence[Mesh], kinds: Sequence[str]) -> Counterexample | None:
    """The first choice of the rule `text` under which shards of `node` don't combine to the whole, or None.

    `kinds`: of values; the op must take the first. On a mesh of two axes, of equal size, pairs of splits are tried.
    Raises `RuleError` where the rule doesn't fit the node's operands and results at all.
    """
    probe = at_shapes(node, shapes_of(node)[0])  # each operand a value of its own: `f(x, x)` may split them apart
    probe.meta["found_rule"] = text
    rule: LeafRule = single_op(probe)[1].meta["rule"]
    samples = [_of_kind(kind) for kind in kinds if kind == kinds[0] or _takes(probe, kind)]
    for mesh in meshes:
        choices = [choice for choice in enumerate_choices(rule, mesh) if _is_first_of_its_kind(choice, mesh)]
        _, wrong = prove(probe, mesh, samples, choices)
        if wrong:
            return wrong[0]
    return None


def _of_kind(kind: str) -> Sample:
    return lambda operand, generator: draw_like(operand, kind, generator)


def _is_first_of_its_kind(choice: Choice, mesh: Mesh) -> bool:
    """Of two axes: whether both split, in the order of what they split."""
    splits = [(s.factor, s.linear) for s in sorted(choice, key=lambda s: mesh.names.index(s.axis))]
    return len(mesh.spmd.axes) == 1 or (len(splits) > 1 and splits == sorted(splits))


def _takes(probe: Node, kind: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        run(probe, [draw_like(operand, kind, generator) for operand in tensor_operands(probe)])
    except Exception:
        return False
    return True


def _inputs(node: Node, rule: LeafRule, sample: Sample, generator: torch.Generator) -> dict[str, Tensor]:
    indexed = dict(rule.indexes)
    values: dict[str, Tensor] = {}
    for i, operand in enumerate(tensor_operands(node)):
        if i in indexed:
            size = math.prod(factor.size for factor in rule.factors if factor.letter == indexed[i])
            value = operand.meta["val"]
            values[operand.name] = torch.randint(0, size, tuple(value.shape), generator=generator, dtype=value.dtype)
        else:
            values.setdefault(operand.name, sample(operand, generator))
    return values


def random_value(operand: Node, generator: torch.Generator) -> Tensor:
    """Floating values in [0.5, 1.5), integers 0 and 1, both parts of complex ones."""
    value = operand.meta["val"]
    shape = tuple(value.shape)
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if value.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator, dtype=value.dtype)
    return promoted(torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5)


def ties(operand: Node, generator: torch.Generator) -> Tensor:
    """Few distinct values, negative ones and zero among them."""
    value = operand.meta["val"]
    drawn = torch.randint(-2, 3, tuple(value.shape), generator=generator)
    return drawn > 0 if value.dtype == torch.bool else drawn.to(promoted_dtype(value.dtype))


def _try(node: Node, mesh: Mesh, choice: Choice, trials: Sequence[_Trial]) -> list[Counterexample] | None:
    """The counterexamples of one choice; None where it can't be executed alone."""
    graph, probe = single_op(node)
    rule: LeafRule = probe.meta["rule"]
    probe.meta["choice"] = choice
    needed = operand_layouts(rule, choice)
    for operand, layout in zip(tensor_operands(probe), needed, strict=True):
        if operand.meta.setdefault("layout", layout) != layout:
            return None  # one value in two layouts: a graph would reshard one of them
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if any(n.meta["layout"].partial and n.meta["val"].dtype == torch.bool for n in placeholders):
        return None  # no op leaves a bool partial
    try:
        differences = _execute(graph, probe, mesh, trials)
    except Exception as error:  # a wrong rule may leave shards that the op refuses
        text = choice_text(rule, choice)
        return [Counterexample(op_name(node), text, 0, float("inf"), f"{type(error).__name__}: {error}")]
    return [
        Counterexample(op_name(node), choice_text(rule, choice), index, difference)
        for index, difference in differences
        if not difference <= TOLERANCE
    ]


def _execute(graph: Graph, probe: Node, mesh: Mesh, trials: Sequence[_Trial]) -> list[tuple[int, float]]:
    """Runs the shards; how far each combined result is from the whole one."""
    layouts = result_layouts(probe.meta["rule"], probe.meta["choice"])
    probe.meta["layout"] = _spread(probe, layouts)
    placeholders = [(n.name, n.meta["layout"]) for n in graph.nodes if n.op == "placeholder"]
    aligned = _aligned(probe, layouts)
    is_linear = any(split.linear >= 0 for split in probe.meta["choice"])
    several = isinstance(probe.meta["val"], (tuple, list))
    localise_graph(graph, mesh)
    local = promote_nodes(graph)
    output = next(n for n in reversed(local.nodes) if n.op == "output")
    output.args = ((output.args[0],),)
    differences = []
    for trial in trials:
        shards = [_shards(trial.inputs[name], layout, mesh) for name, layout in placeholders]
        (got,) = Lockstep(mesh).run_graph(local, shards, lambda _node, _wide: None)
        differences += [
            (index, _difference([rank[index] if several else rank for rank in got], layout, expected, mesh, is_linear))
            for index, (layout, expected) in enumerate(zip(aligned, trial.whole, strict=True))
            if layout is not None and expected is not None
        ]
    return differences


def _spread(node: Node, layouts: tuple[Layout, ...]) -> Any:
    aligned = _aligned(node, layouts)
    return tuple(aligned) if isinstance(node.meta["val"], (tuple, list)) else aligned[0]


def _aligned(node: Node, layouts: tuple[Layout, ...]) -> list[Layout | None]:
    remaining = iter(layouts)
    return [None if value is None else next(remaining) for value in result_values(node)]


def _shards(value: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The local tensors of all ranks; a partial value is random addends that sum to the whole."""
    ranks = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    locals_ = [poisoned_shard(value, layout, mesh, at).contiguous() for at in ranks]
    if not layout.partial:
        return locals_
    noise = torch.Generator().manual_seed(1)
    for axis, _ in layout.partial:
        addend = torch.randn(locals_[0].shape, generator=noise).to(value.dtype)  # equal over the other axes
        for group in mesh.groups(axis):
            locals_[group[0]] = locals_[group[0]] + addend
            locals_[group[-1]] = locals_[group[-1]] - addend
    return locals_


def _difference(got: list[Tensor], layout: Layout, expected: Tensor, mesh: Mesh, is_linear: bool) -> float:
    """How far the combined ranks are from `expected`, or replicas from each other.

    Where a linear op divides by 0, addends give inf - inf: there, nothing is compared.
    """
    combined = layout.unshard(lambda at: got[mesh.rank(at)], mesh)
    if is_linear and (combined.shape, combined.dtype) == (expected.shape, expected.dtype):
        combined = combined.where(expected.isfinite(), expected)
    apart = [difference(combined, expected)]
    for axis in set(mesh.names) - {*layout.split_axes, *dict(layout.partial)}:
        apart += [difference(got[rank], got[group[0]]) for group in mesh.groups(axis) for rank in group[1:]]
    return max(apart)
