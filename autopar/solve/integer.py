"""The flow form as a CP-SAT model: whole numbers that bound the true costs from below.

    outcome = search_integers(flow, prices, cutoff, effort)
    outcome.bound       # no choice of the flow's model with an objective under `cutoff` costs less

Invariants:
- costs are rounded down to units (all rounding together stays under a quarter of the gap aimed at) after the couplings'
  prices are taken off, so the optimum of the integer model, in seconds, never exceeds the true one;
- memory in whole bytes is exact (in units of the greatest common divisor); otherwise it is rounded down, and the caller
  checks the choice against the true limits;
- one seed, one worker and a deterministic time limit: the same problem gives the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopar.solve.flow import Flow, Prices, coupled, linear_costs
from autopar.solve.problem import Array, Index

FINEST = 1e-13
LARGEST = 2.0**46
MEMORY_STEPS = 2.0**36


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try: an absolute gap in seconds that is good enough, deterministic time, a wall-clock net, a seed."""

    gap: float
    deterministic_s: float
    wall_s: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The best choice found for what is left, if any, a proven bound, and the deterministic time used."""

    chosen: dict[int, int] | None
    bound: float
    deterministic_s: float


def search_integers(
    flow: Flow,
    prices: Prices,
    bound: float,
    cutoff: float,
    effort: Effort,
    room: Mapping[int, float],
    hint: Mapping[int, int] | None,
) -> Outcome:
    """Looks for the best choice under `cutoff`; `bound` is the bound that `prices` prove, `room` the limits' bytes."""
    unit = max(_unit(flow, effort), (cutoff - bound) / LARGEST, FINEST * max(abs(cutoff), abs(bound)), 1e-300)
    text, offset = _model_text(flow, prices, unit, cutoff, room, hint)
    model = cp_model.CpModel()
    assert model.proto.parse_text_format(text), text[:1000]
    solver = cp_model.CpSolver()
    _set_parameters(solver, effort, unit)
    status = solver.solve(model)
    spent = float(solver.response_proto.deterministic_time)
    assert status != cp_model.MODEL_INVALID, model.validate()
    if status == cp_model.INFEASIBLE:
        return Outcome(None, cutoff, spent)
    least = solver.best_objective_bound
    proven = max(bound, offset + unit * least) if math.isfinite(least) else bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(None, min(cutoff, proven), spent)
    values = np.array(list(solver.response_proto.solution), dtype=float)
    return Outcome(flow.choice(values), min(cutoff, proven), spent)


def _unit(flow: Flow, effort: Effort) -> float:
    """Seconds per unit such that all rounding together stays under a quarter of the gap aimed at."""
    num_rows = 1 + sum(len(term.rows) for term in flow.model.peaks)
    return effort.gap / (4 * num_rows * (1 + len(flow.starts)))


def _set_parameters(solver: cp_model.CpSolver, effort: Effort, unit: float) -> None:
    """One worker with the full linear relaxation (which the default portfolio lacks, and never closes without).

    OR-Tools 9.15: interleaved workers abort the process when presolve proves such a model infeasible; presolve itself
    returned optima that were not (its inclusion rules; `tests/solve` has the instance), and its time doesn't pay here.
    """
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.linearization_level = 2
    parameters.cp_model_presolve = False
    parameters.random_seed = effort.seed
    parameters.max_deterministic_time = max(effort.deterministic_s, 0.1)
    parameters.max_time_in_seconds = max(effort.wall_s, 1.0)
    parameters.absolute_gap_limit = max(0.5, effort.gap / unit)


