"""Write a GGUF model of a well-known shape with random weights, to measure speed and memory with.

Neither depends on what the weights are, so a real model of gigabytes need not be had. All layers
share one set of random matrices, which takes seconds to draw.

    python -m research.benchmarks.random_model llama-2-7b model.gguf
    python -m research.benchmarks.random_model llama-3-8b model.gguf --type Q8_0 --context 32768
    python -m research.benchmarks.random_model qwen3.5-0.8b model.gguf --type Q8_0
    python -m research.benchmarks.random_model gpt-oss-small model.gguf --type Q8_0

gpt-oss-small is smaller than gpt-oss-20b, so that two cores read 8,192 tokens in minutes: it has 12
layers instead of 24, a residual stream and experts of 1440 elements instead of 2880, 32 query and 4
KV heads instead of 64 and 8, and 8 experts instead of 32. Both ask 4 experts for a token; head
size, window, sinks, YaRN and vocabulary are the real ones.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from .shapes.gpt_oss import GptOss
from .shapes.llama import Llama
from .shapes.qwen35 import Qwen35
from .shapes.random_tensors import RandomTensors
from .shapes.shape import Shape

SHAPES: dict[str, Shape] = {
    "llama-2-7b": Llama(
        n_layer=32, n_embd=4096, n_head=32, n_head_kv=32, head_size=128, n_ff=11008, n_vocab=32000
    ),
    "llama-3-8b": Llama(
        n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, head_size=128, n_ff=14336, n_vocab=128256
    ),
    "tinyllama-1.1b": Llama(
        n_layer=22, n_embd=2048, n_head=32, n_head_kv=4, head_size=64, n_ff=5632, n_vocab=32000
    ),
    # As many layers and heads as 7B, and little else: for what does not depend on the weights.
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
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_vocab_size(shape.n_vocab)
    shape.add_fields(writer)
    add_tokenizer(writer, shape.n_vocab)
    shape.add_tensors(RandomTensors(writer, dtype))

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
