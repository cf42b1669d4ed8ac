"""The zoo: tiny versions of the models that must compile and be exact, from config with random weights.

Each has at least four parts to cut between, no dropout, float64 weights, and a plain user's forward signature. The
Hugging Face models bring their own loss; the others, which stand in `tests/networks.py`, need a `loss_fn`.

Not all is float64: Hugging Face computes RMS norms, softmaxes or the loss of some models in float32, whatever the
weights. Those have a float32 `tolerance`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests import networks

hf: Any = transformers  # its configurations take more than they declare

ROWS, LENGTH, VOCABULARY, CLASSES = 8, 10, 100, 10
FLOAT32, FLOAT64 = 1e-6, 1e-12


@dataclass(frozen=True)
class Example:
    """A model, a batch for it, how many stages it can sensibly be cut in, and how exact it can be against a loop."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    stage_count_max: int = 4
    tolerance: float = 1e-12


def gpt2() -> Example:
    """Embedding tied to the head."""
    config = hf.GPT2Config(
        n_layer=4, n_embd=16, n_head=2, n_positions=32, vocab_size=VOCABULARY, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _own_loss("gpt2", hf.GPT2LMHeadModel, config, FLOAT32, input_ids=_ids(), labels=_ids())


def llama() -> Example:
    """Grouped-query attention, rotary embedding."""
    config = hf.LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, use_cache=False, **_transformer(heads=4))
    return _own_loss("llama", hf.LlamaForCausalLM, config, FLOAT32, input_ids=_ids(), labels=_ids())


def bert() -> Example:
    """Embedding tied to the masked-language head."""
    config = hf.BertConfig(num_hidden_layers=4, max_position_embeddings=32, **_no_dropout(), **_transformer())
    return _own_loss("bert", hf.BertForMaskedLM, config, FLOAT64, input_ids=_ids(), labels=_ids())


def t5() -> Example:
    """Version 1: one embedding for encoder, decoder and head; the decoder's ids are a late input."""
    config = hf.T5Config(
        num_layers=2, d_model=16, d_ff=32, num_heads=2, d_kv=8, vocab_size=VOCABULARY, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    return _own_loss("t5", hf.T5ForConditionalGeneration, config, FLOAT32, input_ids=_ids(), labels=_ids(6))


def vit() -> Example:
    """Image patches through four encoder layers."""
    shape = {name: value for name, value in _transformer().items() if name != "vocab_size"}
    config = hf.ViTConfig(
        num_hidden_layers=4, image_size=16, patch_size=4, num_labels=CLASSES, **_no_dropout(), **shape
    )
    return _own_loss("vit", hf.ViTForImageClassification, config, FLOAT64, pixel_values=_images(16), labels=_classes())


def resnet() -> Example:
    """BatchNorm in every layer."""
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", num_labels=CLASSES
    )
    return _own_loss(
        "resnet", hf.ResNetForImageClassification, config, FLOAT64, pixel_values=_images(64), labels=_classes()
    )


def mixtral() -> Example:
    """A mixture of experts: which weights a row meets depends on the data. (The default grouped_mm lacks float64.)"""
    config = hf.MixtralConfig(
        num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        experts_implementation="batched_mm", **_transformer(heads=4),
    )  # fmt: skip
    return _own_loss("mixtral", hf.MixtralForCausalLM, config, FLOAT32, input_ids=_ids(), labels=_ids())


def whisper() -> Example:
    """Convolutions into an encoder; a decoder whose embedding is tied to the head."""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=12, max_target_positions=16, use_cache=False, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    features = torch.randn(ROWS, 8, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model = hf.WhisperForConditionalGeneration
    return _own_loss("whisper", model, config, FLOAT64, input_features=features, labels=_ids(6))


def unet() -> Example:
    """Two skips that lie across all later stages."""
    return _with_target("unet", networks.UNet, (_images(16),), _images(16), F.mse_loss)


def vgg16() -> Example:
    """The layers of VGG-16, a sixteenth as wide, with in-place ReLU."""
    return _with_target("vgg16", lambda: networks.Vgg16(CLASSES), (_images(32),), _classes(), F.cross_entropy)


def awd_lm() -> Example:
    """Three LSTM layers between a tied embedding and decoder."""
    return _with_target("awd_lm", lambda: networks.AwdLm(VOCABULARY), (_ids(),), _ids(), token_loss)


def gnmt() -> Example:
    """Stacked LSTM encoder and decoder with attention; the target sentence is a late input."""
    return _with_target("gnmt", lambda: networks.Gnmt(VOCABULARY), (_ids(), _ids(7)), _ids(7), token_loss)


def mlp() -> Example:
    """The smallest: a chain of Linear and ReLU."""
    rows = _images(4).flatten(1)
    return _with_target("mlp", lambda: networks.mlp(rows.size(1), CLASSES), (rows,), _classes(), F.cross_entropy)


ZOO: dict[str, Callable[[], Example]] = {
    make.__name__: make
    for make in (gpt2, llama, bert, t5, vit, resnet, mixtral, whisper, unet, vgg16, awd_lm, gnmt, mlp)
}


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _own_loss(name: str, build: Callable[[Any], nn.Module], config: Any, tolerance: float, **kwargs: Any) -> Example:
    return Example(name, _seeded(lambda: build(config)), kwargs=kwargs, tolerance=tolerance)


def _with_target(
    name: str, build: Callable[[], nn.Module], args: tuple[Tensor, ...], target: Tensor, loss_fn: Callable[..., Tensor]
) -> Example:
    return Example(name, _seeded(build), args, target=target, loss_fn=loss_fn)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double().train()


def _transformer(heads: int = 2) -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": heads}


def _no_dropout() -> dict[str, float]:
    return {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(length))


def _images(size: int) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def _classes() -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(2))
