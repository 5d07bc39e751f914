"""Run batch inference on several machines with Ray Data, which repeats the work of engines that are lost."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from notso.cluster.plan import ClusterError, last_error


def answers(
    requests: Sequence[str],
    worker_class: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    engines: int | None,
    requests_per_call: int,
) -> Iterator[str]:
    """Yield answers in order of completion. Raises ClusterError if a worker fails, for example while starting."""
    # worker_class: instantiated with `options` and `workers` (the number of workers). Its instances are callables that
    # map {"request": [...]} to {"answer": [...]}.
    # engines: maximum number of engines; None: one per machine.
    machines = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    machines = [cpus for cpus in machines if cpus >= 1]  # Ray's head node may have no CPUs for work
    count = max(1, min(engines or len(machines), math.ceil(len(requests) / requests_per_call)))
    engines_per_machine = math.ceil(count / max(1, len(machines)))
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised below
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    data = ray.data.from_items(
        [{"request": each} for each in requests], override_num_blocks=math.ceil(len(requests) / requests_per_call)
    )
    answered = data.map_batches(
        worker_class,
        fn_constructor_kwargs={**options, "workers": count},
        batch_size=None,  # one call per block, that is, per `requests_per_call` requests
        compute=ray.data.ActorPoolStrategy(size=count),  # Ray Data spreads actors over the machines
        num_cpus=max(1, int(min(machines, default=1)) // engines_per_machine),
    )
    try:
        for row in answered.iter_rows():
            yield str(row["answer"])
    except RayError as error:
        address = re.search(r"\bip=([^,\s)]+)", str(error))
        where = f" on {address[1]}" if address is not None else ""
        raise ClusterError(f"a worker failed{where}: {last_error(str(error))}") from error
