"""A device without a GPU: "strict", memory of the host beside the CPU's, and a transport that takes what NCCL takes.

    python -m tests.device                              # all checks of checks.py
    python -m tests.device tests.ddp.test_mixed:_uneven # a body of a test, on two ranks
    python -m tests.device --on cuda                    # with NCCL; those of gpus.py, too
    python -m pytest --on cuda tests/ddp                # what ranks do in tests, there; also --on cuda-gloo

Operators are the CPU's kernels, so values can be compared. What a GPU would not do fails here, by name: tensors on the
CPU in a collective, gaps, dtypes and reductions that NCCL does not know, tensors of another device than the group's.
`torch.strict.waits()` counts how often the host has waited for the device: values read, and numbers put there without
non_blocking. A collective is over when it has been begun, so nothing shows that depends on streams.

`device.cpp` is compiled when it is first used (some 80 s), hence not in every run of the tests.

On GPUs ranks share one where there are fewer than ranks. Some tests fail there for what they are made of: tensors that
they make on the CPU, limits that are the CPU's, `destroy_process_group()` with a collective of NCCL under way.
"""
