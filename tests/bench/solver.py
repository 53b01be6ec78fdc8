"""Times the solver on problems shaped like a training step of an 8B Llama.

    python tests/bench/solver.py [--layers 32] [--axes 2] [--seed 0]

Each layer has seven matmuls with a parameter (memory: weight, gradient, moments), an input that is kept for the
backward, two backward matmuls and relays; per mesh axis an op splits one of three factors or nothing. A layout that
the consumer doesn't want is resharded at a price. "Shared" has one layer, with all costs and memory times the layers.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

from autopar.solve.problem import Array, Edge, Limit, Node, Problem, Term, evaluate
from autopar.solve.search import solve

HIDDEN, FEED, KV, TOKENS = 4096, 14336, 1024, 8 * 4096
MATMULS = [
    (HIDDEN, HIDDEN),
    (HIDDEN, KV),
    (HIDDEN, KV),
    (HIDDEN, HIDDEN),
    (HIDDEN, FEED),
    (HIDDEN, FEED),
    (FEED, HIDDEN),
]
OPTIONS = ("none", "batch", "seq", "out", "in", "out2", "batch2")
SPEED, AXES = 4e14, ((8, 2.5e10), (8, 2.5e11))
# per option of a matmul y[t, o] = x[t, i] w[i, o]: layouts of x, w, y (R whole, P partial, else the dim that is split)
LAYOUTS = {
    "none": "RRR",
    "batch": "bRb",
    "seq": "sRs",
    "out": "RoO",
    "in": "IiP",
    "out2": "RqQ",
    "batch2": "cRc",
}
ACTIVATION, WEIGHT = "RbscIOQP", "Roiq"


def reshard(bytes_: float, source: str, target: str, axis: int) -> float:
    """Seconds to change one axis of a layout."""
    size, speed = AXES[axis]
    if source == target or (source == "R" and target != "P"):
        return 0.0
    if target == "P":
        return np.inf
    factor = {("P", "R"): 2.0}.get((source, target), 1.0 if source == "P" or target == "R" else 2.0 / size)
    return 5e-6 + factor * bytes_ * (size - 1) / size / speed


def layouts(letters: str, axes: int) -> list[str]:
    return ["".join(part) for part in itertools.product(letters, repeat=axes)]


def reshard_table(bytes_: float, sources: list[str], targets: list[str]) -> Array:
    """[source, target]: axis by axis, each on what the others leave."""
    table = np.zeros((len(sources), len(targets)))
    for i, source in enumerate(sources):
        share = [1.0 if letter in "RP" else 1 / AXES[axis][0] for axis, letter in enumerate(source)]
        for j, target in enumerate(targets):
            table[i, j] = sum(
                reshard(bytes_ * np.prod(share) / share[axis], source[axis], target[axis], axis)
                for axis in range(len(source))
            )
    return table


class Builder:
    def __init__(self, axes: int, scale: float) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.axes, self.scale = axes, scale
        self.choices = list(itertools.product(OPTIONS, repeat=axes))
        self.tables: dict[tuple[float, str, str], Array] = {}

    def node(self, name: str, cost: Array, memory: Array | None = None, row: int = 0) -> int:
        used = {} if memory is None else {0: memory * self.scale}
        self.nodes.append(Node(name, cost * self.scale, row, used))
        return len(self.nodes) - 1

    def relay(self, name: str, letters: str, bytes_: float, kept: bool) -> int:
        share = np.array(
            [
                np.prod([1.0 if letter in "RP" else 1 / AXES[axis][0] for axis, letter in enumerate(layout)])
                for layout in layouts(letters, self.axes)
            ]
        )
        return self.node(name, np.zeros(len(share)), np.round(bytes_ * share) if kept else None)

    def op(self, name: str, flops: float) -> int:
        split = [
            sum(np.log(AXES[axis][0]) for axis, option in enumerate(pick) if option != "none") for pick in self.choices
        ]
        return self.node(name, flops / SPEED / np.exp(np.array(split)))

    def operand(self, relay: int, letters: str, op: int, which: int, bytes_: float, out: bool, row: int = 0) -> None:
        """Links an op's operand (or result) with the relay of its tensor."""
        held = layouts(letters, self.axes)
        wanted = ["".join(LAYOUTS[option][which] for option in pick) for pick in self.choices]
        key = (bytes_, letters, "".join(wanted) + str(out))
        if key not in self.tables:
            self.tables[key] = reshard_table(bytes_, wanted, held) if out else reshard_table(bytes_, held, wanted)
        table = self.tables[key] * self.scale
        self.edges.append(Edge(op, relay, table, row) if out else Edge(relay, op, table, row))


