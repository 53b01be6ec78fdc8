"""A plan of two layers, made by hand, for tests of what shows and carries plans."""

from autopar.cluster import parse_cluster
from autopar.mesh import Mesh
from autopar.plans import Candidate, CollectiveRow, Estimate, MemoryRow, Plan, StageSpan, ValidFor

LAYERS = range(2)


def small_plan(mesh: str, cluster: str, step_s: float = 0.02, up: str = "dp=b") -> Plan:
    """With one stage, or a layer in each of two."""
    parsed = Mesh.parse(mesh)
    stages = range(parsed.num_stages)
    memory = tuple(MemoryRow(stage, "all", 2**20, 2**20, 2**21, 2**19, 2**19, 5 * 2**20) for stage in stages)
    collectives = (CollectiveRow("dp", "all_reduce", 4, 2**10, 2**12, "shm", 1e-4),)
    estimate = Estimate(step_s, step_s, 0.0, "optimal", 0.5, 1.5, 2**32, memory, collectives, 0.1, {"compute": step_s})
    choices = {f"layers.{i}.up/linear/forward#0": up for i in LAYERS}
    return Plan(
        valid_for=ValidFor("0" * 16, {"x": "f32[8 8]"}, "fp32", "AdamW", 2),
        cluster=parse_cluster(cluster),
        mesh=parsed,
        microbatches=2,
        schedule="1f1b",
        stages=tuple(StageSpan(f"layers.{i}", f"layers.{i}", f"layers.{i}", rank=i) for i in stages),
        node_stage={f"layers.{i}": min(i, stages[-1]) for i in LAYERS},
        choices=choices | {f"param:layers.{i}.up.weight": "dp=d0.1" for i in LAYERS},
        recomputed=("layers.1.*",),
        pins=(),
        estimate=estimate,
        candidates=(Candidate(parsed, 2, len(stages), step_s, 2**20, "chosen", ""),),
    )
