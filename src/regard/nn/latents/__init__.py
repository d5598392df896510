"""Layers in which a few latent vectors read many inputs."""
