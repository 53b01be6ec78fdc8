"""Capture: the step of a single-device model as graphs of ATen ops."""

from autopar.capture.graphs import (
    Captured,
    Role,
    StateInit,
    UpdateGraph,
    assign_keys,
    graph_hash,
    graph_text,
    op_name,
    outputs,
    placeholders,
)
from autopar.capture.step import ForwardStep, TrainStep

__all__ = [
    "Captured",
    "ForwardStep",
    "Role",
    "StateInit",
    "TrainStep",
    "UpdateGraph",
    "assign_keys",
    "graph_hash",
    "graph_text",
    "op_name",
    "outputs",
    "placeholders",
]
