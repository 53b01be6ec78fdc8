"""What the ranks of tests/dist run: `python checks.py NAME FOLDER`, under `autopar.program.launch.run_ranks`."""

import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import hand_built as hb
import torch
import torch.distributed as dist

from autopar import collectives as c
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.program.communicator import Edge, ProcessCommunicator
from autopar.program.parts import Slot
from autopar.program.trainer import Trainer
from autopar.program.virtual import Lockstep, VirtualMesh

CALLS = [
    *((c.all_gather, ("b", dim)) for dim in range(3)),
    *((c.reduce_scatter, ("a", dim, op)) for dim in range(3) for op in ("sum", "max")),
    *((c.all_reduce, (axis, op)) for axis in "ab" for op in ("sum", "max")),
    *((c.all_to_all, ("b", *dims)) for dims in itertools.product(range(3), repeat=2)),
    (c.shard, ("b", 1)),
    (c.all_gather, ("one", 0)),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def four_ranks(folder: Path) -> None:
    """One start for all that needs four ranks: starting costs more than running."""
    from tests.dist import agreement

    dist.init_process_group("gloo")
    collectives()
    point_to_point()
    ring()
    pipeline(folder / "pipeline")
    agreement.compare(folder)
    dist.destroy_process_group()


def collectives() -> None:
    """Every collective × dtype × dim equals the virtual mesh's, bit for bit, at once and started many at a time."""
    mesh = Mesh((("a", 2), ("b", dist.get_world_size() // 2), ("one", 1)))
    for direct, deterministic in ((True, False), (False, False), (False, True)):
        comm = ProcessCommunicator(mesh, torch.device("cpu"), deterministic=deterministic, direct=direct)
        for dtype in DTYPES if direct else DTYPES[:1]:
            generator = torch.Generator().manual_seed(0)
            wide = [torch.randn(4, 8, 4, generator=generator).mul(3).to(dtype) for _ in range(mesh.num_ranks)]
            with c.use(comm):
                compare(mesh, comm, wide)
        comm.close()


def ring() -> None:
    """A large all-reduce of more than two ranks takes another way."""
    comm = ProcessCommunicator(Mesh((("dp", dist.get_world_size()),)), torch.device("cpu"))
    total = comm.all_reduce(torch.full((1 << 18,), float(comm.rank)), "dp")
    assert torch.equal(total, torch.full_like(total, float(sum(range(dist.get_world_size())))))
    comm.close()


def compare(mesh: Mesh, comm: ProcessCommunicator, wide: list) -> None:
    is_bool = wide[0].dtype == torch.bool
    calls = [call for call in CALLS if not (is_bool and call[0] in (c.reduce_scatter, c.all_reduce))]
    own = wide[comm.rank]
    pending = [c.STARTED[target](own, *args) if target in c.STARTED else None for target, args in calls]
    for (target, args), started in zip(calls, pending, strict=True):
        expected = lockstep(mesh, target, args, wide)[comm.rank]
        for got in (target(own, *args), *([c.wait(started)] if started is not None else [])):
            assert torch.equal(got, expected), (target.__name__, args, own.dtype)
    assert [c.coordinate(axis) for axis in mesh.names] == list(mesh.coordinates(comm.rank).values())


def lockstep(mesh: Mesh, target: Callable, args: tuple, wide: list) -> list:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *args)),))
    return Lockstep(mesh).run(torch.fx.GraphModule(torch.nn.Module(), graph), [wide], lambda node, wide: None)[0]


