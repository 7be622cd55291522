"""Times of dispatch and combine over ranks. Two modes, after DeepEP's kernels.

`low latency`: one kernel without the host; a row per assignment goes straight to the rank of its expert. `normal`: the host launches and waits for counts; a row
per (token, rank), and between hosts a row per (token, host), which the receiving host hands on over NVLink.

time = latency + bytes of the slower link / its bandwidth + bytes that pass through the memory / copy bandwidth, of the busiest rank. Rows pass through memory
where kernels stage them: arrival, reading and writing on the way out, and reading by the sender, arrival and reading on the way back.

Latency and bandwidth are fitted on two GPUs of one host, with the least relative errors; RDMA between hosts is what others published. The fit reads
`links.yaml` alone: tables that validate the model are not opened here, and a test checks this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.scale.flows import Array, Flow

PARAMETERS = Path(__file__).with_name("links.yaml")
_MIB = 2**20


@dataclass(frozen=True)
class Links:
    """Latencies in µs, bandwidths in bytes per µs of one GPU and one direction; `memory` counts bytes read and bytes written."""

    push_us: float  # a kernel that stores into the memory of other ranks
    launch_us: float  # a collective that the host launches
    rdma_us: float  # one way, between kernels of two hosts
    nvlink: float
    rdma: float
    memory: float
    host: int  # GPUs of a host
    capacity: float  # bytes of a GPU's memory


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """alpha (µs) and beta (bytes per µs) of times (µs) of messages (bytes), with the least sum of squared relative errors."""
    size, time = np.asarray(sizes, float), np.asarray(times, float)
    (alpha, inverse), *_ = np.linalg.lstsq(np.stack([1 / time, size / time], 1), np.ones_like(time), rcond=None)
    return float(alpha), float(1 / inverse)


def points(parameters: Mapping[str, Any], way: str) -> tuple[list[float], list[float]]:
    """Sizes (bytes) and times (µs) of two GPUs: `push` or `copy`."""
    sizes = [point["mib"] * _MIB for point in parameters[way]]
    return sizes, [size / (point["gb_per_s"] * 1e3) for size, point in zip(sizes, parameters[way], strict=True)]


@cache
def parameters() -> Mapping[str, Any]:
    """What `links.yaml` says."""
    return read_mapping(PARAMETERS)


def load(memory: float, card: str = "h200") -> Links:
    """The links of a card. `memory` is the copy bandwidth that its stored rows have, in bytes per µs.

    A card other than the H200 has the fitted share of its specified bandwidths.
    """
    known = parameters()
    alpha, beta = fit(*points(known, "push"))
    links = Links(
        push_us=alpha,
        launch_us=float(np.mean(known["launch_us"])),
        rdma_us=known["rdma_round_trip_us"] / 2,
        nvlink=beta,
        rdma=known["rdma_gb_per_s"] * 1e3,
        memory=memory,
        host=known["host"],
        capacity=known["cards"][card]["memory_gb"] * 1e9,
    )
    ours, theirs = known["cards"]["h200"], known["cards"][card]
    nvlink, memory_share = (theirs[name] / ours[name] for name in ("nvlink_gb_per_s", "memory_gb_per_s"))
    return replace(links, nvlink=links.nvlink * nvlink, memory=links.memory * memory_share)


LOW_LATENCY, NORMAL = MODES = ("low-latency", "normal")
PAYLOADS = ("fp8", "bf16")
_HEADER, _GROUP, _SCALE = (
    16,
    128,
    4,
)  # bytes of a low-latency message's header; elements of an fp8 group, and bytes of its scale


@dataclass(frozen=True)
class Times:
    """Dispatch and combine in µs."""

    dispatch: float
    combine: float

    @property
    def both(self) -> float:
        """Their sum."""
        return self.dispatch + self.combine


def row_bytes(hidden: int, payload: str, mode: str) -> float:
    """Bytes of a row of dispatch: fp8 has a float32 scale per 128 elements; low-latency rows have a header."""
    values = 2 * hidden if payload == "bf16" else hidden + _SCALE * hidden / _GROUP
    return values + (_HEADER if mode == LOW_LATENCY else 0)


def times(flow: Flow, hidden: int, mode: str, payload: str, links: Links, once: bool = True) -> Times:
    """The times of a flow of rows of `hidden` elements. `once`: normal mode sends a row per (token, rank), not per assignment."""
    if len(flow.rows) == 1:
        return Times(0.0, 0.0)
    out, back = row_bytes(hidden, payload, mode), 2.0 * hidden
    near, far, here, there = _relayed(flow, links.host) if once and mode == NORMAL else _direct(flow.rows, links.host)
    latency = links.push_us if mode == LOW_LATENCY else links.launch_us
    latency += links.rdma_us if len(flow.rows) > links.host else 0.0
    wire = np.maximum(near / links.nvlink, far / links.rdma)
    dispatch = wire * out + (3 * here * out + flow.tokens * 2 * hidden) / links.memory
    combine = wire * back + (here + 2 * there + flow.tokens) * back / links.memory
    return Times(latency + float(dispatch.max()), latency + float(combine.max()))


def _direct(rows: Array, host: int) -> tuple[Array, Array, Array, Array]:
    """For each rank: rows over NVLink and over RDMA, in the busier direction, and rows that its experts and its tokens have."""
    places = np.arange(len(rows)) // host
    inside = places[:, None] == places[None]
    near, far = (
        np.maximum(part.sum(0), part.sum(1))
        for part in (rows * inside * ~np.eye(len(rows), dtype=bool), rows * ~inside)
    )
    return near, far, rows.sum(0), rows.sum(1)


def _relayed(flow: Flow, host: int) -> tuple[Array, Array, Array, Array]:
    """The same with a row per (token, host) between hosts: it lands on the GPU with the sender's place in its host, which hands it on."""
    ranks, hosts = flow.hosts.shape
    rail, at = np.arange(ranks) % host, np.arange(ranks) // host
    same_rail = (rail[:, None] == rail[None]).astype(float)
    leaving = flow.hosts * (at[:, None] != np.arange(hosts)[None])
    landing = (same_rail @ leaving)[np.arange(ranks), at]
    handed = (same_rail @ flow.once) * (at[:, None] == at[None]) * ~np.eye(ranks, dtype=bool)
    near = np.maximum(handed.sum(0), handed.sum(1))
    return near, np.maximum(leaving.sum(1), landing), flow.once.sum(0), flow.once.sum(1)
