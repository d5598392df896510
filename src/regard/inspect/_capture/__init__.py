"""Recording while a model runs."""
