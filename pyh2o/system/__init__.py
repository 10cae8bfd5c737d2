"""The machine: its files, memory, threads and devices."""
