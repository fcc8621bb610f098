"""Profiles add up, and floors are what a hand calculation gives. No test depends on a time."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedagrac.cli.app import main
from fedagrac.experiments.bench import (
    CASES,
    KINDS,
    Bench,
    Floor,
    copy_rate,
    kind_of,
    product_rate,
    profile_rounds,
    step_bytes,
)
from fedagrac.experiments.bench.timing import fleet_of
from fedagrac.heterogeneity import Constant

SMALL = replace(CASES["lr-a9a"], clients=4, samples=40, steps=Constant(3))


def flops(case):
    return fleet_of(case, "serial", Bench("cpu")).workload.step_flops()


def test_the_operations_of_logistic_regression():
    # forward and the gradient of the weight: a product of [20, 123] and [123, 2] each; inputs need no gradient
    assert flops(SMALL) == 2 * (2 * 20 * 123 * 2)


def test_the_operations_of_a_convolution():
    def network():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))

    case = replace(CASES["resnet20"], model=network, shape=(3, 8, 8), classes=5, images=None, batch=7, short=None)
    convolution, linear = 2 * 7 * (4 * 6 * 6) * (3 * 3 * 3), 2 * 7 * (4 * 6 * 6) * 5
    assert flops(replace(case, clients=2, samples=10)) == 2 * convolution + 3 * linear


def test_the_operations_of_recurrent_layers_and_of_attention_are_counted():
    steps, batch = 80, 16
    gates = 8 * 1024 + 256 * 1024 + 2 * 256 * 1024  # the four gates of two layers, from inputs and from states
    lstm, head = 2 * batch * steps * gates, 2 * batch * 256 * 80
    assert flops(CASES["char-lstm"]) == pytest.approx(3 * (lstm + head), rel=1e-2)  # state 0 has no gradient
    scores = 2 * (2 * batch * 4 * 80 * 80 * 32)  # of one block: queries by keys, weights by values
    tokens = batch * 80
    layers = 2 * tokens * 128 * (3 * 128 + 128 + 8 * 128)
    assert flops(CASES["char-gpt"]) == 3 * (4 * (scores + layers) + 2 * batch * 128 * 90)


def test_the_traffic_of_alexnet_is_six_passes_and_one_over_the_correction():
    parameters = sum(p.numel() for p in CASES["alexnet"].model().parameters())
    assert step_bytes(parameters, corrected=False) == 6 * 4 * parameters == pytest.approx(6 * 28.85e6, rel=1e-3)
    assert step_bytes(parameters) == 7 * 4 * parameters
    assert Floor(1.0, 1e12, step_bytes(parameters, corrected=False), 4.3e12).us == pytest.approx(40.3, abs=0.1)


def test_rates_are_of_this_machine():
    assert 1e8 < product_rate("cpu") < 1e14
    assert 1e8 < copy_rate("cpu") < 1e13


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mkldnn_convolution", "products, convolutions"),
        ("aten::addmm", "products, convolutions"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", "products, convolutions"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn>(T)", "products, convolutions"),
        ("aten::mkldnn_rnn_layer", "products, convolutions"),
        ("aten::max_pool2d_with_indices_backward", "pools"),
        ("aten::_softmax", "softmax, attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "softmax, attention"),
        ("aten::index", "batches, embeddings"),
        ("aten::embedding_dense_backward", "batches, embeddings"),
        ("aten::native_group_norm", "norms and pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "norms and pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("kernel", "update of the model"),
        ("aten::as_strided", "calls, Python, waiting"),
        ("ConvolutionBackward0", "calls, Python, waiting"),
    ],
)  # fmt: skip
def test_operators_and_kernels_have_a_kind(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_the_parts_of_a_profile_sum_to_the_whole(engine):
    row = profile_rounds("lr-a9a", SMALL, engine, Bench("cpu", budget=0.01))
    assert row["takes"] == engine
    assert {part["kind"] for part in row["kinds"]} == set(KINDS)
    assert sum(part["us"] for part in row["kinds"]) == pytest.approx(row["us"])
    assert sum(part["share"] for part in row["kinds"]) == pytest.approx(1)
    assert sum(entry["us"] for entry in row["entries"]) == pytest.approx(row["us"])
    assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"])
    assert row["floor"]["flops"] == 2 * (2 * 20 * 123 * 2)
    assert row["floor"]["bytes"] == 7 * 4 * 248  # FedaGrac corrects every step


def test_a_profile_counts_calls_per_client_step():
    entries = {
        engine: profile_rounds("lr-a9a", SMALL, engine, Bench("cpu", budget=0.01))["entries"]
        for engine in ("serial", "lanes")
    }
    calls = {engine: {entry["name"]: entry["count"] for entry in rows} for engine, rows in entries.items()}
    assert calls["serial"]["aten::addmm"] == 1  # one client at a time: one product per client-step
    assert calls["lanes"]["aten::bmm"] == pytest.approx(2 / 4)  # forward and backward of four lanes at once


def test_a_profile_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(CASES, "lr-a9a", SMALL)
    options = ["bench", "lr-a9a", "--engines", "lanes", "--profile", "--budget", "0.01"]
    with pytest.raises(SystemExit) as done:
        main([*options, "--out", str(tmp_path)])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert all(
        part in printed for part in ("x the floor of", "arithmetic", "memory", "kind of work", "largest 12")
    )
    assert max(map(len, printed.splitlines())) <= 80
    (written,) = json.loads((tmp_path / "profile.json").read_text())["profiles"]
    assert written["workload"] == "lr-a9a"
    with pytest.raises(SystemExit):
        main([*options, "--json"])
    assert json.loads(capsys.readouterr().out)["profiles"][0]["floor"]["flops"] == 19680


def test_threads_are_restored_after_a_profile():
    before = torch.get_num_threads()
    profile_rounds("lr-a9a", SMALL, "auto", Bench("cpu", budget=0.01))
    assert torch.get_num_threads() == before
