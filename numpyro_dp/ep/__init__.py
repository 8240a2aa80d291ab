"""Expectation propagation: the algebra of exponential families."""