def _model_text(
    flow: Flow, prices: Prices, unit: float, cutoff: float, room: Mapping[int, float], hint: Mapping[int, int] | None
) -> tuple[str, float]:
    """CP-SAT's text form of the model, and the seconds to add to its objective."""
    model, num_peaks = flow.model, len(flow.model.peaks)
    wide = int(LARGEST)
    parts = ["variables{domain:[0,1]}\n" * flow.size, f"variables{{domain:[{-wide},{wide}]}}\n" * num_peaks]
    ends = np.append(flow.starts, flow.size)
    for first, end in zip(ends[: len(flow.first)].tolist(), ends[1:].tolist(), strict=False):
        parts.append(f"constraints{{exactly_one{{literals:{list(range(first, end))}}}}}\n")
    parts += _coupling_texts(flow)
    for limit, used in flow.memory.items():
        coefficients, capacity = _whole_memory(used, room[limit])
        parts.append(_linear(np.flatnonzero(coefficients), coefficients, -wide * 64, capacity))
    for number, term in enumerate(model.peaks):
        for row in term.rows:
            whole = np.append(-np.floor(term.weight * flow.costs[row] / unit), np.zeros(num_peaks))
            whole[flow.size + number] = 1
            constant = math.floor(term.weight * model.constant[row] / unit)
            parts.append(_linear(np.flatnonzero(whole), whole.astype(np.int64), constant, wide * 64))
    objective, offset = _objective(flow, prices, unit)
    whole = np.append(objective, np.ones(num_peaks, np.int64))
    used_in = np.flatnonzero(whole)
    limit_ = math.ceil((cutoff - offset) / unit) + 1
    parts.append(
        f"objective{{vars:{used_in.tolist()} coeffs:{whole[used_in].tolist()} domain:[{-wide * 64},{limit_}]}}\n"
    )
    parts.append(_hint_text(flow, hint))
    return "".join(parts), offset


def _objective(flow: Flow, prices: Prices, unit: float) -> tuple[Index, float]:
    """Whole coefficients outside the peaks, and the offset in seconds."""
    costs = linear_costs(flow) - coupled(flow, prices.coupling)
    least = np.minimum.reduceat(costs, flow.starts)
    constant = math.fsum(weight * flow.model.constant[row] for row, weight in flow.model.linear.items())
    whole = np.floor((costs - least[flow.group]) / unit)
    return np.minimum(whole, LARGEST / 4).astype(np.int64), constant + float(least.sum())


def _coupling_texts(flow: Flow) -> Iterable[str]:
    rows, columns, values = flow.couplings
    order = np.argsort(rows, kind="stable")
    columns, values = columns[order].tolist(), values[order].astype(int).tolist()
    ends = np.searchsorted(rows[order], np.arange(flow.num_couplings + 1)).tolist()
    for first, end in itertools.pairwise(ends):
        yield f"constraints{{linear{{vars:{columns[first:end]} coeffs:{values[first:end]} domain:[0,0]}}}}\n"


def _linear(used: Index, coefficients: Index, lower: int, upper: int) -> str:
    terms = f"vars:{used.tolist()} coeffs:{coefficients[used].tolist()}"
    return f"constraints{{linear{{{terms} domain:[{lower},{upper}]}}}}\n"


def _whole_memory(used: Array, room: float) -> tuple[Index, int]:
    """Coefficients and capacity in whole units that never forbid what fits."""
    if (used == np.rint(used)).all() and used.max(initial=0.0) < LARGEST:
        whole = used.astype(np.int64)
        divisor = int(np.gcd.reduce(whole)) or 1
        return whole // divisor, math.floor(room / divisor)
    unit = max(room, float(used.max())) / MEMORY_STEPS
    return np.floor(used / unit).astype(np.int64), math.ceil(room / unit)


def _hint_text(flow: Flow, hint: Mapping[int, int] | None) -> str:
    if hint is None:
        return ""
    variables: list[int] = []
    values: list[int] = []
    for node, first in flow.first.items():
        alive = flow.model.alive[node]
        variables += range(first, first + len(alive))
        values += (alive == hint[node]).astype(int).tolist()
    return f"solution_hint{{vars:{variables} values:{values}}}\n"
