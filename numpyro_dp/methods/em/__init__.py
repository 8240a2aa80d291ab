"""Private expectation maximisation of mixtures of normals."""
