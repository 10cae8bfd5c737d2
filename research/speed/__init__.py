"""Speed and memory of many caches by turns: full ones, evicting ones, and other programs'."""
