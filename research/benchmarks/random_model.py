"""Write a GGUF model of a well-known shape with random weights, to measure speed and memory.

Neither depends on the values of weights, so no download of gigabytes is needed. All layers share
one set of random matrices, which takes seconds to generate.

    python -m research.benchmarks.random_model llama-2-7b model.gguf
    python -m research.benchmarks.random_model qwen3.5-0.8b model.gguf --type Q8_0
    python -m research.benchmarks.random_model gpt-oss-small model.gguf --type Q8_0

gpt-oss-small is smaller than gpt-oss-20b, so that two cores read 8,192 tokens in minutes: it has 12
layers instead of 24, a residual stream and experts of 1440 elements instead of 2880, 32 query and 4
KV heads instead of 64 and 8, and 8 experts instead of 32. Both use 4 experts for a token; head
size, window, sinks, YaRN and vocabulary are the real ones.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize


@dataclass(frozen=True)
class Tensor:
    """A tensor as llama.cpp reads it: its values or their blocks, row by row, and their type."""

    data: npt.NDArray[Any]
    dtype: GGMLQuantizationType


class RandomTensors:
    """Generates tensors; the same calls return the same tensors."""

    def __init__(self, dtype: GGMLQuantizationType) -> None:
        """Use this type for matrices by default."""
        self._dtype = dtype
        self._rng = np.random.default_rng(0)

    def matrix(self, *sizes: int, dtype: GGMLQuantizationType | None = None) -> Tensor:
        """Return weights [..., n_out, n_in] that keep the variance of their inputs."""
        dtype = self._dtype if dtype is None else dtype
        return Tensor(quantize(self.normal(*sizes) / np.float32(sizes[-1] ** 0.5), dtype), dtype)

    def normal(self, *sizes: int) -> npt.NDArray[np.float32]:
        """Return numbers of mean 0 and variance 1."""
        return self._rng.standard_normal(sizes, np.float32)


def vector(values: npt.NDArray[np.floating[Any]]) -> Tensor:
    """Return the values in F32."""
    return Tensor(values.astype(np.float32), GGMLQuantizationType.F32)


def ones(*sizes: int) -> Tensor:
    """Return the weights of a norm."""
    return vector(np.ones(sizes))


def zeros(*sizes: int) -> Tensor:
    """Return biases, which cost time and change nothing."""
    return vector(np.zeros(sizes))


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """A model without its weights: its sizes, and the tensors of its architecture.

    Attributes:
        architecture: llama.cpp's name of it.
        epsilon, rope_base: constants of norms and of the rotation.
        n_layer: layers of all kinds.
        n_embd: elements of the residual stream.
        n_head, n_head_kv, head_size: of the layers that attend.
        n_ff: elements inside a feed-forward block, or inside one expert.
        n_vocab: tokens.
        n_ctx_train: trained context that it claims.
        n_rot: elements of a head that are rotated.
    """

    architecture: ClassVar[str]
    epsilon: ClassVar[float] = 1e-5
    rope_base: ClassVar[float] = 10000.0

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int

    @property
    def n_rot(self) -> int:
        return self.head_size

    def add_fields(self, writer: GGUFWriter) -> None:
        """Store the sizes and the architecture's other fields."""
        writer.add_block_count(self.n_layer)
        writer.add_context_length(self.n_ctx_train)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_vocab_size(self.n_vocab)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.n_rot)
        writer.add_rope_freq_base(self.rope_base)

    @abstractmethod
    def layers(self, tensors: RandomTensors) -> list[dict[str, Tensor]]:
        """Yield the tensors of each layer; layers of a kind share one set of matrices."""

    def embeddings(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """Return the tensors around the layers; the output has its own matrix."""
        return {
            "token_embd.weight": tensors.matrix(self.n_vocab, self.n_embd),
            "output.weight": tensors.matrix(self.n_vocab, self.n_embd),
            "output_norm.weight": ones(self.n_embd),
        }

    def attention(self, tensors: RandomTensors, n_q: int | None = None) -> dict[str, Tensor]:
        """Return a norm and the four matrices; the query matrix has `n_q` outputs."""
        n_embd_q, n_embd_kv = self.n_head * self.head_size, self.n_head_kv * self.head_size
        return {
            "attn_norm.weight": ones(self.n_embd),
            "attn_q.weight": tensors.matrix(n_q or n_embd_q, self.n_embd),
            "attn_k.weight": tensors.matrix(n_embd_kv, self.n_embd),
            "attn_v.weight": tensors.matrix(n_embd_kv, self.n_embd),
            "attn_output.weight": tensors.matrix(self.n_embd, n_embd_q),
        }

    def feed_forward(self, tensors: RandomTensors, norm: str) -> dict[str, Tensor]:
        """Return a norm of that name and a gated block."""
        return {
            f"{norm}.weight": ones(self.n_embd),
            "ffn_gate.weight": tensors.matrix(self.n_ff, self.n_embd),
            "ffn_up.weight": tensors.matrix(self.n_ff, self.n_embd),
            "ffn_down.weight": tensors.matrix(self.n_embd, self.n_ff),
        }


@dataclass(frozen=True, kw_only=True)
class Llama(Shape):
    """A model of identical layers."""

    architecture: ClassVar[str] = "llama"

    n_ctx_train: int = 32768

    def layers(self, tensors: RandomTensors) -> list[dict[str, Tensor]]:
        layer = self.attention(tensors) | self.feed_forward(tensors, "ffn_norm")
        return [layer] * self.n_layer


@dataclass(frozen=True, kw_only=True)
class Qwen35(Shape):
    """Qwen 3.5: three gated delta nets, then attention, repeated.

    The dense models: without experts, images, and the layer that predicts further tokens. The
    output is the embedding, as in the small models.

    Attributes:
        attends_every: the last of this many layers attends; the others are delta nets.
        rope_sections: pairs of a head's elements that each of M-RoPE's four positions rotates; the
            other elements stay unchanged.
        n_delta_head: key heads of a delta net, and value heads.
        delta_head_size: elements of a key and of a value there.
        n_kernel: inputs of the convolution before a delta net, in tokens.
    """

    architecture: ClassVar[str] = "qwen35"
    epsilon: ClassVar[float] = 1e-6
    rope_base: ClassVar[float] = 1e7

    attends_every: int
    rope_sections: tuple[int, int, int, int]
    n_delta_head: int
    delta_head_size: int
    n_kernel: int

    @property
    def n_rot(self) -> int:
        return 2 * sum(self.rope_sections)

    def add_fields(self, writer: GGUFWriter) -> None:
        super().add_fields(writer)
        writer.add_rope_dimension_sections(self.rope_sections)
        writer.add_full_attention_interval(self.attends_every)
        writer.add_ssm_conv_kernel(self.n_kernel)
        writer.add_ssm_state_size(self.delta_head_size)
        writer.add_ssm_group_count(self.n_delta_head)
        writer.add_ssm_time_step_rank(self.n_delta_head)
        writer.add_ssm_inner_size(self.n_delta_head * self.delta_head_size)

    def embeddings(self, tensors: RandomTensors) -> dict[str, Tensor]:
        embedding = tensors.matrix(self.n_vocab, self.n_embd)
        return {"token_embd.weight": embedding, "output_norm.weight": ones(self.n_embd)}

    def layers(self, tensors: RandomTensors) -> list[dict[str, Tensor]]:
        """Each query has a gate for its output."""
        n_q = 2 * self.n_head * self.head_size
        norms = {f"attn_{name}_norm.weight": ones(self.head_size) for name in "qk"}
        attention = self.attention(tensors, n_q) | norms
        delta_net = self._delta_net(tensors)
        block = self.feed_forward(tensors, "post_attention_norm")
        return [
            (attention if (i + 1) % self.attends_every == 0 else delta_net) | block
            for i in range(self.n_layer)
        ]

    def _delta_net(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """Some heads remember a few tokens and some hundreds."""
        n_inner = self.n_delta_head * self.delta_head_size
        taps = tensors.normal(3 * n_inner, self.n_kernel) / self.n_kernel**0.5
        return {
            "attn_norm.weight": ones(self.n_embd),
            "attn_qkv.weight": tensors.matrix(3 * n_inner, self.n_embd),
            "attn_gate.weight": tensors.matrix(n_inner, self.n_embd),
            "ssm_conv1d.weight": vector(taps),
            "ssm_dt.bias": zeros(self.n_delta_head),
            "ssm_a": vector(-np.geomspace(0.002, 0.2, self.n_delta_head)),
            "ssm_beta.weight": tensors.matrix(self.n_delta_head, self.n_embd),
            "ssm_alpha.weight": tensors.matrix(self.n_delta_head, self.n_embd),
            "ssm_norm.weight": ones(self.delta_head_size),
            "ssm_out.weight": tensors.matrix(self.n_embd, n_inner),
        }


# Type of the experts, whatever the other matrices have: the real models were published in it.
EXPERT_TYPE = GGMLQuantizationType.MXFP4


@dataclass(frozen=True, kw_only=True)
class GptOss(Shape):
    """gpt-oss: experts, attention with sinks, a window in every second layer.

    Attributes:
        n_window: window in tokens of every second layer, starting with the first.
        n_expert: experts of a layer.
        n_expert_used: experts that a token uses.
        n_ctx_original: trained context before YaRN.
        yarn_factor: extension of the context by YaRN.
    """

    architecture: ClassVar[str] = "gpt-oss"
    rope_base: ClassVar[float] = 150000.0

    n_window: int
    n_expert: int
    n_expert_used: int
    n_ctx_original: int
    yarn_factor: float

    def add_fields(self, writer: GGUFWriter) -> None:
        super().add_fields(writer)
        writer.add_sliding_window(self.n_window)
        writer.add_expert_count(self.n_expert)
        writer.add_expert_used_count(self.n_expert_used)
        writer.add_expert_feed_forward_length(self.n_ff)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(self.yarn_factor)
        writer.add_rope_scaling_orig_ctx_len(self.n_ctx_original)

    def layers(self, tensors: RandomTensors) -> list[dict[str, Tensor]]:
        attention = self.attention(tensors)
        biases = {
            f"attn_{name}.bias": zeros(len(attention[f"attn_{name}.weight"].data))
            for name in ("q", "k", "v", "output")
        }
        # About as much as all keys of a window.
        sinks = {"attn_sinks.weight": vector(5 + tensors.normal(self.n_head))}
        return [attention | biases | sinks | self._experts(tensors)] * self.n_layer

    def _experts(self, tensors: RandomTensors) -> dict[str, Tensor]:
        """Return the matrices of all experts in one tensor each, and the router."""
        inwards = (self.n_expert, self.n_ff, self.n_embd)
        outwards = (self.n_expert, self.n_embd, self.n_ff)
        chooser = tensors.matrix(self.n_expert, self.n_embd, dtype=GGMLQuantizationType.F32)
        return {
            "post_attention_norm.weight": ones(self.n_embd),
            "ffn_gate_inp.weight": chooser,
            "ffn_gate_inp.bias": zeros(self.n_expert),
            "ffn_gate_exps.weight": tensors.matrix(*inwards, dtype=EXPERT_TYPE),
            "ffn_gate_exps.bias": zeros(self.n_expert, self.n_ff),
            "ffn_up_exps.weight": tensors.matrix(*inwards, dtype=EXPERT_TYPE),
            "ffn_up_exps.bias": zeros(self.n_expert, self.n_ff),
            "ffn_down_exps.weight": tensors.matrix(*outwards, dtype=EXPERT_TYPE),
            "ffn_down_exps.bias": zeros(self.n_expert, self.n_embd),
        }


SHAPES: dict[str, Shape] = {
    "llama-2-7b": Llama(
        n_layer=32, n_embd=4096, n_head=32, n_head_kv=32, head_size=128, n_ff=11008, n_vocab=32000
    ),
    "llama-3-8b": Llama(
        n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, head_size=128, n_ff=14336, n_vocab=128256
    ),
    # As many layers and heads as 7B, and little else: for measurements independent of the weights.
    "heads-of-7b": Llama(
        n_layer=32, n_embd=256, n_head=32, n_head_kv=32, head_size=128, n_ff=64, n_vocab=512
    ),
    "qwen3.5-0.8b": Qwen35(
        n_layer=24,
        n_embd=1024,
        n_head=8,
        n_head_kv=2,
        head_size=256,
        n_ff=3584,
        n_vocab=248320,
        n_ctx_train=262144,
        attends_every=4,
        rope_sections=(11, 11, 10, 0),
        n_delta_head=16,
        delta_head_size=128,
        n_kernel=4,
    ),
    "gpt-oss-small": GptOss(
        n_layer=12,
        n_embd=1440,
        n_head=32,
        n_head_kv=4,
        head_size=64,
        n_ff=1440,
        n_vocab=201088,
        n_ctx_train=131072,
        n_window=128,
        n_expert=8,
        n_expert_used=4,
        n_ctx_original=4096,
        yarn_factor=32.0,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--type",
        choices=("F16", "Q8_0", "Q4_0"),
        default="Q4_0",
        help="of the matrices; experts of gpt-oss are MXFP4, as the real models' are",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="tokens it claims to be trained on; 32768 for a Llama, else what the real model was",
    )
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.context is not None:
        shape = replace(shape, n_ctx_train=args.context)
    write_model(args.output, shape, GGMLQuantizationType[args.type])
    print(f"{args.output}: {args.output.stat().st_size / 1e9:.2f} GB")


def write_model(path: Path, shape: Shape, dtype: GGMLQuantizationType) -> None:
    """Write the model; the same arguments give the same file."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name("random weights")
    shape.add_fields(writer)
    add_tokenizer(writer, shape.n_vocab)
    tensors = RandomTensors(dtype)
    all_tensors = shape.embeddings(tensors)
    for i, layer in enumerate(shape.layers(tensors)):
        all_tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    for name, tensor in all_tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.dtype)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece tokenizer with bytes, letters and made-up words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    words = ["\u2581", *ascii_lowercase, *(f"\u2581{letter}" for letter in ascii_lowercase)]
    words += [f"\u2581w{i}" for i in range(n_vocab - len(tokens) - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([-float(i) for i in range(n_vocab)])
    writer.add_token_types([*types, *[TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


if __name__ == "__main__":
    main()
