"""Text generation: chat templates, samplers, grammars, and the loop that samples tokens."""
