"""Training whose ranks agree on parameters in other ways than by a mean of gradients in every step."""
