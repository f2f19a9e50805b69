"""Correctness: the judge, the runs that it judges, and the records of those runs."""
