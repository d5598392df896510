"""Mutated model folders, tables, pairs and options files through the commands that load them."""
