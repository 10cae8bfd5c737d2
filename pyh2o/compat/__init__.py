"""Compatibility: llama_cpp's `Llama` and OpenAI's completions."""
