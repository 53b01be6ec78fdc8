"""Schedules: their order, the deadlock check, and bubbles against published formulas and measurements."""

import math
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed import pipelining

from autopar.errors import PlanError
from autopar.program.actions import Action, format_schedule, parse_schedule
from autopar.program.generators import (
    INTERLEAVED,
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved_1f1b,
    make_schedule,
    one_f_one_b,
    round_of,
    steady_after,
    zero_bubble_h1,
)
from autopar.program.parts import Slot, Transfer
from autopar.program.schedule import (
    bubble_fraction,
    chain_transfers,
    check_no_deadlock,
    in_flight,
    is_step_level,
    receiving_event,
    simulate,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 13)]
INTERLEAVED_SIZES = [(2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 2, 8), (4, 3, 10), (4, 2, 3), (8, 4, 16)]
"""(ranks, stages of each, microbatches)"""


def chain_of(name, num_stages):
    chain = chain_transfers(num_stages, is_split=name == "zb-h1")
    return [transfer for transfer in chain if name != "forward" or transfer.part == "forward"]


# -- notation ------------------------------------------------------------------------------------------------------
def test_notation():
    assert str(Action.parse("12I3")) == "12I3"
    assert [Action.parse(f"0{kind}0").part for kind in "FBIW"] == ["forward", "backward", "input_grad", "weight_grad"]


def test_text_round_trip():
    text = format_schedule(one_f_one_b(2, 3))
    assert text == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert parse_schedule(text) == one_f_one_b(2, 3)


def test_bubbles_of_a_table_are_left_out():
    assert parse_schedule("0F0, 0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1,") == (("0F0", "0F1", "0B0", "0B1"),
                                                                     ("1F0", "1B0", "1F1", "1B1"))  # fmt: skip


@pytest.mark.parametrize("text", ["F0", "0X0", "0F", "-1F0", "0F0F", "0SEND_F0"])
def test_bad_action(text):
    message = f"schedule, line 2: {text!r} is not an action; expected stage, one of F B I W, and microbatch"
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_schedule(f"0F0\n1F0,{text}\n")


# -- generators ----------------------------------------------------------------------------------------------------
def test_one_f_one_b():
    assert one_f_one_b(3, 4)[0] == ("0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3")
    assert one_f_one_b(3, 4)[2] == ("2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3")
    assert one_f_one_b(4, 1)[0] == ("0F0", "0B0")


def test_gpipe():
    assert gpipe(2, 2) == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))


def test_zero_bubble_h1():
    assert zero_bubble_h1(2, 3) == (
        ("0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"),
        ("1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"),
    )


def test_forward_only():
    assert forward_only(2, 2) == (("0F0", "0F1"), ("1F0", "1F1"))


def test_interleaved():
    assert interleaved_1f1b(2, 2, 2) == (
        ("0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"),
        ("1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1B0", "1B1"),
    )


@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED_SIZES)
def test_interleaved_schedules_pass_the_check(p, v, m):
    check_no_deadlock(make_schedule(INTERLEAVED, p, m, v), chain_transfers(p * v))


def test_rounds_of_interleaved_schedules():
    assert [round_of(*sizes) for sizes in ((4, 8), (4, 10), (4, 3))] == [4, 5, 3]
    message = "schedule 'interleaved_1f1b': 11 microbatches on 4 pipeline ranks can't be run in 2 equal rounds"
    with pytest.raises(PlanError, match=re.escape(f"{message}; use a multiple of 4, or of 2")):
        interleaved_1f1b(4, 2, 11)


@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_schedules_pass_the_check(name):
    for num_stages, microbatches in SIZES:
        check_no_deadlock(make_schedule(name, num_stages, microbatches), chain_of(name, num_stages))


