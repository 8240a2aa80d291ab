"""Accountants: each gives an upper bound on the epsilon that an event spends.

* :class:`.Best`: The default. Takes the smallest upper bound of GDP, PLD and RDP.
* :class:`.GDP`: Full batches. Exact.
* :class:`.PLD`: Full and Poisson batches. Adds 0.05 % to epsilon, at any delta.
* :class:`.RDP`: Full batches, Poisson batches under ``add_or_remove_one``, and fixed-size batches
  without replacement under ``replace_one``. Adds 3 to 15 % to epsilon.
* :class:`.PRV`: Full batches, and Poisson batches under ``add_or_remove_one``. Gives a lower and an
  upper bound, for comparison.
"""
