"""The front end to NumPyro: models, guides and their arguments."""
