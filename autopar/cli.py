"""The command line: `autopar plan | explain | diff | verify | build | run | rules | profile | cluster`.

    autopar plan train.py:step --cluster 8xh100 --pin "tp=4" -o plan.json
    autopar explain plan.json model.layers.0

Invariants:
- exit status 0 done, 2 a mistake of the user's, 3 infeasible, 1 a failed verification or a bug of ours;
- with `--json`, stdout holds JSON alone; progress and messages go to stderr, progress only to a terminal;
- a file is written whole or not at all;
- `--help` imports neither torch nor rich.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autopar import __version__
from autopar.errors import Error, InfeasibleError, PlanError, VerificationError
from autopar.garbage import collected_seldom

if TYPE_CHECKING:
    from autopar.capture import ForwardStep, TrainStep
    from autopar.cluster import Cluster
    from autopar.models import StepOptions
    from autopar.pins import Pins
    from autopar.plans import Plan
    from autopar.program.program import Program
    from autopar.show import Table

Command = TypeVar("Command", bound=Callable[..., Any])

_PIN_HELP = (
    "Fix part of the plan: AXIS=N, zero=0..3, microbatches=N, recompute=none|full|GLOB, 'GLOB: AXIS=out', "
    "'GLOB: stage=N'."
)
_MODEL_HELP = "MODEL is file.py:factory, a function that returns a TrainStep, or a Hugging Face config.json."


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its status."""
    atexit.register(gc.freeze)  # seconds at exit, else: millions of objects would be searched for garbage a last time
    try:
        status = autopar.main(args=arguments, prog_name="autopar", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = 2
    except click.Abort:
        status = _fail("stopped", 130)
    except Error as error:
        status = _fail(str(error), error.exit_status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        status = _fail(f"a bug of ours: {type(error).__name__}: {error}\nAUTOPAR_DEBUG=1 shows where", 1)
    sys.exit(status)


def _fail(message: str, status: int) -> int:
    if os.environ.get("AUTOPAR_DEBUG", "0") != "0":
        traceback.print_exc()
    click.echo(f"autopar: {message}", err=True)
    return status


# -- options that commands share ---------------------------------------------------------------------------------
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON alone on stdout.")


class _Count(click.ParamType):  # type: ignore[type-arg]
    """A number of at least 1, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else click.IntRange(1).convert(value, param, ctx)


_STEP_OPTIONS = (
    click.option("--batch", type=click.IntRange(1), help="Samples of one optimizer step."),
    click.option("--seq", type=click.IntRange(1), help="Tokens of one sample."),
    click.option("--microbatches", type=_Count(), help="Microbatches of one step; auto: what is fastest."),
    click.option(
        "--precision", type=click.Choice(["fp32", "mixed", "mixed-bf16-sums"]), help="Default: what the factory says."
    ),
    click.option("--clip-norm", type=float, help="Clip the norm of all gradients together to this."),
)
"""What the command line says about the step."""


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


_step_options = _options(
    click.argument("model"),
    click.option("--cluster", "-c", required=True, help="2xcpu, 8xh100, 16x8xh100, auto, or a cluster file."),
    *_STEP_OPTIONS,
    click.option("--pin", "pins", multiple=True, help=_PIN_HELP),
    click.option("--memory", help="Budget of one device, such as 60GiB; default: what the device has."),
    click.option(
        "--time-limit",
        "time_limit_s",
        metavar="SECONDS",
        type=click.FloatRange(0, min_open=True),
        help="Take the best plan found by then; the first found where that takes longer.",
    ),
)
"""MODEL, and what the command line says about the step, the cluster and the search."""


class _InOrder(click.Group):
    """Lists commands in the order of the flow, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, help="Compiles a single-device training step into a program that many devices run together.")
@click.version_option(__version__, message="autopar %(version)s")
def autopar() -> None:
    """The group that holds the commands."""


# -- commands ----------------------------------------------------------------------------------------------------
@autopar.command(help=f"Search for the best plan.\n\n{_MODEL_HELP}")
@_step_options
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the plan to this file.")
@click.option(
    "--best",
    type=click.IntRange(1),
    help="Also find the next best: so many plans, with -o to plan.json, plan.2.json, …",
)
@_json
def plan(output: str | None, best: int | None, as_json: bool, **options: Any) -> None:
    """MODEL → plan, or several."""
    from autopar import differing, show

    request = _request(**options)
    with _certified(as_json):
        found = _plans(request, _load(request), best or 1)
    for path, each in zip(_paths(output, len(found)), found, strict=False):
        each.save(path)
    if as_json:
        _print_json({"plans": [each.json_report() for each in found]} if best else found[0].json_report())
    else:
        show.print_tables([*show.summary(found[0]), *([differing.ranking(found)] if best else [])])


def _paths(output: str | None, count: int) -> list[Path]:
    """`plan.json`, `plan.2.json`, …; none without a file to write to."""
    if output is None:
        return []
    first = Path(output)
    return [first, *(first.with_name(f"{first.stem}.{number}{first.suffix}") for number in range(2, count + 1))]


@autopar.command(
    help="Show a plan, or its choices at a MODULE or NODE.\n\n"
    "With --model, what each other choice there would have cost, and why it lost."
)
@click.argument("plan_file", metavar="PLAN")
@click.argument("target", metavar="[MODULE or NODE]", required=False)
@click.option("--model", help="The MODEL that the plan is of; a plan is data, and never loads code by itself.")
@_options(*_STEP_OPTIONS)
@_json
def explain(plan_file: str, target: str | None, model: str | None, as_json: bool, **options: Any) -> None:
    """A plan file (and its MODEL) → text."""
    from autopar import show
    from autopar.plans import Plan

    read = Plan.load(plan_file)
    if model and not target:
        raise PlanError("--model: of which part? Name a module (a path or a glob) or a node after the plan")
    if as_json and target is None:
        _print_json(read.json_report())
    elif model and target:
        _print_tables(_alternatives(read, target, model, **options), as_json)
    else:
        _print_tables(show.explain(read, target) if target else show.summary(read), as_json)


@autopar.command(help="Show in what two plans differ: mesh, choices, estimate.")
@click.argument("before", metavar="A.json")
@click.argument("after", metavar="B.json")
@_json
def diff(before: str, after: str, as_json: bool) -> None:
    """Two plan files → their differences."""
    from autopar import differing
    from autopar.plans import Plan

    tables = differing.difference(Plan.load(before), Plan.load(after))
    if not as_json and not any(table.rows for table in tables):
        click.echo("the plans are equal")
    _print_tables(tables, as_json)


@autopar.command(
    help=f"Prove a program equal to the single-device step.\n\nRuns all ranks on a virtual mesh. {_MODEL_HELP}"
)
@_step_options
@click.option("--plan", "plan_file", metavar="PLAN", help="Verify this plan instead of searching for one.")
@_json
def verify(as_json: bool, **options: Any) -> None:
    """MODEL (and a plan) → report; exit status 1 when it isn't equal."""
    program = _program(_request(**options))
    with _progress("verifying"):
        report = program.verify()
    _print_json(report.to_dict()) if as_json else click.echo(str(report))
    if not report.ok:
        raise VerificationError("the program differs from the single-device step; the report above names where")


@autopar.command(help=f"Compile to a directory of readable Python.\n\n{_MODEL_HELP}")
@_step_options
@click.option("--plan", "plan_file", metavar="PLAN", help="Compile this plan instead of searching for one.")
@click.option("--output", "-o", required=True, type=click.Path(file_okay=False), help="The directory to make.")
@_json
def build(output: str, as_json: bool, **options: Any) -> None:
    """MODEL (and a plan) → directory."""
    from autopar.running import ORIGIN, origin_of

    directory = Path(output)
    request = _request(**options)
    origin = origin_of(request.model, request.step, directory)
    _program(request).save(directory, extra={ORIGIN: origin.to_json()})
    files = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
    if as_json:
        _print_json({"directory": output, "files": files})
    else:
        click.echo(f"{output}: {', '.join(files)}")
        click.echo(f"next: autopar run {output} --steps 10")


@autopar.command(help="Run a built program.\n\nStarts its ranks on this machine, or is one of them under torchrun.")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Optimizer steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights, batches and dropout.")
@_json
def run(directory: str, steps: int, seed: int, as_json: bool) -> int:
    """A built directory → losses."""
    from autopar import running

    if not running.is_rank():
        arguments = ["--steps", str(steps), "--seed", str(seed), *(["--json"] if as_json else [])]
        return running.start_ranks(directory, arguments)
    told, *metrics = _followed(running.run_rank(directory, steps, seed), quiet=as_json)
    if as_json and running.is_first_rank():
        _print_json({**told, "steps": metrics})
    return 0


@autopar.command(help="List the sharding rules of ops, those that match OP-GLOB; --prove executes them.")
@click.argument("pattern", metavar="[OP-GLOB]", default="*")
@click.option("--prove", is_flag=True, help="Run each choice of each rule on shards and compare with the whole op.")
@_json
def rules(pattern: str, prove: bool, as_json: bool) -> None:
    """The table of rules → text; exit status 1 where a shard's numbers contradict a rule."""
    from autopar.rules import proofs

    rows, found = proofs.listed(pattern), []
    if not rows:
        raise PlanError(f"no op with a rule matches {pattern!r}; try 'aten.*mm*', or leave it out")
    with _progress("proving") as tell:
        for row in rows if prove else ():
            tell(row.op)
            found.append(proofs.proof_of(row))
    _print_tables(proofs.tables(rows, found), as_json)
    wrong = [text for proof in found for text in proof.counterexamples]
    if wrong:
        raise VerificationError("rules contradicted by execution:\n" + "\n".join(wrong))


@autopar.command(
    help="Measure this machine and write a cluster file.\n\nStarts its ranks, or is one of them under torchrun."
)
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the cluster file, for --cluster.")
@click.option("--ranks", type=click.IntRange(1), help="Default: one for each GPU, or for each core without GPUs.")
@_json
def profile(output: str | None, ranks: int | None, as_json: bool) -> None:
    """This machine → a cluster file, and each timing beside what the file says of it."""
    from autopar import profiling, running
    from autopar.plans import write_whole

    if output and not Path(output).parent.is_dir():
        raise PlanError(f"cluster file {output!r}: no folder {str(Path(output).parent)!r}; make it first")
    if running.is_rank():
        if ranks is not None:
            raise PlanError("--ranks: torchrun has started the ranks; leave --ranks out")
        found = profiling.measure_here()
    else:
        with _progress("measuring"):
            found = profiling.profile(ranks)
    if found is None:
        return
    if output:
        write_whole(Path(output), f"{found.cluster.to_json()}\n", "cluster")
    _print_json(dataclasses.asdict(found)) if as_json else _print_tables(found.tables(), as_json)


@autopar.command(help="Show a cluster: the figures that plans are priced by, and their sources.")
@click.argument("cluster", metavar="C", required=False)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of cluster files instead.")
@_json
def cluster(cluster: str | None, schema: bool, as_json: bool) -> None:
    """A cluster → its figures; with --json, the cluster file."""
    from autopar.cluster import cluster_schema, parse_cluster
    from autopar.show_cluster import cluster_tables

    if schema == (cluster is not None):
        raise PlanError("cluster: give C (8xh100, auto, a cluster file) or --schema")
    if schema or cluster is None:
        _print_json(cluster_schema())
    elif as_json:
        click.echo(parse_cluster(cluster).to_json())
    else:
        _print_tables(cluster_tables(parse_cluster(cluster)), as_json)


def _followed(lines: Iterator[dict[str, Any]], quiet: bool) -> list[dict[str, Any]]:
    """All of `lines`; rank 0 prints each as it comes, unless `quiet`."""
    from autopar import running

    seen = []
    for index, line in enumerate(lines):
        seen.append(line)
        if not quiet and running.is_first_rank():
            words = [
                f"{name} {value:.6f}" if isinstance(value, float) else f"{name}: {value}"
                for name, value in line.items()
            ]
            click.echo(f"step {index - 1:4}  {'  '.join(words)}" if index else "  ".join(words))
    return seen


# -- the steps between them --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Request:
    """The options of plan, verify and build, read and checked before the model is loaded."""

    model: str
    step: StepOptions
    cluster: Cluster
    pins: Pins
    memory: int | None
    time_limit_s: float | None
    plan: Plan | None = None


def _request(
    model: str,
    cluster: str,
    batch: int | None,
    seq: int | None,
    microbatches: int | str | None,
    precision: str | None,
    clip_norm: float | None,
    pins: tuple[str, ...],
    memory: str | None,
    time_limit_s: float | None,
    plan_file: str | None = None,
) -> Request:
    from autopar.cluster import parse_cluster
    from autopar.models import StepOptions
    from autopar.pins import parse_pins
    from autopar.plans import Plan
    from autopar.units import parse_bytes

    request = Request(
        model,
        StepOptions(batch, seq, microbatches, precision, clip_norm),
        parse_cluster(cluster),
        parse_pins(pins),
        None if memory is None else parse_bytes(memory),
        time_limit_s,
        Plan.load(plan_file) if plan_file else None,
    )
    _require_consistent(request)
    return request


def _require_consistent(request: Request) -> None:
    """A given plan stands as it is: it must be for the cluster asked for, and nothing may narrow it."""
    if request.plan is None:
        return
    if str(request.plan.cluster) != str(request.cluster):
        raise PlanError(f"--cluster {request.cluster}: the plan is for {request.plan.cluster}; give that, or plan anew")
    if request.pins != type(request.pins)() or (request.memory, request.time_limit_s) != (None, None):
        options = "--pin, --memory and --time-limit"
        raise PlanError(f"--plan: the plan is fixed; {options} are for a search, so leave them or --plan out")


def _load(request: Request) -> TrainStep | ForwardStep:
    from autopar.models import load_step

    with collected_seldom(), _progress("loading the model"):
        return load_step(request.model, request.step)


def _plans(request: Request, step: TrainStep | ForwardStep, count: int = 1) -> list[Plan]:
    with collected_seldom(), _progress("searching for a plan") as tell:
        from autopar import planning

        limits = {"memory": request.memory, "time_limit_s": request.time_limit_s}
        return planning.best_plans(step, request.cluster, count, pin=request.pins, progress=tell, **limits)


def _alternatives(plan: Plan, target: str, model: str, **options: Any) -> list[Table]:
    from autopar import explaining
    from autopar.models import StepOptions, load_step

    with collected_seldom(), _progress("loading the model"):
        step = load_step(model, StepOptions(**options))
    with _progress("pricing alternatives") as tell:
        return explaining.explain(step, plan, target, progress=tell).tables()


def _program(request: Request) -> Program:
    from autopar import compiling

    step = _load(request)
    plan = request.plan or _plans(request, step)[0]
    with _progress("compiling"):
        return compiling.compile(step, plan)


@contextlib.contextmanager
def _certified(as_json: bool) -> Iterator[None]:
    """With `--json`, what there is to say of a step that nothing fits goes to stdout as data, too."""
    try:
        yield
    except InfeasibleError as error:
        if as_json and error.certificate is not None:
            _print_json({"status": "infeasible", **error.certificate.to_dict()})
        raise


# -- output ------------------------------------------------------------------------------------------------------
def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _print_tables(tables: Sequence[Table], as_json: bool) -> None:
    from autopar import show

    _print_json(show.json_tables(tables)) if as_json else show.print_tables(tables)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with `what` on a terminal, and how to change its text; silence in a pipe."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …") as status:
        yield lambda text: status.update(f"{what}: {text} …")
