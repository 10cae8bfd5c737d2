"""Speed and memory side by side: llama.cpp's full cache against caches of fixed size.

Each cache has a process of its own, because peak memory belongs to a process, and the processes
take turns, so that a change in the machine's speed meets them all.
"""
