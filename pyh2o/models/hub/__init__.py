"""Models of repositories on the Hugging Face hub, fetched into the models folder."""

from __future__ import annotations

from .fetching import Chosen, choose_on_hub, fetch_chosen

__all__ = ["Chosen", "choose_on_hub", "fetch_chosen"]
