"""How the models were trained whose numbers the documentation shows; :mod:`recipes.pack` makes the one in the box."""