@pytest.mark.parametrize(("arguments", "message"), [
    (("2f2b", 2, 2), "schedule '2f2b': unknown; expected one of 1f1b, gpipe, zb-h1, forward, interleaved_1f1b"),
    (("1f1b", 0, 2), "schedule '1f1b': 0 stages and 2 microbatches; expected at least 1"),
    (("1f1b", 2, 0), "schedule '1f1b': 2 stages and 0 microbatches; expected at least 1"),
    (("1f1b", 2, 4, 2), "schedule '1f1b': 2 stages a rank; 'interleaved_1f1b' is for several"),
])  # fmt: skip
def test_bad_name_or_counts(arguments, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make_schedule(*arguments)


@pytest.mark.parametrize(("name", "expected"), [
    ("1f1b", lambda p, m, stage: min(m, p - stage)),  # Narayanan et al., 2021: stage i holds p − i
    ("zb-h1", lambda p, m, stage: min(m, p)),  # Qi et al., 2024, table 2: p everywhere
    ("gpipe", lambda p, m, stage: m),
    ("forward", lambda p, m, stage: m),
])  # fmt: skip
def test_in_flight(name, expected):
    for num_stages, microbatches in SIZES:
        for stage, row in enumerate(make_schedule(name, num_stages, microbatches)):
            assert in_flight(stage, row) == expected(num_stages, microbatches, stage)


def held_at_once(row):
    """The most microbatches that a rank's stages hold together."""
    held = [0]
    for action in map(Action.parse, row):
        held.append(held[-1] + {"F": 1, "B": -1}[action.kind])
    return max(held)


@pytest.mark.parametrize(("p", "v", "m"), [sizes for sizes in INTERLEAVED_SIZES if sizes[2] >= 2 * sizes[0]])
def test_what_interleaved_ranks_hold(p, v, m):
    """Megatron: (v - 1) p + 2 (p - 1 - r) forwards ahead of the first backward, and one."""
    for rank, row in enumerate(interleaved_1f1b(p, v, m)):
        assert held_at_once(row) == min((v - 1) * round_of(p, m) + 2 * (p - 1 - rank) + 1, v * m)


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), (INTERLEAVED, 2), (INTERLEAVED, 3)])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_steady_schedules_only_repeat(name, virtual, p):
    few = steady_after(name, p, 16 * p)
    for short, long in zip(*(make_schedule(name, p, m, virtual) for m in (few, 16 * p)), strict=True):
        assert held_at_once(short) == held_at_once(long)
        for stage in {Action.parse(text).stage for text in short}:
            assert in_flight(stage, short) == in_flight(stage, long)


# -- torch's own ---------------------------------------------------------------------------------------------------
def torch_row(name, stage_index, num_stages, microbatches):
    """The order in which torch's schedule runs a stage: the stage only records."""
    row = []
    stage = MagicMock(num_stages=num_stages, stage_index=stage_index, is_first=False, is_last=False, device="cpu")
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    stage.forward_one_chunk.side_effect = lambda i, *args, **kwargs: row.append(f"{stage_index}F{i}")
    stage.backward_one_chunk.side_effect = lambda i, *args, **kwargs: row.append(f"{stage_index}B{i}")
    schedule = getattr(pipelining, name)(stage, microbatches, loss_fn=lambda output, target: output)
    schedule.step(return_outputs=False)
    return tuple(row)


@pytest.mark.parametrize(("name", "ours"), [("Schedule1F1B", one_f_one_b), ("ScheduleGPipe", gpipe)])
@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 13)])
def test_same_order_as_torch(name, ours, num_stages, microbatches):
    theirs = tuple(torch_row(name, stage, num_stages, microbatches) for stage in range(num_stages))
    assert ours(num_stages, microbatches) == theirs


