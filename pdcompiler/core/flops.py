"""What each operator of torch costs: its kind, its floating-point operations, the bytes that it reads.

    kind            operators                                   floating-point operations
    product         mm, bmm, addmm, mv, dot ...                 2 x elements made x contracted size
    convolution     convolution, convolution_backward           2 x output positions x weights, once per gradient
    attention       _scaled_dot_product_*, and backward         its two products (five backward)
    recurrent       mkldnn_rnn_layer, _cudnn_rnn ...            2 x steps x rows x weights, twice as many backward
    normalization   native_layer_norm, batch, group, rms        a few per element
    ...             everything else                             about one per element made, or read
    unknown         a user's own operator                       none, with a note: priced by its bytes alone

A multiply-add counts two, as in torch.utils.flop_counter. Not here: bytes written, saved, of parameters (`annotate_costs`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from pdcompiler.core.ir import Integer, ValueType, is_integer, type_of
from pdcompiler.core.values import is_view

Count: TypeAlias = Callable[[fx.Node], Any]


def kind_of(node: fx.Node) -> str:
    """To which kind the operator of a node belongs; "view" and "integer" cost nothing."""
    if node.op != "call_function" or is_integer(node):
        return "integer"
    return "view" if is_view(node) else _rule(node.target)[0]


def flops_of(node: fx.Node) -> Any:
    """Floating-point operations, an expression in the rows."""
    return _rule(node.target)[1](node)


def bytes_read_by(node: fx.Node) -> Any:
    """Of its inputs, each once. What gathers rows of a table reads as much as it makes, not the table."""
    gathered = node.all_input_nodes[0] if _name(node.target) in GATHERS else None
    read = [nbytes(t) for source in node.all_input_nodes if source is not gathered for t in tensors(stored_type(source))]
    return sympy.Add(*read, *(nbytes(t) for t in tensors(type_of(node)) if gathered is not None))


def tensors(type: Any) -> list[ValueType]:
    """The tensors of a type: one, or those of a tuple."""
    if isinstance(type, ValueType):
        return [type]
    return [t for part in type for t in tensors(part)] if isinstance(type, tuple) else []


def stored_type(node: fx.Node) -> Any:
    """The type of what lies in memory: an expanded value is only as large as what was expanded."""
    while getattr(node.target, "_opname", "") == "expand":
        node = node.all_input_nodes[0]
    return type_of(node)


@functools.lru_cache(maxsize=4096)
def elements(type: ValueType) -> Integer:
    """`type.elements()`, remembered: sympy is slow."""
    return math.prod(type.shape) if all(isinstance(s, int) for s in type.shape) else type.elements()


@functools.lru_cache(maxsize=4096)
def nbytes(type: ValueType) -> Integer:
    """`type.nbytes()`, remembered."""
    return elements(type) * type.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def _rule(target: Any) -> tuple[str, Count]:
    name = _name(target)
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in vars(operator).values():
        return "elementwise", made(1)
    is_reduction = torch.Tag.reduction in getattr(target, "tags", ())
    return ("reduction", read(1)) if is_reduction else ("unknown", made(0))


def _name(target: Any) -> str:
    """The operator's name without its overload; "" for what is not torch's own."""
    return getattr(target, "_opname", "") if getattr(target, "namespace", "") in ("aten", "prims") else ""


def _argument(node: fx.Node, index: int) -> ValueType:
    type = type_of(node.args[index])  # type: ignore[arg-type]
    assert isinstance(type, ValueType)
    return type


def made(each: int) -> Count:
    """So many for each element of what is made."""
    return lambda node: each * sympy.Add(*(elements(t) for t in tensors(type_of(node))))


def read(each: int) -> Count:
    """So many for each element of the first input."""
    return lambda node: each * sympy.Add(*(elements(t) for i in node.all_input_nodes[:1] for t in tensors(type_of(i))))


def _product(left: int) -> Count:
    """2 m n k: the contracted size is the last of the left factor."""
    return lambda node: 2 * elements(type_of(node)) * _argument(node, left).shape[-1]


def _batches_added(node: fx.Node) -> Any:
    """addbmm: the products of all batches, summed."""
    return 2 * elements(_argument(node, 1)) * _argument(node, 2).shape[-1]


def _weights_per_position(weight: ValueType) -> Any:
    """Of a convolution, for each channel of the side that the weight's first dimension counts."""
    return math.prod(weight.shape[1:])


