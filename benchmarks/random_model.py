"""Write a GGUF model of a well-known shape with random weights, to measure speed and memory with.

Neither depends on what the weights are, so a real model of gigabytes need not be had. All layers
share one set of random matrices, which takes seconds to draw.

    python benchmarks/random_model.py llama-2-7b model.gguf
    python benchmarks/random_model.py llama-3-8b model.gguf --type Q8_0 --context 32768
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the Llama architecture; the embedding has n_head * head_size elements."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    n_vocab: int

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_size


SHAPES = {
    "llama-2-7b": Shape(32, 32, 32, 128, 11008, 32000),
    "llama-3-8b": Shape(32, 32, 8, 128, 14336, 128256),
    "tinyllama-1.1b": Shape(22, 32, 4, 64, 5632, 32000),
    # As many layers and heads as 7B, and little else: for what does not depend on the weights.
    "heads-of-7b": Shape(32, 32, 32, 32, 64, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--type", choices=("F16", "Q8_0", "Q4_0"), default="Q4_0", help="of the matrices"
    )
    parser.add_argument(
        "--context", type=int, default=32768, help="tokens it claims to be trained on"
    )
    args = parser.parse_args()
    write_model(args.output, SHAPES[args.shape], GGMLQuantizationType[args.type], args.context)
    print(f"{args.output}: {args.output.stat().st_size / 1e9:.2f} GB")


def write_model(path: Path, shape: Shape, dtype: GGMLQuantizationType, context: int) -> None:
    """Write the model; the same arguments give the same file."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("random weights")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer, shape.n_vocab)

    rng = np.random.default_rng(0)
    n_kv = shape.n_head_kv * shape.head_size

    def matrix(n_out: int, n_in: int) -> npt.NDArray[np.uint8]:
        """Of weights that keep the variance of their inputs."""
        return quantize(
            rng.standard_normal((n_out, n_in), np.float32) / np.float32(n_in**0.5), dtype
        )

    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", matrix(shape.n_vocab, shape.n_embd), raw_dtype=dtype)
    shared = {
        "attn_q": matrix(shape.n_embd, shape.n_embd),
        "attn_k": matrix(n_kv, shape.n_embd),
        "attn_v": matrix(n_kv, shape.n_embd),
        "attn_output": matrix(shape.n_embd, shape.n_embd),
        "ffn_gate": matrix(shape.n_ff, shape.n_embd),
        "ffn_up": matrix(shape.n_ff, shape.n_embd),
        "ffn_down": matrix(shape.n_embd, shape.n_ff),
    }
    ones = np.ones(shape.n_embd, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.n_layer):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, data in shared.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=dtype)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece tokenizer that knows bytes, letters and made-up words."""
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
