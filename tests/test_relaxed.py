"""What layers hold under relaxed choices."""

from autopar.mesh import Mesh
from tests.solve.test_share import trials_of
from tests.virtual.step_models import step_of


def test_a_layer_that_is_computed_again_holds_what_the_layer_before_brings_to_it() -> None:
    trials = trials_of(step_of("llama, 2 layers"), "4xcpu")
    relaxed = trials.relaxed(Mesh.parse("pp=2 dp=2 tp=1"))
    units = trials.skeletons.units
    layers = dict(zip(units, relaxed.layers(units, True, [(0.0, 0.0)] * (len(units) - 1)), strict=True))
    node = next(n for n in relaxed.built.nodes if n.meta["key"] == "model.layers.0/aten.add/forward#1")
    residual = node.meta["val"].numel() * node.meta["val"].element_size() / 2
    for unit in ("model.layers.0", "model.layers.1"):
        everything, *_, least = layers[unit].points
        assert residual <= least.saved_bytes < everything.saved_bytes
