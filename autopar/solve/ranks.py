"""What the ranks of a pipeline have of its stages, and how long a step takes by those.

    ranks = ranks_of(mesh, microbatches=64, like=(0, 1, 1, 2))      # mesh pp=2 virtual=2; stage 1 stands for 2, too
    ranks.kinds[0].stages           # {0: Owned(1, 3), 1: Owned(1, 2)}: of stage 0 it holds three microbatches

A step of 1F1B takes the slowest stage's time for all microbatches but one, and that one's way through all stages. With
v stages a rank, microbatches pass the ranks v times, in rounds; the slowest of the stages in a round sets its pace, and
the way through all stages is v times shorter beside it (Narayanan et al., SC'21, section 2.2):

    (M - 1/v) * (sum over rounds of the slowest stage's time) + (sum over stages of their times) / v

That is what `simulate` says of equal stages, and of some longer than others as long as those of one rank are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.program.generators import has_rounds, round_of
from autopar.solve.in_flight import Held, held_at, worst


@dataclass(frozen=True, slots=True)
class Owned:
    """Of stages that are alike how many a rank has, how many microbatches of them it holds at some moment, and of how
    many of them it has gradients by then."""

    count: int
    held: int
    summed: int


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with like stages; `rank` is the first of them, which holds most."""

    rank: int
    moments: tuple[tuple[int, Mapping[int, Owned]], ...] = field(hash=False)
    """When it may hold most: the stage whose backward begins, and what it has of its stages, each by the stage of the
    graph that stands for it."""

    @property
    def stages(self) -> dict[int, int]:
        """How many it has that are like each stage of the graph."""
        return {stage: own.count for stage, own in self.moments[0][1].items()}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Those of a pipeline whose graph has a stage for each kind of stages."""

    kinds: tuple[RankKind, ...]
    like: tuple[int, ...]
    """The kind of each rank."""
    rounds: tuple[tuple[int, ...], ...]
    """The stages of each round."""
    times: tuple[int, ...]
    """For how many stages each stage of the graph stands."""

    @property
    def virtual(self) -> int:
        """Stages of each rank."""
        return len(self.rounds)

    def steady(self, microbatches: int) -> dict[tuple[int, ...], float]:
        """Stages of which the slowest is waited for, and how often."""
        each = microbatches - 1 / self.virtual
        return {stages: times * each for stages, times in Counter(self.rounds).items()}

    def longest(self, stage_s: Sequence[float]) -> float:
        """The sum over rounds of the slowest stage's seconds."""
        return sum(max(stage_s[stage] for stage in stages) for stages in self.rounds)


def ranks_of(mesh: Mesh, microbatches: int, like: Sequence[int]) -> Ranks:
    """`like`: for each stage of the pipeline the one of the graph that stands for it; of one stage in all, it is the
    first that counts."""
    size = mesh.size(PIPELINE_AXIS)
    if len(like) == 1:
        return Ranks((RankKind(0, _moments((0,), held_at(size, microbatches)[0])),), (0,), ((0,),), (1,))
    assert len(like) == mesh.num_stages, (like, mesh)
    held, firsts = held_at(size, microbatches, mesh.virtual), dict[tuple[int, ...], int]()
    own = [tuple(like[stage] for stage in mesh.stages_at(rank)) for rank in range(size)]
    for rank, stages in enumerate(own):
        firsts.setdefault(stages, rank)
    kinds = [RankKind(rank, _moments(stages, held[rank])) for stages, rank in firsts.items()]
    rounds = tuple(tuple(sorted(set(like[at : at + size]))) for at in range(0, len(like), size))
    times = Counter(like)
    return Ranks(
        tuple(kinds),
        tuple(list(firsts).index(stages) for stages in own),
        rounds,
        tuple(times[stage] for stage in sorted(times)),
    )


def _moments(stages: Sequence[int], held: Sequence[Held]) -> tuple[tuple[int, Mapping[int, Owned]], ...]:
    """What a rank with such stages has of them; of those that are alike, together."""
    alike, counts = list(dict.fromkeys(stages)), Counter(stages)
    found = []
    for each in held:
        kept, summed = Counter[int](), Counter[int]()
        for stage, in_flight, has_sums in zip(stages, each.kept, each.summed, strict=True):
            kept[stage] += in_flight
            summed[stage] += has_sums
        place = alike.index(stages[each.at])
        found.append(Held(place, tuple(kept[s] for s in alike), tuple(summed[s] for s in alike)))
    return tuple(
        (alike[each.at], {s: Owned(counts[s], each.kept[i], each.summed[i]) for i, s in enumerate(alike)})
        for each in worst(found)
    )


def may_interleave(num_ranks: int, microbatches: int) -> bool:
    """Whether rounds are equal and fill the pipeline: only then a step takes what is said here."""
    return microbatches >= num_ranks and has_rounds(num_ranks, microbatches)


def in_flight_of(num_ranks: int, microbatches: int, virtual: int = 1) -> tuple[int, ...]:
    """Microbatches whose activations each stage holds at once under 1F1B, interleaved where ranks have several: then
    when its rank, its stages being equal, first holds most."""
    if virtual == 1:
        return tuple(min(num_ranks - stage, microbatches) for stage in range(num_ranks))
    size, held = round_of(num_ranks, microbatches), [0] * (num_ranks * virtual)
    for rank in range(num_ranks):
        ahead = (virtual - 1) * size + 2 * (num_ranks - 1 - rank) + 1
        for forward in range(min(ahead, virtual * microbatches)):
            held[rank + num_ranks * (forward // size % virtual)] += 1
    return tuple(held)
