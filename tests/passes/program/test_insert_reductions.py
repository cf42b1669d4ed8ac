"""Each tied weight gets exactly one reduction, over the ranks that have a part of its gradient."""

import re

import torch

from pdcompiler.core.ir import Program, ValueType
from pdcompiler.passes.program.insert_reductions import insert_reductions
from pdcompiler.testing import assert_shows
from tests.levels import FLOATS, Writer

NAMES = {0: ("embed", "first"), 1: ("embed",), 2: ("last", "embed")}


def program(names: dict[int, tuple[str, ...]], stages_of_rank: tuple[tuple[int, ...], ...]) -> Program:
    """Each stage's gradients as one tuple."""
    writer = Writer(len(stages_of_rank))
    results = {
        rank: {"gradients": {s: writer.call(f"stage{s}_backward", rank=rank, type=None) for s in stages if names[s]}}
        for rank, stages in enumerate(stages_of_rank)
    }
    return writer.program(results, gradient_names=names, gradient_types=dict.fromkeys(sum(names.values(), ()), FLOATS))


def test_parts_on_two_ranks_are_summed_by_one_reduction() -> None:
    before = program({0: ("embed", "first"), 1: ("middle",), 2: ("last", "embed")}, ((0,), (1,), (2,)))
    assert_shows(insert_reductions(before, {"embed": (0, 2)}), """
        stage0_backward_0 = stage0_backward()  # rank 0
        stage1_backward_0 = stage1_backward()  # rank 1
        stage2_backward_0 = stage2_backward()  # rank 2
        d_embed = stage0_backward_0[0]  # rank 0
        d_embed = stage2_backward_0[1]  # rank 2
        sums = all_reduce(((d_embed,), (d_embed,)), ranks=(0, 2))  # rank 0
        d_embed_1 = sums[0][0]  # rank 0
        d_embed_1 = sums[1][0]  # rank 2
        return {gradients: {0: stage0_backward_0}, reduced: {embed: d_embed_1}}  # rank 0
        return {gradients: {1: stage1_backward_0}}  # rank 1
        return {gradients: {2: stage2_backward_0}, reduced: {embed: d_embed_1}}  # rank 2
    """)


def test_parts_of_two_stages_on_one_rank_are_added_first() -> None:
    text = str(insert_reductions(program(NAMES, ((0, 1), (2,))), {"embed": (0, 1)}))
    assert text.count("all_reduce(") == 1 and "d_embed_2 = accumulate(d_embed, d_embed_1)  # rank 0" in text


def test_a_holder_without_a_part_of_its_own_is_given_the_sum() -> None:
    before = program({0: ("embed",), 1: (), 2: ("embed",)}, ((0,), (1,), (2,)))
    text = str(insert_reductions(before, {"embed": (0, 1, 2)}))
    assert "ranks=(0, 2)" in text
    assert "return {gradients: {}, reduced: {embed: d_embed_1}}  # rank 1" in text


def test_a_gradient_with_one_part_is_given_to_all_holders_without_a_reduction() -> None:
    text = str(insert_reductions(program({0: ("embed",), 1: ()}, ((0,), (1,))), {"embed": (0, 1)}))
    assert "all_reduce" not in text
    assert text.count("reduced: {embed: d_embed}") == 2


def test_nothing_is_reduced_where_nothing_is_tied() -> None:
    before = program({0: ("first",), 1: ("last",)}, ((0,), (1,)))
    text = str(before)
    assert_shows(insert_reductions(before, {}), text)
    assert_shows(insert_reductions(before, {"frozen": (0, 1)}), text)


def test_weights_of_the_same_ranks_go_in_one_reduction() -> None:
    before = program({0: ("embed", "norm"), 1: ("norm", "embed")}, ((0,), (1,)))
    after = insert_reductions(before, {"embed": (0, 1), "norm": (0, 1)})
    assert "sums = all_reduce(((d_embed, d_norm), (d_embed, d_norm)), ranks=(0, 1))" in str(after)
    assert sorted(after.graph.output_node().args[0][1]["reduced"]) == ["embed", "norm"]  # type: ignore[index, call-overload]


def test_a_bucket_is_full_at_25_mebibytes() -> None:
    large = ValueType((4 * 2**20,), torch.float32)  # 16 MiB
    before = program({0: ("a", "b", "c", "d"), 1: ("a", "b", "c", "d")}, ((0,), (1,)))
    before.gradient_types = {"a": large, "b": large, "c": large, "d": FLOATS}
    text = str(insert_reductions(before, dict.fromkeys("abcd", (0, 1))))
    assert re.findall(r"all_reduce\((.*), ranks", text) == ["((d_a, d_b), (d_a, d_b))", "((d_c, d_d), (d_c, d_d))"]


def test_types_are_not_mixed_in_a_bucket() -> None:
    before = program({0: ("a", "b", "c"), 1: ("a", "b", "c")}, ((0,), (1,)))
    before.gradient_types = {"a": FLOATS, "b": ValueType((4,), torch.bfloat16), "c": FLOATS}
    text = str(insert_reductions(before, dict.fromkeys("abc", (0, 1))))
    assert re.findall(r"all_reduce\((.*), ranks", text) == ["((d_b,), (d_b,))", "((d_a, d_c), (d_a, d_c))"]
