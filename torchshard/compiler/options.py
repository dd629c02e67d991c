"""What the backend can be told, and the sentences for what it cannot."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchshard import _torch
from torchshard.buckets import BucketPolicy, MiB
from torchshard.compiler.joined import JoinReductions
from torchshard.ddp.reducing import traced

Compiler = Callable[..., Callable[..., Any]]

REDUCTIONS = ("auto", "ingraph", "split")


@dataclass(frozen=True)
class Options:
    """Settings of one compilation.

    Attributes:
        reduction: "ingraph" reduces gradients inside of the backward graph (inner compiler inductor only); "split"
            cuts the graph where buckets are full and lets hooks reduce in between; "auto" takes the first that can be.
        inner: the compiler, by its name or as a callable.
        cap_mb, first_mb: sizes of buckets in MiB; None for the wrapper's.
        mode, inductor: what else was given; inductor's.
    """

    reduction: str = "auto"
    inner: str | Compiler = "inductor"
    cap_mb: float | None = None
    first_mb: float | None = None
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_graph(self) -> bool:
        """Whether gradients are to be reduced in the graph."""
        return self.reduction == "ingraph" or (self.reduction == "auto" and self.inner == "inductor")

    @property
    def says_sizes(self) -> bool:
        """Whether something was said about sizes of buckets."""
        return self.cap_mb is not None or self.first_mb is not None

    def sizes(self, otherwise: BucketPolicy) -> BucketPolicy:
        """Sizes of buckets, where they would be `otherwise` if nothing was said."""
        return policy_of(self.cap_mb, self.first_mb, otherwise)

    def compiler(self) -> Compiler:
        """The inner compiler, with its settings."""
        if self.inner == "inductor":
            patches = _torch.inductor_patches(self.mode, dict(self.inductor))
            rewrite = JoinReductions(self.sizes(BucketPolicy())) if traced.in_use() else None
            return lambda graph, inputs: _torch.compile_with_inductor(graph, inputs, patches, rewrite)
        found = _torch.backend_by_name(self.inner) if isinstance(self.inner, str) else self.inner
        given: dict[str, Any] = {"mode": self.mode, "options": dict(self.inductor)}
        return lambda graph, inputs: found(graph, inputs, **{name: value for name, value in given.items() if value})


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Sort what torch.compile was given into ours and inductor's.

    Raises:
        ValueError: an unknown option, or a value that makes no sense.
    """
    rest = dict(options or {})
    reduction, inner = rest.pop("reduction", "auto"), rest.pop("inner", "inductor")
    cap_mb, first_mb = rest.pop("bucket_cap_mb", None), rest.pop("first_bucket_mb", None)
    policy_of(cap_mb, first_mb)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f'backend "torchshard": option reduction={reduction!r} is not known; give one of {", ".join(REDUCTIONS)}'
        )
    check_inner(inner)
    if reduction == "ingraph" and inner != "inductor":
        raise ValueError(
            f'backend "torchshard": reduction="ingraph" needs inductor, not {_name(inner)}; give reduction="split", '
            "which works with any inner compiler, or leave it out"
        )
    if inner == "inductor":
        _check_names(rest)
    return Options(reduction, inner, cap_mb, first_mb, mode, rest)


def policy_of(
    bucket_cap_mb: float | None, first_bucket_mb: float | None, otherwise: BucketPolicy | None = None
) -> BucketPolicy:
    """The policy for sizes in MiB; what is not given is as `otherwise`. ValueError for a negative or senseless one."""
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if size is not None and not (is_number and 0 <= size * MiB < math.inf):
            raise ValueError(f'backend "torchshard": {name}={size!r} is no size; give a number of MiB, 0 or more')
    if bucket_cap_mb is not None:
        return BucketPolicy.from_mb(bucket_cap_mb, first_bucket_mb)
    policy = otherwise or BucketPolicy()
    return policy if first_bucket_mb is None else policy.with_first(int(first_bucket_mb * MiB))


def check_inner(inner: Any) -> None:
    """ValueError unless this is a compiler, or the name of one."""
    if callable(inner):
        return
    try:
        if not isinstance(inner, str) or inner == "torchshard":
            raise ValueError
        _torch.backend_by_name(inner)
    except ValueError:
        raise ValueError(
            f'backend "torchshard": inner={inner!r} is no compiler; give a callable, or a name that '
            "torch.compiler.list_backends() lists"
        ) from None


def _check_names(given: Mapping[str, Any]) -> None:
    ours = {"reduction", "inner", "bucket_cap_mb", "first_bucket_mb"}
    known = ours | _torch.inductor_options()
    for name in given:
        if name.replace("-", "_") not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f'backend "torchshard": unknown option {name!r}'
                + (f", did you mean {close[0]!r}?" if close else ";")
                + f" Its own options are {', '.join(sorted(ours))}; all others must be options of inductor"
            )


def _name(inner: str | Compiler) -> str:
    return repr(inner) if isinstance(inner, str) else getattr(inner, "__name__", repr(inner))
