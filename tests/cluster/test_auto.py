"""`auto`: the machine of the test, measured; GPUs are imitated."""

import time
import types

import pytest
import torch

from autopar.cluster import auto, measure, parse_cluster, preset_device
from autopar.errors import PlanError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(auto, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(measure, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(measure, "BUDGET_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_one_rank_per_core(monkeypatch):
    monkeypatch.setattr(auto, "_num_cpus", lambda: 3)
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    cluster = parse_cluster("auto")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (cluster.name, cluster.levels_text) == ("auto:1x3xcpu", "loopback=3")
    assert all(rate > 0 for rate in cluster.device.flops_per_s.values())
    assert cluster.device.sources["flops_per_s"] == "measured on this machine"
    assert 3 * cluster.device.memory_bytes <= auto._memory_bytes()


def test_a_rank_with_its_own_core_is_timed_by_that_core(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert measure.own_clock(cpu, num_ranks=2, num_cores=2) is time.thread_time
    assert measure.own_clock(cpu, num_ranks=3, num_cores=2) is time.perf_counter
    assert measure.own_clock(torch.device("cuda"), 1, 8) is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert measure.own_clock(cpu, 1, 8) is time.perf_counter
    assert measure.best_s(lambda: time.sleep(0.01), cpu) > 0.009
    assert measure.best_s(lambda: time.sleep(0.01), cpu, clock=time.thread_time) < 0.009


def test_counts_of_the_running_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert parse_cluster("auto").levels_text == "loopback=6"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert parse_cluster("auto").levels_text == "network=3 loopback=2"


@pytest.mark.parametrize(
    ("world", "local", "message"),
    [
        ("5", "2", "WORLD_SIZE=5 is not a multiple of LOCAL_WORLD_SIZE=2"),
        ("none", "", "WORLD_SIZE='none' in the environment; expected a positive number"),
        ("0", "", "WORLD_SIZE='0' in the environment; expected a positive number"),
    ],
)
def test_bad_environment(monkeypatch, world, local, message):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(PlanError, match=message):
        parse_cluster("auto")


def imitate_gpus(monkeypatch, name, count=8):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(total_memory=10**10))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_known_gpu(monkeypatch, name, kind):
    imitate_gpus(monkeypatch, name)
    cluster = parse_cluster("auto")
    assert cluster.device.kind == kind
    assert cluster.device.memory_bytes == 10**10
    assert cluster.device.flops_per_s == preset_device(kind).flops_per_s
    assert cluster.levels[-1].size == 8


def test_unknown_gpu_is_measured(monkeypatch):
    imitate_gpus(monkeypatch, "Example X1")
    monkeypatch.setattr(auto, "MATMUL_SIZE", {"cuda": 1000})
    monkeypatch.setattr(measure, "matmul_s", lambda device, dtype, shape, clock: 1e-3)
    monkeypatch.setattr(measure, "moved_byte_s", lambda device, clock: 1e-11)
    cluster = parse_cluster("auto")
    assert (cluster.device.kind, cluster.device.memory_bytes) == ("example-x1", 9 * 10**9)
    assert (cluster.device.flops_per_s["bfloat16"], cluster.device.bytes_per_s) == (2e12, 1e11)
    assert cluster.levels_text == "pcie=8"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parse_cluster("auto").levels_text == "network=2 pcie=8"
