"""Speed and memory of caches side by side: a process for each, which take turns."""
