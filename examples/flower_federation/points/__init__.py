"""Ten clients with points of their own train one classifier on Flower."""
