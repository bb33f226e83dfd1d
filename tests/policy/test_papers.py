"""The exact small examples of the literature (papers.md §7.2) that are not with the module they concern."""

from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.policy.baselines import oobleck_templates, recover_roles
from odyssey_megatron.policy.search import Rate, min_max_shares
from odyssey_megatron.policy.tensor import best_tensor_parallel


def test_recover_counts():
    """4: B = 256 over 31 survivors: 28 majors of 9, a minor of 4, 2 spares."""
    assert recover_roles(256, 31) == (28, 9, 4, 2)
    majors, each, minor, spares = recover_roles(256, 31)
    assert majors * each + minor == 256
    assert majors + 1 + spares == 31
    assert recover_roles(256, 32) == (32, 8, 0, 0)


def test_oobleck_coverage():
    """5: f = 1, n_0 = 3, N = 13: templates 3..12 cover every number of nodes from 6 to 13."""
    templates = oobleck_templates(13, 3, 1)
    assert templates == tuple(range(3, 13))
    for nodes in range(6, 14):
        reachable = {0: {0}}
        for total in range(1, nodes + 1):
            reachable[total] = {
                count + 1 for size in templates for count in reachable.get(total - size, ()) if total >= size
            }
        assert any(count >= 2 for count in reachable[nodes]), nodes


def test_tensor_parallel_choice():
    """6: four ranks, one at 0.4: two are faster than four; at 0.6 four are."""
    assert best_tensor_parallel({0: 1.0, 1: 0.4, 2: 1.0, 3: 1.0}) == (2.0, (0, 2))
    assert best_tensor_parallel({0: 1.0, 1: 0.6, 2: 1.0, 3: 1.0}) == (2.4, (0, 1, 2, 3))
    assert best_tensor_parallel({0: 1.0, 2: 1.0, 3: 1.0}) == (2.0, (0, 2))
    assert best_tensor_parallel({0: 1.0, 1: 1.0, 2: 1.0}, least=4) == (0.0, ())
    assert best_tensor_parallel(dict.fromkeys(range(4), 1.0), divides=6) == (2.0, (0, 1))


def test_weighting():
    """7: pipelines of 5, 3 and 2 microbatches are one sum over ten, not a mean of three means."""
    shares = min_max_shares(10, [Rate(head_s=0.0, each_s=each) for each in (6.0, 10.0, 15.0)])
    assert shares == (5, 3, 2)
    ids = (tuple(range(5)), tuple(range(5, 8)), tuple(range(8, 10)))
    layout = layout_from_routes(1, tuple(pipeline_route((w,), (1,), ids[w]) for w in range(3)))
    gradient = {m: float(m) for m in range(layout.num_microbatches)}
    summed = sum(gradient[m] for route in layout.routes for m in route.microbatches)
    assert summed / layout.num_microbatches == 4.5
    means = [
        sum(gradient[m] for m in route.microbatches) / len(route.microbatches) for route in layout.routes
    ]
    assert sum(means) / 3 != 4.5
