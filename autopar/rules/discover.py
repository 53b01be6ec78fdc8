"""A rule found by experiment for an op that has none.

    discover(node)      # Discovery(rule="a b [c], [c] -> a b [c]"), or why there is none: Discovery(reason="…")

The op runs whole and on subsets at its real attributes, on small sizes of equal pattern (`search`); what holds there
is tried again with each letter at its real size, since an op may behave otherwise beyond a size that it knows. Then the
rule as a whole is proven (`prove`) on two-way, three-way and two-axis meshes.

Invariants:
- the same call gives the same rule in every process: effort is counted in runs and elements, never in seconds;
- random ops, and ops that write to their operands, have no rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.errors import RuleError
from autopar.mesh import Mesh
from autopar.private import OpOverload, schema_of
from autopar.rules.aside import CrashError, aside
from autopar.rules.experiment import Observed, first_line, is_equal, num_elements, observed, trials
from autopar.rules.found_text import found_text
from autopar.rules.nodes import call_text, is_random, op_name, result_values, shapes_of, tensor_operands
from autopar.rules.notation import Linear, Rule, Shape, bind, read_rule
from autopar.rules.search import find_letters
from autopar.rules.sizes import at_real, at_sizes, small, stand_ins_of
from autopar.rules.trials import Bench, Letter, Place, Sample

_CHEAP = 1 << 16
"""Elements up to which a rule is proven at all real sizes, too."""

_KINDS = ("positive", "ties")
"""Of values on which a rule is proven that wasn't found by trials on all kinds."""

_MOST_JOINT = 6
"""Floating operands up to which every set of them is tried for joint linearity."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """A rule with its linear operands, or the reason why none was found; and what the op was seen to do beside."""

    rule: str = ""
    reason: str = ""
    seen: Observed | None = None
    rounds: str = ""
    """The dtype that all results are rounded to, though the operands were float64; "" where they aren't."""
    is_refuted: bool = False
    """A rule that was given doesn't fit, or was seen to be wrong; otherwise it just couldn't be tried."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What was found out about an op at some small sizes: it holds for all calls that are tried at these."""

    letters: tuple[Letter, ...]
    linear: Linear
    rounds: str
    proven: frozenset[str] = frozenset()
    """Rules that were proven as a whole at these sizes."""


Memory = dict[str, Learnt]
"""Calls at small sizes → what was learnt there."""


def discover(node: Node, memory: Memory | None = None) -> Discovery:
    """The freest rule that could be proven; one that splits nothing counts as found, too.

    `memory` is read and added to: calls of one op that differ in their sizes alone share what takes long.
    """
    memory = {} if memory is None else memory
    try:
        discovery, learnt = aside(lambda: _discovery(node, memory))
    except CrashError as crash:
        return Discovery(reason=f"{crash} on trial values")
    memory.update(learnt)
    return discovery


def tried(node: Node, text: str, thorough: bool = False) -> Discovery:
    """The rule `text` where it is right at a call: proven at small sizes, and (thorough) at each real one."""
    try:
        return aside(lambda: _tried(node, text, thorough))
    except CrashError as crash:
        return Discovery(reason=f"{crash} on shards", is_refuted=True)


def _discovery(node: Node, memory: Memory) -> tuple[Discovery, Memory]:
    seen = None
    try:
        with trials():
            probe = small(node)
            seen = observed(probe)
            _require_function(node, seen)
            learnt = memory.get(call_text(probe)) or _learnt(probe, _parts(node))
            text = _found(node, probe, learnt)
            learnt = replace(learnt, proven=learnt.proven | {text})
            return Discovery(text, "", seen, learnt.rounds), {call_text(probe): learnt}
    except RuleError as error:
        return Discovery("", str(error), seen), {}
    except Exception as error:  # an op may do anything, and none stops a compile
        return Discovery("", f"it couldn't be tried ({type(error).__name__}: {first_line(error)})", seen), {}


