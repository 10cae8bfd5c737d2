"""A model that is loaded once, with a context that has room for several texts."""

from __future__ import annotations

from typing import Any

from ..errors import SettingsError
from ..llama import Llama
from ..llama.evicting import address
from .batcher import Batcher

# llama.cpp has no more sequences.
MOST_TEXTS = 256


class SharedModel(Llama):
    """`Llama`, whose context has several sequences. It has no text of its own: places have.

    Args:
        model_path: a GGUF file.
        n_texts: places for texts.
        n_reading: most tokens that are read at once while another text is written.
        **kwargs: as for `Llama`, for each text.

    Raises:
        PyH2OError: as for `Llama`; SettingsError also for what only one text can have.

    Attributes:
        batcher: decodes for all places.
    """

    def __init__(self, model_path: str, *, n_texts: int, n_reading: int, **kwargs: Any) -> None:
        self._n_texts = n_texts
        _check(n_texts, kwargs)
        super().__init__(model_path, **kwargs)
        self.batcher = Batcher(
            self.ctx,
            n_vocab=self.n_vocab(),
            n_batch=self._n_in_batch,
            n_reading=n_reading,
            least_piece=self.least_piece,
            search_group=self.search_group,
        )

    def _model_loaded(self) -> None:
        super()._model_loaded()
        params = self.context_params
        params.n_seq_max = self._n_texts
        params.kv_unified = False
        # the next token of every text at once, beside a piece that one may read
        self._n_in_batch = params.n_batch = params.n_batch + self._n_texts
        params.n_ubatch = max(params.n_ubatch, self._n_texts)

    @property
    def _ctx(self) -> Any:
        return super()._ctx

    @_ctx.setter
    def _ctx(self, context: Any) -> None:
        self._context = context
        # The parent makes room in its batch, which nobody uses, for as many sequences as that.
        self.context_params.n_ctx = 1

    def address(self) -> int:
        """Of the context."""
        return address(self.ctx)

    def close(self) -> None:
        """Free the model, after the last batch."""
        batcher = getattr(self, "batcher", None)
        if batcher is not None:
            batcher.close()
        super().close()


def _check(n_texts: int, kwargs: dict[str, Any]) -> None:
    if isinstance(n_texts, bool) or not isinstance(n_texts, int) or not 0 < n_texts <= MOST_TEXTS:
        raise SettingsError(f"{n_texts!r} texts at once: give a count from 1 to {MOST_TEXTS}")
    refused = {
        "recall_archive": "the archive of each text is in memory",
        "draft_model": "a draft model knows one text",
        "embedding": "embeddings come from a `Llama` of their own",
        "vocab_only": "there are no weights to decode with",
    }
    for name, reason in refused.items():
        if kwargs.get(name):
            raise SettingsError(f"{name} goes with one text only ({reason}): use Llama for it")
    if kwargs.get("prefill") == "exact":
        raise SettingsError(
            "prefill='exact' takes a larger cache for all texts at once: use Llama for it, or "
            "prefill='stream' (--prefill stream)"
        )
