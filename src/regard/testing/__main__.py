"""``python -m regard.testing``: a long campaign over drawn cases."""

from regard.testing.campaign import main

if __name__ == "__main__":
    raise SystemExit(main())