def point_to_point() -> None:
    """First in, first out per edge, both directions at once."""
    mesh = Mesh((("pp", 2), ("tp", dist.get_world_size() // 2)))
    comm = ProcessCommunicator(mesh, torch.device("cpu"), [(0, 1), (1, 0)])
    edges = [Edge(0, 1, 0), Edge(1, 0, 1)]
    out, back = edges if comm.stage == 0 else edges[::-1]
    sent = [comm.send(torch.full((3,), float(i)), out) for i in range(20)]
    got = [comm.receive(torch.empty(3), back) for _ in range(20)]
    assert [pending.wait()[0].item() for pending in got] == list(range(20))
    for pending in sent:
        pending.wait()
    comm.close()


def pipeline(folder: Path) -> None:
    """Trainer on pp=2 tp=2 against the virtual mesh, bit for bit; LR scheduler; checkpoint."""
    train(folder, hb.two_stages(), ["w1", "w2"], hb.weights((8, 6), (12, 8)))


def zero3(folder: Path) -> None:
    """The same for a strided parameter on dp=2."""
    train(folder, hb.zero3(), ["w"], hb.weights((12, 6)))


def train(folder: Path, pipeline, names: list[str], weights: list) -> None:
    initial = dict(zip(names, weights, strict=True))
    trainer = new_trainer(pipeline, initial)
    virtual = VirtualMesh(pipeline)
    for name, weight in initial.items():
        virtual.load({Slot("param", name): weight, Slot("state", f"{name}.m"): torch.zeros_like(weight)})
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
    for step in range(3):
        steps_agree(trainer, virtual, step)
        scheduler.step()
    same_weights(trainer, virtual, names)
    save_and_load(folder, trainer, pipeline, initial, virtual)
    trainer.close()


def new_trainer(pipeline, initial: dict) -> Trainer:
    program = hb.HandBuilt(pipeline, aliases={"tied": next(iter(initial))})
    return Trainer(program, lambda slot: initial.get(slot.name, torch.zeros(()).expand(shape_of(pipeline, slot))))


def shape_of(pipeline, slot: Slot) -> tuple:
    return next(stage.values[slot].layout.global_shape for stage in pipeline.stages if slot in stage.values)


def steps_agree(trainer: Trainer, virtual: VirtualMesh, step: int) -> None:
    x, y = hb.batch(step)
    lr = trainer.optimizer.param_groups[0]["lr"]
    got, expected = trainer.step(x, y), virtual.step({"x": x, "y": y}, {"group0.lr": lr})
    assert got["loss"] == expected["loss"].item(), (step, got, expected)
    assert "out" not in expected or torch.equal(got["out"], expected["out"])


def same_weights(trainer: Trainer, virtual: VirtualMesh, names: list[str]) -> None:
    full = trainer.full_state_dict()
    if dist.get_rank() == 0:
        assert sorted(full) == sorted([*names, "tied"])
        assert all(torch.equal(full[name], virtual.gather(Slot("param", name))) for name in names)
        assert full["tied"] is full[names[0]]
    else:
        assert full == {}


def save_and_load(folder: Path, trainer: Trainer, pipeline, initial: dict, virtual: VirtualMesh) -> None:
    """A checkpoint read into a new trainer, and a model's whole state into another, go on alike."""
    import torch.distributed.checkpoint as dcp

    dcp.save(trainer.state_dict(), checkpoint_id=folder)
    loaded = new_trainer(pipeline, initial)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    assert loaded.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"] == 0.0125
    whole = {name: virtual.gather(Slot("param", name)) for name in initial}
    steps_agree(loaded, virtual, 3)
    by_name = new_trainer(pipeline, initial)
    first = next(iter(initial))
    by_name.load_full_state_dict({"tied" if name == first else name: whole[name] for name in initial})
    fresh = VirtualMesh(pipeline)
    for name, weight in whole.items():
        fresh.load({Slot("param", name): weight, Slot("state", f"{name}.m"): torch.zeros_like(weight)})
    steps_agree(by_name, fresh, 3)
    refused(by_name, whole)


def refused(trainer: Trainer, whole: dict) -> None:
    x, y = hb.batch(0)
    for attempt, message in (
        (lambda: trainer.step(x[:7], y), "batch 'x': got shape (7, 6), expected (16, 6)"),
        (lambda: trainer.step(x), "batch: got tensors 1 in order; expected x, y"),
        (lambda: trainer.step(x.double(), y), "batch 'x': got torch.float64, expected torch.float32"),
        (lambda: trainer.load_full_state_dict({}), "the state to load has no w"),
    ):
        try:
            attempt()
        except PlanError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def dropout(folder: Path) -> None:
    """Training with dropout is the eager model's under `reference_rng`, and goes on so from a checkpoint."""
    import torch.distributed.checkpoint as dcp

    from autopar.compiling import compile
    from autopar.planning import plan
    from autopar.program.verify import EagerStep
    from tests.virtual.step_models import step_of, weights_of

    step = step_of("gpt, dropout", 2)
    program = compile(step, plan(step, "2xcpu", pin="dp=2"))
    eager = EagerStep(step, weights_of(step), seed=5)
    trainer = program.start(seed=5)

    def both(running: Trainer, index: int) -> None:
        expected, got = eager.backward(index), running.step(step.batch)["loss"]
        assert abs(got - float(expected)) < 1e-5, (index, got, expected)
        eager.optimizer.step()

    both(trainer, 0)
    both(trainer, 1)
    dcp.save(trainer.state_dict(), checkpoint_id=folder)
    resumed = program.start(seed=4)
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state)
    both(resumed, 2)
    full = resumed.full_state_dict()
    for name, weight in eager.parameters().items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(full[name], weight, rtol=1e-3, atol=1e-4)
    trainer.close()


def hashes(folder: Path) -> None:
    """Ranks with different programs: a clear error on each."""
    Trainer(hb.HandBuilt(hb.zero3(), hash=f"program of {sys.argv[0]} {os.environ['RANK']}"))


def rank_1_dies(folder: Path) -> None:
    """Rank 1 fails while rank 0 waits for it: nobody is left, and its status comes through."""
    if os.environ["RANK"] == "1":
        print("rank 1 gives up", file=sys.stderr)
        raise SystemExit(7)
    (folder / "rank0.pid").write_text(str(os.getpid()))
    time.sleep(60)


def two_ranks(folder: Path) -> None:
    """One start, too, for all that needs two ranks and ends well."""
    from tests.dist import against_eager

    against_eager.compare(folder)  # each trainer makes and ends a process group of its own
    dist.init_process_group("gloo")
    zero3(folder / "zero3")
    dropout(folder / "dropout")
    dist.destroy_process_group()


CHECKS = {check.__name__: check for check in (four_ranks, two_ranks, hashes, rank_1_dies)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        CHECKS[sys.argv[1]](Path(sys.argv[2]))
    except PlanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_status) from None