def llama(layers: int, axes: int, shared: bool, noise: float, seed: int, memory_share: float) -> Problem:
    rng = np.random.default_rng(seed)
    build = Builder(axes, float(layers) if shared else 1.0)
    flowing = build.relay("embed", ACTIVATION, TOKENS * HIDDEN * 2, False)
    back = build.relay("gradient", ACTIVATION, TOKENS * HIDDEN * 2, False)
    for layer in range(1 if shared else layers):
        for number, (inner, outer) in enumerate(MATMULS):
            name = f"{layer}.{number}"
            weight, flops = inner * outer * 2.0, 2.0 * TOKENS * inner * outer * (1 + noise * rng.random())
            x_bytes, y_bytes = TOKENS * inner * 2.0, TOKENS * outer * 2.0
            parameter = build.relay(name + ".w", WEIGHT, weight * 8, True)
            x = build.relay(name + ".x", ACTIVATION, x_bytes, True)
            reshape = reshard_table(x_bytes, layouts(ACTIVATION, axes), layouts(ACTIVATION, axes)) * build.scale
            build.edges.append(Edge(flowing, x, reshape))
            y = build.relay(name + ".y", ACTIVATION, y_bytes, False)
            forward = build.op(name + ".forward", flops)
            build.operand(x, ACTIVATION, forward, 0, x_bytes, False)
            build.operand(parameter, WEIGHT, forward, 1, weight, False)
            build.operand(y, ACTIVATION, forward, 2, y_bytes, True)
            dy = build.relay(name + ".dy", ACTIVATION, y_bytes, False)
            build.edges.append(Edge(back, dy, reshape))
            dw = build.op(name + ".dw", flops)
            build.operand(x, ACTIVATION, dw, 0, x_bytes, False)
            build.operand(dy, ACTIVATION, dw, 2, y_bytes, False)
            build.operand(parameter, WEIGHT, dw, 1, weight, True, 1)
            dx = build.op(name + ".dx", flops)
            build.operand(parameter, WEIGHT, dx, 1, weight, False)
            build.operand(dy, ACTIVATION, dx, 2, y_bytes, False)
            after = build.relay(name + ".dx_out", ACTIVATION, x_bytes, False)
            build.operand(after, ACTIVATION, dx, 0, x_bytes, True)
            flowing, back = y, after
    used = [node.memory.get(0, np.zeros(1)) for node in build.nodes]
    least, most = sum(part.min() for part in used), sum(part.max() for part in used)
    limit = Limit("memory", float(round(least + memory_share * (most - least))))
    return Problem(tuple(build.nodes), tuple(build.edges), (limit,), (Term(4.0, (0,)), Term(1.0, (1,))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--axes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0)
    args = parser.parse_args()
    print(
        f"{'case':24} {'nodes':>6} {'edges':>6} {'objective':>12} {'bound':>12} {'gap':>9} {'seconds':>8} {'cpu_s':>7}"
    )
    for shared, share in itertools.product((True, False), (1.0, 0.2, 0.1, 0.05, 0.02, 0.005)):
        problem = llama(args.layers, args.axes, shared, 0.1, args.seed, share)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        found = solve(problem, time_limit_s=args.limit, seed=args.seed)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
        assert found.status == "infeasible" or evaluate(problem, found.choice).feasible
        case = f"{'shared' if shared else 'unshared'}, memory {share:g}"
        sizes = f"{len(problem.nodes):6} {len(problem.edges):6}"
        print(
            f"{case:24} {sizes} {found.objective:12.6g} {found.bound:12.6g} {found.gap:9.2e}"
            f" {seconds:8.2f} {cpu_s:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
