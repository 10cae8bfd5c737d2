"""Batches: a file of requests that an engine answers, many at once, and a file of results.

What has ended is in a journal beside the results until all have: whatever breaks a run off, the
next one goes on with the requests that have no result.
"""
