"""Where the time of a step of lanes goes, kernel by kernel (GPU).

PYTHONPATH=src python benchmarks/profile_lanes.py alexnet,vgg19,pfl
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from fedagrac.engines import LanesEngine, Workload
from fedagrac.engines.lanes.kernels.descend import descend
from fedagrac.experiments.bench import CASES
from fedagrac.models import VectorModel


def main():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in (sys.argv[1] if len(sys.argv) > 1 else "alexnet").split(","):
        case = CASES[name]
        lanes, batch, images, fed = case.cohort or case.clients, case.batch, case.images, case.federation()
        workload = Workload.of(VectorModel(case.model(), "cuda"), fed, None, batch, "replacement", 0.0, 0)
        engine = LanesEngine(workload)
        engine.model.route(lanes)
        print(name, "routes:", [(c.inputs[1:], c.weight, r) for c, r in engine.model.layers.routes.items()])
        X = [b.contiguous() for b in workload.model.row_views(workload.model.initial().repeat(lanes, 1)).values()]
        samples = torch.randint(0, 1000, (lanes, batch), device="cuda")
        shifts = torch.randint(0, 2, (lanes, batch, 3), device="cuda") if images.padding else None
        C, eta = [torch.zeros_like(b) for b in X], torch.full((lanes,), 0.01, device="cuda")

        def step(engine=engine, X=X, samples=samples, shifts=shifts, C=C, eta=eta):
            for x, g, c in zip(X, engine.model.pieces(X, samples, shifts)[1], C, strict=True):
                descend(x, g, c, eta)

        workload.model.module.train()
        with torch.no_grad():
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(5):
                    step()
                torch.cuda.synchronize()
        kernels = [k for k in seen.key_averages() if k.self_device_time_total > 0]
        total = sum(k.self_device_time_total for k in kernels) / 5
        print(f"{name}: {total:.0f} us of kernels per step, {total / lanes:.1f} us per client-step")
        for k in sorted(kernels, key=lambda k: -k.self_device_time_total)[:16]:
            print(f"{k.self_device_time_total / 5:9.1f} us {k.count / 5:5.0f} x {k.key[:120]}")


if __name__ == "__main__":
    main()
