"""One bucket's memory: gradients go in, scaled; one collective sums them; they come out as `.grad`."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, cast

import torch

from torchshard import _torch
from torchshard.ddp.telling import messages

_grad, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")

SMALL = 4096
"""Elements. Contiguous gradients below this are copied in together when the bucket closes, others when they arrive."""


class FlatBucket:
    """The gradients of some parameters side by side in one flat tensor.

    Args:
        members: the parameters by their numbers in the wrapper, in the order in which gradients are expected; of one
            device, and their gradients of one dtype.
        scale: what gradients are multiplied with on their way in: 1 / world size.
        views_stay: whether each `.grad` is a view of the bucket for good (gradient_as_bucket_view=True).
        never: members that are known to get no gradient.
        small: elements below which a contiguous gradient counts as small.

    Unless the views stay, `.grad` behaves as if there were no bucket. A small gradient, and a large one that was there
    before the backward, keeps its memory and gets the result copied back. A large new one is an alias of the bucket's
    memory, and that memory is not written again while anybody but the bucket and `.grad` holds it: the bucket then
    takes fresh memory. For a small one an alias would cost more than the copy.
    """

    _is_dense = True  # the members lie side by side, without holes
    given: Collection[int] = ()  # members whose gradients a graph has given: autograd brings nothing for them

    def __init__(
        self,
        members: Mapping[int, torch.Tensor],
        scale: float,
        views_stay: bool,
        never: Collection[int] = (),
        small: int = SMALL,
    ) -> None:
        apart = {i: p for i, p in members.items() if p.numel() < small and p.is_contiguous() and p.grad_dtype}
        self.members = {**apart, **members}  # the small ones first
        self.large = members.keys() - apart.keys()
        self.order, self.parameters = [*members], [*members.values()]  # as hooks see them
        self._expected = [i for i in members if i not in never]
        self.quiet = apart.keys() & {*self._expected[:-1]}  # need not be looked at on arrival
        self.pending = set(self._expected)  # those whose gradients have not arrived, or only been heard of
        self.heard: deque[torch.Tensor] = deque(maxlen=len(members) + 1)  # of quiet ones, not yet taken off `pending`
        self.work: Any = None  # what reduces this bucket now, with the methods of dist.Work
        self.graph_filled = 0  # gradients that a compiled graph has put in, in this backward
        self.scale = scale
        self.watched: Collection[int] = ()  # members on whose gradients others have hooks: these see autograd's own
        self._never = members.keys() & set(never)
        self._small, self._views_stay = apart, views_stay
        self._are_flat = all(p.dim() == 1 for p in apart.values())  # the small ones
        self._addresses: list[int] = []  # of views that stay
        self._existing: Collection[int] = ()  # large gradients that were there when the running backward began
        self._number = {id(p): i for i, p in members.items()}
        self._offsets: dict[int, int] = {}
        self._numel = 0
        for i, p in self.members.items():
            self._offsets[i] = self._numel
            self._numel += p.numel()
        self._shown = self._offsets, self._numel  # the same of what is reduced
        self._small_numel = sum(p.numel() for p in apart.values())
        self._flat: torch.Tensor | None = None
        self._storage: torch.UntypedStorage | None = None
        self._small_segment: torch.Tensor | None = None  # where the small ones lie, of the bucket alone;
        self._small_views: Sequence[torch.Tensor] = ()  # the place of each, too, unless these stay
        self._views: dict[int, torch.Tensor] = {}  # all; during a backward, and between them only if they stay
        self._opened = self._closed = False
        self._kept: dict[int, torch.Tensor] = {}  # gradients that the result is copied back to,
        self._kept_small: Sequence[torch.Tensor] = ()  # and those of all small members, if they came together
        self._absent: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}  # unused: .grad, its old value

    # ---------------------------------------------------------------------------------------------- in

    def begin(self) -> None:
        """A backward begins whose gradients will be reduced."""
        if not self._views_stay:
            self._existing = [i for i in self.large if self.members[i].grad is not None]
        elif [view.data_ptr() for view in self._places().values()] != self._addresses:
            self._forget_views()  # a module that was converted has moved its gradients elsewhere
            self._places()
        if self._views_stay:
            for i in self.watched:
                grad = self.members[i].grad
                self.members[i].grad = None if grad is None else grad.detach().clone()

    @_torch.untraced
    def take(self, param: torch.Tensor, index: int) -> None:
        """Move the gradient of one parameter in, scaled; none counts as unused."""
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self.take(param, index)
            return
        grad, place = param.grad, self._places()[index]
        if grad is None:
            self._absent[index] = None, None
            place.zero_()
            return
        if grad.is_sparse:
            _refuse_sparse(grad)
        if grad.dtype is not place.dtype:  # possible only where grad_dtype is None
            raise RuntimeError(messages.other_dtype_text(index, grad.dtype, place.dtype))
        torch.mul(grad, self.scale, out=place)
        stays = grad.requires_grad or index in self._existing or index in self.watched
        if stays or not self._becomes_gradient(index):
            if grad.data_ptr() != place.data_ptr():
                self._kept[index] = grad
        else:
            param.grad = place

    def succeed(self, others: Iterable["FlatBucket"]) -> None:
        """Take what has come in this backward while others stood in the place of this bucket, which have taken none."""
        came = {i for other in others for i in other.members.keys() - other.pending}
        self.pending.difference_update(came)
        self._existing = {i for other in others for i in other._existing}
        self.take_large()

    def settle(self) -> None:
        """Take those that were heard of off the pending ones; KeyError with the number of one that came twice."""
        came = [*map(self._number.__getitem__, map(id, self.heard))]
        self.heard.clear()
        if len({*came}) == len(came) and self.pending.issuperset(came):
            self.pending.difference_update(came)
        else:
            for i in came:
                self.pending.remove(i)

    def forget_since(self, before: Collection[torch.Tensor]) -> list[int]:
        """Have heard only of what was heard of before; the quiet members that were heard of since then."""
        since = [self._number[id(p)] for p in self.heard]
        self.heard.clear()
        self.heard.extend(before)
        return since

    def take_large(self) -> None:
        """Move in the large gradients that have come, after a backward in which none was taken on arrival."""
        for i in self.large - self.pending - self._never:
            self.take(self.members[i], i)

    def close(self) -> None:
        """All gradients that will come have come: move in the small ones, and what stands for the missing ones."""
        if self._closed:
            return
        self._closed = True
        if self.pending or self._never or (self._views_stay and self.watched):
            missing = self.pending | self._never
            with torch.no_grad():
                for i in sorted(missing):
                    self._take_absent(i)
                for i, p in self._small.items():
                    if i not in missing:
                        self.take(p, i)
        elif self._small:
            self._take_small()

    def _take_small(self) -> None:
        grads, views = [*map(_grad, self._small.values())], self._places_of_small()
        segment = self._small_segment
        assert segment is not None, "made with its views"
        if self._views_stay and all(map(is_, grads, views)):
            segment.mul_(self.scale)  # all were accumulated in place
        elif torch.is_grad_enabled() or any(map(is_, grads, repeat(None))):
            for i, p in self._small.items():
                self.take(p, i)
        else:
            given = cast(list[torch.Tensor], grads)
            _refuse_sparse(*given)
            self._gather(given, segment, views)
            if self._views_stay:
                for p, view in zip(self._small.values(), views, strict=True):
                    p.grad = view
            else:
                self._kept_small = given

    def _gather(self, grads: list[torch.Tensor], segment: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
        """Lay small gradients side by side, scaled."""
        if self._are_flat:  # three times faster
            try:
                torch.cat(grads, out=segment).mul_(self.scale)
                return
            except RuntimeError:
                begin = segment.data_ptr()
                if not any(begin <= grad.data_ptr() < begin + segment.nbytes for grad in grads):
                    raise
                # Some lie there already, as other tensors than the bucket's views: these are copied first.
        if self._views_stay:
            torch.mul(_torch.flatten(grads), self.scale, out=segment)
        else:  # where nobody's gradient can lie
            _torch.copy_all(places, grads)
            segment.mul_(self.scale)

    def _take_absent(self, index: int) -> None:
        """A parameter unused in this backward adds what it has accumulated before, or nothing."""
        grad, place = self.members[index].grad, self._places()[index]
        if grad is None:
            place.zero_()
            self._absent[index] = None, None
        else:
            self._absent[index] = grad, grad.clone() if grad.data_ptr() == place.data_ptr() else None
            torch.mul(grad, self.scale, out=place)

    @property
    def absent(self) -> Collection[int]:
        """Parameters that had no gradient to give in this backward, once the bucket is closed."""
        return self._absent.keys()

    def is_empty(self) -> bool:
        """Whether no member had a gradient to give, once the bucket is closed."""
        return len(self._absent) == len(self.members)

    def has_begun(self) -> bool:
        """Whether a gradient has arrived."""
        return len(self.pending) < len(self._expected)

    # ---------------------------------------------------------------------------------------------- across

    def outgoing(self) -> torch.Tensor:
        """What is to be reduced, in place."""
        return self._open()

    def shown(self) -> tuple[torch.Tensor, Callable[[], Sequence[torch.Tensor]]]:
        """The same for a hook, and what gives the members' parts of it."""
        return self.outgoing(), self.views

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients would contribute."""
        like = next(iter(self.members.values()))
        return torch.zeros(self._shown[1], dtype=gradient_dtype(like), device=like.device)

    def views(self) -> list[torch.Tensor]:
        """The members' parts of it, in their order."""
        places = self._places()
        return [places[i] for i in self.order]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members' parts of another tensor of the form in which it is reduced."""
        return [self._piece(flat, i, self._shown[0]) for i in self.order]

    def receive(self, result: torch.Tensor) -> None:
        """Take another tensor for the result, of as many elements; or the same, and nothing is to be done."""
        flat = self._open()
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            with torch.no_grad():
                flat.copy_(result.reshape(flat.shape))

    def adopt(self, flat: torch.Tensor, used: Collection[int]) -> None:
        """Make the average of the others, in memory that is of no other use, the gradients of a rank without inputs."""
        with torch.no_grad():
            for i, p in self.members.items():
                if i in used:
                    p.grad = self._piece(flat, i, self._shown[0]).detach().to(gradient_dtype(p))

    # ---------------------------------------------------------------------------------------------- out

    def install(self) -> None:
        """A backward is over, though maybe not the last one for this bucket: nothing to do, unless a graph ran."""

    def finish(self, used: Collection[int]) -> None:
        """The sum is there. Give it to whom it does not belong yet; `used`: parameters that some rank has used."""
        if torch.is_grad_enabled():  # backward(create_graph=True); to say no_grad costs as much as what follows
            with torch.no_grad():
                self.finish(used)
            return
        if self._kept_small:
            _torch.copy_all(self._kept_small, self._places_of_small())
        if self._kept:
            places = self._places()
            _torch.copy_all([*self._kept.values()], [places[i] for i in self._kept])
        for i, (grad, before) in self._absent.items():
            place = self._places()[i]
            if i not in used:
                if before is not None:
                    place.copy_(before)
            elif grad is None or self._views_stay:
                self.members[i].grad = place if self._becomes_gradient(i) else place.clone()
            elif before is None:
                grad.copy_(place)

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.pending.update(self._expected)
        self.heard.clear()
        self._kept.clear()
        self._absent.clear()
        self._kept_small = ()
        self.work, self._opened, self._closed = None, False, False
        if not self._views_stay:
            self._views, self._existing = {}, ()  # views count as users of the memory

    # ---------------------------------------------------------------------------------------------- memory

    def _becomes_gradient(self, index: int) -> bool:
        """Whether a new `.grad` of this member is the bucket's own memory."""
        return self._views_stay or index in self.large

    def _places(self) -> Mapping[int, torch.Tensor]:
        """Where the gradients go, each with its parameter's own strides: autograd adds to them in place."""
        flat = self._open()
        if not self._views:
            self._views = dict(zip(self._small, self._places_of_small(), strict=True))
            if self.large:
                with _torch.aliasing():
                    self._views.update(self._split(flat))
            if self._views_stay:
                self._addresses = [view.data_ptr() for view in self._views.values()]
        return self._views

    def _places_of_small(self) -> Sequence[torch.Tensor]:
        flat = self._open()
        if not self._small_views and self._small:
            with _torch.aliasing():
                self._small_segment = flat[: self._small_numel]
                self._small_views = _torch.unflatten(self._small_segment, [*self._small.values()])
        return self._small_views

    def _split(self, flat: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
        """The places of the large gradients."""
        large = {i: p for i, p in self.members.items() if i in self.large}
        if self._is_dense and all(p.is_contiguous() for p in large.values()):
            return zip(large, _torch.unflatten(flat[self._small_numel :], [*large.values()]), strict=True)
        return [(i, self._piece(flat, i, self._offsets)) for i in large]

    def _piece(self, flat: torch.Tensor, index: int, offsets: Mapping[int, int]) -> torch.Tensor:
        param = self.members[index]
        return flat.as_strided(param.shape, gradient_strides(param), offsets[index])

    def _open(self) -> torch.Tensor:
        """The flat tensor, free to be written in this backward."""
        if self._opened and self._flat is not None:
            return self._flat
        like = next(iter(self.members.values()))
        if self._flat is None or self._flat.dtype is not self._dtype_like(like) or self._held_by_others():
            self._flat = self._allocate(like)
            self._storage = self._flat.untyped_storage()
            self._forget_views()
        self._opened = True
        return self._flat

    def _forget_views(self) -> None:
        self._views, self._small_segment, self._small_views = {}, None, ()

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._numel, dtype=self._dtype_like(like), device=like.device)

    def _dtype_like(self, like: torch.Tensor) -> torch.dtype:
        """Of the bucket, for a member as it is now: modules may be converted between two steps."""
        return gradient_dtype(like)

    def _held_by_others(self) -> bool:
        """Whether anybody but this bucket and the present gradients holds the memory."""
        if self._views_stay or self._storage is None or self._flat is None:
            return False
        # Besides the flat tensor, the storage object and views that are the bucket's own:
        own = 2 + (self._small_segment is not None) + len(self._small_views)
        strangers = _torch.storage_uses(self._storage) - own
        if strangers <= 0:
            return False
        start, size = self._flat.data_ptr(), self._flat.element_size()
        for i in self.large:
            grad = self.members[i].grad
            if grad is not None and grad.data_ptr() == start + size * self._offsets[i]:
                strangers -= 1
        return strangers > 0


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """Of its gradient: the parameter's own, unless `grad_dtype` says otherwise (None leaves it to each gradient)."""
    return param.grad_dtype or param.dtype


def gradient_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if its memory has no holes, else those of a contiguous tensor."""
    return param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()


def _refuse_sparse(*grads: torch.Tensor) -> None:
    if any(map(_is_sparse, grads)):
        raise NotImplementedError(
            "DistributedDataParallel: sparse gradients are not reduced yet for parameters that are no weights of "
            "nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True); use one of these, or sparse=False"
        )
