"""A Gaussian posterior from a few noisy sums over all records: scores and curvatures."""
