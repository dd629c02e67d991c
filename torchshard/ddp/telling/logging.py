"""What `_get_ddp_logging_data` gives: the keys of torch's own, filled from what is known here."""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torchshard import _torch
from torchshard.buckets import PlannedBucket
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.telling.recording import Recorder, Step

_ENVIRONMENT = {
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "CUDA_VISIBLE_DEVICES": "cuda_visible_devices",
    "TORCH_DISTRIBUTED_DEBUG": "torch_distributed_debug",
}
_OF_BACKEND = {
    "gloo": {"GLOO_SOCKET_IFNAME": "gloo_socket_ifname", "GLOO_DEVICE_TRANSPORT": "gloo_device_transport"},
    "nccl": {
        "NCCL_SOCKET_IFNAME": "nccl_socket_ifname",
        "TORCH_NCCL_BLOCKING_WAIT": "nccl_blocking_wait",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "nccl_async_error_handling",
        "NCCL_DEBUG": "nccl_debug",
        "NCCL_NTHREADS": "nccl_nthreads",
        "NCCL_IB_TIMEOUT": "nccl_ib_timeout",
    },
}
_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

_TOLD = frozenset({"comm_hook", "join_uneven_inputs", "static_graph", "has_error", "error"})


class Logger:
    """Stands in the place of dist.Logger: keeps what a wrapper knows of itself, as texts and as integers.

    Args:
        facts: what does not change.
        reducer: for the buckets.
        recorder: for the times.
    """

    def __init__(self, facts: Mapping[str, str | int], reducer: ObservedReducer, recorder: Recorder) -> None:
        self._facts, self._recorder = dict(facts), recorder
        self._reducer: ObservedReducer = weakref.proxy(reducer)  # which asks this to note
        self._facts["bucket_sizes"] = _sizes(reducer.plan)
        self._sums, self._summed = dict.fromkeys(_durations(Step(0, lambda step: None)), 0), 0
        self._shown: dict[str, str | int] = {"iteration": 0}

    def take_over(self, other: "Logger") -> None:
        """What another one was told, of a reducer of the same parameters."""
        self._facts.update({name: fact for name, fact in other._facts.items() if name in _TOLD})

    def next_forward(self) -> None:
        """A forward begins whose gradients will be reduced: show what was recorded in the one before it."""
        step, number = self._recorder.last, self._recorder.forwards
        if step is None or step.number != number or not self._recorder.is_sampled(number):
            return
        durations = _durations(step)
        for name, ns in durations.items():
            self._sums[name] += ns
        self._summed += 1
        plan = self._reducer.plan
        rebuilt = self._reducer.has_learned and not self._facts["find_unused_parameters"]  # torch never does otherwise
        begin, end = step.communication
        self._shown = {
            "iteration": number,
            "unused_parameter_size": self._reducer.unused_bytes,
            "num_buckets_reduced": sum(t.launched > 0 for t in step.times),
            "has_rebuilt_buckets": int(rebuilt),
            "prev_iteration_grad_ready_order_indices": ", ".join(str(g.index) for b in plan for g in b.gradients),
            "forward_compute_time_start": step.forward,
            "backward_compute_time_start": step.backward,
            "backward_compute_time_end": step.backward_end,
            "backward_comm_time_start": begin,
            "backward_comm_time_end": end,
            **durations,
            **{f"avg_{name}": ns // self._summed for name, ns in self._sums.items()},
        }
        if rebuilt:
            self._shown["rebuilt_bucket_sizes"] = _sizes(plan)
            self._shown["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(g.index) for g in bucket.gradients) for bucket in plan
            )

    def _set_comm_hook_name(self, name: str) -> None:
        """A communication hook was registered."""
        self._facts["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        """The wrapper was given to Join."""
        self._facts["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        """The graph is taken to be static."""
        self._facts["static_graph"] = 1

    def set_error_and_log(self, error: str) -> None:
        """Something was raised."""
        self._facts["has_error"], self._facts["error"] = 1, error

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is raised inside is noted."""
        try:
            yield
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: Exception) -> None:
        """This was raised."""
        self.set_error_and_log(f"{type(error)}: {error}")

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """All of it, in the two maps that dist.Logger gives."""
        found = {**self._facts, **self._shown}
        texts = {name: value for name, value in found.items() if isinstance(value, str)}
        return SimpleNamespace(strs_map=texts, ints_map={n: v for n, v in found.items() if n not in texts})


def environment(backend: str) -> dict[str, str]:
    """Environment variables that matter to a wrapper on this backend; N/A where there is none."""
    names = {**_ENVIRONMENT, **_OF_BACKEND.get(backend, {})}
    return {key: os.environ.get(variable, "N/A") for variable, key in names.items()}


def sizes_of(params: Sequence[torch.Tensor]) -> dict[str, str | int]:
    """Dtypes, sizes and number of parameters."""
    return {
        "dtypes": ", ".join(sorted({_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in params})),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "num_parameter_tensors": len(params),
    }


def _sizes(plan: Iterable[PlannedBucket]) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan)


def _durations(step: Step) -> dict[str, int]:
    """What torch calls times: lengths, in ns."""
    begin, end = step.communication if step.times else (0, 0)
    return {
        "forward_compute_time": step.forward_end - step.forward if step.forward_end else 0,
        "backward_compute_time": step.backward_end - step.backward,
        "backward_comm_time": end - begin,
        "backward_compute_comm_overlap_time": max(0, min(end, step.backward_end) - begin),
    }


def facts_of(wrapper: Any) -> dict[str, str | int]:
    """What a wrapper knows of itself when it is built."""
    group, backend = wrapper.process_group, _torch.group_backend(wrapper.process_group)
    return {
        "module_name": type(wrapper.module).__name__,
        "world_size": group.size(),
        "rank": group.rank(),
        "backend_name": backend,
        "device_ids": ", ".join(map(str, wrapper.device_ids or [])),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "is_multi_device_module": int(wrapper.is_multi_device_module),
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in wrapper.module.modules())),
        **({"static_graph": 1} if wrapper.static_graph else {}),
        **({"gloo_num_threads": _torch.gloo_threads(group)} if backend == "gloo" else {}),
        **environment(backend),
        **sizes_of(wrapper.reducer.params),
    }
