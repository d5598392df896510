"""The tests as a package: other libraries install one of this name, and processes that tests spawn import from here."""
