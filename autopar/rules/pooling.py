"""Rules of pooling: batch and channels are free, the spatial dims whole.

Where the greatest stood in the window is an index into the flat (whole) spatial dims.
"""

from __future__ import annotations

from autopar.rules.entries import Rows, texts

_MEAN_2D = texts("0", "... [h] [w] -> ... [y] [x]")
_MEAN_2D_BACKWARD = texts("0", "... [y] [x], ... [h] [w] -> ... [h] [w]")
_MEAN_3D = texts("0", "... [d] [h] [w] -> ... [z] [y] [x]")
_MEAN_3D_BACKWARD = texts("0", "... [z] [y] [x], ... [d] [h] [w] -> ... [d] [h] [w]")
_MAX_2D = texts("", "... [h] [w] -> ... [y] [x], ... [y] [x]")
_MAX_2D_BACKWARD = texts("0", "... [y] [x], ... [h] [w], {w}... [y] [x] -> ... [h] [w]")
_MAX_3D = texts("", "... [d] [h] [w] -> ... [z] [y] [x], ... [z] [y] [x]")
_MAX_3D_BACKWARD = texts("0", "... [z] [y] [x], ... [d] [h] [w], {w}... [z] [y] [x] -> ... [d] [h] [w]")

ROWS: Rows = {
    "aten.max_pool2d_with_indices": _MAX_2D,
    "aten.max_pool2d_with_indices_backward": _MAX_2D_BACKWARD,
    "aten.max_pool3d_with_indices": _MAX_3D,
    "aten.max_pool3d_with_indices_backward": _MAX_3D_BACKWARD,
    "aten.adaptive_max_pool2d": _MAX_2D,
    "aten.adaptive_max_pool2d_backward": _MAX_2D_BACKWARD,
    "aten.adaptive_max_pool3d": _MAX_3D,
    "aten.adaptive_max_pool3d_backward": _MAX_3D_BACKWARD,
    "aten.max_unpool2d": texts("", "... [h] [w], {w}... [h] [w] -> ... [y] [x]"),
    "aten.max_unpool3d": texts("", "... [d] [h] [w], {w}... [d] [h] [w] -> ... [z] [y] [x]"),
    "aten.fractional_max_pool2d": texts("", "n c [h] [w], n c [r] -> n c [y] [x], n c [y] [x]"),
    "aten.fractional_max_pool2d_backward": _MAX_2D_BACKWARD,
    "aten.fractional_max_pool3d": texts("", "n c [d] [h] [w], n c [r] -> n c [z] [y] [x], n c [z] [y] [x]"),
    "aten.fractional_max_pool3d_backward": _MAX_3D_BACKWARD,
    "aten.avg_pool2d": _MEAN_2D,
    "aten.avg_pool2d_backward": _MEAN_2D_BACKWARD,
    "aten.avg_pool3d": _MEAN_3D,
    "aten.avg_pool3d_backward": _MEAN_3D_BACKWARD,
    "aten._adaptive_avg_pool2d": _MEAN_2D,
    "aten._adaptive_avg_pool2d_backward": _MEAN_2D_BACKWARD,
    "aten._adaptive_avg_pool3d": _MEAN_3D,
    "aten._adaptive_avg_pool3d_backward": _MEAN_3D_BACKWARD,
}