def _convolution(node: fx.Node) -> Any:
    """2 x elements made x weights for each; a transposed one scatters the elements read."""
    base = _argument(node, 0) if node.args[6] else type_of(node)
    return 2 * elements(base) * _weights_per_position(_argument(node, 1))


def _convolution_backward(node: fx.Node) -> Any:
    """The gradients of input and of weight cost a forward each, that of the bias a sum."""
    base = _argument(node, 1 if node.args[7] else 0)
    wanted: Any = node.args[-1]
    return 2 * elements(base) * _weights_per_position(_argument(node, 2)) * sum(bool(flag) for flag in wanted[:2])


def _attention(query: int, length: int, of_keys: int, of_values: int) -> Count:
    """2 x batch x heads x queries x keys x width for each product: so many of the keys' width, so many of the values'.
    query: the argument's place; keys and values follow.   length: the dimension of the sequence."""

    def count(node: fx.Node) -> Any:
        queries, keys, values = (_argument(node, query + k) for k in range(3))
        scores = elements(queries) * keys.shape[length] / sympy.sympify(queries.shape[-1])
        return 2 * scores * (of_keys * queries.shape[-1] + of_values * values.shape[-1])

    return count


def _recurrent(times: int) -> Count:
    """Each weight matrix meets each row of each step. The sequence is the first input; matrices have two dimensions, as the
    sequence and the states have not."""

    def count(node: fx.Node) -> Any:
        sequence, *others = [t for i in node.all_input_nodes for t in tensors(type_of(i))]
        weights = sympy.Add(*(elements(t) for t in others if len(t.shape) == 2))
        return times * 2 * weights * elements(sequence) / sympy.sympify(sequence.shape[-1])

    return count


def _cell(node: fx.Node) -> Any:
    """The gates of a recurrent cell, whose products are operators of their own: some ten for each element made."""
    return made(10)(node)


def _pooling(node: fx.Node) -> Any:
    """As many per element as the window has."""
    window: Any = node.args[1]
    return elements(tensors(type_of(node))[0]) * (math.prod(window) if isinstance(window, (list, tuple)) else window**2)


def _distances(node: fx.Node) -> Any:
    """Each a difference, a power and a sum over the width."""
    return 3 * elements(type_of(node)) * _argument(node, 0).shape[-1]


def _rules(kind: str, count: Count, names: str) -> dict[str, tuple[str, Count]]:
    return {name: (kind, count) for name in names.split()}


FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
SDPA = " ".join(f"_scaled_dot_product_{variant}" for variant in (*FUSED, "attention_math", "attention_math_for_mps"))
SDPA_BACKWARD = " ".join(f"_scaled_dot_product_{variant}_backward" for variant in FUSED)
GATHERS = frozenset(("embedding", "gather", "index", "_unsafe_index", "index_select", "take"))
"""They read, of their first input, as much as they make."""

