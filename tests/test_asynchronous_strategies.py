"""Random asynchronous cases have what they promise, and each feature is drawn often enough to be tested."""

from collections import Counter

from hypothesis import given, settings
from torch.nn import functional as F

import pdcompiler
from pdcompiler.asynchronous_strategies import AsynchronousCase, StageSkip, asynchronous_cases
from pdcompiler.weight_versions import pipedream_depths

PRINTED = {each.__name__: each for each in (AsynchronousCase, StageSkip)}


def features(case: AsynchronousCase) -> set[str]:
    rounds = [case.batch or count for count in case.replicas]
    present = {
        "skip": bool(case.skips),
        "drain": bool(case.drains),
        "deeper": case.depths != pipedream_depths(case.replicas),
        "steady": case.count > case.depths[0] > 0,
        "unequal replicas": len(set(case.replicas)) > 1,
        "partial round": any(len(stream) % size for stream in case.streams for size in rounds),
        "uneven rows": len(set(case.rows_of_each())) > 1,
    }
    return {name for name, there in present.items() if there} | {case.semantics, case.optimizer, f"{len(case.kinds)} stages"}


def test_each_feature_is_in_its_share_of_300_cases() -> None:
    seen: list[AsynchronousCase] = []

    @settings(max_examples=300)
    @given(asynchronous_cases())
    def draw(case: AsynchronousCase) -> None:
        assert eval(repr(case), PRINTED) == case
        assert case.count == len(case.rows_of_each()) == sum(map(len, case.streams))
        seen.append(case)

    draw()
    shares = {name: count / len(seen) for name, count in Counter(name for case in seen for name in features(case)).items()}
    assert len(shares) == 18 and all(share > 0.05 for share in shares.values()), shares
    assert all(shares[name] > 0.2 for name in ("skip", "drain", "steady", "unequal replicas", "partial round")), shares


@settings(max_examples=30)
@given(asynchronous_cases(semantics=("2bw",), whole_batches=True))
def test_batches_can_be_whole(case: AsynchronousCase) -> None:
    assert case.batch is not None and all(len(stream) % case.batch == 0 for stream in case.streams)
    rows = case.rows_of_each()
    assert all(sum(rows[start : start + case.batch]) == case.rows for start in range(0, case.count, case.batch))


@settings(max_examples=3)
@given(asynchronous_cases(most_stages=3))
def test_the_compiler_cuts_a_model_where_its_stages_begin(case: AsynchronousCase) -> None:
    model, (x, target) = case.model(), case.minibatches()[0]
    pipe = pdcompiler.compile(
        model, len(case.kinds), partition=case.partition, loss_fn=F.mse_loss, example_args=(x,), example_target=target,
        microbatches=1,
    )  # fmt: skip
    for stage, module in zip(pipe.partition.stages, model.stages, strict=True):
        assert {id(model.get_parameter(name)) for name in stage.parameters} == {id(p) for p in module.parameters()}
