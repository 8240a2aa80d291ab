"""The privacy layer: randomness, sampling, noise, accounting, plan."""
