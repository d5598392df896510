"""The commands of this package: parse, then call."""
