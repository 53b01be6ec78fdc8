"""The optimizer: an abstract choice problem, its exact reductions, its search, and the cut into stages."""
