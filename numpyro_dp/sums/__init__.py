"""Clipped sums over the records of a batch: exact, by products, by microbatches, on devices."""
