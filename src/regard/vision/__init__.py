"""What learns from images."""
