"""One tick's text: its drawing, what is kept for later ticks, whose losses are told, and that steady state repeats."""

from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core import tick_text as module
from pdcompiler.core.tick_text import TickForward, TickUpdate, last_tick, tick_text
from pdcompiler.core.ticks import Ticks
from tests.core.test_ticks import any_ticks


def test_the_docstrings_drawing() -> None:
    text = tick_text(Ticks((2, 1), (2, 0)), 3)
    drawn = [line[:40].strip() for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    assert drawn == ["2-1, tick 3 (minibatch 3 comes in)", *map(str, text.items)]
    assert text == tick_text(Ticks((2, 1), (2, 0)), 5)


@given(any_ticks(), st.integers(0, 40))
def test_steady_state_repeats(ticks: Ticks, more: int) -> None:
    number = max(ticks.until_known, 2 * ticks.depths[0], 2 * (ticks.batch or 1)) + more
    assert tick_text(ticks, number) == tick_text(ticks, number + ticks.repeat)


@given(any_ticks(), st.integers(1, 24))
def test_every_loss_is_told_once_and_in_order(ticks: Ticks, minibatches: int) -> None:
    told = []
    for number in range(last_tick(ticks, minibatches) + 1):
        text = tick_text(ticks, number, None if number < minibatches else minibatches)
        told += [number + loss.minibatch for loss in text.losses]
        assert text.last == (number == last_tick(ticks, minibatches)) and text.feeds == (number < minibatches)
    assert told == list(range(minibatches))


@given(any_ticks(), st.integers(1, 24))
def test_every_minibatch_is_in_one_update_of_each_stage(ticks: Ticks, minibatches: int) -> None:
    """The drain is only known when it begins: a last round of the last stage, too."""
    found: dict[int, list[int]] = {stage: [] for stage in range(ticks.stages)}
    for number in range(last_tick(ticks, minibatches) + 1):
        for item in tick_text(ticks, number, None if number < minibatches else minibatches).items:
            if isinstance(item, TickUpdate):
                found[item.stage] += [number + t for t in item.minibatches]
    assert all(updated == list(range(minibatches)) for updated in found.values())


def test_losses_are_told_when_nobody_waits_for_them() -> None:
    """A replica of stage 0 runs a backward every second tick, and then has gradients of what the losses are of."""
    assert Ticks((1, 1, 1), (2, 1, 0)).until_known == 2
    assert Ticks((2, 1), (2, 0)).until_known == 3
    assert Ticks((2,), (0,)).until_known == 1 + 2


def test_old_weights_are_kept_for_forwards_of_the_same_batch() -> None:
    """Two stages, an update every 2 microbatches: after update 1 the weights before it are those of microbatches 2 and 3, and
    stage 1 has run the forward of neither."""
    ticks = Ticks((1, 1), (1, 0), batch=2)
    (update,) = [item for item in tick_text(ticks, 1).items if isinstance(item, TickUpdate)]
    assert update.stage == 1 and update.next == (1,) and not update.mean
    forward = next(item for item in tick_text(ticks, 2).items if isinstance(item, TickForward) and item.stage == 1)
    assert forward.kept and forward.next == 1
    forward = next(item for item in tick_text(ticks, 3).items if isinstance(item, TickForward) and item.stage == 1)
    assert forward.kept and forward.next is None


def test_only_weights_that_a_backward_is_on_are_in_flight() -> None:
    """The last stage's backward has run before its update; the first one's of the minibatches in between has not."""
    updates = {item.stage: item.in_flight for item in tick_text(Ticks((1, 1), (1, 0)), 5).items if isinstance(item, TickUpdate)}
    assert updates == {0: True, 1: False}
