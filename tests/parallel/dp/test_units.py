"""Which modules are units, and which buckets they read."""

from torch import nn

from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.units import child_units, given_units, traced_units, unit_modules
from nanotrain.spec.params import Constant, LocalParam, ParamSpec


def layout_of(*names: str, bucket_size: int | None = None):
    """One bucket per unit, unless it is larger; the unit is the name up to the last dot."""
    specs = (
        ParamSpec(name, (200,), dtype="fp32", init=Constant(0.0), weight_decay=True, unit=name.rpartition(".")[0])
        for name in names
    )
    return plan_layout(
        [LocalParam.unsharded(spec) for spec in specs], LayoutRules(2, bucket_size=bucket_size, gathers_by_unit=True)
    )


def test_unit_modules_are_the_children_and_the_items_of_lists_and_dicts():
    stage = nn.Module()
    stage.embedding, stage.norm = nn.Linear(1, 1), nn.Linear(1, 1)
    stage.layers = nn.ModuleDict({"3": nn.Linear(1, 1), "4": nn.Sequential(nn.Linear(1, 1))})
    assert [name for name, _ in unit_modules(stage)] == ["embedding", "norm", "layers.3", "layers.4"]


def test_the_buckets_after_a_unit_are_complete_when_its_backward_begins():
    stage = nn.Module()
    stage.a, stage.b, stage.silent = nn.Linear(1, 1), nn.Linear(1, 1), nn.Identity()
    units = child_units(stage, layout_of("a.weight", "b.weight"))
    # Buckets are in reverse order of registration.
    assert [(unit.module, unit.buckets, unit.num_complete) for unit in units] == [
        (stage.a, (1,), 1),
        (stage.b, (0,), 0),
    ]


def test_of_given_units_nothing_is_known_to_be_complete():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    layout = layout_of("x.weight", "y.weight", "y.bias", "z.weight")
    units = given_units([(first, {"y.weight", "y.bias"}), (second, {"x.weight", "z.weight"})], layout)
    assert [(unit.buckets, unit.num_complete) for unit in units] == [((1,), 0), ((0, 2), 0)]


def test_graphs_write_gradients_of_units_that_borrow_one_bucket():
    layout = layout_of("x.weight", "y.weight", "y.bias", "z.weight", bucket_size=200)  # a bucket for each
    assert traced_units(layout, is_transient=False, num_blocks=0) == {"x", "y", "z"}
    assert traced_units(layout, is_transient=True, num_blocks=0) == {"x", "z"}
    # Units in the same memory cannot be told apart by the memory of a weight.
    assert traced_units(layout, is_transient=True, num_blocks=2) == set()
