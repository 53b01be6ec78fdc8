"""Linear programs as MathOpt takes them soonest: as one message of whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import model_pb2

from autopar.solve.problem import Array, Index


@dataclass(slots=True)
class Rows:
    """A linear program's constraints, one after another."""

    entries: list[tuple[Index, Index, Array]] = field(default_factory=list)
    """(rows, variables, coefficients)."""
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, coefficients: Array, lower: float, upper: float) -> None:
        """One, with a coefficient for each variable."""
        used = np.flatnonzero(coefficients)
        self.entries.append((np.full(len(used), len(self.lower)), used, coefficients[used]))
        self.lower.append(lower)
        self.upper.append(upper)

    def add_equal(self, entries: tuple[Index, Index, Array], count: int, value: float) -> None:
        """Several, from sparse entries."""
        self.entries.append((len(self.lower) + entries[0], entries[1], entries[2]))
        self.lower += [value] * count
        self.upper += [value] * count

    def add_least(self, entries: Sequence[tuple[int, float]], lower: float) -> None:
        """One that is at least `lower`, from (variable, coefficient)."""
        columns, values = zip(*entries, strict=True)
        self.entries.append((np.full(len(columns), len(self.lower)), np.array(columns), np.array(values)))
        self.lower.append(lower)
        self.upper.append(np.inf)


def program(rows: Rows, objective: Array, lower: list[float]) -> model_pb2.ModelProto:
    """The program as MathOpt's message, which takes whole arrays."""
    proto, used = model_pb2.ModelProto(), np.flatnonzero(objective)
    proto.variables.ids.extend(range(len(lower)))
    proto.variables.lower_bounds.extend(lower)
    proto.variables.upper_bounds.extend([np.inf] * len(lower))
    proto.variables.integers.extend([False] * len(lower))
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    proto.objective.linear_coefficients.values.extend(objective[used].tolist())
    proto.linear_constraints.ids.extend(range(len(rows.lower)))
    proto.linear_constraints.lower_bounds.extend(rows.lower)
    proto.linear_constraints.upper_bounds.extend(rows.upper)
    row, column, value = (np.concatenate([entry[part] for entry in rows.entries]) for part in range(3))
    order = np.lexsort((column, row))
    proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(value[order].tolist())
    return proto
