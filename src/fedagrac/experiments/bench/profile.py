"""Where the time of a client-step goes, against the floor.

Whole rounds are profiled, as they are timed: plan, local steps, aggregation. On a GPU the profiler records
kernels, those of recorded graphs included. Their durations are kept, and what is left of the time is the host's.
On a CPU it records operators, which takes time itself. Their times are scaled so that the whole is the time
without the profiler, and what is left is Python's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fedagrac.core.layout import Layout
from fedagrac.engines import restored_threads, use_threads
from fedagrac.experiments.bench.cases import Case
from fedagrac.experiments.bench.floor import Floor, copy_rate, product_rate, step_bytes
from fedagrac.experiments.bench.timing import Bench, fleet_of, keep_memory, run_threads, taken, wait

__all__ = ["HOST", "KINDS", "Entry", "kind_of", "profile_rounds"]

HOST = "calls, Python, waiting"
UPDATE = "update of the model"
POINTWISE = "norms and pointwise"
COPIES = "copies and fills"

KINDS: dict[str, str] = {
    HOST: r"^autograd::|^\w*Backward\d*$|^Torch-Compiled|Prologue|Pregraph|Pseudo-Op|^ProfilerStep|^cuda[A-Z]"
    r"|^aten::(_?(reshape|reshape_alias|unsafe_view)|view|expand|expand_as|as_strided|slice|select|t|transpose"
    r"|permute|unsqueeze|squeeze|detach|alias|unbind|split\w*|chunk|movedim|narrow|flatten|resolve_\w+|empty\w*"
    r"|lift_fresh|item|_local_scalar_dense|is_nonzero|result_type|broadcast_\w+|result|resize_)$|^(detach|to)$",
    "fused by the compiler": r"CompiledFxGraph|^triton_|cpp_fused",
    "products, convolutions": r"gemm|gemv|(?<![a-z])(b|add|baddb)?mm(?![a-z])|matmul|linear|conv(?!ert)|cutlass"
    r"|xmma|wgrad|dgrad|fprop|rnn|lstm|gru|nvjet|splitk|im2col|col2im|unfold|^columns$|^pictures$",
    "pools": r"pool",
    "softmax, attention": r"softmax|scaled_dot|flash|fmha|attention",
    "batches, embeddings": r"index|gather|scatter|embedding|flip|randperm|take",
    UPDATE: r"^kernel$|descend|addcmul|multi_tensor_apply",
    COPIES: r"copy|memcpy|memset|fill|zero|clone|contiguous|cat|constant_pad|^aten::(ones|to|_to_copy)",
    POINTWISE: r"",
}
"""Kinds of work, each with a pattern of operators and kernels. The first that matches counts."""


@dataclass(frozen=True)
class Entry:
    """An operator or kernel.

    Attributes:
        name: its name.
        kind: the kind of work, of `KINDS`.
        us: microseconds per client-step.
        count: calls per client-step.
    """

    name: str
    kind: str
    us: float
    count: float


def kind_of(name: str) -> str:
    """Return the kind of work of an operator or kernel.

    Examples:
        >>> kind_of("aten::convolution_backward"), kind_of("aten::bmm"), kind_of("MulBackward0")
        ('products, convolutions', 'products, convolutions', 'calls, Python, waiting')
        >>> kind_of("aten::comm"), kind_of("aten::max_pool2d_with_indices")
        ('norms and pointwise', 'pools')
    """
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def profile_rounds(name: str, case: Case, engine: str, bench: Bench) -> dict[str, Any]:
    """Profile rounds of a case with an engine; return the time of a client-step, its parts and its floor.

    Args:
        name: the name of the case.
        case: the problem.
        engine: a candidate, or "auto".
        bench: the device, the precision, and the seconds to time rounds.
    """
    keep_memory(bench.device)
    timed = case.on(bench.device)
    with restored_threads(), torch.random.fork_rng([]):
        if engine != "auto":
            use_threads(run_threads(case, bench))
        fleet = fleet_of(case, engine, bench)
        with fleet.ready(corrected=case.make_algorithm().traits.corrects):
            server = fleet.server(case.make_algorithm())
            fleet.start(server)

            def round_() -> bool:
                (replies,) = fleet.round([server])
                server.take_in(replies)
                wait(bench.device)
                return replies.order.plan.correction is not None

            steps = timed.client_steps()
            us = _median_us(round_, steps, bench.budget)
            entries = _entries(round_, steps, us, fleet.model.layout, timed.lanes(), bench.device)
            dtype = torch.bfloat16 if bench.precision == "bf16" else fleet.model.dtype
            floor = Floor(
                flops=fleet.workload.step_flops(),
                flops_per_s=product_rate(bench.device, dtype),
                bytes=step_bytes(fleet.model.size, fleet.model.dtype.itemsize, corrected=round_()),
                bytes_per_s=copy_rate(bench.device),
            )
            facts = {"takes": taken(fleet), "threads": torch.get_num_threads()}
    return {"workload": name, "about": case.about, "engine": engine, **facts, **_parts(us, entries, floor)}


def _parts(us: float, entries: list[Entry], floor: Floor) -> dict[str, Any]:
    """Return a profile as plain values: the time, the floor, the kinds of work and the entries, largest first."""
    kinds = {kind: sum(entry.us for entry in entries if entry.kind == kind) for kind in KINDS}
    return {
        "us": us,
        "floor_us": floor.us,
        "ratio": us / floor.us,
        "floor": {**asdict(floor), "arithmetic_us": floor.arithmetic_us, "memory_us": floor.memory_us},
        "kinds": [
            {"kind": kind, "us": kinds[kind], "share": kinds[kind] / us}
            for kind in sorted(kinds, key=lambda kind: -kinds[kind])
        ],
        "entries": [asdict(entry) for entry in sorted(entries, key=lambda entry: -entry.us)],
    }


def _median_us(round_: Callable[[], object], steps: int, seconds: float) -> float:
    """Return the microseconds per client-step of the median round, after one that prepares."""
    round_()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        begun = time.perf_counter()
        round_()
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) / steps * 1e6


def _entries(
    round_: Callable[[], object], steps: int, us: float, layout: Layout, lanes: int, device: str
) -> list[Entry]:
    """Profile one round. Return its operators or kernels and what is left; their times sum to `us`."""
    on_gpu = device.startswith("cuda")
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]):  # the first use of the profiler prepares it
        pass
    with profile(activities=[activity], record_shapes=not on_gpu) as seen:
        begun = time.perf_counter()
        round_()
        whole = (time.perf_counter() - begun) * 1e6
    shapes = _model_shapes(layout, lanes)
    spent: dict[tuple[str, str], tuple[float, int]] = {}
    for event in seen.key_averages(group_by_input_shape=not on_gpu):
        own = float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        kind = kind_of(event.key)
        if kind in (POINTWISE, COPIES) and tuple(next(iter(event.input_shapes or []), ())) in shapes:
            kind = UPDATE
        before = spent.get((event.key, kind), (0.0, 0))
        if own > 0:
            spent[event.key, kind] = before[0] + own, before[1] + int(event.count)
    total = sum(own for own, _ in spent.values())
    # kernels keep their durations unless they overlap; operators are scaled to the time without the profiler
    scale = us / max(total, us * steps if on_gpu else whole)
    entries = [Entry(name, kind, own * scale, n / steps) for (name, kind), (own, n) in spent.items()]
    left = max(0.0, us - sum(entry.us for entry in entries))
    return [*entries, Entry("between kernels" if on_gpu else "Python", HOST, left, 0.0)]


def _model_shapes(layout: Layout, lanes: int) -> set[tuple[int, ...]]:
    """Return the shapes that models have in an engine: vectors, matrices of rows, and views of each parameter."""
    single = {parameter.shape for parameter in layout.parameters}
    single.add((sum(parameter.size for parameter in layout.parameters),))
    return single | {(rows, *shape) for shape in single for rows in (1, lanes)}
