"""Rules of convolutions: `n c [spatial], o c [kernel] -> n o [spatial]`.

Spatial dims are whole: neighbouring shards would have to exchange their edges. Channels are (groups, per
group), both of which may be split.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import from_letters, whole_letters
from autopar.rules.nodes import argument, result_values, shapes_of
from autopar.rules.notation import BoundRule, Dims, Shape


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
    sizes, whole = {"n": x[0], "g": groups, "c": x[1] // groups, "o": y[1] // groups}, set[str]()
    inner: Dims = (("n",), ("g", "c"), *whole_letters(x[2:], "x", sizes, whole))
    outer: Dims = (("n",), ("g", "o"), *whole_letters(y[2:], "y", sizes, whole))
    channels: Dims = (("g", "c"), ("o",)) if transposed else (("g", "o"), ("c",))
    return _Convolution(inner, (*channels, *whole_letters(weight[2:], "k", sizes, whole)), outer, sizes, whole)


def convolution(node: Node) -> BoundRule:
    """`n (g c) …, (g o) c … -> n (g o) …`; a bias is added once, by one of the ranks that split `c`."""
    (x, weight, *bias), (y,) = shapes_of(node)
    found = _convolution(x, weight, y, argument(node, 6, "transposed"), argument(node, 8, "groups"))
    operands = [found.inner, found.kernel, *[found.bias] * len(bias)]
    return from_letters(operands, [found.outer], found.sizes, found.whole, ((0,), (1,)))


def convolution_backward(node: Node) -> BoundRule:
    """`n (g o) …, n (g c) …, (g o) c … -> n (g c) …, (g o) c …, (g o)`: the bias's knows nothing of `c`."""
    (y, x, weight), _ = shapes_of(node)
    found = _convolution(x, weight, y, argument(node, 7, "transposed"), argument(node, 9, "groups"))
    present = [value is not None for value in result_values(node)]
    results = list(itertools.compress((found.inner, found.kernel, found.bias), present))
    same = list(itertools.compress((set[str](), set[str](), {"c"}), present))
    operands = [found.outer, found.inner, found.kernel]
    return from_letters(operands, results, found.sizes, found.whole, ((0,),), same=same)


def time_convolution(node: Node) -> BoundRule:
    """`conv_tbc`, whose dims are time, batch, channel."""
    (x, weight, _), (y,) = shapes_of(node)
    sizes = {"t": x[0], "b": x[1], "c": x[2], "k": weight[0], "o": weight[2], "y": y[0]}
    operands: list[Dims] = [(("t",), ("b",), ("c",)), (("k",), ("c",), ("o",)), (("o",),)]
    return from_letters(operands, [(("y",), ("b",), ("o",))], sizes, {"t", "k", "y"}, ((0,), (1,)))


ROWS: Rows = {
    "aten.convolution": by(convolution),
    "aten.convolution_backward": by(convolution_backward),
    "aten.conv_tbc": by(time_convolution),
}