@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED_SIZES)
def test_same_interleaved_order_as_torch(p, v, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, m // p)
    theirs = SimpleNamespace(n_local_stages=v, pp_group_size=p, _n_microbatches=m, microbatches_per_round=m // rounds)
    for rank, row in enumerate(interleaved_1f1b(p, v, m)):
        actions = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, rank)
        assert row == tuple(str(action) for action in actions if action is not None)


def test_torch_reads_our_actions():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_Action"):
        pytest.skip("this torch has no parser of actions")
    for text in zero_bubble_h1(2, 2)[1]:
        assert str(schedules._Action.from_str(text)) == text


# -- the check -----------------------------------------------------------------------------------------------------
def message_of(rows, transfers=()):
    with pytest.raises(PlanError) as raised:
        check_no_deadlock(rows, transfers)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("0F0", "0Z0")], "'0Z0' is not an action; expected stage, one of F B I W, and microbatch, such as '0F0'"),
        ([("0F0", "1B0"), ("1F0", "0B0")], "schedule: stage 1 has actions on ranks 0 and 1"),
        ([("0F0", "0B0"), ("2F0", "2B0")], "schedule: stage 1 has no actions"),
        ([()], "schedule: stage 0 has no actions"),
        ([("0F0", "0F0", "0B0")], "schedule, rank 0: 0F0 stands twice"),
        (
            [("0F0", "0F1", "0B0")],
            "schedule, stage 0, microbatch 1: missing or superfluous actions: got 0F1; "
            "expected 0F1, 0B1 or 0F1, 0I1, 0W1",
        ),
        (
            [("0F0", "0F1"), ("1F0",)],
            "schedule, stage 1, microbatch 1: missing or superfluous actions: got nothing; expected 1F1",
        ),
        (
            [("0F0", "0B0", "0I0", "0W0")],
            "schedule, stage 0, microbatch 0: missing or superfluous actions: got 0F0, 0B0, 0I0, 0W0; "
            "expected 0F0, 0B0 or 0F0, 0I0, 0W0",
        ),
        (
            [("0B0", "0F0")],
            "schedule, stage 0, microbatch 0: wrong order: got 0B0, 0F0; expected 0F0, 0B0 or 0F0, 0I0, 0W0",
        ),
        (
            [("0F0", "0W0", "0I0")],
            "schedule, stage 0, microbatch 0: wrong order: got 0F0, 0W0, 0I0; expected 0F0, 0B0 or 0F0, 0I0, 0W0",
        ),
    ],
)
def test_actions_that_are_missing_twice_or_out_of_order(rows, message):
    assert message_of(rows) == message


def test_deadlock_names_who_waits_for_whom():
    rows = [("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1")]
    assert message_of(rows, chain_transfers(2)) == (
        "the schedule deadlocks: "
        "stage 0 waits at 0B0 for saved:gradient1 of microbatch 0, made by 1B0; "
        "stage 1 waits at 1F1 for saved:activation0 of microbatch 1, made by 0F1"
    )


def test_step_level_parts():
    norm = [Transfer(Slot("saved", "norm"), 0, 1, "norm"), Transfer(Slot("saved", "norm"), 1, 0, "norm")]
    check_no_deadlock(one_f_one_b(2, 2), [*chain_transfers(2), *norm, Transfer(Slot("state", "x"), 1, 0, "update")])
    rows = [("0F1", "0B1", "0F0", "0B0"), ("1F0", "1B0", "1F1", "1B1")]
    assert message_of(rows, [*chain_transfers(2), *norm]) == (
        "the schedule deadlocks: "
        "stage 0 waits at 0B1 for saved:gradient1 of microbatch 1, made by 1B1; "
        "stage 1 waits at 1F0 for saved:activation0 of microbatch 0, made by 0F0"
    )


def test_sends_do_not_block():
    # Each stage sends twice before the other takes anything: fine for asynchronous sends.
    check_no_deadlock(gpipe(2, 4), chain_transfers(2))


def test_tied_weights():
    tied = [
        Transfer(Slot("gathered", "embed.weight"), 0, 2, "prologue"),
        Transfer(Slot("accumulator", "embed.weight"), 2, 0, "backward"),
        Transfer(Slot("param", "norm.weight"), 2, 0, "prologue"),
    ]
    assert all(map(is_step_level, tied))
    assert [receiving_event(transfer) for transfer in tied] == ["first", "update", "prologue"]
    check_no_deadlock(one_f_one_b(3, 4), [*chain_transfers(3), *tied])
    split = [*chain_transfers(3, is_split=True), Transfer(Slot("accumulator", "w"), 2, 0, "weight_grad")]
    check_no_deadlock(zero_bubble_h1(3, 4), split)


@pytest.mark.parametrize(("part", "source", "target", "kind", "expected"), [
    ("forward", 0, 1, "saved", "forward"),
    ("forward", 1, 0, "saved", "backward"),
    ("backward", 1, 0, "saved", "backward"),
    ("input_grad", 1, 0, "saved", "backward"),
    ("backward", 0, 1, "saved", "update"),
    ("weight_grad", 1, 0, "saved", "weight_grad"),
    ("weight_grad", 0, 1, "saved", "update"),
    ("update", 0, 1, "param", "end"),
    ("norm", 0, 1, "saved", "update"),
])  # fmt: skip
def test_where_a_value_is_taken(part, source, target, kind, expected):
    transfer = Transfer(Slot(kind, "x"), source, target, part)
    assert receiving_event(transfer) == expected
    schedule = zero_bubble_h1(2, 2) if "grad" in part else one_f_one_b(2, 2)
    check_no_deadlock(schedule, [transfer])


