"""Speed and memory in interleaved rounds: full caches, evicting ones and other programs."""