def _learnt(probe: Node, parts: Sequence[int]) -> Learnt:
    bench = Bench.of(probe)
    return Learnt(tuple(find_letters(bench, parts)), _linear_sets(bench), _rounds(bench))


def _found(node: Node, probe: Node, learnt: Learnt) -> str:
    """The rule's text; raises `RuleError` where it can't be proven."""
    letters = [letter for letter in learnt.letters if _holds_at_real_size(node, probe, letter)]
    text = found_text(node, probe, letters, learnt.linear)
    bind(read_rule(text), *shapes_of(node))
    wrong = "" if text in learnt.proven else _counterexample(probe, text, ("positive",), "x=2", "x=3", "x=2 y=2")
    wrong = wrong or _refuted_at_own_sizes(node, probe, text)
    if wrong:
        raise RuleError(f"what holds for its dims one by one doesn't hold together: {wrong}")
    return text


def _rounds(bench: Bench) -> str:
    """The lower precision in which the op computes, as its results on bell-shaped values tell."""
    floats = [r for r in bench.samples[0].results if r is not None and r.is_floating_point()]
    fractions = [r for r in floats if bool((r.isfinite() & (r != r.round())).any())]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if fractions and all(torch.equal(r.to(dtype).to(r.dtype).nan_to_num(), r.nan_to_num()) for r in fractions):
            return str(dtype).removeprefix("torch.")
    return ""


def _tried(node: Node, text: str, thorough: bool) -> Discovery:
    seen, rule = None, read_rule(text)
    try:
        bind(rule, *shapes_of(node))
    except RuleError as error:
        return Discovery(reason=str(error), is_refuted=True)
    try:
        with trials():
            probe = small(node, rule)
            seen = observed(probe)
            _require_function(node, seen)
            wrong = _counterexample(probe, text, _KINDS, "x=2", "x=3")
            wrong = wrong or (_refuted_at_real_sizes(node, probe, rule, text) if thorough else "")
            return Discovery("" if wrong else text, wrong, seen, is_refuted=bool(wrong))
    except RuleError as error:
        return Discovery("", str(error), seen)


def _counterexample(probe: Node, text: str, kinds: Sequence[str], *meshes: str) -> str:
    from autopar.rules.prove import refute  # which needs the passes, and they this package

    wrong = refute(probe, text, [Mesh.parse(mesh) for mesh in meshes], kinds)
    return "" if wrong is None else str(wrong)


# -- what has no rule ---------------------------------------------------------------------------------------------
def _require_function(node: Node, seen: Observed) -> None:
    """Raises `RuleError` where results aren't a function of the operands, or can't be tried."""
    target, called = node.target, (node.target, *node.args)
    values = [operand.meta["val"] for operand in tensor_operands(node)]
    results = [result for result in result_values(node) if result is not None]
    faults = {
        "it writes to its operands": any(isinstance(op, OpOverload) and schema_of(op).is_mutable for op in called),
        "it calls other functions": not isinstance(target, OpOverload),
        "it takes no tensor": not values,
        "an operand or a result is complex": any(value.is_complex() for value in (*values, *results)),
        "its result is undefined": op_name(node).startswith("aten.") and "empty" in op_name(node),
        "an operand is empty": any(0 in value.shape for value in values),
        "it draws random numbers": is_random(node) or seen.draws,
        "it gives two results for equal operands": not seen.repeats,
        "it writes to an operand": seen.writes is not None,
        "its results are the same whatever it is given": not any(seen.varying),
    }
    fault = next((fault for fault, is_so in faults.items() if is_so), None)
    if fault is not None:
        raise RuleError(fault)


# -- real sizes ----------------------------------------------------------------------------------------------------
def _parts(node: Node) -> list[int]:
    """Sizes that whole parts of a dim may have, as the attributes say (the width of a head, or of a block)."""
    return [a for a in pytree.tree_leaves((node.args, node.kwargs)) if type(a) is int and 1 < a <= 1 << 16]


