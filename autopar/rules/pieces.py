"""Rules of ops that take values apart and put them together along a dim.

x[:, 6:12] of [4, 18]:  a ([n] c) -> a c         stack([x, y], 1):  a b, a b -> a [n] b
"""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.along import along
from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, letters, letters_along, whole
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


def _chunked(dim: int, big: Shape, small: Shape, start: int) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Letters of a value and of an aligned chunk of its `dim`: `([n] c)` and `c`; a ragged piece is whole."""
    dims, sizes = letters(big, "d")
    sizes = {**sizes, f"d{dim}": small[dim]}
    if big[dim] == small[dim]:
        return dims, dims, sizes, set()
    if small[dim] and big[dim] % small[dim] == 0 and start % small[dim] == 0:
        outer = (*dims[:dim], ("n", f"d{dim}"), *dims[dim + 1 :])
        return outer, dims, {**sizes, "n": big[dim] // small[dim]}, {"n"}
    outer = (*dims[:dim], ("x",), *dims[dim + 1 :])
    return outer, dims, {**sizes, "x": big[dim]}, {"x", f"d{dim}"}


def sliced(node: Node) -> BoundRule:
    """An aligned chunk is `([n] c) -> c`; any other slice keeps its dim whole."""
    (big,), (small,) = shapes_of(node)
    dim = argument(node, 1, "dim", 0) % len(big)
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    start = start + big[dim] if start < 0 else start
    outer, inner, sizes, kept = _chunked(dim, big, small, start if step == 1 else 1)
    return from_letters([outer], [inner], sizes, kept, linear=((0,),))


def narrowed(node: Node) -> BoundRule:
    """A slice, by its start and length."""
    (big,), (small,) = shapes_of(node)
    dim, start = argument(node, 1, "dim") % len(big), argument(node, 2, "start")
    outer, inner, sizes, kept = _chunked(dim, big, small, start + big[dim] if start < 0 else start)
    return from_letters([outer], [inner], sizes, kept, linear=((0,),))


def slice_backward(node: Node) -> BoundRule:
    """The mirror of `sliced`."""
    (small,), (big,) = shapes_of(node)
    dim, start, step = argument(node, 2, "dim") % len(big), argument(node, 3, "start"), argument(node, 5, "step")
    start = start + big[dim] if start < 0 else start
    outer, inner, sizes, kept = _chunked(dim, big, small, start if step == 1 else 1)
    return from_letters([inner], [outer], sizes, kept, linear=((0,),))


def selected(node: Node) -> BoundRule:
    """The dim selected from is whole."""
    (operand,), _ = shapes_of(node)
    dim = argument(node, 1, "dim") % len(operand)
    dims, sizes = letters(operand, "d")
    return from_letters([dims], [dims[:dim] + dims[dim + 1 :]], sizes, {f"d{dim}"}, linear=((0,),))


def select_backward(node: Node) -> BoundRule:
    """The mirror of `selected`."""
    _, (result,) = shapes_of(node)
    dim = argument(node, 2, "dim") % len(result)
    dims, sizes = letters(result, "d")
    return from_letters([dims[:dim] + dims[dim + 1 :]], [dims], sizes, {f"d{dim}"}, linear=((0,),))


def split(node: Node) -> BoundRule:
    """Equal parts: `([n] c) -> c, c, …`; unequal ones keep the dim whole."""
    (big,), parts = shapes_of(node)
    dim = argument(node, 2, "dim", 0) % len(big)
    if len({part[dim] for part in parts}) == 1:
        outer, inner, sizes, kept = _chunked(dim, big, parts[0], 0)
        return from_letters([outer], [inner] * len(parts), sizes, kept, linear=((0,),))
    dims, sizes = letters(big, "d")
    results = [(*dims[:dim], (f"p{i}",), *dims[dim + 1 :]) for i in range(len(parts))]
    sizes.update({f"p{i}": part[dim] for i, part in enumerate(parts)})
    kept = {f"d{dim}", *(f"p{i}" for i in range(len(parts)))}
    return from_letters([dims], results, sizes, kept, linear=((0,),))


def concatenated(node: Node) -> BoundRule:
    """The mirror of `split`."""
    parts, (big,) = shapes_of(node)
    if {len(part) for part in parts} != {len(big)}:
        return whole(node)  # an old-style empty operand of shape [0]
    dim = argument(node, 1, "dim", 0) % len(big)
    together: Linear = (tuple(range(len(parts))),)
    if len({part[dim] for part in parts}) == 1:
        outer, inner, sizes, kept = _chunked(dim, big, parts[0], 0)
        return from_letters([inner] * len(parts), [outer], sizes, kept, linear=together)
    dims, sizes = letters(big, "d")
    operands = [(*dims[:dim], (f"p{i}",), *dims[dim + 1 :]) for i in range(len(parts))]
    sizes.update({f"p{i}": part[dim] for i, part in enumerate(parts)})
    kept = {f"d{dim}", *(f"p{i}" for i in range(len(parts)))}
    return from_letters(operands, [dims], sizes, kept, linear=together)


def padded(node: Node) -> BoundRule:
    """Padded dims are whole; linear where zeros are put around."""
    (operand,), (result,) = shapes_of(node)
    dims, sizes = letters(operand, "d")
    pads = argument(node, 1, "pad")  # (before, after) from the last dim on; [1, -1] shifts at an equal size
    changed = [d for d in range(len(operand)) if any(pads[2 * (len(operand) - 1 - d) :][:2])]
    outer = tuple((f"y{d}",) if d in changed else dims[d] for d in range(len(operand)))
    sizes.update({f"y{d}": result[d] for d in changed})
    kept = {name for d in changed for name in (f"d{d}", f"y{d}")}
    is_linear = argument(node, 2, "value", 0) == 0
    return from_letters([dims], [outer], sizes, kept, linear=((0,),) if is_linear else ())


def stacked(node: Node) -> BoundRule:
    """The new dim is whole; jointly linear."""
    operands, (result,) = shapes_of(node)
    dim = argument(node, 1, "dim", 0) % len(result)
    sizes, kept = dict[str, int](), set[str]()
    outer = letters_along(result, {dim}, 0, sizes, kept)
    inner = outer[:dim] + outer[dim + 1 :]
    return from_letters([inner] * len(operands), [outer], sizes, kept, (tuple(range(len(operands))),))


def unbound(node: Node) -> BoundRule:
    """The dim that is taken apart is whole."""
    (operand,), results = shapes_of(node)
    dim, sizes, kept = argument(node, 1, "dim", 0) % len(operand), dict[str, int](), set[str]()
    outer = letters_along(operand, {dim}, 0, sizes, kept)
    return from_letters([outer], [outer[:dim] + outer[dim + 1 :]] * len(results), sizes, kept, ((0,),))


def select_scatter(node: Node) -> BoundRule:
    """The dim into which a slice is put is whole; jointly linear."""
    (operand, _), _ = shapes_of(node)
    dim, sizes, kept = argument(node, 2, "dim", 0) % len(operand), dict[str, int](), set[str]()
    outer = letters_along(operand, {dim}, 0, sizes, kept)
    return from_letters([outer, outer[:dim] + outer[dim + 1 :]], [outer], sizes, kept, ((0, 1),))


ROWS: Rows = {
    "aten.slice": by(sliced),
    "aten.slice_backward": by(slice_backward),
    "aten.select": by(selected),
    "aten.select_backward": by(select_backward),
    "aten.split": by(split),
    "aten.split_with_sizes": by(split),
    "aten.cat": by(concatenated),
    "aten.constant_pad_nd": by(padded),
    "aten.stack": by(stacked),
    "aten.unbind": by(unbound),
    "aten.select_scatter": by(select_scatter),
    "aten.slice_scatter": by(along(2, "dim", 0, ((0, 1),))),
    "aten.unsafe_split": by(split),
    "aten.unsafe_split_with_sizes": by(split),
    "aten.narrow_copy": by(narrowed),
    "aten._stack": by(stacked),
}
