"""Where the gradients of a step with one microbatch are reduced: by the backward, as far as it can hide that.

With several microbatches their sum is reduced, once a step or in each; with one, the way from a gradient to its reduced
value is put into the backward (`passes.place_reductions`), so that no gradient stays unreduced until the update but
those of the blocks that the backward reaches last: it would have nothing left to hide them behind.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autopar.layers import block_of

LAST_BLOCKS = 2
"""Blocks at the end of the backward whose gradients the update reduces."""


def reduced_by_backward(graph: Graph) -> list[Node]:
    """The gradients of the only microbatch, in a step graph or a lowered one, that are reduced before the update."""
    gradients = [node for node in graph.nodes if node.meta.get("gradient_of") and node.meta["phase"] == "backward"]
    blocks = list(dict.fromkeys(map(_block, reversed(gradients))))
    last = set(blocks[:LAST_BLOCKS]) if len(blocks) > LAST_BLOCKS else set()
    return [gradient for gradient in gradients if _block(gradient) not in last]


def _block(node: Node) -> str:
    """As `passes.kinds` tells blocks apart."""
    path: str = node.meta.get("path", "")
    return block_of(path) or path.partition(".")[0]
