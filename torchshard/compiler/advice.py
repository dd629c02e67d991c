"""Graph breaks around distributed objects that remain, and the way around each; the same are in the guide."""

from collections.abc import Mapping

from torchshard.tensor.calls.plain import WITHOUT_TANGENTS

_LOCAL = "take x.local_tensor() in the region: parts that require gradients have them by themselves"
_PLAIN = "run them on `to_local()`, or outside of the region"
_REPLICATED = "make it a DTensor, or put torchshard.implicit_replication() around the calls of the region, not in it"
_VALUES = "of a DTensor take full_tensor() first: x.full_tensor()[mask.full_tensor()] is traced, forward and backward"
_CONVERT = "convert outside of the region: in it full_tensor() and redistribute() of a DTensor are traced"
_CONVERSIONS = ("to_full", "to_dtensor", "to_sharded_tensor", "to_torch", "from_torch", "KeyRules.__call__")
_SUPPORT = "call torchshard.compiler.support_groups() first"

# What Dynamo says (a part of it) -> what to do instead.
WAYS_AROUND: Mapping[str, str] = {
    "Module-level backwards hooks require compiled autograd": (
        "set torch._dynamo.config.compiled_autograd = True and compile the call of backward() too"
    ),
    "does not support copy.deepcopy()": "copy outside of the region, or take x.detach().clone()",
    "Forward AD makes zeros for operands without a tangent": WITHOUT_TANGENTS,
    "is a plain torch.Tensor among DTensors": _REPLICATED,
    "function _fall_back": "put torchshard.fallback around the calls of the region",
    "There was no rule registered for HOP": _PLAIN,
    "backward hook in a compiled forward takes no gradient": "register the hook outside of the region",
    "Expected FakeTensor, got <class 'torchshard.": _PLAIN,
    "get_tensor_storages does not support traceable wrapper subclasses": _PLAIN,
    "expected both a and b to be FakeTensor": _PLAIN,
    "Mutating a variable from outside the scope of this HOP": (
        "compile what the checkpoint calls, or set "
        "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True"
    ),
    "higher order operator variable for flat_apply": "compile the module itself, or program.run_decompositions()",
    "An opaque object was created in the middle of the program": "make meshes and groups before the region",
    "Dynamo does not know how to enter a `device` context manager": "make meshes and groups before the region",
    "Encountered aliased inputs that are mutated": "write before the region, or give it a clone",
    "between two meshes cannot be compiled": "redistribute to another mesh outside of the region",
    "A compiled region cannot make a leaf": "make leaves outside of the region, or use DTensor.from_local",
    "cannot ask the other ranks for the sizes": "pass shape and stride to from_local",
    "draws random numbers as no compiled region can": "call this operator outside of the region",
    "cannot make a DTensor of torch's": "call to_torch() outside of the region",
    "function of_all": "call from_local() outside of the region",
    "gather() of a ShardedTensor": "call gather() outside of the region",
    "reshard() of a ShardedTensor": "call reshard() outside of the region",
    **{f"function {name}": _CONVERT for name in _CONVERSIONS},
    "is not an operator of ShardedTensors": (
        "make it a DTensor before the region: torchshard.state_dict.to_dtensor(x, mesh, placements)"
    ),
    "on user-defined type 'ShardedTensor'": _LOCAL,
    "'ShardedTensor' implements": _LOCAL,
    "of class `ShardedTensor`": _LOCAL,
    "(ShardedTensor)": _LOCAL,
    "example_value type: Shard": _SUPPORT,
    "example_value type: ChunkShardingSpec": _SUPPORT,
    "example_value type: EnumerableShardingSpec": _SUPPORT,
    "does not know how to wrap <class 'torch.distributed._shard": (
        "ask a ShardedTensor that came into the region: results are cut alike"
    ),
    "returning intermediate with requires_grad_()": "call requires_grad_() outside of the region",
    "cls_source must not be None for MRO walk": "make texts of placements outside of the region",
    "is not registered for this opaque object type": f"{_SUPPORT}; ask outside of the region whether there is one",
    "ClassVariable(<class 'torch.distributed.tensor.placement_types.": "isinstance(p, Shard), or `is` instead of `==`",
    "builtin operator `is_` with argument types ['OpaqueBaseMeta'": "isinstance(p, Shard)",
    "how to enter a `FakeScriptObject` context manager": "give the mesh to what is called in the region",
    "op: call_method; target: storage_offset": "call storage_offset() outside of the region",
    "how to wrap <class 'torchshard.tensor.layout.TensorLayout'>": "ask the tensor: device_mesh, placements, shape",
    "Could not guard on data-dependent expression": _VALUES,  # a length, or where to cut, that follows from values
}


def way_around(reason: str) -> str:
    """What to do about a graph break; empty where nothing is known."""
    return next((advice for words, advice in WAYS_AROUND.items() if words in reason), "")