def _holds_at_real_size(node: Node, probe: Node, letter: Letter) -> bool:
    """Whether the letter holds with its dims at their real sizes."""
    own = {n[p.dim] for n, p in zip(shapes_of(node)[0], letter.operands, strict=True) if p is not None}
    if not own & stand_ins_of(node, probe).keys():
        return True
    large = at_real(node, probe, own)
    return large is not None and _holds(large, letter)


def _refuted_at_real_sizes(node: Node, probe: Node, rule: Rule, text: str) -> str:
    """A counterexample with one size real, or "" where there is none that can be tried."""
    for size in stand_ins_of(node, probe):
        large = at_real(node, probe, [size], rule)
        wrong = _counterexample(large, text, _KINDS, "x=2", "x=4") if large is not None else ""
        if wrong:
            return wrong
    return ""


def _refuted_at_own_sizes(node: Node, probe: Node, text: str) -> str:
    """A counterexample at all sizes real, or "" where there is none, or it would take long."""
    if not stand_ins_of(node, probe):
        return ""
    try:
        whole = at_sizes(node, {})
    except RuleError:
        return ""
    return _counterexample(whole, text, ("positive",), "x=2") if num_elements(whole) <= _CHEAP else ""


def _holds(probe: Node, letter: Letter) -> bool:
    shapes = shapes_of(probe)[0]
    sizes = {_factor_size(shape, place) for shape, place in zip(shapes, letter.operands, strict=True) if place}
    if len(sizes) != 1:
        return False
    found = Bench.of(probe, ("normal", "positive"), seed=1).letter(sizes.pop(), letter.operands)
    return found is not None and found.results == letter.results


def _factor_size(shape: Shape, place: Place) -> int:
    return shape[place.dim] // (place.major * place.minor)


# -- linearity -----------------------------------------------------------------------------------------------------
def _linear_sets(bench: Bench) -> Linear:
    """The smallest sets of operands in which all results are jointly linear."""
    results = [r for r in bench.samples[0].results if r is not None]
    floating = [i for i, value in enumerate(bench.samples[0].values) if value.is_floating_point()]
    if not results or not all(r.is_floating_point() for r in results):
        return ()
    found: list[tuple[int, ...]] = []
    for group in _groups(floating):
        if not any(set(smaller) <= set(group) for smaller in found) and _is_linear(bench, group):
            found.append(group)
    return tuple(found)


def _groups(operands: Sequence[int]) -> Iterator[tuple[int, ...]]:
    sizes = range(1, len(operands) + 1) if len(operands) <= _MOST_JOINT else (1, len(operands))
    return itertools.chain.from_iterable(itertools.combinations(operands, size) for size in sizes)


def _is_linear(bench: Bench, group: tuple[int, ...]) -> bool:
    """f(x + y) = f(x) + f(y) and f(0) = 0 on every kind of values, where not everything is 0."""
    for sample in bench.samples:
        given = dict(enumerate(sample.values))
        others = {i: -2.0 * given[i].roll(1, 0) if given[i].dim() else 3.0 * given[i] for i in group}
        zeros = {i: torch.zeros_like(given[i]) for i in group}
        if not (_adds_up(bench, sample, others) and _adds_up(bench, sample, zeros)):
            return False
    return any(r is not None and bool(r.any()) for sample in bench.samples for r in sample.results)


def _adds_up(bench: Bench, sample: Sample, addends: Mapping[int, Tensor]) -> bool:
    """Whether the results change by what they are for the addends alone, added to some operands of the sample."""
    given = dict(enumerate(sample.values))
    second = bench.run(list({**given, **addends}.values()))
    total = bench.run(list({**given, **{i: given[i] + addend for i, addend in addends.items()}}.values()))
    if second is None or total is None:
        return False
    results = [r for r in zip(sample.results, second, total, strict=True) if r[0] is not None]
    return all(
        a is not None and b is not None and c is not None and bool(c.isfinite().all()) and is_equal(a + b, c)
        for a, b, c in results
    )
