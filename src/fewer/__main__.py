"""`python -m fewer`."""

from fewer.cli import main

main()
