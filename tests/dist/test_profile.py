"""`autopar profile` on real ranks: measured in small, and what the command line makes of it."""

import json
import os
from pathlib import Path

import pytest

from autopar import profiling
from autopar.cluster import Cluster, measure, parse_cluster
from autopar.errors import PlanError
from autopar.program import launch
from tests.test_cli import refused, run

SMALL = """
import sys
from autopar import profiling
from autopar.cluster import measure
measure.BUDGET_S, measure.COPY_BYTES = 0.002, {"cpu": 1 << 20}
profiling.MATMUL_SIZES, profiling.FLAT_SHAPES = {"cpu": (16, 32)}, {"cpu": ((4, 32, 32),)}
profiling.COLLECTIVE_BYTES = {"cpu": (1 << 10, 1 << 16)}
profiling.main(sys.argv[1])
"""


@pytest.fixture
def small(monkeypatch):
    """Ranks that measure little."""

    def small_ranks(ranks, command, timeout_s):
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        return launch_ranks(ranks, ["-c", SMALL, command[-1]], env={"PYTHONPATH": path}, timeout_s=120)

    launch_ranks = launch.run_ranks
    monkeypatch.setattr(launch, "run_ranks", small_ranks)


@pytest.mark.dist
def test_two_ranks_write_a_cluster_file(small, tmp_path, capfd):
    file = tmp_path / "cluster.json"
    status, out, err = run(capfd, "profile", "--ranks", "2", "--json", "-o", str(file))
    assert status == 0, err
    found, cluster = json.loads(out), parse_cluster(str(file))
    assert Cluster.from_json(json.dumps(found["cluster"])) == cluster
    assert (cluster.name, cluster.levels_text, cluster.device.kind) == ("profile:1x2xcpu", "loopback=2", "cpu")
    assert all(device > 0 for device in cluster.device.flops_per_s.values())
    assert {len(curve) for curve in cluster.device.efficiency_curves.values()} == {2}
    assert cluster.levels[0].direct and cluster.levels[0].source == "measured by autopar profile"
    kinds = [row["what"].split(" over ")[0] for row in found["timings"] if " over " in row["what"]]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"), 2
    )
    assert all(row["measured_s"] > 0 and row["model_s"] > 0 for row in found["timings"])


def test_one_rank_has_nothing_to_send_to(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(measure, "BUDGET_S", 0.002)
    monkeypatch.setattr(profiling, "MATMUL_SIZES", {"cpu": (16, 32)})
    found = profiling.measure_here()
    assert found.cluster.levels_text == "loopback=1"
    assert "not measured" in found.cluster.levels[0].source
    assert not any(" over " in row.what for row in found.timings)


# -- without ranks -----------------------------------------------------------------------------------------------
def canned(ranks=None):
    cluster = parse_cluster("2x4xh100")
    return profiling.Profile(cluster, (profiling.Timing("matmul", 1e-3, 1.5e-3),))


def test_tables_show_the_error_of_the_model(monkeypatch, capsys):
    monkeypatch.setattr(profiling, "profile", canned)
    status, out, _ = run(capsys, "profile")
    assert status == 0
    assert "matmul  1.00 ms   1.50 ms  +50%" in out and "450 GB/s" in out
    assert "off by 50% in the median; is something else running here?" in out


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_of_a_job_measures_with_it_and_the_first_prints(monkeypatch, capsys, is_first):
    monkeypatch.setenv("RANK", "0" if is_first else "1")
    monkeypatch.setattr(profiling, "profile", lambda ranks: pytest.fail("started ranks"))
    monkeypatch.setattr(profiling, "measure_here", lambda: canned() if is_first else None)
    status, out, _ = run(capsys, "profile", "--json")
    assert status == 0 and bool(out) == is_first
    assert "leave --ranks out" in refused(capsys, "profile", "--ranks", "2")


def test_no_file_where_a_rank_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments, **keywords: 7)
    message = refused(capsys, "profile", "--ranks", "2", "-o", str(tmp_path / "cluster.json"))
    assert message == "autopar: profile: one of 2 ranks failed (status 7); what it said stands above\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_absent_is_noticed_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(profiling, "profile", lambda ranks: pytest.fail("measured"))
    message = refused(capsys, "profile", "-o", str(tmp_path / "absent" / "cluster.json"))
    assert "no folder" in message and "absent" in message


def test_more_ranks_than_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlanError, match="3 ranks, but this machine has 2 GPUs"):
        profiling.profile(3)
    with pytest.raises(PlanError, match="0 ranks; expected at least 1"):
        profiling.profile(0)
