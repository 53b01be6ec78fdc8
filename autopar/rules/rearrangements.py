"""Rules of ops that put elements elsewhere: repeats, shuffles of channels and pixels, windows, diagonals.

pixel_shuffle(x, 2) of [n, 12, h, w]:  n (c [r] [q]) h w -> n c (h [r]) (w [q])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.fx import Node

from autopar.rules.entries import Rows, by, texts
from autopar.rules.letters import from_letters, letters, letters_along, whole
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear

_ALONE: Linear = ((0,),)


def _mirrored(rule: BoundRule) -> BoundRule:
    """The rule of the op's backward: results and operand exchanged."""
    return from_letters(rule.results, rule.operands, rule.sizes, rule.whole, _ALONE)


def repeated(node: Node) -> BoundRule:
    """`a b -> (r a) b`: the copies are a factor that only the result has."""
    (operand,), (result,) = shapes_of(node)
    dims, sizes = letters(operand, "d")
    missing = len(result) - len(operand)
    padded = (1,) * missing + operand
    sizes |= {f"r{i}": whole // part if part else 1 for i, (whole, part) in enumerate(zip(result, padded, strict=True))}
    outer = tuple((f"r{i}", *(dims[i - missing] if i >= missing else ())) for i in range(len(result)))
    return whole(node) if 0 in result else from_letters([dims], [outer], sizes, linear=_ALONE)


# -- channels and pixels -----------------------------------------------------------------------------------------
def _shuffled(packed: Sequence[int], factor: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Letters of a packed value `… (c r q) h w` and of the image `… c (h r) (w q)`."""
    *leading, channels, height, width = packed
    outer, sizes = letters(tuple(leading), "d")
    sizes |= {"c": channels // factor**2, "r": factor, "q": factor, "h": height, "w": width}
    return (*outer, ("c", "r", "q"), ("h",), ("w",)), (*outer, ("c",), ("h", "r"), ("w", "q")), sizes


def pixel_shuffle(node: Node) -> BoundRule:
    """`… (c [r] [q]) h w -> … c (h [r]) (w [q])`"""
    (operand,), _ = shapes_of(node)
    packed, image, sizes = _shuffled(operand, argument(node, 1, "upscale_factor"))
    return from_letters([packed], [image], sizes, {"r", "q"}, _ALONE)


def pixel_unshuffle(node: Node) -> BoundRule:
    """The mirror of `pixel_shuffle`."""
    _, (result,) = shapes_of(node)
    packed, image, sizes = _shuffled(result, argument(node, 1, "downscale_factor"))
    return from_letters([image], [packed], sizes, {"r", "q"}, _ALONE)


def channel_shuffle(node: Node) -> BoundRule:
    """`n (g c) … -> n (c g) …`"""
    (operand,), _ = shapes_of(node)
    dims, sizes = letters(operand, "d")
    sizes["g"] = argument(node, 1, "groups")
    sizes["c"] = operand[1] // sizes["g"]
    return from_letters([(dims[0], ("g", "c"), *dims[2:])], [(dims[0], ("c", "g"), *dims[2:])], sizes, linear=_ALONE)


# -- windows -----------------------------------------------------------------------------------------------------
def _windows(big: Sequence[int], small: Sequence[int], dim: int, step: int) -> BoundRule:
    """A value and its windows along `dim`: side by side they are `(n [s]) -> n [s]`, else the dim is whole."""
    dims, sizes = letters(tuple(big), "d")
    count, size = small[dim], small[-1]
    sizes |= {"n": count, "s": size}
    side_by_side = step == size and count * size == big[dim]
    outer = (*dims[:dim], ("n", "s") if side_by_side else dims[dim], *dims[dim + 1 :])
    inner = (*dims[:dim], ("n",), *dims[dim + 1 :], ("s",))
    return from_letters([outer], [inner], sizes, {"s", *(() if side_by_side else ("n", f"d{dim}"))}, _ALONE)


def unfolded(node: Node) -> BoundRule:
    """`x.unfold(dim, size, step)`"""
    (operand,), (result,) = shapes_of(node)
    dim = argument(node, 1, "dimension") % max(len(operand), 1)
    return _windows(operand, result, dim, argument(node, 3, "step")) if operand else whole(node)


def unfold_backward(node: Node) -> BoundRule:
    """The mirror of `unfolded`."""
    (gradient,), (result,) = shapes_of(node)
    dim = argument(node, 2, "dim") % max(len(result), 1)
    return _mirrored(_windows(result, gradient, dim, argument(node, 4, "step"))) if result else whole(node)


def _columns(image: Sequence[int], columns: Sequence[int], kernel: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Letters of an image `n c [h] [w]` and of its columns `n (c [k]) [l]`."""
    outer, sizes = letters(tuple(image[:-3]), "d")
    sizes |= {"c": image[-3], "h": image[-2], "w": image[-1], "k": math.prod(kernel), "l": columns[-1]}
    return (*outer, ("c",), ("h",), ("w",)), (*outer, ("c", "k"), ("l",)), sizes


def im2col(node: Node) -> BoundRule:
    """`n c [h] [w] -> n (c [k]) [l]`"""
    (image,), (columns,) = shapes_of(node)
    outer, inner, sizes = _columns(image, columns, argument(node, 1, "kernel_size"))
    return from_letters([outer], [inner], sizes, {"h", "w", "k", "l"}, _ALONE)


def col2im(node: Node) -> BoundRule:
    """The mirror of `im2col`: windows that overlap are added."""
    (columns,), (image,) = shapes_of(node)
    outer, inner, sizes = _columns(image, columns, argument(node, 2, "kernel_size"))
    return from_letters([inner], [outer], sizes, {"h", "w", "k", "l"}, _ALONE)


# -- diagonals ---------------------------------------------------------------------------------------------------
def _diagonal(full: Sequence[int], length: int, dim1: int, dim2: int) -> BoundRule:
    """A value and its diagonal, which stands last: both dims of it are whole."""
    taken = {dim1 % len(full), dim2 % len(full)}
    sizes, kept = {"k": length}, {"k"}
    outer = letters_along(tuple(full), taken, 0, sizes, kept)
    inner = (*(dim for d, dim in enumerate(outer) if d not in taken), ("k",))
    return from_letters([outer], [inner], sizes, kept, _ALONE)


def _with_diagonal(dim1: tuple[int, int], dim2: tuple[int, int], is_forward: bool) -> Callable[[Node], BoundRule]:
    """A rule from where the op's arguments `dim1` and `dim2` stand and their defaults."""

    def rule(node: Node) -> BoundRule:
        (operand, *_), (result,) = shapes_of(node)
        full, part = (operand, result) if is_forward else (result, operand)
        found = _diagonal(
            full, part[-1], argument(node, dim1[0], "dim1", dim1[1]), argument(node, dim2[0], "dim2", dim2[1])
        )
        return found if is_forward else _mirrored(found)

    return rule


def diagonal_scatter(node: Node) -> BoundRule:
    """Jointly linear in the value and its new diagonal."""
    (full, diagonal), _ = shapes_of(node)
    found = _diagonal(full, diagonal[-1], argument(node, 3, "dim1", 0), argument(node, 4, "dim2", 1))
    (outer,), (inner,) = found.operands, found.results
    return from_letters([outer, inner], [outer], found.sizes, found.whole, ((0, 1),))


ROWS: Rows = {
    "aten.repeat": by(repeated),
    "aten.pixel_shuffle": by(pixel_shuffle),
    "aten.pixel_unshuffle": by(pixel_unshuffle),
    "aten.channel_shuffle": by(channel_shuffle),
    "aten.unfold": by(unfolded),
    "aten.unfold_backward": by(unfold_backward),
    "aten.im2col": by(im2col),
    "aten.col2im": by(col2im),
    "aten.diagonal": by(_with_diagonal((2, 0), (3, 1), is_forward=True)),
    "aten.diagonal_backward": by(_with_diagonal((3, 0), (4, 1), is_forward=False)),
    "aten.diag_embed": by(_with_diagonal((2, -2), (3, -1), is_forward=False)),
    "aten.diagonal_scatter": by(diagonal_scatter),
    "aten.view_as_real": texts("0", "... -> ... [z]"),
    "aten.view_as_complex": texts("0", "... [z] -> ..."),
}
