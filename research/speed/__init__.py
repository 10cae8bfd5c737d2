"""Speed and memory, interleaved: full caches, caches with eviction, and other programs."""
