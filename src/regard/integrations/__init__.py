"""Other libraries' models on this library's attention; each is imported by name, and needs its library."""
