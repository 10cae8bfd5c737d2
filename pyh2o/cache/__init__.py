"""The KV cache: what the user asks for, what it comes to, what it holds, what it costs."""
