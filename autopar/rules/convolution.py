"""Rules of convolutions: `n c [spatial], o c [kernel] -> n o [spatial]`.

Spatial dims are whole: neighbouring shards would have to exchange their edges. With groups, channels are whole too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, whole_letters
from autopar.rules.nodes import argument, result_values, shapes_of
from autopar.rules.notation import BoundRule, Dims, Linear, Shape


@dataclass(slots=True)
class _Convolution:
    """The dims of a convolution's values, the sizes of their letters, and which are whole."""

    inner: Dims
    kernel: Dims
    outer: Dims
    sizes: dict[str, int]
    whole: set[str]

    @property
    def bias(self) -> Dims:
        return self.outer[1:2]


def _convolution(x: Shape, weight: Shape, y: Shape, transposed: bool, groups: int) -> _Convolution:
    sizes, whole = {"n": x[0]}, set[str]()
    if groups > 1:
        channels, outputs = whole_letters(x[1:2], "i", sizes, whole), whole_letters(y[1:2], "o", sizes, whole)
        kernels = whole_letters(weight[:2], "w", sizes, whole)
    else:
        channels, outputs = (("c",),), (("o",),)
        kernels = (*channels, *outputs) if transposed else (*outputs, *channels)
        sizes |= {"c": x[1], "o": y[1]}
    inner: Dims = (("n",), *channels, *whole_letters(x[2:], "x", sizes, whole))
    kernel: Dims = (*kernels, *whole_letters(weight[2:], "k", sizes, whole))
    return _Convolution(inner, kernel, (("n",), *outputs, *whole_letters(y[2:], "y", sizes, whole)), sizes, whole)


def convolution(node: Node) -> BoundRule:
    """`n c …, o c … -> n o …`; a bias would be added once a rank where `c` is split, so it keeps `c` whole."""
    (x, weight, *bias), (y,) = shapes_of(node)
    found = _convolution(x, weight, y, argument(node, 6, "transposed"), argument(node, 8, "groups"))
    operands = [found.inner, found.kernel, *[found.bias] * len(bias)]
    linear: Linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return from_letters(operands, [found.outer], found.sizes, found.whole | ({"c"} if bias else set()), linear)


def convolution_backward(node: Node) -> BoundRule:
    """`n o …, n c …, o c … -> n c …, o c …, o`: linear in the gradient; the bias's knows nothing of `c`."""
    (y, x, weight), _ = shapes_of(node)
    found = _convolution(x, weight, y, argument(node, 7, "transposed"), argument(node, 9, "groups"))
    present = [value is not None for value in result_values(node)]
    results = list(itertools.compress((found.inner, found.kernel, found.bias), present))
    whole = found.whole | ({"c"} if present[2] else set())
    return from_letters([found.outer, found.inner, found.kernel], results, found.sizes, whole, ((0,),))


ROWS: Rows = {
    "aten.convolution": by(convolution),
    "aten.convolution_backward": by(convolution_backward),
}