RULES: dict[str, tuple[str, Count]] = {
    **_rules("product", _product(0), "mm bmm mv dot vdot linear _scaled_mm _int_mm _grouped_mm"),
    **_rules("product", _product(1), "addmm baddbmm addmv _addmm_activation"),
    **_rules("product", _batches_added, "addbmm"),
    **_rules("product", _distances, "_cdist_forward _cdist_backward _euclidean_dist"),
    **_rules("convolution", _convolution, "convolution _convolution"),
    **_rules("convolution", _convolution_backward, "convolution_backward"),
    **_rules("attention", _attention(0, -2, 1, 1), SDPA),
    **_rules("attention", _attention(1, -2, 3, 2), SDPA_BACKWARD),
    **_rules("attention", _attention(0, -3, 1, 1), "_flash_attention_forward _efficient_attention_forward"),
    **_rules("attention", _attention(1, -3, 3, 2), "_flash_attention_backward _efficient_attention_backward"),
    **_rules("recurrent", _recurrent(1), "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    **_rules("recurrent", _recurrent(2), "mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward"),
    **_rules("recurrent", _cell, "_thnn_fused_lstm_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell_backward_impl"
                                 " _thnn_fused_gru_cell_backward"),
    # Mean 1, variance 3, scaling 2, weight and bias 2; backward, two sums more. Batch norm's running values are few.
    **_rules("normalization", read(8), "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm"
                                       " _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update"
                                       " _native_batch_norm_legit_no_training _batch_norm_with_update_functional _fused_rms_norm"
                                       " _batch_norm_no_update"),
    **_rules("normalization", read(12), "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"
                                        " cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"
                                        " _fused_rms_norm_backward"),
    # Largest, difference, exponential, sum, quotient; backward: product, sum, difference, product.
    **_rules("softmax", made(5), "_softmax _log_softmax _safe_softmax"),
    **_rules("softmax", made(4), "_softmax_backward_data _log_softmax_backward_data logsumexp"),
    **_rules("pooling", _pooling, "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d"),
    **_rules("pooling", read(1), "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d"
                                 " max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward"
                                 " avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
                                 " adaptive_max_pool2d_backward adaptive_max_pool3d_backward"),
    **_rules("pooling", made(4), "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d"
                                 " upsample_bicubic2d upsample_trilinear3d grid_sampler_2d"),
    **_rules("pooling", read(4), "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"
                                 " upsample_bilinear2d_backward upsample_linear1d_backward upsample_bicubic2d_backward"
                                 " upsample_trilinear3d_backward grid_sampler_2d_backward"),
    **_rules("embedding", made(0), "embedding"),
    **_rules("embedding", read(1), "embedding_dense_backward _embedding_bag"),
    **_rules("reduction", read(1), "sum mean amax amin max min argmax argmin prod any all count_nonzero nansum"
                                   " cumsum cumprod logcumsumexp cummax cummin topk sort kthvalue median nll_loss_forward"
                                   " nll_loss2d_forward bincount histc"),
    **_rules("reduction", read(3), "var std var_mean std_mean linalg_vector_norm norm"),
    **_rules("elementwise", made(1), "nll_loss_backward nll_loss2d_backward smooth_l1_loss mse_loss native_dropout bernoulli"
                                     " native_dropout_backward rand rand_like randn randn_like uniform normal_functional dropout"
                                     " mse_loss_backward smooth_l1_loss_backward huber_loss huber_loss_backward addr outer ger"
                                     " random randint randint_like randperm multinomial exponential glu glu_backward"
                                     " binary_cross_entropy_backward"),
    **_rules("movement", made(1), "scatter_add scatter_reduce index_add index_put _unsafe_index_put index_reduce"),
    **_rules("movement", made(0), "copy clone cat stack _to_copy convert_element_type contiguous constant_pad_nd pad roll flip"
                                  " repeat tril triu diag_embed gather index index_select take _unsafe_index scatter"
                                  " slice_scatter select_scatter diagonal_scatter as_strided_scatter masked_scatter index_copy"
                                  " index_fill full full_like zeros zeros_like ones ones_like empty empty_like new_zeros new_ones"
                                  " new_full new_empty new_empty_strided empty_strided empty_permuted arange eye linspace"
                                  " scalar_tensor lift_fresh_copy slice_backward select_backward nonzero masked_select reshape"
                                  " fill unfold_backward diagonal_backward reflection_pad1d reflection_pad2d replication_pad2d"
                                  " im2col col2im pixel_shuffle pixel_unshuffle one_hot bucketize searchsorted tril_indices"
                                  " triu_indices expand_copy view_copy unbind_copy isin unique_dim _unique2 repeat_interleave"
                                  " _local_scalar_dense item sym_size"),
}  # fmt: skip
"""Kind and count of each operator of torch that is neither pointwise nor a plain reduction by torch's own tags."""
