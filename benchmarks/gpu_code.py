"""Write the code that torch's compiler makes of a workload's step for a GPU, without a GPU.

    PYTHONPATH=src python benchmarks/gpu_code.py resnet18 --precision bf16 --out step.py

The step is traced on this CPU with the layers of a GPU; then inductor gets the trace with tensors that only say
that they are on one. Printed are the kernels in their order, with the microseconds per client-step that their
bytes take at 4.15 TB/s, as inductor counts them (memory that is read and written again counts twice), and between
them the products and our own operations. Needs torch 2.11 or 2.13 and triton, whose insides it reaches into; a CPU
build of torch fails where a step writes into slices (resnet20).
"""

import argparse
import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.utils._triton
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines.lanes import compiled, fixed
from fedagrac.engines.lanes.convolutions import routes_for
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.experiments.bench import CASES, Bench
from fedagrac.experiments.bench.timing import fleet_of

BYTES_PER_SECOND = 4.15e12
DEVICE = SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048, warp_size=32,
    regs_per_multiprocessor=65536, total_memory=140 << 30, shared_memory_per_block=49152, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
)  # fmt: skip


class Done(BaseException):
    """Ends a run when what was wanted has been made."""


def traced(name, precision, lanes):
    """Return the graph of one step of all lanes, and its inputs."""
    case = replace(CASES[name], clients=lanes, samples=CASES[name].batch, steps=fg.Constant(5), cohort=None)
    fleet, got = fleet_of(case, "compiled lanes", Bench("cpu", precision)), {}

    def take(*arguments):
        graph, got["inputs"] = compiled.traced_step(*arguments)
        got["graph"] = compiled.without_identities(graph)
        raise Done

    own = mock.patch.object(compiled, "with_faster_products", lambda graph: graph)  # they are for CPUs
    with fleet.ready(), mock.patch.object(fixed, "compile_step", take), own, contextlib.suppress(Done):
        engine, workload = fleet.engine, fleet.workload
        engine.width = lanes
        inputs, _ = workload.load(
            torch.zeros(case.batch, dtype=torch.int64), generators=workload.generators([0], 0)
        )
        convolutions = convolutions_of(lambda: workload.call(inputs))
        engine.model.layers = RoutedLayers({c: route(c) for c in convolutions}, fused=True)
        plan = Plan.of(steps=[5] * lanes, lr=0.01, correction=torch.zeros(lanes, workload.model.size))
        engine.run(plan, workload.model.initial(), np.arange(lanes) % workload.federation.num_clients, 0)
    return got["graph"], got["inputs"]


def route(c):
    """Return a route much as an H200 takes it."""
    names = routes_for(c)
    return "direct" if "direct" in names and c.outputs >= 1024 else "rows"


def without_constants(graph, inputs):
    """Make inputs of the graph's own tensors and of random numbers, which need a device."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        constant = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if "randint" in str(node.target):
            constant = torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        if isinstance(constant, torch.Tensor):
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{node.name}")
            last.meta = dict(node.meta)
            inputs.append(constant)
            node.replace_all_uses_with(last)
            graph.graph.erase_node(node)
    graph.recompile()


def on_gpu(value):
    """Return a fake tensor that says that it is on a GPU, like one that says that it is on a CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def code_of(graph, inputs):
    """Return the code that inductor writes."""
    code = []

    def take(lowering, *_):
        text = lowering.codegen()[0]
        code.append(getattr(text, "value", text))
        raise Done

    def inner(module, examples, **options):
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(on_gpu, node.meta["val"])
            node.args, node.kwargs = pytree.tree_map_only(
                torch.device, lambda _: torch.device("cuda", 0), (node.args, dict(node.kwargs))
            )
        module.recompile()
        with contextlib.ExitStack() as stack:
            for patch in as_if_there_were_a_gpu(take):
                stack.enter_context(patch)
            return compile_fx_inner(module, [on_gpu(value) for value in examples], **options)

    fake = FakeTensorMode(shape_env=ShapeEnv())
    with fake:
        arguments = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
    with tracing(TracingContext(fake)), torch.no_grad(), contextlib.suppress(Done):
        compile_fx(graph, arguments, inner_compile=inner)
    return code[0]


def as_if_there_were_a_gpu(take):
    """Return patches of what inductor asks, which hand its graph over when code is to be made of it."""
    hint = hints.DeviceProperties(
        type="cuda", index=0, cc=90, major=9, multi_processor_count=DEVICE.multi_processor_count,
        regs_per_multiprocessor=DEVICE.regs_per_multiprocessor, warp_size=DEVICE.warp_size,
        max_threads_per_multi_processor=DEVICE.max_threads_per_multi_processor, max_threads_per_block=1024,
    )  # fmt: skip
    answers = {
        torch.cuda: {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
            "get_device_properties": lambda *_: DEVICE, "get_device_capability": lambda *_: (9, 0),
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
            "_lazy_init": lambda: None, "_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0,
        },
        CudaInterface: {
            "is_available": staticmethod(lambda: True), "current_device": staticmethod(lambda: 0),
            "get_device_properties": staticmethod(lambda *_: DEVICE),
            "get_compute_capability": staticmethod(lambda *_: 90),
        },
        CudaInterface.Worker: {"get_device_properties": staticmethod(lambda *_: DEVICE)},
        hints.DeviceProperties: {"create": classmethod(lambda *_: hint)},
        torch.utils._triton: {"triton_hash_with_backend": lambda: "none"},
        GraphLowering: {"compile_to_module": take, "_compile_to_module": take},
    }  # fmt: skip
    patches = [mock.patch.object(of, name, value) for of, some in answers.items() for name, value in some.items()]
    return [*patches, config.patch(force_disable_caches=True, fx_graph_cache=False, profile_bandwidth=True)]


def kernels_in(code, lanes):
    """Yield a line for each kernel and product of the code, and the sum of the kernels' times."""
    kernels = re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S)
    gigabytes = {name: float(re.search(r"'kernel_num_gb': ([\d.e-]+)", text)[1]) for name, text in kernels}
    total = 0.0
    for line in code[code.index("def call(") :].splitlines():
        kernel = re.search(r"(triton_\w+)\.run\(", line)
        other = re.search(r"(?:extern_kernels|torch\.ops\.fedagrac)\.(\w+)(?:\.default)?\((.*)\)", line)
        if kernel:
            us = gigabytes[kernel[1]] * 1e15 / BYTES_PER_SECOND / lanes
            total += us
            yield f"{us:8.2f}  {kernel[1]}"
        elif other:
            yield f"          {other[1]} {other[2]}"
    yield f"{total:8.2f}  all; {len(gigabytes)} different kernels"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=CASES)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--lanes", type=int, default=20)
    parser.add_argument("--out", default="step.py", help="file for the code")
    o = parser.parse_args()
    graph, inputs = traced(o.workload, o.precision, o.lanes)
    without_constants(graph, inputs)
    code = code_of(graph, inputs)
    with open(o.out, "w", encoding="utf-8") as file:
        file.write(code)
    for line in kernels_in(code, o.lanes):
        print(line[:150])


if __name__ == "__main__":
    main()
