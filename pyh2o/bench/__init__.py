"""Benchmarks of caches: interleaved rounds, one process per cache."""
