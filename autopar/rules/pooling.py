"""Rules of pooling: batch and channels are free, the spatial dims whole.

Where the greatest stood in the window is an index into the flat (whole) spatial dims.
"""

from __future__ import annotations

from autopar.rules.entries import Rows, texts

ROWS: Rows = {
    "aten.max_pool2d_with_indices": texts("", "... [h] [w] -> ... [y] [x], ... [y] [x]"),
    "aten.max_pool2d_with_indices_backward": texts("0", "... [y] [x], ... [h] [w], {w}... [y] [x] -> ... [h] [w]"),
    "aten.avg_pool2d": texts("0", "... [h] [w] -> ... [y] [x]"),
    "aten.avg_pool2d_backward": texts("0", "... [y] [x], ... [h] [w] -> ... [h] [w]"),
    "aten._adaptive_avg_pool2d": texts("0", "... [h] [w] -> ... [y] [x]"),
    "aten._adaptive_avg_pool2d_backward": texts("0", "... [y] [x], ... [h] [w] -> ... [h] [w]"),
}
