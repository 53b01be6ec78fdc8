"""A plan as text, tables and HTML."""

import functools
from dataclasses import replace

import pytest

from autopar import differing, show
from autopar.errors import PlanError
from autopar.plans import OverlapRow
from autopar.units import format_bytes, format_seconds, parse_bytes
from tests.small_plan import small_plan

plan = functools.partial(small_plan, "pp=2 dp=2", "4xcpu")


def test_summary_names_what_matters():
    text = show.text(plan())
    for part in (
        "4xcpu: mesh pp=2 dp=2, 2 microbatches, schedule 1f1b",
        "step 20.0 ms = compute 20.0 ms; optimal, bound 20.0 ms, gap 0.0%",
        "dp: dim 0 factor 1  layers.*.up.weight (2)",
        "memory of a rank, of 4.00 GiB",
        "5.00 MiB",
        "dp    all_reduce",
        "meshes tried: 1 chosen; captured in 500 ms, solved in 1.50 s",
    ):
        assert part in text
    assert "\x1b" not in text


def test_html_is_escaped():
    html = show.html(replace(plan(), schedule="<b>"))
    assert "&lt;b&gt;" in html and "<table>" in html


def test_explain_a_module_and_a_node():
    nodes = show.json_tables(show.explain(plan(), "layers.1"))["nodes"]
    assert nodes == [
        {"node": "param:layers.1.up.weight", "stage": 1, "choice": "dp=d0.1", "backward": ""},
        {"node": "layers.1.up/linear/forward#0", "stage": 1, "choice": "dp=b", "backward": "recomputed"},
    ]
    assert len(show.json_tables(show.explain(plan(), "layers.0.up/linear/forward#0"))["nodes"]) == 1
    assert len(show.json_tables(show.explain(plan(), "layers.*.up"))["nodes"]) == 4


def test_explain_a_module_that_splits_nothing():
    tables = show.explain(replace(plan(), choices={}), "layers.1")
    assert tables[0].caption == "layers.1: whole on every rank"
    assert show.json_tables(tables)["memory"] == [{"stage": 1, "ranks": "all", "peak_bytes": 5 * 2**20}]


def test_rules_that_the_table_lacks_have_a_line_each():
    found = {"my::up(f32[8 8])": "a b -> a b; linear 0", "my::up(f32[4 8])": "a b -> a b; linear 0"}
    with_rules = replace(plan(), found_rules=found, registered_rules={"my::norm(f32[8])": "[a] -> [a]"})
    lines = show.text(with_rules).splitlines()
    assert lines.count("found by experiment: my.up: a b -> a b; linear 0") == 1
    assert "registered: my.norm: [a] -> [a]" in lines
    named = replace(with_rules, choices={"layers.1.up/my.up/forward#0": "dp=a"})
    captions = [table.caption for table in show.explain(named, "layers.1")]
    assert captions[-1] == "found by experiment: my.up: a b -> a b; linear 0"
    assert ("rules", "of the table", "registered: my.norm: [a] -> [a]") in [
        tuple(row.values())
        for row in show.json_tables(differing.difference(plan(), replace(with_rules, found_rules={})))["plan"]
    ]


def test_explain_nothing():
    with pytest.raises(
        PlanError, match=r"'layer': no module or node of the plan; its modules are layers\.0, layers\.0\.up"
    ):
        show.explain(plan(), "layer")


def test_difference_is_in_seconds_and_bytes():
    tables = show.json_tables(differing.difference(plan(), small_plan("pp=2 tp=2", "4xcpu", step_s=0.01, up="tp=o")))
    assert {"what": "step_s", "before": 0.02, "after": 0.01} in tables["plan"]
    assert {"what": "mesh", "before": "pp=2 dp=2", "after": "pp=2 tp=2"} in tables["plan"]
    assert tables["choices"] == [{"nodes": "layers.*.up/linear/forward#0 (2)", "before": "dp=b", "after": "tp=o"}]
    text = show.tables_text(differing.difference(plan(), plan(step_s=0.01)))
    assert "20.0 ms  10.0 ms" in text


def test_equal_plans_have_no_difference():
    assert not any(show.json_tables(differing.difference(plan(), plan())).values())


@pytest.mark.parametrize(
    ("text", "value"), [("60GiB", 60 * 2**30), ("80 GB", 80 * 10**9), ("1e9", 10**9), ("1.5kib", 1536), (7, 7)]
)
def test_bytes_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "12 parsecs", "nan"])
def test_bytes_that_are_none(text):
    with pytest.raises(PlanError, match="memory"):
        parse_bytes(text)


def test_quantities_have_three_digits():
    assert [format_bytes(v) for v in (0, 999, 1536, 80e9)] == ["0 B", "999 B", "1.50 KiB", "74.5 GiB"]
    assert [format_seconds(v) for v in (0, 2.5e-5, 0.00125, 1, 123.4)] == [
        "0 s",
        "25.0 µs",
        "1.25 ms",
        "1.00 s",
        "123 s",
    ]


def test_stages_of_which_as_much_hides_share_their_rows():
    rows = [OverlapRow(stage, "dp", 1e-3 * (stage != 1), 2e-3) for stage in range(5)]
    estimate = replace(plan().estimate, overlap=tuple(rows), serial_s=0.025)
    text = show.text(replace(plan(), estimate=estimate))
    assert "with all of it waited for the step takes 25.0 ms" in text
    told = [line.split() for line in text.splitlines() if line.endswith("2.00 ms")]
    assert [" ".join(words[: words.index("dp")]) for words in told] == ["0", "1", "2 to 4"]
