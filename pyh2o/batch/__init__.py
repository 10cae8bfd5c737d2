"""Batches: a file of requests, answered by an engine, and a file of results.

Until all requests are answered, a journal next to the results has the finished ones: a run that was
interrupted resumes with the requests that have no result.
"""
