"""Training without flushes as a user sees it: real models, weights kept, what a step returns, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError, Pipeline
from pdcompiler.core import ops
from pdcompiler.core.asynchronous import Asynchronous
from pdcompiler.core.ir import evaluate
from pdcompiler.passes.program import lower_tick
from pdcompiler.stream_memory import StreamMemory
from pdcompiler.testing import AsynchronousCase, assert_close_by_tensor
from tests.closed_forms import Weights, half_squared, linear, minibatches, one_batch_behind, one_each, sgd, two_replicas_and_one
from tests.delayed_models import delayed_training, minibatch
from tests.models import ZOO
from tests.streams import assert_equal, batches, case_of, compiled, oracle, run


def cut(model: nn.Sequential) -> list[str]:
    """One layer a stage."""
    return [str(index) for index in range(1, len(model))]


def small(schedule: Any = "pipedream", stages: int = 2, **options: Any) -> Pipeline:
    model = linear(stages)
    given = {"partition": cut(model), "optimizer": sgd, "loss_fn": half_squared} | options
    return pdcompiler.compile(model, sum(options.get("replicas", (1,) * stages)), schedule=schedule, **given)


def feed(pipe: Pipeline, count: int) -> list[Any]:
    return [pipe.step(x, target=target) for x, target in minibatches(count)]


# Closed forms


def assert_closed(pipe: Pipeline, count: int, expected: list[Weights]) -> None:
    """The weights after every update."""
    stream = minibatches(count)
    pipe.prepare(stream[0][0], target=stream[0][1])
    seen = [[parameter.detach().clone()] for parameter in pipe.parameters()]
    optimizer: Any = pipe.optimizer
    for stage, parameter in enumerate(pipe.parameters()):
        optimizer.of_stage[stage].register_step_post_hook(
            lambda *_, stage=stage, parameter=parameter: seen[stage].append(parameter.detach().clone())
        )
    feed(pipe, count)
    pipe.drain()
    for actual, versions in zip(seen, expected, strict=True):
        for weights, closed in zip(actual, versions, strict=True):
            assert_close_by_tensor(weights, closed, 1e-12, "weights")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_papers_equations(stages: int) -> None:
    """Stashing: w(t+1) = w(t) - rate * gradient of f(w_1(t-n+1), ..., w_n(t)); vertical sync: all n-1 behind."""
    assert_closed(small(stages=stages), 9, one_each(list(reversed(range(stages))), 9))
    together = small(Asynchronous(vertical_sync=True), stages)
    assert_closed(together, 9, one_each([stages - 1] * stages, 9))


def test_two_replicas_and_one_in_closed_form() -> None:
    assert_closed(small(replicas=(2, 1)), 10, two_replicas_and_one(5))


def test_2bw_in_closed_form() -> None:
    """W(b+1) = W(b) - rate * gradient at W(b-1)."""
    pipe, stream = small("pipedream-2bw", 3, microbatches=2), minibatches(8)
    expected = one_batch_behind(3, 2, 4)
    for b in range(4):
        x, target = (torch.cat(tensors) for tensors in zip(*stream[2 * b : 2 * b + 2], strict=True))
        pipe.step(x, target=target)
    pipe.drain()
    # half_squared is a sum over the rows, weighed by the microbatches' shares, so it has their mean
    for parameter, versions in zip(pipe.parameters(), expected, strict=True):
        assert_close_by_tensor(parameter.detach(), versions[-1], 1e-12, "weights")


def test_whole_pipelines_take_minibatches_in_turn() -> None:
    """Two pipelines of two stages are replicas 2-2: the oracle's weights, with ranks 0 and 1 in the first pipeline."""
    case = case_of((2, 2), "stash", "momentum", 9)
    straight = compiled(case, partition=case.partition, replicas=(2, 2))
    inputs, target, _ = next(iter(batches(case)))
    straight.prepare(inputs, target=target)
    stages = tuple(dataclasses.replace(stage, replicas=1) for stage in straight.partition.stages)
    pipe = compiled(case, partition=pdcompiler.Partition(stages, pipelines=2), replicas=None)
    seen = run(case, pipe)
    assert_equal(case, seen)
    assert pipe.options.schedule.replicas == {0: (0, 2), 1: (1, 3)}


