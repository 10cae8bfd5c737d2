"""The KV cache: settings, contents and statistics."""
