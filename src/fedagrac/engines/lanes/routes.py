"""The choice of a route for every convolution on a GPU: each is timed once, and the times stay on disk.

Which route is the fastest depends on the shape of the convolution, the number of lanes, the device, the precision
and the versions of torch and of this package. All of them name a measurement, so that the next process takes the
same routes without timing anything.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.func import vmap
from torch.nn import functional

from fedagrac.engines.code import code_version
from fedagrac.engines.lanes.convolutions import GROUPED, ROUTES, routes_for
from fedagrac.engines.lanes.layers import RoutedLayers
from fedagrac.engines.precision import product_precision
from fedagrac.errors import one_of, positive
from fedagrac.files import cache_folder, make_folder, read_bounded, write_atomically
from fedagrac.parsing import parse_json

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedagrac.engines.lanes.kernels.patches import Convolution

__all__ = ["MEASURED", "Seconds", "choose_routes", "measured_routes", "route_seconds"]

log = logging.getLogger("fedagrac")

MEASURED = (GROUPED, "patches", "patches, padded", "rows", "rows, padded", "pointwise", "direct")
"""The routes that are timed where they fit. Each costs a kernel that must be compiled on its first use."""

CHANNELS_BESIDE = ("rows", "rows, padded", "direct")
"""The routes whose outputs, and gradients of pictures, have the channels of a pixel side by side."""

DEARER = 0.1
"""How much longer convolutions may take together so that all pictures of a compiled step have one layout.

What the compiler fuses between convolutions then reads and writes neighbours in memory. In ResNet-18, where half
of it read one layout and wrote another, that took four times as long as its bytes need.
"""

LARGEST = 10_000
"""The most bytes of a measurement on disk."""

Seconds = Callable[["Convolution", str, bool], float]
"""Times a convolution on a route, forward and backward; the flag says whether its pictures need a gradient."""


def choose_routes(
    convolutions: Mapping[Convolution, bool],
    lanes: int,
    device: torch.device,
    dtype: torch.dtype,
    seconds: Seconds | None = None,
    folder: Path | None = None,
    fused: bool = False,
) -> dict[Convolution, str]:
    """Return the name of the fastest route of each convolution; time only what is not on disk yet.

    In compiled steps, where one of them would have the channels of a pixel side by side, all have, unless that
    takes clearly longer.

    Args:
        convolutions: the convolutions, and whether their pictures need a gradient.
        lanes: how many lanes step together.
        device: the device.
        dtype: the precision of the model.
        seconds: times a route; None to run it on the device.
        folder: where measurements are kept; None for the cache folder.
        fused: whether routes are for compiled steps.
    """
    timer = seconds or (lambda c, name, to_pictures: route_seconds(c, name, to_pictures, lanes, device, dtype))
    folder = folder or _folder()
    known = {}
    for c, to_pictures in convolutions.items():
        about = _about(c, to_pictures, lanes, device, dtype)
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
        path = None if folder is None else folder / f"{key}.json"
        times = {} if path is None else (_read(path) or {}).get("us", {})
        names = [name for name in routes_for(c) if name in MEASURED]
        missing = [name for name in names if name not in times]
        times |= {name: seconds_of * 1e6 for name in missing if (seconds_of := timer(c, name, to_pictures)) < 1e6}
        if missing and path is not None:
            make_folder(path.parent)
            write_atomically(path, json.dumps({**about, "us": times}, indent=1).encode())
        known[c] = {name: times[name] for name in names if name in times}
    return _chosen(known, fused)


def _chosen(times: Mapping[Convolution, Mapping[str, float]], fused: bool) -> dict[Convolution, str]:
    """Return the route of each convolution, given the times of those that it can take."""
    fastest = {c: min(us, key=us.__getitem__, default=GROUPED) for c, us in times.items()}
    if not fused or not any(name in CHANNELS_BESIDE for name in fastest.values()):
        return fastest
    beside = {
        c: min((n for n in us if n in CHANNELS_BESIDE), key=us.__getitem__, default="") for c, us in times.items()
    }
    if not all(beside.values()):
        return fastest
    least, alike = (sum(times[c][name] for c, name in some.items()) for some in (fastest, beside))
    return beside if alike <= (1 + DEARER) * least else fastest


def measured_routes(folder: Path | None = None) -> list[dict[str, Any]]:
    """Return all measurements on this machine: each describes a convolution and has the routes' times, `us`.

    Args:
        folder: where measurements are kept; None for the cache folder.
    """
    folder = folder or _folder()
    if folder is None:
        return []
    measurements = [_read(path) for path in sorted(folder.glob("*.json"))]
    return [measurement for measurement in measurements if measurement is not None]


def route_seconds(
    c: Convolution, name: str, to_pictures: bool, lanes: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the seconds of a forward and backward pass on a route; infinity if it does not run here.

    On a GPU they are the seconds of the kernels alone.
    """
    try:
        numbers = torch.Generator(device).manual_seed(0)  # not zeros: products of zeros take less time
        inputs = torch.rand((lanes, *c.inputs), generator=numbers, dtype=dtype, device=device)
        weights = torch.rand((lanes, *c.weight), generator=numbers, dtype=dtype, device=device)
        inputs.requires_grad_(to_pictures), weights.requires_grad_()
        sources = (inputs, weights) if to_pictures else (weights,)
        layers = RoutedLayers({c: name})

        def one(x: Tensor, w: Tensor) -> Tensor:
            return functional.conv2d(x, w, None, c.stride, c.padding)

        def both() -> None:
            with torch.enable_grad(), layers:
                outputs = vmap(one)(inputs, weights)
                torch.autograd.grad(outputs, sources, torch.ones_like(outputs))

        return _shortest(both, device)
    except Exception as error:  # too much memory, or a library that does not take these shapes
        log.info("convolution %s does not run as %r: %s", c, name, error)
        return float("inf")


def _shortest(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the shortest of five runs; a GPU replays a recording."""
    repeat: Callable[[], Any] = work
    if device.type == "cuda":
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        repeat = graph.replay
    best = float("inf")
    for _ in range(5):  # in the first run the libraries choose their kernels
        _wait(device)
        begun = time.perf_counter()
        repeat()
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _about(
    c: Convolution, to_pictures: bool, lanes: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what names a measurement."""
    return {
        "inputs": list(c.inputs),
        "weight": list(c.weight),
        "stride": list(c.stride),
        "padding": list(c.padding),
        "to_pictures": to_pictures,
        "lanes": lanes,
        "precision": product_precision(dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "fedagrac": code_version(),
    }


def _folder() -> Path | None:
    """Return the folder of the measurements, or None without a cache folder."""
    cache = cache_folder()
    return None if cache is None else cache / "routes"


def _read(path: Path) -> dict[str, Any] | None:
    """Read a measurement, or None if the file is invalid."""
    try:
        table = parse_json(read_bounded(path, LARGEST))
        for name, us in table["us"].items():
            one_of("route", name, ROUTES)
            positive("us", us)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(table)