@pytest.mark.parametrize(("transfer", "message"), [
    (Transfer(Slot("saved", "x"), 0, 0, "forward"), "transfer of saved:x: from stage 0 to itself"),
    (Transfer(Slot("saved", "x"), 0, 2, "forward"), "transfer of saved:x: no stage 2; the schedule has 2 stages"),
    (Transfer(Slot("saved", "x"), 1, 0, "backward"),
     "transfer of saved:x: made by 'backward', but stage 1 has no B actions"),
    (Transfer(Slot("accumulator", "x"), 1, 0, "backward"),
     "transfer of accumulator:x: made by 'backward', but stage 1 has no B actions"),
])  # fmt: skip
def test_bad_transfer(transfer, message):
    assert message_of(zero_bubble_h1(2, 2), [transfer]) == message


def test_virtual_stages_on_one_rank():
    rows = [("0F0", "0F1", "2F0", "2B0", "2F1", "2B1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1")]
    check_no_deadlock(rows, chain_transfers(3))
    stuck = [("2F0", "2B0", "2F1", "2B1", "0F0", "0F1", "0B0", "0B1"), rows[1]]
    assert "stage 2 waits at 2F0 for saved:activation1 of microbatch 0, made by 1F0" in message_of(
        stuck, chain_transfers(3)
    )


# -- bubbles -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
def test_published_bubble_of_equal_stages(make):
    """(p − 1)/m of the busy time (Huang et al., 2019; Narayanan et al., 2021)."""
    for p, m in SIZES:
        assert math.isclose(bubble_fraction(make(p, m), {"F": 1.0, "B": 2.0}), (p - 1) / (m + p - 1), abs_tol=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 16)])
def test_published_bubble_of_interleaved(p, v, m):
    """(p − 1)/(v m) of the busy time (Narayanan et al., 2021)."""
    span = simulate(interleaved_1f1b(p, v, m), {"F": 1.0, "B": 2.0}).span_s
    assert math.isclose(span, 3 * v * m * (1 + (p - 1) / (v * m)))


def test_published_bubble_of_zb_h1():
    """(p − 1)(TF + TB − TW) (Qi et al., 2024, table 2), for m ≥ 2p − 1, where the steady state is reached."""
    f, b, w = 3.0, 3.0, 2.0
    for p, m in [(2, 4), (4, 8), (8, 16), (8, 32)]:
        span = simulate(zero_bubble_h1(p, m), {"F": f, "I": b, "W": w}).span_s
        assert math.isclose(span, m * (f + b + w) + (p - 1) * (f + b - w))


ZERO_BUBBLE_TABLE = [
    # p, m, T_F, T_B, T_W, T_comm in ms, bubble rate of 1F1B, of ZB-H1: Qi et al., 2024, tables 5 and 9
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
]


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "comm", "rate_1f1b", "rate_h1"), ZERO_BUBBLE_TABLE)
def test_published_bubble_rates(p, m, f, b, w, comm, rate_1f1b, rate_h1):
    assert abs(bubble_fraction(one_f_one_b(p, m), {"F": f, "B": b + w}, transfer_s=comm) - rate_1f1b) < 1e-4
    assert abs(bubble_fraction(zero_bubble_h1(p, m), {"F": f, "I": b, "W": w}, transfer_s=comm) - rate_h1) < 1e-4


def test_durations_by_action_stage_and_kind():
    timeline = simulate(one_f_one_b(2, 2), {"F": 1, "B": 2, "1F": 3, "1F1": 5}, transfer_s=0.5)
    assert (timeline.start_s["1F0"], timeline.end_s["1F0"]) == (1.5, 4.5)
    assert timeline.end_s["1B0"] == 6.5
    assert timeline.end_s["1F1"] == 11.5
    assert timeline.start_s["0B0"] == 7.0
    assert timeline.busy_s == (6, 12)
    assert timeline.span_s == timeline.end_s["0B1"] == 16


def test_missing_duration():
    with pytest.raises(PlanError, match="no duration for 0B0: expected one of '0B0', '0B', 'B'"):
        simulate(one_f_one_b(1, 1), {"F": 1})


def test_unequal_stages_are_bound_by_the_slowest():
    timeline = simulate(one_f_one_b(4, 64), {"F": 1, "B": 2, "2F": 2, "2B": 4})
    assert 64 * 6 < timeline.span_s < 66.5 * 6
