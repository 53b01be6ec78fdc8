"""Which units pins put on which pipeline stage, and whether a pipeline of some stages can keep to that.

    pinned_stages(pins, skeletons)      # (0, None, None, 1): the first unit on stage 0, the last on stage 1
    can_cut((0, None, None, 1), 2)      # True; cannot_cut(pins, skeletons, 2) says why where it is False

A module that is part of a unit takes the whole unit with it: a pipeline is cut between units.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.layers import units_of
from autopar.pins import Pins, StagePin, matches_module
from autopar.skeletons import Skeletons


def pinned_stages(pins: Pins, skeletons: Skeletons) -> tuple[int | None, ...]:
    """The stage of each unit of the model that a pin puts on one; empty without such pins.

    Raises `PlanError` for pins that no pipeline can keep to: two stages for one unit, a later unit on an earlier one.
    """
    if not pins.stages:
        return ()
    found: list[tuple[str, StagePin | None]] = []
    for unit, paths in _paths(skeletons).items():
        meant = [pin for pin in pins.stages if any(matches_module(pin.glob, path) for path in paths)]
        if len({pin.stage for pin in meant}) > 1:
            raise PlanError(f"pins '{meant[0]}' and '{meant[1]}': {unit} can't be on two stages; keep one of the two")
        found.append((unit, meant[0] if meant else None))
    _require_order([(unit, pin) for unit, pin in found if pin is not None])
    return tuple(pin.stage if pin is not None else None for _, pin in found)


def _paths(skeletons: Skeletons) -> dict[str, set[str]]:
    """The modules in each unit, itself included."""
    graph = skeletons.folded.captured.gradient.graph
    traced, unit_of = units_of(graph)
    inside: dict[str, set[str]] = defaultdict(set)
    for node, number in unit_of.items():
        inside[traced[number]].add(node.meta.get("path", ""))
    spread = skeletons.folded.repeats.spread(traced)
    return {unit: {unit, *(path.replace(like, unit, 1) for path in inside[like])} for unit, like in spread}


def _require_order(pinned: Sequence[tuple[str, StagePin]]) -> None:
    for (unit, pin), (later, following) in itertools.pairwise(pinned):
        if following.stage < pin.stage:
            raise PlanError(
                f"pins '{pin}' and '{following}': {later} runs after {unit}, so it can't be on an earlier stage; "
                f"stages follow the order in which modules run"
            )


def can_cut(pinned: Sequence[int | None], num_stages: int) -> bool:
    """Whether units can be cut into that many stages, none empty, with those that are pinned where they have to be."""
    reached = {-1}  # the stages on which the units so far may end
    for stage in pinned:
        following = {last + step for last in reached for step in (0, 1)} - {-1, num_stages}
        reached = following if stage is None else following & {stage}
    return num_stages - 1 in reached


def cannot_cut(pins: Pins, skeletons: Skeletons, num_stages: int) -> str:
    """Why a model can't be cut into that many stages; "" where it can."""
    units, pinned = skeletons.units, pinned_stages(pins, skeletons)
    if num_stages > len(units):
        return f"{num_stages} stages, but {len(units)} units to cut between"
    last = max((stage for stage in pinned if stage is not None), default=0)
    if last >= num_stages:
        return f"a pin asks for stage {last}, but of {num_stages} the last is {num_stages - 1}"
    if pinned and not can_cut(pinned, num_stages):
        return f"no cut into {num_stages} stages keeps to the pins: one of them would have no unit"
    return ""
