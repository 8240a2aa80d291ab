"""Expectation propagation, with and without privacy."""
