"""Which tiles a product gets, and what holds it back."""

from hypothesis import given
from hypothesis import strategies as st

from rankwise.sim import GraphEngine
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.tiling import Product, Tilings
from rankwise.sim.hardware import load_topology

PRESETS = {name: GraphEngine(name) for name in ("default", "torus16", "pod64", "switch8")}


def tilings(product: Product, preset: str) -> Tilings:
    engine = PRESETS[preset]
    return Tilings(
        product,
        engine.topology.machine,
        engine.machine.costs,
        roofline_of(engine.topology, product.dtype),
        engine.topology.pe_count,
    )


@given(
    st.sampled_from(sorted(PRESETS)),
    st.tuples(*[st.integers(1, 5_000)] * 3),
    st.sampled_from([("f16", 2), ("f32", 4)]),
)
def test_the_best_tiles_fit_and_the_bound_is_no_lower_than_the_roofline(
    preset: str, sizes: tuple[int, int, int], kind: tuple[str, int]
) -> None:
    product = Product(*sizes, *kind)
    m, n, k = sizes
    room = load_topology(preset).machine.pe.tcm.capacity

    best, bound = tilings(product, preset).best(), tilings(product, preset).bound()

    step = (best.m + best.n) * best.k * product.item_bytes
    assert best.stages >= 2
    assert 4 * best.m * best.n + best.stages * step <= room
    roof = roofline_of(PRESETS[preset].topology, product.dtype)
    moved = (m * k + k * n + m * n) * product.item_bytes
    assert bound.picoseconds >= roof.bound(2 * m * n * k, moved).picoseconds


def test_small_products_are_cut_so_that_all_processing_elements_have_work() -> None:
    best = tilings(Product(512, 512, 512, "f16", 2), "default").best()

    assert (512 // best.m) * (512 // best.n) == 32


def test_a_fast_engine_gets_tiles_that_load_less() -> None:
    product = Product(4_096, 4_096, 4_096, "f16", 2)

    slow, fast = (tilings(product, preset).best() for preset in ("default", "switch8"))

    assert fast.m * fast.n > slow.m * slow.n