# Real models


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("unet", (1, 1, 1)),
        pytest.param("llama", (2, 1), marks=pytest.mark.full),
        pytest.param("resnet", (1, 1, 1), marks=pytest.mark.full),
        pytest.param("gnmt", (2, 1), marks=pytest.mark.full),
        pytest.param("vit", (1, 2, 1), marks=pytest.mark.full),
        pytest.param("mixtral", (1, 1), marks=pytest.mark.full),
    ],
)
def test_models_as_they_come(name: str, replicas: tuple[int, ...]) -> None:
    """Seven minibatches of 4 and 5 rows in turn, AdamW: losses, weights and buffers are those of the plain loop."""
    example = ZOO[name]()
    cut = pdcompiler.compile(
        copy.deepcopy(example.model), len(replicas), example_args=example.args, example_kwargs=example.kwargs,
        example_target=example.target, loss_fn=example.loss_fn,
    ).partition  # fmt: skip
    stages = tuple(dataclasses.replace(stage, replicas=count) for stage, count in zip(cut.stages, replicas, strict=True))
    partition = pdcompiler.Partition(stages, cut.model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    losses, state = delayed_training(example, partition, replicas, optimizer, 7)
    pipe = pdcompiler.compile(
        example.model, sum(replicas), partition=partition, schedule="pipedream", optimizer=optimizer, loss_fn=example.loss_fn
    )
    found = []
    for t in range(7):
        args, kwargs, target = minibatch(example, t)
        found.append(pipe.step(*args, target=target, **kwargs))
    found += pipe.drain()
    told = [result.loss for result in found if result is not None]
    tolerance = 50 * max(example.tolerance, 1e-12)  # AdamW divides small gradients by themselves
    for t, (loss, expected) in enumerate(zip(told, losses, strict=True)):
        assert_close_by_tensor(loss, expected, tolerance, f"loss of minibatch {t}")
    for key, value in pipe.state_dict().items():
        if key in state:
            assert_close_by_tensor(value, state[key], tolerance, key)


# What is kept


def live_weights(pipe: Pipeline) -> dict[tuple[int, int], int]:
    """Bytes of weights by (stage, rank), measured by their storages: the newest, and what is put by."""
    stream: Any = pipe.stream
    found = {}
    for stage, ranks in stream.replicas.items():
        names = pipe.partition.stages[stage].parameters
        for rank in ranks:
            held = [value for name, value in pipe.named_parameters() if name in names]
            for (kind, of, _, on), value in stream.memory.stashed.items():
                held += value if kind in ("weights", "kept weights") and (of, on) == (stage, rank) else ()
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
            found[stage, rank] = sum(storages.values())
    return found


KEPT = {
    "1-1-1": case_of((1, 1, 1), "stash", "sgd", 14),
    "2-1": case_of((2, 1), "stash", "adamw", 14),
    "deeper": case_of((1, 2), "stash", "sgd", 14, depths=(3, 0)),
    "vertical sync": case_of((1, 1, 1), "vertical-sync", "sgd", 14),
    "2-1, vertical sync": case_of((2, 1), "vertical-sync", "sgd", 14),
    "2bw": case_of((1, 1, 1), "2bw", "momentum", 15, batch=3, rows=6),
}


@pytest.mark.parametrize("name", KEPT)
def test_bytes_of_weight_versions_are_the_predicted_ones(name: str) -> None:
    """Their largest number equals what the schedule and the partition's table say, and what the oracle needs."""
    case = KEPT[name]
    pipe, most = compiled(case), dict[tuple[int, int], int]()
    for inputs, target, _ in batches(case):
        pipe.step(inputs, target=target)
        for where, nbytes in live_weights(pipe).items():
            most[where] = max(most.get(where, 0), nbytes)
    expected = oracle(case)
    for (stage, rank), nbytes in most.items():
        plan = pipe.partition.stages[stage]
        assert plan.cost is not None and pipe.request.ticks is not None
        versions = expected.live_versions[stage]
        assert nbytes == versions * plan.parameter_bytes, (stage, rank)
        assert versions <= plan.cost.versions == pipe.request.ticks.versions(stage)
        if case.semantics == "stash":
            assert plan.cost.weights == nbytes


def test_bytes_of_saved_values_are_the_predicted_ones() -> None:
    """Between ticks a stage holds those of its depth's minibatches, and no more."""
    case = KEPT["1-1-1"]
    pipe = compiled(case)
    for inputs, target, _ in batches(case):
        pipe.step(inputs, target=target)
    stream: Any = pipe.stream
    for stage in pipe.stages:
        held = [value for (kind, of, _, _), value in stream.memory.stashed.items() if (kind, of) == ("saved", stage.index)]
        assert len(held) == case.depths[stage.index]
        measured = sum(tensor.numel() * tensor.element_size() for saved in held for tensor in saved)
        given: Any = stage.forward.module.graph.output_node().args[0]
        saved = given[stage.forward.gives.index("saved")]
        assert measured == len(held) * sum(evaluate(node.meta["type"].nbytes(), case.rows) for node in saved)


def test_a_stage_of_depth_0_is_never_copied() -> None:
    """Nor is one whose backward does not read its weights."""
    pipe, copies = small(stages=2), []
    with mock.patch.object(StreamMemory, "update", autospec=True, side_effect=StreamMemory.update) as updates:
        feed(pipe, 6)
    for call in updates.call_args_list:
        copies.append((call.kwargs["stage"], call.kwargs["keep"]))
    assert {stage for stage, _ in copies} == {0, 1} and not any(keep for _, keep in copies)


# The tests can fail


def broken(case: AsynchronousCase) -> None:
    with pytest.raises(AssertionError):
        assert_equal(case, run(case))


def test_without_the_copy_of_old_weights_the_laws_fail() -> None:
    right = StreamMemory.update

    def in_place(self: StreamMemory, weights: Any, gradients: Any, *, stage: int, rank: int, keep: bool) -> None:
        right(self, weights, gradients, stage=stage, rank=rank, keep=False)

    with mock.patch.object(StreamMemory, "update", in_place):
        broken(KEPT["1-1-1"])


def test_with_backwards_on_the_newest_weights_the_laws_fail() -> None:
    right = lower_tick._Lowering._for_backward

    def newest(self: Any, name: str, item: Any, note: Any) -> Any:
        if name == "weights":
            return self.writer.once(ops.weights, f"stage{item.stage}_weights", note)
        return right(self, name, item, note)

    with (
        mock.patch.object(lower_tick._Lowering, "_for_backward", newest),
        mock.patch.object(StreamMemory, "end_stream"),  # the stashed weights are never taken back
    ):
        broken(case_of((1, 1, 1), "stash", "sgd", 8))


# What a step returns


def test_step_returns_what_has_finished_and_drain_the_rest() -> None:
    pipe = small(stages=3)
    found = feed(pipe, 6)
    assert [None if result is None else result.index for result in found] == [None, None, 0, 1, 2, 3]
    assert [result.index for result in pipe.drain()] == [4, 5] and pipe.drain() == []
    found = feed(pipe, 3)  # a drained pipeline fills again, and counts on
    assert [None if result is None else result.index for result in found] == [None, None, 6]


def test_stopping_in_the_stream_loses_nothing_that_was_stepped() -> None:
    """The model has each stage's newest weights at any time; a drain later goes on from there."""
    pipe = small(stages=2)
    feed(pipe, 5)
    expected = one_each([1, 0], 5)
    model: Any = pipe.request.model
    for layer, versions, updates in zip(model, expected, (4, 5), strict=True):
        assert_close_by_tensor(layer.weight.detach(), versions[updates], 1e-12, "weights")
    pipe.drain()
    assert_close_by_tensor(model[0].weight.detach(), expected[0][5], 1e-12, "weights")


def test_stopping_in_the_stream_loses_no_statistics() -> None:
    """Every forward that has run has moved the model's own buffers."""
    case = case_of((1, 1), "stash", "sgd", 5)
    pipe = compiled(case)
    for fed, (inputs, target, _) in enumerate(batches(case), 1):
        pipe.step(inputs, target=target)
        counts = [value for name, value in pipe.request.model.named_buffers() if "num_batches" in name]
        assert counts and all(int(count) == fed for count in counts)


def written_later() -> None:
    case = case_of((1, 1), "stash", "sgd", 5)
    pipe = compiled(case).eval()
    for index, (inputs, target, _) in enumerate(batches(case)):
        if index == 2:
            pipe.train()
        pipe.step(inputs, target=target)


def test_learning_rate_schedulers_and_hooks_work() -> None:
    """The rate halves after each minibatch: closed form for one stage; hooks on parameters fire once an update."""
    pipe, fired = small(stages=1), []
    stream = minibatches(4)
    pipe.prepare(stream[0][0], target=stream[0][1])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
    (parameter,) = pipe.parameters()
    parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    w, rate = parameter.detach().clone(), pipe.optimizer.param_groups[0]["lr"]
    for x, target in stream:
        w = w - rate * (x @ w.T - target).T @ x
        rate *= 0.5
        pipe.step(x, target=target)
        scheduler.step()
    assert_close_by_tensor(parameter.detach(), w, 1e-12, "weights")
    assert len(fired) == 4 and parameter.grad is None


def test_schedulers_may_step_while_the_pipeline_fills(recwarn: pytest.WarningsRecorder) -> None:
    pipe = small(stages=3)
    (x, target), *_ = minibatches(1)
    pipe.prepare(x, target=target)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(pipe.optimizer, 0.1, total_steps=10)
    pipe.step(x, target=target)
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
    assert len({group["lr"] for group in pipe.optimizer.param_groups}) == 1


def test_learning_rates_can_be_scaled_by_replicas() -> None:
    case = case_of((2, 1), "stash", "sgd", 7)
    pipe = compiled(case, schedule=Asynchronous(depths=case.depths, scale_learning_rate=True))
    for inputs, target, drains in batches(case):
        pipe.step(inputs, target=target)
        if drains:
            pipe.drain()
    expected = oracle(case, scale_learning_rate=True).final_weights
    for name, parameter in pipe.named_parameters():
        assert_close_by_tensor(parameter.detach(), expected[name], 1e-12, name)
    assert [group["lr"] for group in pipe.optimizer.param_groups] == [0.2, 0.1]


def test_an_optimizer_for_a_schedule_that_flushes() -> None:
    """One of all parameters, which the user steps."""
    pipe = small("1f1b")
    (x, target), *_ = minibatches(1, rows=8)
    pipe.step(x, target=target)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    pipe.optimizer.step()
    for parameter, old in zip(pipe.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert_close_by_tensor(parameter.detach(), old - 0.05 * parameter.grad, 1e-12, "weights")
    assert pipe.drain() == []


def test_evaluation_and_state_after_a_drain() -> None:
    pipe = small()
    feed(pipe, 3)
    pipe.drain()
    (x, target), *_ = minibatches(1)
    result = pipe.eval_step(x, target=target)
    assert_close_by_tensor(result.outputs, pipe.request.model(x).detach(), 1e-12, "outputs")
    assert pipe.state_dict().keys() == pipe.request.model.state_dict().keys()
    assert pipe.verify(x, target=target).worst()[1] <= 1e-12


def test_the_schedule_says_how_old_weights_are() -> None:
    text = str(small(stages=2, replicas=(2, 1)).schedule)
    assert "F3@0.1 B1@0.1 U1@0   F3@1.0 B3@1.0 U4@1" in text
    assert "stage 0: 2 replicas, depth 2, weights 1 update old, at most 2 versions kept" in text
    table = str(compiled_partition(KEPT["1-1-1"]))
    assert "weight versions" in table and re.search(r" 3 x \d+ B", table)


def compiled_partition(case: AsynchronousCase) -> Any:
    pipe = compiled(case)
    inputs, target, _ = next(iter(batches(case)))
    pipe.prepare(inputs, target=target)
    return pipe.partition


# What is refused


def in_flight(act: Callable[[Pipeline], Any]) -> Callable[[], Any]:
    def fed() -> None:
        pipe = small()
        feed(pipe, 2)
        act(pipe)

    return fed


def changed_in_place() -> None:
    pipe = small(stages=3)
    x, target = torch.randn(2, 4).double(), torch.randn(2, 4).double()
    pipe.step(x, target=target)
    x.add_(1)
    pipe.step(x.clone(), target=target)


def tied() -> None:
    model: Any = linear(2)
    model[1].weight = model[0].weight
    x = torch.ones(2, 4).double()
    pdcompiler.compile(
        model, 2, partition=["1"], schedule="pipedream", optimizer=sgd, loss_fn=half_squared, example_args=(x,), example_target=x
    )


def frozen_later() -> None:
    pipe = small()
    feed(pipe, 1)
    next(iter(pipe.parameters())).requires_grad_(False)
    feed(pipe, 1)


def some(x: dict[str, Tensor]) -> Tensor:
    return (x["input"].sum() > 0).double()


def weightless() -> None:
    pipe = small("pipedream-2bw", microbatches=2, loss_weight=some)
    x = torch.cat([torch.ones(2, 4), -torch.ones(2, 4)]).double()
    pipe.step(x, target=x)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no optimizer": (lambda: small(optimizer=None), "pipedream updates the weights inside of a step, and no optimizer was given"),
    "no real optimizer": (lambda: feed(small(optimizer=list), 1), "optimizer returned a list, expected a torch.optim.Optimizer"),
    "microbatches": (lambda: small(microbatches=4), "microbatches is 4, but pipedream does not cut a batch: each step feeds one"),
    "automatic microbatches": (lambda: small(microbatches="auto"), "the schedule does not flush"),
    "no such schedule": (lambda: small(Asynchronous("pipe")), "there is no schedule without flushes named 'pipe'"),
    "depth of too few": (
        lambda: small(Asynchronous(depths=(3, 0)), replicas=(2, 1)), "depth 3 of stage 0 is no multiple of its 2 replicas",
    ),
    "depths not falling": (lambda: small(Asynchronous(depths=(1, 1, 0)), 3), "depth 1 of stage 1 must be less than"),
    "depth of the last": (lambda: small(Asynchronous(depths=(2, 1))), "depth 1 of stage 1 must be 0"),
    "depths for others": (lambda: small(Asynchronous(depths=(0,))), "1 depths for 2 stages"),
    "2bw, too few": (
        lambda: small("pipedream-2bw", 4, microbatches=2), "a batch of 2 microbatches is less than the first stage's depth 3",
    ),
    "2bw, idle replicas": (
        lambda: small("pipedream-2bw", replicas=(1, 3), microbatches=2), "microbatches is 2, but a stage has 3 replicas",
    ),
    "2bw, vertical sync": (
        lambda: small(Asynchronous("pipedream-2bw", vertical_sync=True)), "pipedream-2bw has no vertical sync",
    ),
    "2bw, too few rows": (
        lambda: small("pipedream-2bw", microbatches=4).step(torch.ones(3, 4).double(), target=torch.ones(3, 4).double()),
        "the batch has 3 rows, pipedream-2bw cuts each into 4 microbatches",
    ),
    "2bw, a weight of 0": (weightless, "a microbatch that counts nothing still takes its turn"),
    "outputs": (
        lambda: small().step(torch.ones(2, 4).double(), target=torch.ones(2, 4).double(), outputs="all"),
        'outputs is "all", but pipedream gives none',
    ),
    "evaluation in flight": (
        in_flight(lambda pipe: pipe.eval_step(torch.ones(2, 4).double())), "eval_step, while the pipeline is fed",
    ),
    "state in flight": (in_flight(lambda pipe: pipe.state_dict()), "state_dict, while the pipeline is fed (2 minibatches since"),
    "loading in flight": (in_flight(lambda pipe: pipe.load_state_dict({})), "load_state_dict, while the pipeline is fed"),
    "verify in flight": (in_flight(lambda pipe: pipe.verify(torch.ones(2, 4).double())), "verify, while the pipeline is fed"),
    "clipping by the norm of all": (
        lambda: small().clip_grad_norm_(1.0), "pipedream updates each stage when its gradients are there",
    ),
    "a step of one's own": (in_flight(lambda pipe: pipe.optimizer.step()), "updates each stage inside pipe.step"),
    "tied over stages": (tied, "parameter 0.weight is tied over stages 0, 1, which update at different times"),
    "a batch changed": (changed_in_place, "input of batch 0 was changed in place while its backward is still to come"),
    "frozen later": (frozen_later, "what is trained has changed"),
    "statistics that move later": (written_later, "are written now, and were not when the stream began"),
    "no optimizer asked": (lambda: small("1f1b", optimizer=None).optimizer, "no optimizer was given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    act, message = REFUSED[case]
    with pytest.raises(CompileError, match=re.escape(message)) as caught:
        act()
    assert "try: " in str(caught.value) or case in ("depths for others", "2bw, vertical sync", "automatic microbatches")


def test_a_refused_batch_leaves_the_stream_as_it_was() -> None:
    pipe = small(stages=2)
    feed(pipe, 3)
    with pytest.raises(CompileError):
        pipe.step(torch.ones(2, 4).double(), target=torch.ones(2, 4).double(), outputs="all")
    with pytest.raises(Exception):  # noqa: B017 (torch's own, of a matrix product)
        pipe.step(torch.ones(2, 7).double(), target=torch.ones(2, 4).double())
    (x, target) = minibatches(4)[3]
    pipe.step(x, target=target)
    pipe.drain()
    for parameter, versions in zip(pipe.parameters(), one_each([1, 0], 4), strict=True):
        assert_close_by_tensor(parameter.detach(), versions[4], 1e-12, "weights")


def test_a_frozen_first_stage_has_no_backward_and_no_update() -> None:
    model = linear(2)
    model[0].requires_grad_(False)
    first = model[0].weight.clone()
    pipe = pdcompiler.compile(model, 2, partition=["1"], schedule="pipedream", optimizer=sgd, loss_fn=half_squared)
    found = [*feed(pipe, 4), *pipe.drain()]
    assert [result.index for result in found if result is not None] == [0, 1, 2, 3]
    w = linear(2)[1].weight.detach()
    for x, target in minibatches(4):
        hidden = F.linear(x, first)
        w = w - 0.05 * (F.linear(hidden, w) - target).T @ hidden
    assert torch.equal(model[0].weight, first)
    assert_close_by_tensor(model[1].weight.detach(), w, 1e-12, "weights")
