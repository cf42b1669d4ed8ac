"""Random models have what they promise, and each feature is drawn often enough to be tested."""

from collections import Counter
from typing import Any

from hypothesis import event, given, settings

from pdcompiler.random_model import Late, ModelSpec, RandomModel, Skip, Tie
from pdcompiler.strategies import Case, cases, features, random_models
from pdcompiler.testing import assert_same, plain_step, split_rows

PRINTED = {each.__name__: each for each in (RandomModel, ModelSpec, Skip, Tie, Late)}


def test_each_feature_is_in_its_share_of_300_cases() -> None:
    seen: list[frozenset[str]] = []

    @settings(max_examples=300)
    @given(cases())
    def draw(case: Case) -> None:
        seen.append(features(case))

    draw()
    shares = {name: count / len(seen) for name, count in Counter(name for case in seen for name in case).items()}
    for often in ("skip", "tied weight", "mutated buffer", "unused parameter", "uneven rows", "several stages"):
        assert shares[often] > 0.35, (often, shares)
    for name in ("concat", "frozen", "late input", "auxiliary loss", "extra outputs", "loss inside", "ids"):
        assert shares[name] > 0.05, (name, shares)
    assert {f"output {form}" for form in ("tensor", "scalar", "tuple", "dict", "dataclass")} <= set(shares)


@settings(max_examples=50)
@given(cases())
def test_a_random_model_has_the_gradients_that_its_spec_promises(case: Case) -> None:
    for name in features(case):
        event(name)
    model, batch = case.model(), case.batch()
    sizes = split_rows(case.rows, case.microbatches)
    observed = plain_step(
        model, batch.args, batch.kwargs, target=batch.target, loss_fn=batch.loss_fn, rows_of_microbatches=sizes
    )
    assert observed.loss.isfinite()
    for name, parameter in model.named_parameters():
        gradient = observed.gradients[name]
        assert (gradient is None) == (not parameter.requires_grad or name.endswith("unused")), name
        assert gradient is None or gradient.abs().max() > 1e-9, name
    counted = {name: int(b) for name, b in observed.buffers.items() if name.endswith(("count", "num_batches_tracked"))}
    assert set(counted.values()) <= {len(sizes)}


@settings(max_examples=20)
@given(random_models())
def test_a_random_model_is_built_again_from_what_it_prints(drawn: Any) -> None:
    model, _ = drawn
    again = eval(repr(model), PRINTED)
    assert again.spec == model.spec
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()), 0.0, "weights")
