"""Speed and memory of caches side by side: interleaved rounds, a process for each cache."""
