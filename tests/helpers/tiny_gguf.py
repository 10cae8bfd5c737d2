"""Write tiny random GGUF models, which llama.cpp computes in milliseconds.

The weights are normal random numbers, scaled so that each part of the model matters:

* queries and keys have elements of standard deviation `ATTENTION_GAIN`. Over 300 keys a query's
  attention then has a perplexity of 2 to 60, median 14, and the median of its largest probability
  is 0.3: peaks to keep and a tail to evict;
* half the variance of the embedding is common to all tokens, so queries have a mean, and most
  queries attend to a key parallel to it: a heavy hitter. Without it only age would count, and the
  oldest rows would always be kept;
* the attention and feed-forward outputs have a gain of 2, about as large as the embedding in the
  residual stream, so a missing row changes the logits;
* logits have a standard deviation of about 1.

The tokenizer is SentencePiece ("llama") or byte pair encoding, with all bytes, so any text can be
tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, product
from pathlib import Path
from string import ascii_letters, ascii_lowercase, digits, punctuation

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from tiny_architectures import ARCH_VARIANTS
from tiny_hybrids import HYBRIDS
from tiny_latent import LATENT
from tiny_model import TinyModel, store
from tiny_windowed import TIED

ALL_VARIANTS = ARCH_VARIANTS | HYBRIDS | LATENT

# Renders each message on its own line; enough to distinguish roles and turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_gguf(
    path: str | Path,
    *,
    seed: int,
    n_layer: int = 3,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_size: int = 32,
    n_ff: int = 192,
    n_vocab: int = 384,
    n_ctx_train: int = 4096,
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied_output: bool = False,
    chat_template: str | None = None,
    arch_variant: str = "llama",
    bpe: bool = False,
    marks: Mapping[str, TokenType] | None = None,
) -> Path:
    """Write a random model; the same arguments give the same file.

    The embedding has n_head * head_size elements. Matrices have the dtype, vectors are F32. `marks`
    are texts and types of the last tokens, unless `bpe`.

    H2O does not fit the variants "recurrent" (Mamba), "alibi" (BLOOM) and "encoder" (BERT). Some
    layers have a window in those of `tiny_windowed`, which says how many are needed. Rows can be
    evicted but not re-based in "learned_positions" (GPT-2) and "normed_after_rope" (Hunyuan). The
    others cover all kinds of rotation; "capped" (Grok) caps its attention logits.
    """
    if n_vocab < 288:
        raise ValueError(f"n_vocab must be >= 288, for the bytes and some pieces, not {n_vocab}")
    architecture, add_layers = ALL_VARIANTS[arch_variant]
    model = TinyModel(
        GGUFWriter(path, architecture),
        np.random.default_rng(seed),
        dtype,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_size=head_size,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        tied_output=tied_output or arch_variant in TIED,
    )
    writer = model.writer
    store(writer, name=f"tiny random {arch_variant}", block_count=n_layer)
    store(writer, context_length=n_ctx_train, embedding_length=model.n_embd)
    store(writer, feed_forward_length=n_ff, head_count=n_head, vocab_size=n_vocab)
    if bpe:
        _add_bpe_tokenizer(writer, n_vocab)
    else:
        _add_tokenizer(writer, n_vocab, marks or {})
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    model.embedding()
    add_layers(model)
    writer.add_head_count_kv(model.n_head_kv)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_tokenizer(writer: GGUFWriter, n_vocab: int, marks: Mapping[str, TokenType]) -> None:
    """Add <unk>, <s>, </s>, all bytes, single characters, then pairs and triples of letters."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    types = [TokenType.BYTE] * 256
    # SentencePiece writes a space as this character.
    pieces += ["\u2581", *ascii_letters, *digits, *punctuation]
    for length in (2, 3):
        pieces += ["".join(letters) for letters in product(ascii_lowercase, repeat=length)]
    pieces = pieces[: n_vocab - 3]
    if len(pieces) < n_vocab - 3:
        raise ValueError(f"n_vocab must be <= {len(pieces) + 3}, not {n_vocab}")
    types += [TokenType.NORMAL] * (len(pieces) - 256)
    first = len(pieces) - len(marks)
    pieces[first:], types[first:] = marks.keys(), marks.values()
    store(writer, tokenizer_model="llama", tokenizer_pre="default")
    store(writer, token_list=["<unk>", "<s>", "</s>", *pieces])
    store(writer, token_types=[TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *types])
    # Merges with a higher score come first; any order works.
    store(writer, token_scores=[0.0, 0.0, 0.0, *(-float(rank) for rank in range(len(pieces)))])
    store(writer, unk_token_id=0, bos_token_id=1, eos_token_id=2, add_bos_token=True)
    store(writer, add_eos_token=False)


def _add_bpe_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """Add SmolLM's tokenizer: <|endoftext|>, all bytes, and pairs of a letter and a vowel.

    The type of the file, which OpenVINO asks for, is included.
    """
    pairs = list(islice(product(ascii_lowercase, "aeiou"), n_vocab - 257))
    tokens = ["<|endoftext|>", *_signs_of_bytes(), *map("".join, pairs)]
    if len(tokens) != n_vocab:
        raise ValueError(f"n_vocab must be 257 to {257 + 26 * 5}, not {n_vocab}")
    store(writer, tokenizer_model="gpt2", tokenizer_pre="smollm", token_list=tokens)
    store(writer, token_types=[TokenType.CONTROL, *[TokenType.NORMAL] * (n_vocab - 1)])
    store(writer, token_merges=[" ".join(pair) for pair in pairs], bos_token_id=0, eos_token_id=0)
    store(writer, unk_token_id=0, pad_token_id=0, add_bos_token=False)
    store(writer, file_type=LlamaFileType.MOSTLY_F16)


def _signs_of_bytes() -> list[str]:
    """GPT-2 writes invisible bytes as characters from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
