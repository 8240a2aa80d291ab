"""Probabilistic backpropagation for the weights of a network, with and without privacy."""
