"""In-graph mode without inductor: the same pass on the same graphs, run operator by operator. Compiles in a second."""

from torchshard import _torch
from torchshard.compiler.ingraph import InGraph
from torchshard.compiler.rewrite import BucketPass, graph_parameters
from torchshard.ddp import active
from torchshard.ddp.cutting import reduces_gradients


@reduces_gradients
def traced(graph, inputs):
    reducer = active.reducer_to_compile_for()
    if reducer is None:
        return graph.forward
    parameters = graph_parameters(inputs, reducer.names_by_id)
    rewrite = BucketPass(parameters, reducer.lending.segments)
    return InGraph(_torch.trace_backward(graph, inputs, rewrite), list(parameters))


BACKENDS = {
    "traced": lambda: {"backend": traced},
    "inductor": lambda: {"backend": "torchshard"},
    "split": lambda: {"backend": "torchshard", "options": {"reduction": "split", "inner": "aot_eager"}},
}
